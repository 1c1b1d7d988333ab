"""Distributions: exact sums, distinct choices, determinism, and the shape each promises."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertile.lab.race.routing import draw, parse_routing, rows_of_experts, topk_ids, usage

SPECS = ("balanced", "uniform", "uneven(0.3)", "zipf(1.2)", "skewed", "skewed(1, 2)", "one-expert", "half-empty")


@st.composite
def _cases(draw_from):
    experts = draw_from(st.integers(1, 40))
    return (
        draw_from(st.sampled_from(SPECS)),
        draw_from(st.integers(0, 300)),
        experts,
        draw_from(st.integers(1, experts)),
        draw_from(st.integers(0, 2**32)),
    )


@given(_cases())
@settings(max_examples=150, deadline=None)
def test_every_token_chooses_top_k_distinct_experts(case):
    spec, tokens, experts, top_k, seed = case
    (drawn,) = draw(spec, tokens, experts, top_k, seed)
    ids = topk_ids(spec, tokens, experts, top_k, seed)
    assert len(drawn.group_sizes) == experts
    assert sum(drawn.group_sizes) == tokens * top_k
    assert ids.shape == (tokens, top_k) and ids.dtype == np.int32
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert np.bincount(ids.ravel(), minlength=experts).tolist() == list(drawn.group_sizes)


@given(_cases())
@settings(max_examples=50, deadline=None)
def test_the_seed_decides(case):
    first = draw(*case)
    rows_of_experts.cache_clear()
    assert draw(*case) == first
    assert (topk_ids(*case) == topk_ids(*case)).all()
    assert f"seed={case[-1]}" in draw(*case)[0].label


def test_another_seed_draws_otherwise():
    for spec in SPECS:
        if spec != "balanced":
            draws = {draw(spec, 1000, 16, 2, seed)[0].group_sizes for seed in range(4)}
            assert len(draws) > 1, spec


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_balanced_differs_by_one_at_most(tokens, experts):
    sizes = draw("balanced", tokens, experts)[0].group_sizes
    assert max(sizes) - min(sizes) <= 1


def test_uneven_stays_within_its_spread():
    sizes = draw("uneven(0.15)", 16384, 8)[0].group_sizes
    shares = [s / 2048 for s in sizes]
    assert 0.85 / 1.15 <= min(shares) < 1 < max(shares) <= 1.15 / 0.85


def test_zipf_follows_the_power_law():
    rows, experts, s = 400_000, 8, 1.3
    sizes = sorted(draw(f"zipf({s})", rows, experts)[0].group_sizes, reverse=True)
    weights = [r**-s for r in range(1, experts + 1)]
    for size, weight in zip(sizes, weights, strict=True):
        share = weight / sum(weights)
        assert size == pytest.approx(rows * share, abs=5 * math.sqrt(rows * share))


def test_zipf_of_zero_is_uniform():
    sizes = draw("zipf(0)", 100_000, 4)[0].group_sizes
    assert max(abs(s - 25_000) for s in sizes) < 5 * math.sqrt(25_000)


def test_skewed_follows_its_formula():
    # With sigma -> 0 only the prior -s ln(e + 1) is left: the first k experts take all.
    assert draw("skewed(1, 0)", 100, 6, 2)[0].group_sizes == (100, 100, 0, 0, 0, 0)
    # Two experts: expert 1 wins when sigma (z1 - z0) > ln 2, a normal of variance 2 sigma².
    p = 0.5 * math.erfc(math.log(2) / (0.5 * math.sqrt(2)) / math.sqrt(2))
    won = draw("skewed", 100_000, 2, 1)[0].group_sizes[1]
    assert won == pytest.approx(100_000 * p, abs=5 * math.sqrt(100_000 * p))


def test_one_expert_takes_all():
    assert sorted(draw("one-expert", 64, 8)[0].group_sizes) == [0] * 7 + [64]
    assert sorted(draw("one-expert", 64, 8, 3)[0].group_sizes) == [0] * 5 + [64] * 3


def test_half_empty_leaves_half_empty():
    sizes = draw("half-empty", 5000, 9, 2)[0].group_sizes
    assert sizes.count(0) == 4
    assert draw("half-empty", 5000, 4, 3)[0].group_sizes.count(0) == 1  # top-3 needs three experts


def test_large_draws_are_made_in_pieces():
    sizes = draw("uniform", 10_001, 5, 2)[0].group_sizes
    assert sum(sizes) == 20_002


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("zipf", "zipf(1)"),
        ("zipf( 1.20 )", "zipf(1.2)"),
        ("skewed", "skewed(1, 0.5)"),
        ("skewed(2)", "skewed(2, 0.5)"),
        (" uniform ", "uniform"),
        ("uniform()", "uniform"),
    ],
)
def test_specs_are_parsed_with_their_defaults(text, spec):
    assert parse_routing(text).spec == spec
    assert parse_routing(spec).spec == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zpif(1)", r"routing: expected balanced, uniform, .*zipf\(s\).*\.json or \.npz, got 'zpif\(1\)'"),
        ("zipf(1", "routing: expected"),
        ("", "routing: expected"),
        ("zipf(a)", "zipf: s: expected a number, got 'a'"),
        ("zipf(-1)", "zipf: s: expected 0 to 10, got -1"),
        ("zipf(nan)", "zipf: s: expected 0 to 10, got nan"),
        ("zipf(1,2)", "zipf: expected at most 1 arguments, got 2"),
        ("uniform(1)", "uniform: expected at most 0 arguments, got 1"),
    ],
)
def test_bad_specs_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_routing(text)


def test_usage_names_every_distribution_and_parses():
    assert {u.split("(")[0] for u in usage()} >= {s.split("(")[0] for s in SPECS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 8, 1), "tokens: expected 0 or more, got -1"),
        ((2**30, 8, 2), r"tokens: expected tokens · top_k below 2\^31, .* got 1073741824 · 2"),
        ((8, 0, 1), "num_experts: expected 1 or more, got 0"),
        ((8, 4, 5), r"top_k: expected 1 to 4 \(num_experts\), got 5"),
        ((8, 4, 0), r"top_k: expected 1 to 4 \(num_experts\), got 0"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    for function in (draw, topk_ids):
        with pytest.raises(ValueError, match=message):
            function("uniform", *arguments)
