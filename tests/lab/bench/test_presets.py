"""Presets: the exact shapes their sources state, options, and what a machine gets by default."""

import json

import pytest

from expertile.device import Device
from expertile.lab.bench.presets import ALL_PRESETS, PRESETS, default_preset, preset, preset_options, workloads_for
from expertile.ops.grouped_mm.problem import Layout
from expertile.ragged import tiles_per_group


def _by_name(name, **options):
    return {w.name: w for w in preset(name, **options)}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_deterministic_and_their_names_unique(name):
    workloads = preset(name)
    assert workloads == preset(name)
    assert len({w.name for w in workloads}) == len(workloads)
    elsewhere = name.startswith("end-to-end")  # no workload describes whole models
    assert {w.preset for w in workloads} == (set() if elsewhere else {name})


def test_squares_are_those_of_report_000_each_with_a_ragged_twin():
    w = _by_name("squares")
    expected = {
        "4x512": (4, 512),
        "16x512": (16, 512),
        "8x1024": (8, 1024),
        "64x1024": (64, 1024),
        "16x2048": (16, 2048),
        "32x2048": (32, 2048),
    }
    assert list(w) == [name + twin for name in expected for twin in ("", "-ragged")]
    for name, (groups, side) in expected.items():
        even, ragged = w[name], w[f"{name}-ragged"]
        assert even.group_sizes == (side,) * groups and ragged.groups == groups
        assert len(set(ragged.group_sizes)) > 1
        for one in (even, ragged):
            assert (one.m, one.n, one.k, one.dtype) == (groups * side, side, side, "fp16")


def test_moe_ffn_is_report_001():
    w = _by_name("moe-ffn")
    assert {n: (x.groups, x.k, x.n, x.m) for n, x in w.items()} == {
        "moe-ffn-up-top1": (8, 4096, 14336, 16384),
        "moe-ffn-down-top1": (8, 14336, 4096, 16384),
        "moe-ffn-up-top2": (8, 4096, 14336, 32768),
        "moe-ffn-down-top2": (8, 14336, 4096, 32768),
    }
    up = w["moe-ffn-up-top1"]
    assert up.group_sizes[:3] == (1842, 2341, 1756)
    assert tiles_per_group(up.group_sizes, 128)[:3] == (15, 19, 14)  # as the report prints them
    assert all(x.dtype == "bf16" for x in w.values())


def test_quantised_presets_are_operators_and_take_no_options():
    sweep = workloads_for(("fp8-sweep",))
    assert len(sweep) == 81 and {w.op for w in sweep} == {"scaled_grouped_mm"} and not any(w.unsupported for w in sweep)
    assert preset_options("fp8-sweep") == () and "fp8-sweep" not in PRESETS and "fp8-sweep" in ALL_PRESETS


MODELS = {
    "mixtral": (8, 4096, 14336, 2),
    "deepseek": (64, 4096, 11008, 8),
    "glm5": (128, 5120, 13696, 8),
    "debug": (4, 512, 1024, 2),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "deepseek-v3": (256, 7168, 2048, 8),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}


def test_models_have_both_projections_in_prefill_and_decode():
    w = _by_name("models", batch=4, seq=32)
    assert len(w) == len(MODELS) * 4
    for model, (experts, hidden, ffn, top_k) in MODELS.items():
        for phase, tokens in (("prefill", 128), ("decode", 4)):
            up, down = w[f"{model}-gate-up-{phase}"], w[f"{model}-down-{phase}"]
            assert (up.groups, up.k, up.n, up.m) == (experts, hidden, 2 * ffn, tokens * top_k)
            assert (down.groups, down.k, down.n, down.m) == (experts, ffn, hidden, tokens * top_k)
            assert up.group_sizes == down.group_sizes


def test_tokens_take_the_place_of_the_phases():
    w = _by_name("models", tokens=[7, 64])
    assert len(w) == len(MODELS) * 4
    assert w["glm5-down-tokens7"].m == 56
    assert w["glm5-down-tokens64"].m == 512
    assert len(preset("models", tokens=7)) == len(MODELS) * 2
    with pytest.raises(ValueError, match="tokens: expected 1 or more for tokens0, got 0"):
        preset("models", tokens=0)


