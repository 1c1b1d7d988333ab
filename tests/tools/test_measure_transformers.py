"""tools/measure_transformers.py: first what matters of every model, each in the file, failures with reasons."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.7")

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget
from expertile.lab.operators import transformers_layers as lab
from expertile.lab.race.parts import read_parts
from tests.lab.operators.test_transformers_layers import SMALL
from tools.pages.transformers import blocks

_PATH = Path(__file__).parents[2] / "tools" / "measure_transformers.py"
_SPEC = importlib.util.spec_from_file_location("measure_transformers", _PATH)
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The tool on a CPU, with two small models: (exit status, parts)."""
    monkeypatch.setattr(tool, "MODELS", (SMALL[0], SMALL[3]))
    monkeypatch.setattr(tool, "FIRST", (lab.Case(3), lab.Case(20, both=True)))
    monkeypatch.setattr(tool, "THEN", (lab.Case(17),))
    monkeypatch.setattr(tool, "BUDGETS", {True: Budget(0.02, min_rounds=3, max_rounds=3)})
    monkeypatch.setattr(lab, "set_count", lambda *_: 2)
    for module in (tool, lab):  # collecting garbage takes longest
        monkeypatch.setattr(module, "release", lambda device: None)
    path = tmp_path / "2026-01-02.jsonl"

    def call(*options):
        status = tool.main(["--out", str(path), "--device", "cpu", "--quick", *options])
        return status, read_parts(path)

    call.path = path
    return call


def test_every_model_s_first_cases_come_before_the_rest_and_none_twice(run, monkeypatch):
    def stub(layer, case, *_):
        return iter([lab.layer_part(layer, case, "eager")])

    monkeypatch.setattr(tool, "measure_case", stub)
    monkeypatch.setattr(tool, "make_layer", lambda model, device: model)
    status, parts = run()
    names = [model.name for model in (SMALL[0], SMALL[3])]
    assert status == 0 and parts[0]["part"] == "run" and parts[0]["transformers"]
    assert [(p["model"], p["tokens"], p["both"]) for p in parts[1:]] == [
        *((name, *case) for name in names for case in ((3, False), (20, True))),
        *((name, 17, False) for name in names),
    ]
    assert run()[1][:-1] == parts


def test_the_page_reads_what_is_measured_and_a_failure_is_a_line(run, monkeypatch):
    real = tool.measure_case

    def broken(layer, case, *arguments):
        if case.both:
            raise RuntimeError("no such kernel")
        return real(layer, case, *arguments)

    monkeypatch.setattr(tool, "measure_case", broken)
    status, parts = run("--models", "gpt-oss-120b", "--eager", "--seconds", "100")
    assert status == 1 and [p["part"] for p in parts] == ["run", "layer", "failed", "layer"]
    assert parts[2]["both"] and "no such kernel" in parts[2]["reason"]
    text = blocks(run.path, Device.by_name("h200"))["layers"]
    assert "**gpt-oss-120b**, H = 32" in text and "`eager`, ms" in text and "has no time" not in text


def test_no_time_and_no_such_model(run, capsys):
    status, parts = run("--seconds", "0")
    assert status == 0 and len(parts) == 1 and "no time left for gpt-oss-120b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--models", "Qwen3-30B-A3B,other")
    assert "--models: expected some of Qwen3-30B-A3B, gpt-oss-120b" in capsys.readouterr().err
