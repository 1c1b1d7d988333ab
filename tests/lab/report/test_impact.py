"""Impact: which records count for a model's operators, what is left out, and that nothing is invented."""

import warnings

import pytest

from expertile.device import Device
from expertile.lab.bench.presets import preset
from expertile.lab.measure.env import Env
from expertile.lab.report.impact import MODELS, impact, uses
from tests.lab.records import timed

H200 = Device.by_name("h200")
LAYER_NORM = {"rows": 16384, "cols": 768, "weight": True, "bias": True}


def norm(backend, time_s, run="r1", **changes):
    values = {"op": "layer_norm", "workload": "layernorm-v100/16384x768", "shape": LAYER_NORM, "dtype": "fp32"}
    return timed(time_s, backend=backend, run=run, **(values | changes))


PAIR = [norm("torch", 50e-6), norm("expertile", 20e-6)]


def bert(records, **options):
    return impact("bert-base", records, H200, **options)


def counted(lines):
    return [line for line in lines if line.pair]


def test_bert_counts_its_norms_and_names_what_has_no_record():
    norms, attention = bert(PAIR)
    assert (norms.op, norms.count, [r.time_s for r in norms.pair]) == ("layer_norm", 25, [50e-6, 20e-6])
    assert attention.reason == "no record of sdpa_fa2 and expertile-auto in one run" and attention.pair is None
    assert "no record of torch and expertile" in bert([])[0].reason and counted(bert([])) == []


@pytest.mark.parametrize(
    "change",
    [
        {"run": "another"},
        {"policy": "eager"},
        {"dtype": "bf16"},
        {"env": Env("NVIDIA H100 80GB HBM3")},
        {"shape": LAYER_NORM | {"rows": 16385}},
        {"shape": {"rows": 16384}},
        {"op": "rms_norm"},
        {"workload": "rows/16384x768"},
    ],
    ids=str,
)
def test_times_of_different_measurements_are_not_set_against_each_other(change):
    changed = norm("torch", 50e-6, **change)
    assert counted(bert([changed, PAIR[1]])) == []


def test_the_latest_run_counts():
    old = [norm("torch", 90e-6, "old", date="2026-11-01"), norm("expertile", 10e-6, "old", date="2026-11-01")]
    (line,) = counted(bert([*old, *PAIR]))
    assert [r.run for r in line.pair] == ["r1", "r1"]


def test_another_baseline():
    (line,) = counted(bert([*PAIR, norm("torch.compile", 25e-6)], baseline="torch.compile"))
    assert line.pair[0].backend == "torch.compile"


def test_attention_counts_against_what_torch_takes_by_default():
    shape = {"batch": 32, "heads": 12, "kv_heads": 12, "q_len": 512, "k_len": 512, "head_dim": 64, "causal": False}
    values = {"op": "attention", "shape": shape, "dtype": "bf16", "run": "r1", "workload": "a"}
    records = [timed(2e-4, backend="sdpa_fa2", **values), timed(1e-4, backend="expertile-auto", **values)]
    (line,) = counted(bert(records, dtype="bf16"))
    assert line.count == 12 and line.pair == tuple(records)


@pytest.mark.parametrize("model", [m for m in MODELS if m != "bert-base"])
def test_experts_are_those_of_the_models_preset(model):
    """The products of a pass at its default size are the workloads that `bench --preset models` measures."""
    measured = {(w.name.split(":")[0], w.m, w.n, w.k, w.groups) for w in preset("models")}
    products = [line for line in uses(model, 16, 512) if line.op == "grouped_mm"]
    for line, projection in zip(products, ("gate-up", "down"), strict=True):
        d = line.dims
        assert (f"{model}-{projection}-prefill", d["m"], d["n"], d["k"], d["groups"]) in measured


@pytest.mark.parametrize("model", MODELS)
def test_passes_scale_with_their_tokens(model):
    for a, b in zip(uses(model, 1, 128), uses(model, 2, 128), strict=True):
        grown = [key for key, value in a.dims.items() if b.dims[key] != value]
        assert a.count == b.count and b.dims[grown[0]] == 2 * a.dims[grown[0]]
        assert grown in (["rows"], ["batch"], ["m"]), a


def test_layers_of_the_published_configurations():
    for model, layers, moe in (("mixtral-8x7b", 32, 32), ("deepseek-v3", 61, 58), ("gpt-oss-120b", 36, 36)):
        first, *_, down = uses(model, 1, 1)
        assert first.count == 2 * layers + 1 and down.count == moe
    assert next(uses("bert-base", 1, 1)).count == 2 * 12 + 1


def test_what_is_not_supported_is_named():
    for model, reason in (("deepseek-v3", "keys of 192"), ("gpt-oss-120b", "sinks")):
        (line,) = (line for line in impact(model, [], H200) if line.op == "attention")
        assert reason in line.reason


@pytest.mark.parametrize(
    "model, options, message",
    [
        ("gpt-5", {}, "model: expected one of bert-base, .*got 'gpt-5'"),
        ("bert-base", {"batch": 0}, "batch, seq_len: expected 1 or more, got 0 and 512"),
        ("bert-base", {"policy": "warm"}, "policy: expected one of graph, eager, got 'warm'"),
    ],
)
def test_errors(model, options, message):
    with pytest.raises(ValueError, match=message):
        impact(model, [], H200, **options)


def test_a_gpu_that_nobody_measured_brings_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = impact("gpt-oss-120b", [], Device.by_name("l40s"))
    assert lines and not counted(lines)
