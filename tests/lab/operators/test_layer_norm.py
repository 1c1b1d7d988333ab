"""layer_norm in the lab: the truth, the rivals that run here, what each refuses, the presets."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.operators.layer_norm import OPERATORS, PRESETS
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
    inputs = dy, x, weight, bias, mean, rstd = BACKWARD.make_inputs(w, torch.device("cpu"), 3)
    x64, weight64, bias64 = leaf(x), leaf(weight), leaf(bias)
    y64 = norm64(x64, weight64, bias64, 1e-5, True)
    y64.backward(dy.double())
    for actual, expected in zip(BACKWARD.reference(w, inputs), (x64.grad, weight64.grad, bias64.grad), strict=True):
        assert_close(actual.float(), expected)
    assert_close(FORWARD.reference(w, (x, weight, bias))[0], y64.detach())
    assert_close(mean, x.double().mean(-1), "mean", 5.0)
    assert_close(rstd, torch.rsqrt(x.double().var(-1, unbiased=False) + 1e-5), "rstd")


def test_presets():
    listed = PRESETS["layernorm-v100"]()
    assert [(w.op, w["rows"], w["cols"], w.dtype) for w in listed[:6]] == [
        ("layer_norm", 16384, n, "fp32") for n in (256, 512, 768, 1024, 2048, 4096)
    ]
    assert [w.op for w in listed[6:]] == ["layer_norm_backward"] * 6
    assert {(w["rows"], w["cols"], w.dtype) for w in PRESETS["rows"]()} >= {
        (16384, 4096, "bf16"),
        (4096, 32768, "bf16"),
        (8192, 8192, "fp32"),
    }


def test_work():
    w = workload(rows=1000, cols=1000, dtype="bf16")
    assert FORWARD.work(w).nbytes == 4e6 + 4000  # x and y; weight and bias
    assert BACKWARD.work(w).nbytes == 6e6 + 8000 + 8000  # dy, x, dx; two parameters, two gradients; mean and rstd


def test_what_peers_refuse(monkeypatch):
    monkeypatch.setattr("expertile.lab.operators._supports.find_spec", lambda name: name)
    quack, liger = rivals(FORWARD)["quack"], rivals(FORWARD)["liger"]
    assert quack.supports(workload(), H200) is None and liger.supports(workload(), H200) is None
    assert "9.0" in quack.supports(workload(), A100)
    assert "at most 65536" in liger.supports(workload(cols=131072), H200)


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
