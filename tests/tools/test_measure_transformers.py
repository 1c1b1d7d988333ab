"""tools/measure_transformers.py: first what matters of every model, each in the file, failures with reasons."""

from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("transformers", minversion="5.7")

from expertile.device import Device
from expertile.lab.bench.run import run as measured
from expertile.lab.measure.environment import capture_env
from expertile.lab.race import case
from expertile.lab.race.operator import record_name
from expertile.lab.race.record import append, read
from tests.lab.records import timed
from tests.tools.test_transformers_layers import SMALL
from tools import measure_transformers as tool
from tools.pages.transformers import blocks


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The tool on a CPU, with two small models: (exit status, records)."""
    monkeypatch.setattr(tool, "MODELS", (SMALL[0], SMALL[3]))
    monkeypatch.setattr(tool, "FIRST", (tool.Case(3), tool.Case(20, both=True)))
    monkeypatch.setattr(tool, "THEN", (tool.Case(17),))
    for module in (tool, case):
        monkeypatch.setattr(module, "set_count", lambda *_: 2)
    monkeypatch.setattr(tool, "run", partial(measured, rounds=3))
    path = tmp_path / "x.jsonl"

    def call(*options):
        status = tool.main(["--out", str(path), "--device", "cpu", "--quick", *options])
        return status, read(path) if path.exists() else []

    return call


def test_every_model_s_first_cases_come_before_the_rest_and_none_twice(run, monkeypatch):
    def stub(workloads, _, *, operators, out_path, **options):
        env = capture_env(Device.current("cpu"))
        records = [timed(op=w.op, workload=record_name(w), env=env) for w in workloads]
        append(out_path, *records)
        return records

    monkeypatch.setattr(tool, "run", stub)
    status, records = run()
    names = [model.name for model in (SMALL[0], SMALL[3])]
    assert status == 0
    assert [r.workload.removeprefix("transformers/") for r in records] == [
        *(f"{name}-{case}" for name in names for case in ("T3", "T20-train")),
        *(f"{name}-T17" for name in names),
    ]
    assert run()[1] == records


def test_the_page_reads_what_is_measured_and_a_failure_is_a_line(run, monkeypatch):
    real = tool._bind

    def broken(experts, inputs):
        if len(inputs) == 4:
            raise RuntimeError("no such kernel")
        return real(experts, inputs)

    monkeypatch.setattr(tool, "_bind", broken)
    status, records = run("--models", "gpt-oss-120b", "--eager", "--seconds", "100")
    assert status == 1 and len({r.run for r in records}) == 1
    failed = [r for r in records if r.op == "experts_train" and r.backend != "copy"]
    assert {r.backend for r in failed} == {"expertile", "grouped_mm"}
    assert all(r.status == "failed" and "no such kernel" in r.reason for r in failed)
    device = Device.by_name("h200")
    text = blocks([replace(r, env=replace(r.env, gpu=device.name)) for r in records], device)["layers"]
    assert "**gpt-oss-120b**, H = 32" in text and "`eager`, ms" in text
    assert "20, with backward: `expertile` has no time: in the gate: RuntimeError: no such kernel" in text


def test_no_time_and_no_such_model(run, capsys):
    status, records = run("--seconds", "0")
    assert status == 0 and records == [] and "no time left for gpt-oss-120b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--models", "Qwen3-30B-A3B,other")
    assert "--models: expected some of Qwen3-30B-A3B, gpt-oss-120b" in capsys.readouterr().err
