"""Sweeps vary one thing; skewed workloads have twins of equal work; dgrad is the forward product turned round."""

from expertile.lab.bench.presets import preset
from expertile.lab.bench.sweeps import twin
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout
from tools.pages.scaling import axis_of


def _work(workload):
    return workload.problem("cuda").work()


def _sweep(name):
    found = [(axis_of(w.name), w) for w in preset("scaling")]
    return {place[2]: w for place, w in found if place[0] == name}


def test_tokens_go_from_1_to_65536_in_powers_of_two():
    for name, shape, top_k in (("qwen3-gate-up", (128, 2048, 1536), 8), ("mixtral-up", (8, 4096, 14336), 2)):
        sweep = _sweep(name)
        assert list(sweep) == [2**i for i in range(17)]
        for tokens, w in sweep.items():
            assert (w.groups, w.k, w.n) == shape and w.m == tokens * top_k
            assert max(w.group_sizes) - min(w.group_sizes) <= 1


def test_groups_keep_their_rows_or_their_weights():
    rows = _sweep("same-rows")
    assert list(rows) == [2**i for i in range(10)]
    assert {w.m for w in rows.values()} == {32768} and {(w.k, w.n) for w in rows.values()} == {(2048, 1536)}
    weights = _sweep("same-weights")
    assert {w.groups * w.n * w.k for w in weights.values()} == {65536 * 2048}
    assert {_work(w).flops for w in weights.values()} == {2.0 * 256 * 65536 * 2048}
    assert all(set(w.group_sizes) == {256} for w in weights.values())


def test_every_name_of_scaling_says_what_varies():
    places = [axis_of(w.name) for w in preset("scaling")]
    assert None not in places and len(set(places)) == len(places)
    assert axis_of("scaling/depth-k512") == axis_of("depth-k512") == ("depth", "k", 512)
    assert axis_of("anchors/decode-g128-1024") is None


def test_every_skewed_workload_has_a_twin_of_the_same_work():
    workloads = preset("skew")
    even = {(_work(w), w.k, w.n) for w in workloads if w.name.startswith("balanced-")}
    uneven = [w for w in workloads if not w.name.startswith("balanced-")]
    assert len(uneven) == 13
    for w in uneven:
        assert max(w.group_sizes) - min(w.group_sizes) > 1
        assert (_work(w), w.k, w.n) in even


def test_skewed_cases_are_what_they_say():
    w = {x.name: x for x in preset("skew")}
    assert max(w["qwen3-one-takes-90"].group_sizes) == 65536 * 9 // 10
    assert sum(s == 0 for s in w["mixtral-half-empty"].group_sizes) == 4
    assert len(w["tiny-groups"].group_sizes) == 512 and set(w["tiny-groups"].group_sizes) == {0, 1, 2, 3}
    spreads = [max(w[f"qwen3-zipf{s}"].group_sizes) for s in ("0.5", "1", "1.5", "2")]
    assert spreads == sorted(spreads) and spreads[-1] > 0.5 * 65536


def test_a_twin_has_no_empty_groups():
    even = twin(ragged_m("x", "skew", (0, 7, 0, 1, 3), 64, 32, "bf16"))
    assert even.group_sizes == (4, 4, 3)


def test_dgrad_reads_the_weights_of_the_forward_product_as_they_are_stored():
    forward = {w.name: w for w in preset("anchors")}
    gradients = {w.name: w for w in preset("gradients")}
    dgrad = {n.removeprefix("dgrad-"): w for n, w in gradients.items() if w.layout is Layout.RAGGED_M}
    assert {"moe-ffn-up", "mixtral-small", "prefill-g256-65536"} <= set(dgrad)
    assert not any(name.startswith("decode") for name in dgrad)
    for name, w in dgrad.items():
        assert w.group_sizes == forward[name].group_sizes
        # the same memory: weights stored [G, N, K] of the forward product, read as [G, K', N'] of this one
        stored_forward = (forward[name].groups, forward[name].n, forward[name].k)
        assert w.b_shape == stored_forward and w.b_layout == "kn"
        assert _work(w).flops == _work(forward[name]).flops
    assert {n for n, w in gradients.items() if w.layout is Layout.RAGGED_K} == {
        n for n, w in forward.items() if w.layout is Layout.RAGGED_K
    }


def test_skew_is_drawn_from_its_seed():
    zero, one, two = (preset("skew", seed=seed) for seed in range(3))
    assert zero != one != two != zero
    assert preset("skew", seed=1) == one


def test_gradients_keep_weight_gradients_as_they_are():
    from expertile.lab.bench.sweeps import gradients

    (kept,) = gradients([wgrad("w", "anchors", (4, 4), 8, 8, "bf16")])
    assert (kept.name, kept.preset, kept.layout) == ("w", "gradients", Layout.RAGGED_K)
