"""The steps of the MoE layer: the page's stages in order, right as a chain, and nothing timed otherwise."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget
from expertile.lab.operators import moe_stages
from expertile.lab.operators.moe import make_inputs, workload
from expertile.lab.operators.moe_stages import STAGES
from expertile.lab.race.case import Site
from expertile.moe.experts import moe_mlp
from expertile.moe.router import RouterConfig, route

SITE = Site(Device.current("cpu"), torch.device("cpu"))
SHAPE = (40, 64, 32, 8, 2)
BUDGET = Budget(0.02, min_rounds=3, max_rounds=3)


def test_the_chain_gives_what_the_layer_gives():
    x, router, gate_up, down, dy = make_inputs(workload("w", "moe", SHAPE, train=True), torch.device("cpu"), 0)
    found = moe_stages.steps(x, router, gate_up, down, dy, top_k=2)
    assert list(found.calls) == list(STAGES)
    leaves = [t.requires_grad_() for t in (x, router, gate_up, down)]
    routing = route(x @ router.t(), RouterConfig(8, 2), want_scores=False)
    out = moe_mlp(x, gate_up, down, routing.topk_ids, routing.topk_weights)
    want = (out, *torch.autograd.grad(out, leaves, dy))
    assert all(torch.equal(found.results[i], want[i]) for i in (0, 3, 4))
    for i in (1, 2):  # autograd adds the router's share of dx in another order
        torch.testing.assert_close(found.results[i], want[i], rtol=2e-2, atol=2e-2)


def test_a_part():
    part = moe_stages.measure_stages(SHAPE, SITE, BUDGET)
    assert part["part"] == "stages" and part["size"] == list(SHAPE)
    assert list(part["seconds"]) == list(STAGES) and all(s > 0 for s in part["seconds"].values())
    assert 0 < part["rel_error"] < 0.02


@pytest.mark.parametrize("name", ["combine", "gathered_wgrad"])
def test_a_wrong_step_is_not_timed(name, monkeypatch):
    right = getattr(moe_stages, name)
    monkeypatch.setattr(moe_stages, name, lambda *args, **options: right(*args, **options) * 1.05)
    monkeypatch.setattr(moe_stages, "time_interleaved", None)
    with pytest.raises(RuntimeError, match="wrong result: output"):
        moe_stages.measure_stages(SHAPE, SITE, BUDGET)


def test_a_step_without_a_time_leaves_no_part(monkeypatch):
    timed = moe_stages.time_interleaved

    def broken(candidates, **options):
        def fail(_):
            raise RuntimeError("no such kernel")

        bad = [moe_stages.TimedCall(c.name, fail if c.name == "down" else c.call) for c in candidates]
        return timed(bad, **options)

    monkeypatch.setattr(moe_stages, "time_interleaved", broken)
    with pytest.raises(RuntimeError, match="down: RuntimeError: no such kernel"):
        moe_stages.measure_stages(SHAPE, SITE, BUDGET)
