"""tools/measure_moe.py: the most important part first, failures with reasons, and on from where it ended."""

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget
from expertile.lab.operators import moe_kernels, moe_sizes, moe_stages
from expertile.lab.race import case
from expertile.lab.race.parts import read_parts
from tools.pages import moe as page

_PATH = Path(__file__).parents[2] / "tools" / "measure_moe.py"
_SPEC = importlib.util.spec_from_file_location("measure_moe", _PATH)
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The tool on a CPU, small: (exit status, parts)."""
    monkeypatch.setattr(tool, "SHAPES", ((64, 8, 2), (1, 8, 2)))
    monkeypatch.setattr(tool, "BUDGETS", {True: dict.fromkeys(tool.ONLY, Budget(0.02, min_rounds=3, max_rounds=3))})
    cpu = replace(Device.current("cpu"), l2_bytes=1)  # one set of inputs
    monkeypatch.setattr(tool.Device, "current", staticmethod(lambda _: cpu))
    for module in (moe_sizes, moe_stages, moe_kernels, case):  # collecting garbage takes longest
        monkeypatch.setattr(module, "release", lambda device: None)
    path = tmp_path / "2026-01-02.jsonl"

    def call(*options):
        status = tool.main(["--out", str(path), "--device", "cpu", "--quick", *options])
        return status, read_parts(path)

    call.path = path
    return call


def stub(part_of):
    """Stands for a measuring function: the part without figures."""
    return lambda *arguments: part_of(*arguments[: 3 if part_of is tool.kernels_part else 1])


def test_parts_in_order_of_importance_and_none_twice(run, monkeypatch):
    monkeypatch.setattr(tool, "measure_layer", lambda size, *_: iter([tool.layer_part(size)]))
    monkeypatch.setattr(tool, "measure_stages", stub(tool.stages_part))
    monkeypatch.setattr(tool, "measure_kernels", stub(tool.kernels_part))
    status, parts = run()
    first, second, third = moe_sizes.SIZES
    assert status == 0 and [(p["part"], p.get("size", p.get("T"))) for p in parts] == [
        ("run", None),
        ("sizes", first[0]),
        ("stages", list(first)),
        ("kernels", 64),
        ("stages", list(second)),
        ("stages", list(third)),
        ("kernels", 1),
        ("sizes", second[0]),
        ("sizes", third[0]),
    ]
    assert run()[1][:-1] == parts


def test_the_page_reads_what_is_measured(run, monkeypatch):
    ways = ("ours", "eager-gather")
    monkeypatch.setattr(tool, "measure_layer", partial(moe_sizes.measure_layer, ways=ways))
    monkeypatch.setattr(page, "_rounding", lambda: [])
    status, parts = run("--size", "64,64,32,8,2", "--seconds", "100")
    assert status == 0 and [p["part"] for p in parts] == ["run", "sizes", "stages", "kernels", "kernels"]
    text = page.blocks(run.path, (), Device.by_name("h200"))
    assert text["layer"].count("eager, gathered by token") == 1 and "The stages sum to" in text["stages"]
    shipped = page.shipped_moe("nvidia-h200")
    for part in read_parts(shipped):
        mine = next((p for p in parts if p["part"] == part["part"]), None)
        assert mine is None or part.keys() <= mine.keys()


SIZES = ("--size", "64,64,32,8,2", "--size", "32,64,32,8,2")


def test_only_some_parts_and_no_time(run, capsys):
    status, parts = run(*SIZES, "--only", "kernels", "--seconds", "100")
    assert status == 0 and [p["part"] for p in parts] == ["run", "kernels", "kernels"]
    status, parts = run(*SIZES, "--seconds", "0")
    assert status == 0 and [p["part"] for p in parts] == ["run", "kernels", "kernels", "run"]
    assert "no time left for {'part': 'sizes'" in capsys.readouterr().err


def test_a_failure_is_a_line_and_the_rest_goes_on(run, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(tool, "measure_stages", broken)
        status, parts = run("--size", "64,64,32,8,2", "--only", "stages,kernels")
    assert status == 1 and [p["part"] for p in parts] == ["run", "failed", "kernels", "kernels"]
    assert parts[1]["of"] == "stages" and "no such kernel" in parts[1]["reason"]
    status, parts = run("--size", "64,64,32,8,2", "--only", "stages,kernels")
    assert status == 0 and [p["part"] for p in parts] == ["run", "stages", "kernels", "kernels", "run"]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--only", "sizes,nothing"], "--only: expected some of"),
        (["--size", "1,2,3"], "--size: expected T,H,I,E,k"),
    ],
)
def test_wrong_options(run, options, words, capsys):
    with pytest.raises(SystemExit):
        run(*options)
    assert words in capsys.readouterr().err
