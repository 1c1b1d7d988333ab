"""The page on peak memory, from made-up records."""

import xml.etree.ElementTree as ET

from expertile.lab.race.record import append
from tests.lab.report.test_memory import LENGTHS, growing, record
from tools.pages import __main__ as tool
from tools.pages.memory import memory_svg, memory_text


def test_the_text_names_the_figure_and_what_does_not_fit():
    text = memory_text(growing())
    assert "![memory-attention](figures/memory-attention.svg)" in text and "| 8192 | 16.0 | fails |" in text


def test_figures_show_measured_and_formula():
    (svg,) = memory_svg(growing()).values()
    ET.fromstring(svg)
    assert svg.count("<polyline") == 4 and svg.count('stroke-dasharray="2 3"') >= 2
    assert "unfused, formula" in svg and "Imaginary GPU" in svg and "length (logarithmic)" in svg


def test_the_tool_fills_a_page_from_files(tmp_path, capsys):
    page, records = tmp_path / "attention.md", tmp_path / "x-memory.jsonl"
    page.write_text("<!-- expertile:memory -->\n<!-- /expertile:memory -->\n")
    append(records, *growing())
    arguments = ["memory", "--records", str(records), "--doc", str(page)]
    assert tool.main([*arguments, "--check"]) == 1 and "not what the records say" in capsys.readouterr().err
    assert tool.main(arguments) == 0 and tool.main([*arguments, "--check"]) == 0
    assert tool.main(["memory", "--doc", str(page), "--gpu", "rtx 3090"]) == 2


def test_several_charts_of_an_operator_are_numbered():
    wider = [record("expertile", n, 4096 * n, batch=8) for n in LENGTHS]
    layer = [record("expertile", n, 99 * n, op="moe") for n in LENGTHS]
    found = memory_svg([*growing(), *wider, *layer])
    assert list(found) == ["memory-attention", "memory-attention-2", "memory-moe"]
    assert memory_svg([]) == {} and memory_text([]) == ""