def test_routing_and_seed_reach_the_rows():
    first, second = (_by_name("models", tokens=64, routing="zipf(1)", seed=s) for s in (0, 1))
    one = first["qwen3-30b-a3b-down-tokens64"]
    assert one.routing == "zipf(1) tokens=64 top_k=8 seed=0"
    assert one.group_sizes != second[one.name].group_sizes
    routed = _by_name("moe-ffn", routing="balanced")["moe-ffn-down-top2"]
    assert routed.group_sizes == (4096,) * 8


def test_routing_file_gives_one_workload_per_layer(tmp_path):
    path = tmp_path / "real.json"
    layers = [{"name": f"l{i}", "counts": [i, *[8] * 7]} for i in range(3)]
    path.write_text(json.dumps({"num_experts": 8, "layers": layers}))
    w = _by_name("models", routing=str(path))
    assert w["mixtral-down-decode:l2"].group_sizes == (2, *[8] * 7)
    assert w["mixtral-down-decode:l2"].routing == "real.json:l2"
    assert w["deepseek-v3-down-decode"].unsupported == "real.json has 8 experts, this workload 256"
    assert len(w) == 2 * 4 * 3 + 6 * 4


def test_anchors_have_forward_and_gradient_rows():
    w = _by_name("anchors")
    assert all(x.dtype == "bf16" for x in w.values())
    rows = {n: (x.groups, x.m, x.k, x.n) for n, x in w.items() if x.layout is Layout.RAGGED_M}
    assert rows["prefill-g256-65536"] == (256, 65536, 7168, 4096)
    assert rows["decode-g128-128"] == (128, 128, 2048, 1536)
    assert rows["64x1024"] == (64, 65536, 1024, 1024)
    gradients = {n: (x.groups, x.k, x.m, x.n) for n, x in w.items() if x.layout is Layout.RAGGED_K}
    assert len(rows) == 15 and len(gradients) == 6
    assert gradients["wgrad-g256-65536"] == (256, 65536, 2048, 1024)
    assert w["wgrad-g128-8192"].a_strides == (1, 2048)


def test_cpu_preset_is_small():
    workloads = preset("cpu")
    assert max(w.problem("cpu").work().flops for w in workloads) < 1.2e9
    assert sum(w.memory_nbytes for w in workloads) < 256e6
    assert any(0 in w.group_sizes for w in workloads)
    assert {w.layout for w in workloads} == {Layout.RAGGED_M, Layout.RAGGED_K}


def test_everything_fits_an_h200():
    device = Device.by_name("h200")
    for name in PRESETS:
        assert all(w.memory_nbytes <= 0.9 * device.memory_bytes for w in preset(name))


def test_defaults_suit_the_machine():
    assert default_preset(Device.current("cpu")) == ("cpu",)
    assert default_preset(Device.by_name("V100-SXM2-32GB")) == ("cpu",)
    assert default_preset(Device.by_name("h200")) == ("squares", "moe-ffn", "models")


def test_unknown_names_and_options_are_named():
    with pytest.raises(ValueError, match="preset: expected one of .*, got 'square'; did you mean 'squares'"):
        preset("square")
    with pytest.raises(ValueError, match="preset 'squares': expected options routing, seed, got 'tokens'"):
        preset("squares", tokens=4)
    assert preset_options("models") == ("tokens", "batch", "seq", "routing", "seed")


def test_options_go_to_the_presets_that_take_them():
    workloads = workloads_for(("squares", "models"), tokens=[64], routing=None)
    assert {w.preset for w in workloads} == {"squares", "models"}
    assert len(workloads) == 12 + 16
    message = r"batch: expected a preset that takes this option \(models\), got squares, cpu"
    with pytest.raises(ValueError, match=message):
        workloads_for(("squares", "cpu"), batch=4)
