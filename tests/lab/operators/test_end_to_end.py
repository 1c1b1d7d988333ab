"""Whole small models: how they are built and quantised, what the gate refuses, and the records of both presets."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertile.device import Device
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.lab.operators import _models as models
from expertile.lab.operators import end_to_end as lab
from expertile.lab.race.case import Site
from expertile.lab.race.record import PEAK_BYTES, TOKENS_PER_S, read

CPU = torch.device("cpu")
SITE = Site(Device.current("cpu"), CPU)
QWEN, OSS = lab.plans(lab.SERVE, CPU)


@pytest.fixture(autouse=True)
def without_collecting_garbage(monkeypatch):
    """Which takes longest where transformers is imported."""
    monkeypatch.setattr(lab, "release", lambda device: None)


def logits(model, implementation, ids):
    model.config._experts_implementation = implementation
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def error(found, want):
    return float((found - want).norm() / want.norm())


def test_full_size_is_that_of_the_published_models():
    (train,) = lab.plans(lab.TRAIN, torch.device("cuda"))
    qwen, oss = lab.plans(lab.SERVE, torch.device("cuda"))
    assert train.options == {**qwen.options, "num_hidden_layers": 12} and qwen.options["num_hidden_layers"] == 48
    for plan, billions, active in ((qwen, 30.5, 3.0), (oss, 116.8, 5.1)):  # active: without the embedding
        model = models._empty(plan)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
        assert lab._flops(model, 1, 1, 0) / 2e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("plan", [QWEN, OSS], ids=lambda p: p.name)
def test_weights_come_from_the_seed_with_the_variance_of_their_inputs(plan):
    one, same, other = (models.build(plan, CPU, seed) for seed in (0, 0, 1))
    ids = torch.arange(20)[None]
    assert torch.equal(logits(one, "expertile", ids), logits(same, "expertile", ids))
    assert error(logits(other, "expertile", ids), logits(one, "expertile", ids)) > 0.5
    assert 0.1 < logits(one, "expertile", ids).std() < 10
    experts = one.model.layers[0].mlp.experts
    down = experts.down_proj
    if plan.packed:
        assert isinstance(down.weight, Mxfp4Weight)
        assert down.weight.dequantize().float().std() == pytest.approx(2.93 * 2.0**-7, rel=0.05)
    else:
        assert down.detach().float().std() == pytest.approx(64**-0.5, rel=0.05)


@pytest.mark.parametrize("format, limit", [("mxfp4", 0.03), ("int4", 0.03), ("fp8", 0.12)])
def test_a_quantised_model_shares_the_rest_and_computes_on_the_weights_it_has(format, limit):
    model = models.build(QWEN, CPU)
    other = models.quantised(model, QWEN, format)
    assert other.lm_head.weight is model.lm_head.weight
    held = [models.nbytes(m.model.layers[1].mlp.experts) for m in (model, other)]
    assert held[0] / held[1] == pytest.approx({"mxfp4": 3.76, "int4": 3.76, "fp8": 2}[format], rel=0.1)
    ids, kept = torch.arange(30)[None], {}
    with models.routing(other, kept):
        want = logits(other, models.DEQUANTISED, ids)
        assert error(logits(other, "expertile", ids), want) < limit
    with models.routing(model, kept):
        rounded = error(logits(model, "grouped_mm", ids), want)
    assert rounded > limit / 3  # they are other weights


def test_routing_is_kept_and_given_back():
    model, kept = models.build(QWEN, CPU), {}
    first, second = torch.arange(20)[None], torch.arange(20, 40)[None]
    with models.routing(model, kept):
        logits(model, "grouped_mm", first)
    ids = [own[0].clone() for own in kept.values()]
    assert [list(i.shape) for i in ids] == [[20, 2]] * 2
    free = logits(model, "grouped_mm", second)
    with models.routing(model, kept):
        assert error(logits(model, "grouped_mm", second), free) > 0.01
    assert all(torch.equal(a, own[0]) for a, own in zip(ids, kept.values(), strict=True))
    assert torch.equal(logits(model, "grouped_mm", second), free)  # no hook stays


def measured(preset, **options):
    return list(lab.measure(preset, SITE, **options))


def test_a_training_step_has_tokens_per_second_and_memory(tmp_path):
    path = tmp_path / "x.jsonl"
    found = measured(lab.TRAIN, out_path=path, backends=("expertile", "grouped_mm", "sonicmoe"))
    assert read(path) == found
    of = {(r.backend, r.metric): r for r in found}
    for backend in ("expertile", "grouped_mm"):
        rate, peak = of[backend, TOKENS_PER_S], of[backend, PEAK_BYTES]
        assert rate.status == "ok" and rate.value > 0 and rate.op == "train_step"
        assert rate.workload == "end-to-end-train/small-Qwen3-30B-A3B-T32" and rate.shape["layers"] == 2
        parameters = rate.nbytes / 12
        assert rate.flops > 6 * 32 * parameters / 4 and peak.value > 2 * 4 * parameters  # with moments and gradients
    assert 0 < of["expertile", TOKENS_PER_S].rel_error < 0.03
    if of["sonicmoe", TOKENS_PER_S].status != "ok":
        assert of["sonicmoe", TOKENS_PER_S].reason


def test_serving_has_a_record_of_each_format_that_fits(tmp_path):
    found = measured(lab.SERVE, batches=(2,), backends=("grouped_mm", "expertile-int4", "expertile-mxfp4"))
    rates = {(r.workload.partition("/")[2], r.backend): r for r in found if r.metric == TOKENS_PER_S}
    assert len(rates) == 8 and all(r.status == "ok" for r in rates.values())
    name = QWEN.name + "-decode-B2-C256"
    assert rates[name, "expertile-int4"].nbytes < rates[name, "grouped_mm"].nbytes
    assert rates[name, "expertile-int4"].flops == rates[name, "grouped_mm"].flops
    assert rates[OSS.name + "-decode-B2-C120", "expertile-mxfp4"].rel_error < 0.03
    assert rates[OSS.name + "-prefill-T32", "expertile-mxfp4"].shape["tokens"] == 32


def test_what_computes_something_else_has_no_rate(monkeypatch):
    right = ALL_EXPERTS_FUNCTIONS["expertile"]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "expertile", lambda self, *args: right(self, *args) * 1.2)
    monkeypatch.setattr(models, "register", lambda: None)
    for preset in (lab.TRAIN, lab.SERVE):
        for record in measured(preset, backends=("expertile",), only=("*Qwen3*",), batches=(2,)):
            assert record.status == "wrong" and record.value is None and record.reason
            assert "wrong, " in lab.line(record)


def test_a_decode_step_sees_the_cache_and_leaves_it_as_it_was():
    for plan in (QWEN, OSS):
        model = models.build(plan, CPU)
        model.config._experts_implementation = "expertile"
        call = lab.Call("decode", "x", 2, 2, 100)
        step = lab._bound_to(model, call)
        once = step()
        assert list(once.shape) == [2, 256] and torch.equal(once, step())
        assert error(lab._bound_to(model, replace(call, context=99))().float(), once.float()) > 0.01


def test_without_transformers_a_preset_is_refused_in_a_sentence(monkeypatch):
    def missing():
        raise ImportError("transformers is not installed")

    monkeypatch.setattr(models, "register", missing)
    with pytest.raises(ValueError, match="end-to-end-serve: transformers is not installed"):
        measured(lab.SERVE)
