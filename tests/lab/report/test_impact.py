"""Impact: the arithmetic from records to GPU-hours, what is left out, and that nothing is invented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.race.config import read_bench_file
from expertile.lab.race.presets import preset
from expertile.lab.report.impact import bench_file, impact
from expertile.lab.report.impact_models import MODELS, Use
from tests.lab.records import timed

H200 = Device.by_name("h200")
LAYER_NORM = {"rows": 16384, "cols": 768, "weight": True, "bias": True}


def norm(backend, time_s, run="r1", **changes):
    values = {"op": "layer_norm", "workload": "layernorm-v100/16384x768", "shape": LAYER_NORM, "dtype": "fp32"}
    return timed(time_s, backend=backend, run=run, **(values | changes))


PAIR = [norm("torch", 50e-6), norm("expertile", 20e-6)]


def bert(records, qps=1000.0, **options):
    return impact("bert-base", qps, records, H200, **options)


def test_the_arithmetic():
    found = bert(PAIR, price_per_gpu_hour=2.0)
    assert [line.use.op for line in found.counted] == ["layer_norm"]
    assert found.baseline_s == pytest.approx(25 * 50e-6)
    assert found.saved_s == pytest.approx(25 * 30e-6)
    # 32 sequences share a pass: 23.4 µs saved for each query, 1000 queries a second, 86400 seconds a day.
    assert found.saved_per_query_s == pytest.approx(25 * 30e-6 / 32)
    assert found.gpu_hours_per_day == pytest.approx(1000 * 86400 * 25 * 30e-6 / 32 / 3600)
    assert found.price_per_day == pytest.approx(2.0 * found.gpu_hours_per_day)
    assert bert(PAIR).price_per_day is None, "no price is assumed"
    assert bert(PAIR, qps=0).gpu_hours_per_day == 0


def test_report_004s_own_figures_by_its_own_arithmetic():
    """It saves 24 x 39 µs in a pass of 32 sequences and multiplies by 1000 inferences a second: one inference of its is
    a pass of 32 queries."""
    records = [norm("torch", 0.170e-3), norm("expertile", 0.131e-3)]
    found = bert(records, qps=32 * 1000)
    per_pass = found.saved_s / 25 * 24
    assert per_pass == pytest.approx(0.94e-3, rel=0.01)
    assert found.gpu_hours_per_day * 24 / 25 == pytest.approx(22.6, rel=0.01)


def test_a_slower_kernel_costs():
    found = bert([norm("torch", 20e-6), norm("expertile", 50e-6)])
    assert found.saved_s < 0 and found.gpu_hours_per_day < 0


def test_without_records_nothing_is_said():
    found = bert([])
    assert found.counted == () and found.saved_s == 0
    assert {line.use.op for line in found.left_out} == {"layer_norm", "attention"}
    assert "no record of torch and expertile" in found.left_out[0].reason
    assert "no fused kernel takes fp32" in found.left_out[1].reason


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
    assert bert([changed, PAIR[1]]).counted == ()


def test_the_latest_run_counts():
    old = [norm("torch", 90e-6, "old", date="2026-11-01"), norm("expertile", 10e-6, "old", date="2026-11-01")]
    (line,) = bert([*old, *PAIR]).counted
    assert line.pair.run == "r1" and line.pair.baseline_s == 50e-6


def test_another_baseline():
    compiled = norm("torch.compile", 25e-6)
    (line,) = bert([*PAIR, compiled], baseline="torch.compile").counted
    assert line.pair.baseline == "torch.compile" and line.saved_s == pytest.approx(25 * 5e-6)


def test_scaling_only_when_asked_and_said():
    found = bert(PAIR, batch=8)
    assert found.counted == ()
    (line,) = bert(PAIR, batch=8, scale=True).counted
    assert line.pair.baseline_s == pytest.approx(50e-6 / 4) and "0.25 from rows 16384" in line.pair.scaled
    # The nearest in proportion, not the largest.
    near = [norm(r.backend, r.time_s / 2, "r2", shape=LAYER_NORM | {"rows": 8192}, workload="near") for r in PAIR]
    (line,) = bert([*PAIR, *near], batch=8, scale=True).counted
    assert line.pair.run == "r2" and "0.5 from rows 8192" in line.pair.scaled
    # Columns do not grow in proportion.
    narrow = [norm(r.backend, r.time_s, shape=LAYER_NORM | {"cols": 512}) for r in PAIR]
    assert bert(narrow, batch=8, scale=True).counted == ()


def test_attention_counts_against_what_torch_takes_by_default():
    shape = {
        "batch": 32,
        "heads": 12,
        "kv_heads": 12,
        "q_len": 512,
        "k_len": 512,
        "head_dim": 64,
        "causal": False,
    }
    values = {"op": "attention", "shape": shape, "dtype": "bf16", "run": "r1", "workload": "a"}
    records = [timed(2e-4, backend="sdpa_fa2", **values), timed(1e-4, backend="expertile-auto", **values)]
    (line,) = bert(records, dtype="bf16").counted
    assert line.saved_s == pytest.approx(12 * 1e-4)


@pytest.mark.parametrize("model", [m for m in MODELS if m != "bert-base"])
def test_experts_are_those_of_the_models_preset(model):
    """The products of a pass at its default size are the workloads that `bench --preset models` measures."""
    measured = {(w.name.split(":")[0], w.m, w.n, w.k, w.groups) for w in preset("models")}
    uses = [u for u in MODELS[model].uses(MODELS[model].batch, MODELS[model].seq_len) if u.op == "grouped_mm"]
    for use, projection in zip(uses, ("gate-up", "down"), strict=True):
        d = dict(use.dims)
        assert (f"{model}-{projection}-prefill", d["m"], d["n"], d["k"], d["groups"]) in measured


@pytest.mark.parametrize("model", MODELS)
def test_passes_scale_with_their_tokens(model):
    one, two = MODELS[model].uses(1, 128), MODELS[model].uses(2, 128)
    assert [u.count for u in one] == [u.count for u in two]
    for a, b in zip(one, two, strict=True):
        grown = [key for key, value in a.dims if dict(b.dims)[key] != value]
        assert dict(b.dims)[grown[0]] == 2 * dict(a.dims)[grown[0]]
        assert grown in (["rows"], ["batch"], ["m"]), a


def counts(model):
    return {use.where: use.count for use in MODELS[model].uses(1, 1)}


def test_layers_of_the_published_configurations():
    assert counts("bert-base")["after embeddings and twice a layer"] == 2 * 12 + 1
    for model, layers, moe in (
        ("mixtral-8x7b", 32, 32),
        ("deepseek-v3", 61, 58),
        ("qwen3-30b-a3b", 48, 48),
        ("gpt-oss-120b", 36, 36),
    ):
        assert counts(model)["twice a layer and at the end"] == 2 * layers + 1
        assert counts(model)["experts, down"] == counts(model)["experts, gate and up"] == moe


def test_what_is_not_supported_is_named():
    for model, reason in (("deepseek-v3", "keys of 192"), ("gpt-oss-120b", "sinks")):
        found = impact(model, 1.0, [], H200)
        (line,) = (line for line in found.left_out if line.use.unsupported)
        assert reason in line.reason


def test_what_has_no_record_can_be_measured(tmp_path):
    """The bench file holds the very calls that were missing, and no others."""
    found = impact("qwen3-30b-a3b", 1.0, [], H200, batch=1, seq_len=64)
    path = tmp_path / "missing.toml"
    path.write_text(bench_file(found))
    workloads = read_bench_file(path).workloads()
    missing = [line.use for line in found.left_out]
    assert len(workloads) == len(missing)
    for use, workload in zip(missing, workloads, strict=True):
        assert workload.op == use.op and workload.dtype == "bf16"
        assert all(workload.shape()[key] == value for key, value in use.dims), use
    assert "deepseek" not in bench_file(impact("gpt-oss-120b", 1.0, [], H200))


def test_a_use_is_what_it_says():
    use = Use("softmax", (("rows", 1),), 3, "here")
    assert replace(use, count=4).count == 4 and use.unsupported == ""


@pytest.mark.parametrize(
    "model, qps, options, message",
    [
        ("gpt-5", 1.0, {}, "model: expected one of bert-base, .*got 'gpt-5'"),
        ("bert-base", -1.0, {}, "qps: expected a number of 0 or more, got -1"),
        ("bert-base", float("nan"), {}, "qps: expected a number"),
        ("bert-base", 1.0, {"price_per_gpu_hour": float("inf")}, "price_per_gpu_hour: expected"),
        ("bert-base", 1.0, {"batch": 0}, "batch: expected 1 or more, got 0"),
        ("bert-base", 1.0, {"policy": "warm"}, "policy: expected graph or eager, got 'warm'"),
    ],
)
def test_errors(model, qps, options, message):
    with pytest.raises(ValueError, match=message):
        impact(model, qps, [], H200, **options)
