"""softmax in the lab: the truth, the rivals that run here, what each refuses, the presets."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.operators.softmax import OPERATORS, PRESETS
from expertile.lab.race.gate import judge
from expertile.lab.race.operator import Workload
from tests.ops.rows.cases import assert_close

FORWARD, BACKWARD = OPERATORS
CPU, H200, A100 = Device.current("cpu"), Device.by_name("h200"), Device.by_name("a100")


def workload(operator=FORWARD, rows=24, cols=40, dtype="fp32"):
    return Workload("small", "test", operator.name, (("rows", rows), ("cols", cols)), dtype)


def rivals(operator):
    return {rival.name: rival for rival in operator.rivals}


def test_truth():
    w = workload(BACKWARD)
    dy, y = BACKWARD.make_inputs(w, torch.device("cpu"), 3)
    x = y.double().log().requires_grad_()
    torch.softmax(x, -1).backward(dy.double())
    assert_close(BACKWARD.reference(w, (dy, y))[0], x.grad, "dx", 10.0)
    (x,) = FORWARD.make_inputs(workload(), torch.device("cpu"), 3)
    assert_close(FORWARD.reference(workload(), (x,))[0], torch.softmax(x.double(), -1))


def test_presets():
    listed = PRESETS["softmax-v100"]()
    assert [(w.op, w["rows"], w["cols"], w.dtype) for w in listed[:4]] == [
        ("softmax", n, n, "fp32") for n in (1024, 2048, 4096, 8192)
    ]
    assert [w.op for w in listed[4:]] == ["softmax_backward"] * 4
    assert {(w["rows"], w["cols"], w.dtype) for w in PRESETS["rows"]()} >= {
        (4096, 32768, "bf16"),
        (8192, 131072, "bf16"),
        (32768, 4096, "bf16"),
        (8192, 8192, "fp32"),
    }


def test_work():
    w = workload(rows=1000, cols=1000, dtype="bf16")
    assert FORWARD.work(w).nbytes == 4e6 and BACKWARD.work(w).nbytes == 6e6


def test_what_peers_refuse(monkeypatch):
    monkeypatch.setattr("expertile.lab.operators._supports.find_spec", lambda name: name)
    quack, liger = rivals(FORWARD)["quack"], rivals(FORWARD)["liger"]
    assert quack.supports(workload(), H200) is None and liger.supports(workload(), H200) is None
    assert "9.0" in quack.supports(workload(), A100)
    assert "16 bytes" in quack.supports(workload(cols=50257, dtype="bf16"), H200)
    assert "at most 65536" in liger.supports(workload(cols=131072), H200)
    assert "CUDA" in liger.supports(workload(), CPU)


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
