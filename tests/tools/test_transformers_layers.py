"""Experts of models as tools/measure_transformers.py measures them: weights, routing, reference, work, refusals."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertile.device import Device
from expertile.integrations.transformers import register
from expertile.lab.bench.run import run
from expertile.lab.operators._models import Plan
from expertile.lab.operators.products import REAL_MODELS
from expertile.lab.race.case import Site
from tools import measure_transformers as tool
from tools.measure_transformers import MODELS

CPU = torch.device("cpu")
SITE = Site(replace(Device.current("cpu"), l2_bytes=1), CPU)  # one set of inputs
_SMALL = {
    "Qwen3-30B-A3B": dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3),
    "Mixtral-8x7B": dict(intermediate_size=48, num_local_experts=4),
    "DeepSeek-V3": dict(moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2),
    "gpt-oss-120b": dict(intermediate_size=24, num_local_experts=4, num_experts_per_tok=2),
}


def small(name):
    """The model with a hidden size of 32 and few experts."""
    model = next(m for m in MODELS if m.name == name)
    return replace(model, options={**model.options, "hidden_size": 32, "num_attention_heads": 4, **_SMALL[name]})


SMALL = tuple(small(model.name) for model in MODELS)


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture(autouse=True)
def one_set_of_inputs(monkeypatch):
    monkeypatch.setattr("expertile.lab.race.case.set_count", lambda *_: 1)


def measured(model, case):
    layer = tool.make_layer(model, CPU)
    found = run([tool.workload(layer, case)], (), operators=(tool.operator(layer, case, SITE),), device=CPU, rounds=3)
    return {r.backend: r for r in found if r.backend != "copy"}


def test_sizes_are_those_of_the_published_configurations():
    options = {model.name.lower(): model.options for model in MODELS}
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    for name, (e, h, i, k) in REAL_MODELS.items():
        own = options[name]
        assert own["hidden_size"] == h and own["num_experts_per_tok"] == k
        assert own.get("moe_intermediate_size", own.get("intermediate_size")) == i
        assert next(own[n] for n in names if n in own) == e


@pytest.mark.parametrize("model", SMALL, ids=lambda m: m.name)
def test_the_reference_is_eager_s_value_and_gradient(model):
    layer = tool.make_layer(model, CPU)
    inputs = tool.make_inputs(layer, 40, True, 0)
    x, ids, weights, dy = inputs
    top_k = ids.shape[1]
    assert x.dtype is torch.bfloat16 and list(ids.shape) == list(weights.shape) == [40, top_k]
    assert all(len(set(row)) == top_k for row in ids.tolist()) and int(ids.max()) < layer.sizes[2]
    found = tool.reference(layer, inputs)
    layer.experts.float()
    leaves = (x.float().requires_grad_(), weights.float().requires_grad_(), *layer.experts.parameters())
    out = layer.runs("eager")(leaves[0], ids, leaves[1])
    for got, want in zip(found, (out, *torch.autograd.grad(out, leaves, dy.float())), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-4)
    assert 0.1 < float(out.detach().std()) < 10


def test_weights_are_drawn_from_the_seed_and_inputs_differ_from_set_to_set():
    one, same, other = (tool.make_layer(SMALL[3], CPU, seed) for seed in (0, 0, 1))
    for name, weights in one.experts.named_parameters():
        assert torch.equal(weights, dict(same.experts.named_parameters())[name])
        assert not torch.equal(weights, dict(other.experts.named_parameters())[name])
    spread = float(one.experts.gate_up_proj.detach().float().std())
    assert spread == pytest.approx(32**-0.5, rel=0.05)  # stored [E, H, 2I]
    first, again, second = (tool.make_inputs(one, 30, False, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], second[1])


def test_work_counts_the_experts_that_have_tokens():
    layer = tool.make_layer(SMALL[0], CPU)
    h, i, e = layer.sizes
    assert (h, i, e) == (32, 16, 8)
    x, ids, weights, dy = tool.make_inputs(layer, 1, True, 0)
    forward, both = tool.work(layer, (x, ids, weights)), tool.work(layer, (x, ids, weights, dy))
    assert forward.flops == 6 * 3 * h * i and both.flops == 3 * forward.flops
    routing = 3 * (8 + weights.element_size())
    assert forward.nbytes == 2 * (2 * h + 3 * 3 * h * i) + routing
    assert both.nbytes == 2 * (4 * h + (3 + e) * 3 * h * i) + routing


def test_who_is_called():
    assert tool.implementations(tool.Case(16)) == ("expertile", "grouped_mm", "batched_mm")
    assert tool.implementations(tool.Case(17), eager=True) == ("expertile", "grouped_mm", "eager")
    assert tool.implementations(tool.Case(1, both=True), eager=True) == ("expertile", "grouped_mm")
    cases = {(c.tokens, c.both) for c in (*tool.FIRST, *tool.THEN)}
    assert cases == {(1, False), (16, False), (128, False), (2048, False), (8192, False), (4096, True)}


@pytest.mark.parametrize(
    "model, case",
    [*((model, tool.Case(40, both=True)) for model in SMALL), (SMALL[3], tool.Case(12))],
    ids=lambda x: x.name if isinstance(x, Plan) else ("forward", "both")[x.both],
)
def test_records_of_a_case(model, case):
    found = measured(model, case)
    assert found.keys() == set(tool.implementations(case)) and {r.policy for r in found.values()} == {"eager"}
    for r in found.values():
        assert r.status == "ok" and r.time_s >= r.bound_s and r.rel_error < 0.032
        assert r.workload == f"transformers/{tool.name(model, case)}" and r.op == "experts" + "_train" * case.both
        assert (r.shape["experts"], r.shape["hidden"]) in ((8, 32), (4, 32)) and r.config["transformers"]
        assert r.shape["top_k"] == model.options.get("num_experts_per_tok", 2)


def test_a_wrong_one_and_one_that_raises_have_reasons_and_no_time(monkeypatch):
    def wrong(self, x, ids, weights):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, x, ids, weights) * 1.03

    def raising(self, x, ids, weights):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(tool, "implementations", lambda case, eager: ("expertile", "wrong", "raising"))
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "wrong", wrong)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "raising", raising)
    found = measured(SMALL[1], tool.Case(12))
    assert found["expertile"].time_s and {r.status for r in found.values()} == {"ok", "wrong", "failed"}
    assert found["wrong"].reason.startswith("relative error") and found["wrong"].time_s is None
    assert "no such kernel" in found["raising"].reason
