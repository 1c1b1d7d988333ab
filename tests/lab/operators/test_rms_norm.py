"""rms_norm in the lab: the truth, the rivals that run here, what each refuses, the presets."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.operators.rms_norm import OPERATORS, PRESETS
from expertile.lab.race.gate import judge
from expertile.lab.race.operator import Workload
from tests.ops.rows.cases import assert_close, leaf, norm64

FORWARD, BACKWARD = OPERATORS
CPU, H200, A100 = Device.current("cpu"), Device.by_name("h200"), Device.by_name("a100")


def workload(operator=FORWARD, rows=24, cols=40, dtype="fp32"):
    return Workload("small", "test", operator.name, (("rows", rows), ("cols", cols)), dtype)


def rivals(operator):
    return {rival.name: rival for rival in operator.rivals}


def test_truth():
    w = workload(BACKWARD)
    inputs = dy, x, weight, rstd = BACKWARD.make_inputs(w, torch.device("cpu"), 3)
    x64, weight64 = leaf(x), leaf(weight)
    y64 = norm64(x64, weight64, None, 1e-5, False)
    y64.backward(dy.double())
    for actual, expected in zip(BACKWARD.reference(w, inputs), (x64.grad, weight64.grad), strict=True):
        assert_close(actual.float(), expected)
    assert_close(FORWARD.reference(w, (x, weight))[0], y64.detach())
    assert_close(rstd, torch.rsqrt(x.double().square().mean(-1) + 1e-5), "rstd")


def test_presets():
    listed = PRESETS["rows"]()
    half = len(listed) // 2
    assert {w.op for w in listed[:half]} == {"rms_norm"} and {w.op for w in listed[half:]} == {"rms_norm_backward"}
    assert {(w["rows"], w["cols"], w.dtype) for w in listed} >= {(16384, 4096, "bf16"), (4096, 32768, "bf16")}


def test_work():
    w = workload(rows=1000, cols=1000, dtype="bf16")
    assert FORWARD.work(w).nbytes == 4e6 + 2000
    assert BACKWARD.work(w).nbytes == 6e6 + 4000 + 4000


def test_what_peers_refuse(monkeypatch):
    monkeypatch.setattr("expertile.lab.operators._supports.find_spec", lambda name: None)
    assert "not installed" in rivals(FORWARD)["quack"].supports(workload(), H200)
    assert "not installed" in rivals(FORWARD)["liger"].supports(workload(), H200)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
@pytest.mark.parametrize("name", ["expertile", "torch"])
def test_rivals_pass_the_gate(name, operator, dtype):
    w = workload(operator, cols=100, dtype=dtype)
    rival = rivals(operator)[name]
    assert rival.supports(w, CPU) is None
    inputs = operator.make_inputs(w, torch.device("cpu"), 0)
    gate = judge(rival, w, inputs, operator.reference(w, inputs), operator.tolerance(w))
    assert gate.ok, gate.reason


def test_names_are_unique():
    for build in PRESETS.values():
        names = [w.name for w in build()]
        assert len(set(names)) == len(names)
