"""docs/results/transformers.md: its figures are those of the shipped run."""

import importlib
from dataclasses import replace
from pathlib import Path

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.race.record import append
from tests.lab.records import timed, untimed
from tools.pages.transformers import NOT_MEASURED, blocks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "transformers.md"
H200 = Device.by_name("h200")
EMPTY = "<!-- expertile:transformers layers -->\n<!-- /expertile:transformers layers -->\n"


def layer(tokens, seconds, both=False, policy="eager", model="Small"):
    """Made-up records whose bound on an H200 is that of 4.8 GB: 1 ms; a text is why there is no time."""
    found = []
    for name, value in seconds.items():
        fields = {
            "op": "experts_train" if both else "experts",
            "workload": f"transformers/{model}-T{tokens}{'-train' * both}",
            "shape": {"model": model, "tokens": tokens, "hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2},
            "backend": name,
            "policy": policy,
            "flops": 1e9,
            "nbytes": H200.memory_bps * 1e-3,
            "bound": 0.0,
            "details": {"transformers": "5.17.0"},
            "date": "2026-01-02",
        }
        error = 0.004 + 0.001 * (name != "expertile")
        made = isinstance(value, float)
        found.append(timed(value, rel_error=error, **fields) if made else untimed("failed", value, **fields))
    return found


RECORDS = [
    *layer(2048, {"expertile": 4e-3, "grouped_mm": 6e-3}),
    *layer(1, {"expertile": 2e-3, "grouped_mm": 3e-3, "batched_mm": 1.5e-3}),
    *layer(1, {"expertile": 2e-3, "grouped_mm": 2.5e-3, "batched_mm": "cannot be captured"}, policy="graph"),
    *layer(4096, {"expertile": 5e-3, "grouped_mm": 1e-2}, both=True),
    *layer(16, {"expertile": "wrong: |x|", "grouped_mm": 1e-3}, model="Other"),
    *layer(17, {"expertile": 1e-3}, model="Other"),
]


def test_rows_are_set_beside_their_bounds_and_the_others():
    text = blocks(RECORDS, H200)["layers"]
    assert text.startswith(
        "NVIDIA H200, transformers 5.17.0, torch 2.11, 2026-01-02: `results/nvidia-h200/2026-01-02-transformers.jsonl`."
    )
    assert "**Small**, H = 64, I = 32, E = 8, k = 2" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "1.00 | memory" in line]
    assert rows == [
        "| 1 | 1.00 | memory | 2.00 | 50 % | 3.00 | 1.50× | 1.50 | 0.75× |",
        "| 1, CUDA graph | 1.00 | memory | 2.00 | 50 % | 2.50 | 1.25× | – | – |",
        "| 2048 | 1.00 | memory | 4.00 | 25 % | 6.00 | 1.50× | – | – |",
        "| 4096, with backward | 1.00 | memory | 5.00 | 20 % | 10.0 | 2.00× | – | – |",
        "| 17 | 1.00 | memory | 1.00 | 100 % |",
    ]


def test_losses_are_in_the_summary_and_reasons_beside_the_tables():
    text = blocks(RECORDS, H200)["layers"]
    assert "0.75× to 1.50× (forward, called from Python), 1.25× to 1.25× (forward, in a CUDA graph) and 2.00×" in text
    assert "4.0e-03 of expertile and 5.0e-03 of the others" in text
    assert "1, CUDA graph: `batched_mm` has no time: cannot be captured" in text
    assert r"16: `expertile` has no time: wrong: \|x\|" in text


def test_without_figures_it_says_so():
    records = layer(1, {"expertile": "out of memory", "grouped_mm": 1.0})
    elsewhere = [replace(r, env=Env("NVIDIA B200")) for r in RECORDS]
    assert blocks([], H200) == blocks(records, H200) == blocks(elsewhere, H200) == {"layers": NOT_MEASURED}


def test_the_tool_fills_a_page(tmp_path, capsys):
    tool = importlib.import_module("tools.pages.__main__")
    page = tmp_path / "transformers.md"
    page.write_text(EMPTY)
    append(tmp_path / "x.jsonl", *RECORDS)
    arguments = ["transformers", "--records", str(tmp_path / "x.jsonl"), "--doc", str(page)]
    assert tool.main([*arguments, "--check"]) == 1 and "not what the records say" in capsys.readouterr().err
    assert page.read_text() == EMPTY
    assert tool.main(arguments) == 0 and tool.main([*arguments, "--check"]) == 0
