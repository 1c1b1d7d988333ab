"""laplacian and add_scalar in the lab: every rival passes the gate on the CPU, wrong ones do not, work is counted."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from expertile.device import Device
from expertile.lab.operators import operators, presets
from expertile.lab.race.gate import judge
from expertile.lab.race.operator import Rival, Workload

CPU = torch.device("cpu")
ADD = Workload("a", "t", "add_scalar", (("elements", 1000), ("value", 1.7)), "fp32")


def grid(boundary, op="laplacian", dtype="fp32"):
    dims = (("grids", 2), ("rows", 9), ("columns", 12), ("boundary", boundary))
    return Workload("g", "t", op, dims, dtype)


WORKLOADS = [
    *(replace(ADD, dtype=dtype) for dtype in ("fp32", "bf16", "fp16")),
    *(grid(b, op) for b in ("zero", "replicate", "circular", "interior") for op in ("laplacian", "laplacian_backward")),
    *(grid("zero", op, dtype) for op in ("laplacian", "laplacian_backward") for dtype in ("bf16", "fp16")),
]


def named(w):
    return "-".join(map(str, (w.op, w.dtype, *dict(w.dims).values())))


@pytest.mark.parametrize("w", WORKLOADS, ids=named)
def test_every_rival_is_right(w):
    operator = operators()[w.op]
    inputs = operator.make_inputs(w, CPU, 0)
    reference = operator.reference(w, inputs)
    for rival in operator.rivals:
        # Compiling takes seconds, and what is compiled is what torch's rival runs.
        if rival.name == "torch.compile" and (w.dtype != "fp32" or w not in WORKLOADS[:5]):
            continue
        if rival.supports(w, Device.current("cpu")) is None:
            verdict = judge(rival, w, inputs, reference, operator.tolerance(w))
            assert verdict.ok, f"{rival.name}: {verdict.reason}"


@pytest.mark.parametrize("w", [ADD, grid("zero"), grid("interior", "laplacian_backward")], ids=named)
def test_the_gate_finds_a_wrong_one(w):
    operator = operators()[w.op]
    inputs = operator.make_inputs(w, CPU, 0)
    reference = operator.reference(w, inputs)
    (ours,) = (r for r in operator.rivals if r.name == "expertile")

    def bind(w, inputs):
        call = ours.bind(w, inputs)
        return lambda: tuple(x * (1 + 1e-5) for x in call())

    assert not judge(Rival("off", bind, ours.supports), w, inputs, reference, operator.tolerance(w)).ok


def test_work():
    add, laplacian, backward = (operators()[op].work for op in ("add_scalar", "laplacian", "laplacian_backward"))
    assert (add(ADD).flops, add(ADD).nbytes) == (1000, 8000)
    assert laplacian(grid("zero")).nbytes == 2 * 2 * 9 * 12 * 4
    assert laplacian(grid("interior")).nbytes == 2 * (9 * 12 + 7 * 10) * 4
    assert laplacian(grid("interior")).flops == 6 * 2 * 7 * 10
    assert backward(grid("interior", "laplacian_backward")).nbytes == laplacian(grid("interior")).nbytes


def test_conv2d_says_what_it_cannot():
    (conv,) = (r for r in operators()["laplacian"].rivals if r.name == "conv2d")
    h200 = Device.by_name("h200")
    assert conv.supports(grid("zero"), h200) is None and conv.supports(grid("interior"), h200) is None
    assert "zeros" in conv.supports(grid("circular"), h200)


def test_presets_hold_the_studys_sizes():
    add = {(w["elements"], w.dtype) for w in presets()["add-scalar"]()}
    assert {(n * 1000, "fp32") for n in (32, 64, 128, 256, 512)} <= add
    assert {(10**8, dtype) for dtype in ("fp32", "bf16", "fp16")} <= add
    grids = {(w["grids"], w["rows"], w["columns"], w["boundary"], w.op) for w in presets()["laplacian"]()}
    for op in ("laplacian", "laplacian_backward"):
        assert {(*g, "interior", op) for g in ((1, 512, 512), (1, 2048, 2048), (16, 256, 256))} <= grids


def test_compiled_rivals_keep_their_shapes_static(monkeypatch):
    """Many shapes through one function: each has a graph of its own, none falls back to eager or to dynamic shapes."""
    seen: list[tuple[int, ...]] = []

    def backend(graph, example_inputs):
        seen.extend(tuple(x.shape) for x in example_inputs if isinstance(x, torch.Tensor))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    (compiled,) = (r for r in operators()["add_scalar"].rivals if r.name == "torch.compile")
    for elements in range(10, 22):
        w = replace(ADD, name=f"static-{elements}", dims=(("elements", elements), ("value", 1.0)))
        for seed in (0, 1):
            call = compiled.bind(w, operators()["add_scalar"].make_inputs(w, CPU, seed))
            with torch.no_grad():  # as the race calls it
                call()
    assert seen == [(elements,) for elements in range(10, 22)]
