"""softmax, layer norm and RMS norm in the lab: the truth, the rivals that run here, what each refuses, the presets."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.operators import operators, presets
from expertile.lab.race.gate import judge
from expertile.lab.race.operator import Workload
from tests.ops.rows.cases import assert_close, leaf, norm64

CPU, H200, A100 = Device.current("cpu"), Device.by_name("h200"), Device.by_name("a100")
NAMES = ("softmax", "layer_norm", "rms_norm")


def workload(op, rows=24, cols=40, dtype="fp32"):
    return Workload("small", "test", op, (("rows", rows), ("cols", cols)), dtype)


def rivals(op):
    return {rival.name: rival for rival in operators()[op].rivals}


def made(op):
    """Workload, inputs and reference."""
    w = workload(op)
    inputs = operators()[op].make_inputs(w, torch.device("cpu"), 3)
    return inputs, operators()[op].reference(w, inputs)


def test_truth_of_softmax():
    (dy, y), (dx,) = made("softmax_backward")
    x = y.double().log().requires_grad_()
    torch.softmax(x, -1).backward(dy.double())
    assert_close(dx, x.grad, "dx", 10.0)
    (x,), (y,) = made("softmax")
    assert_close(y, torch.softmax(x.double(), -1))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_truth_of_norms(name):
    (dy, *inputs), gradients = made(f"{name}_backward")
    *inputs, rstd = inputs
    mean = inputs.pop() if name == "layer_norm" else None
    leaves = [leaf(t) for t in inputs]
    y64 = norm64(*leaves, *[None] * (3 - len(leaves)), 1e-5, mean is not None)
    y64.backward(dy.double())
    for actual, expected in zip(gradients, leaves, strict=True):
        assert_close(actual.float(), expected.grad)
    assert_close(operators()[name].reference(workload(name), tuple(inputs))[0], y64.detach())
    x = inputs[0].double()
    if mean is not None:
        assert_close(mean, x.mean(-1), "mean", 5.0)
        x = x - x.mean(-1, keepdim=True)
    assert_close(rstd, torch.rsqrt(x.square().mean(-1) + 1e-5), "rstd")


def test_presets_begin_with_the_forward_passes_and_hold_the_reports_sizes():
    sizes = {op: [] for name in NAMES for op in (name, f"{name}_backward")}
    for preset in ("softmax-v100", "layernorm-v100", "rows"):
        for w in presets()[preset]():
            sizes[w.op].append((w["rows"], w["cols"], w.dtype))
    for name in NAMES:
        assert sizes[name] == sizes[f"{name}_backward"]
    assert sizes["softmax"][:4] == [(n, n, "fp32") for n in (1024, 2048, 4096, 8192)]
    assert sizes["layer_norm"][:6] == [(16384, n, "fp32") for n in (256, 512, 768, 1024, 2048, 4096)]
    assert {(4096, 32768, "bf16"), (8192, 131072, "bf16"), (32768, 4096, "bf16")} <= {*sizes["softmax"]}
    for name in NAMES[1:]:
        assert {(16384, 4096, "bf16"), (4096, 32768, "bf16")} <= {*sizes[name]}
    ops = [w.op for w in presets()["softmax-v100"]()]
    assert ops == ["softmax"] * 4 + ["softmax_backward"] * 4


@pytest.mark.parametrize(
    ("op", "nbytes"),
    [
        ("softmax", 4e6),
        ("softmax_backward", 6e6),
        ("layer_norm", 4e6 + 4000),  # x and y; weight and bias
        ("layer_norm_backward", 6e6 + 8000 + 8000),  # dy, x, dx; two parameters, two gradients; mean and rstd
        ("rms_norm", 4e6 + 2000),
        ("rms_norm_backward", 6e6 + 4000 + 4000),
    ],
)
def test_work(op, nbytes):
    assert operators()[op].work(workload(op, 1000, 1000, "bf16")).nbytes == nbytes


@pytest.mark.parametrize("op", NAMES)
def test_what_peers_refuse(op, monkeypatch):
    quack, liger = (rivals(op)[name].supports for name in ("quack", "liger"))
    monkeypatch.setattr("expertile.lab.operators._supports.find_spec", lambda name: name)
    assert quack(workload(op), H200) is None and liger(workload(op), H200) is None
    assert "9.0" in quack(workload(op), A100)
    assert ("16 bytes" in (quack(workload(op, cols=50257, dtype="bf16"), H200) or "")) == (op == "softmax")
    assert "at most 65536" in liger(workload(op, cols=131072), H200)
    assert "CUDA" in liger(workload(op), CPU)
    monkeypatch.setattr("expertile.lab.operators._supports.find_spec", lambda name: None)
    assert "not installed" in quack(workload(op), H200) and "not installed" in liger(workload(op), H200)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("op", [op for name in NAMES for op in (name, f"{name}_backward")])
@pytest.mark.parametrize("name", ["expertile", "torch"])
def test_rivals_pass_the_gate(name, op, dtype):
    w, operator = workload(op, cols=100, dtype=dtype), operators()[op]
    rival = rivals(op)[name]
    assert rival.supports(w, CPU) is None
    inputs = operator.make_inputs(w, torch.device("cpu"), 0)
    gate = judge(rival, w, inputs, operator.reference(w, inputs), operator.tolerance(w))
    assert gate.ok, gate.reason
