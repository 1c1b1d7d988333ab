"""The steps of the MoE layer: right one by one and as a chain, and a fault is found where it is."""

import pytest
import torch

from expertile.lab.bench.run import run
from expertile.lab.operators import for_cpu, moe_stages, operators
from expertile.lab.operators.moe import make_inputs, workload
from expertile.lab.operators.moe_stages import STAGES
from expertile.lab.race.gate import judge
from expertile.moe.experts import moe_mlp
from expertile.moe.router import RouterConfig, route

CPU = torch.device("cpu")
SMALL = {w["stage"]: w for w in for_cpu(moe_stages.workloads())}
(OPERATOR,) = moe_stages.OPERATORS


def judged(stage):
    w = SMALL[stage]
    inputs = OPERATOR.make_inputs(w, CPU, 0)
    return judge(OPERATOR.rivals[0], w, inputs, OPERATOR.reference(w, inputs), OPERATOR.tolerance(w))


def test_the_chain_gives_what_the_layer_gives():
    inputs = x, router, gate_up, down, dy = make_inputs(workload("w", "moe", (40, 64, 32, 8, 2), train=True), CPU, 0)
    calls = moe_stages.calls(inputs, top_k=2)
    assert list(calls) == list(STAGES) == list(SMALL)
    routing = route(x @ router.t(), RouterConfig(8, 2), want_scores=False)
    leaves = [t.requires_grad_() for t in (x, gate_up, down)]
    out = moe_mlp(x, gate_up, down, routing.topk_ids, routing.topk_weights)
    want = (out, *torch.autograd.grad(out, leaves, dy))
    with torch.no_grad():
        got = [calls[stage]() for stage in ("combine", "B combine", "B wgrad up", "B wgrad down")]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_right(stage):
    verdict = judged(stage)
    assert verdict.ok and verdict.rel_error < 0.01, verdict


@pytest.mark.parametrize(
    ("name", "stage", "later"), [("combine", "combine", "B combine"), ("gathered_wgrad", "B wgrad up", "B wgrad down")]
)
def test_a_wrong_step_is_found_where_it_is(name, stage, later, monkeypatch):
    right = getattr(moe_stages, name)
    monkeypatch.setattr(moe_stages, name, lambda *args, **options: right(*args, **options) * 1.05)
    assert not judged(stage).ok and not judged(later).ok and judged("down").ok


def test_a_run():
    kept = [SMALL["router linear"], SMALL["B dgrad"]]
    found = list(run(kept, operators=[operators()["moe_stage"]], device="cpu", quick=True, seconds=0.1, seed=1))
    assert [(r.shape["stage"], r.backend, r.status) for r in found if r.backend != "copy"] == [
        (w["stage"], "expertile", "ok") for w in kept
    ]
