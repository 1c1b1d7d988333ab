"""Figures and words of docs/results/scaling.md, from made-up records whose growth is known."""

import xml.etree.ElementTree as ET

import pytest

from expertile.lab.bench.presets import preset
from expertile.lab.report.contest import runs
from tests.lab.report.samples import record
from tools.pages.scaling import (
    NOT_MEASURED,
    SECTIONS,
    axis_of,
    blocks,
    newest,
    scaling_svg,
    scaling_text,
    sentences,
    skew_cases,
    sweeps,
)

SLOW = {"quick": 1.1, "slow": 3.0, "dense": 1.02, "copy": 1.02}  # time over the bound


def _records(name, run="r", skewed=1.5, **more):
    """Every workload of a preset: "quick" at 1.1 of the bound, "slow" at 3, and worse where groups are uneven."""
    found = []
    for w in preset(name):
        work = w.problem("cuda").work()
        bound = max(work.flops / 500e12, work.nbytes / 2e12)
        limiter = "compute" if bound == work.flops / 500e12 else "memory"
        uneven = max(w.group_sizes) - min(w.group_sizes) > 1
        for backend, factor in SLOW.items():
            for policy in ("graph", "eager"):
                time = bound * factor * (skewed if uneven and backend == "slow" else 1.0) + (policy == "eager") * 2e-5
                fields = {"shape": w.shape(), "flops": work.flops, "nbytes": work.nbytes, "bound": bound}
                fields |= {"limiter": limiter}
                found.append(record(f"{name}/{w.name}", backend, time, run=run, policy=policy, **fields, **more))
    return found


@pytest.fixture(scope="module")
def both():
    return _records("scaling") + _records("skew", run="s")


def test_a_figure_for_every_sweep_and_one_for_skew(both):
    figures = scaling_svg(both)
    swept = {axis_of(w.name)[:2] for w in preset("scaling")}
    expected = {f"{name}-{axis}" for name, axis in swept} | {f"{n}-tokens-eager" for n, a in swept if a == "tokens"}
    assert set(figures) == expected | {"skew"}
    for svg in figures.values():
        ET.fromstring(svg)
    tokens = figures["mixtral-up-tokens"]
    assert "Imaginary GPU" in tokens and "8 groups, K 4096, N 14336" in tokens
    assert tokens.count("<polyline") == len(SLOW) + 1  # and the bound


def test_words_follow_from_the_records(both):
    (sweep,) = [s for s in sweeps(runs(both)[0], "graph") if s.name == "mixtral-up"]
    said = sentences(sweep)
    (first, start), (last, end) = sweep.points[0], sweep.points[-1]
    assert (first, last) == (1, 65536)
    assert said[0].startswith("From 1 to 65536 tokens FLOPs grow 65,536×, bytes ")
    assert f"{end.best.time_s / start.best.time_s:,.0f}×" in said[0]
    switch = next(v for v, c in sweep.points if c.limiter == "compute")
    assert f"Limited by: memory (1 to {switch // 2}), compute ({switch} to 65536)." in said
    assert "Fastest (ties count for both): `quick` (1 to 65536)." in said
    assert "Where compute limits, the fastest backend reaches 91 % of the bound and 93 % of `dense`'s speed." in said


def test_the_plain_is_the_longest_stretch_that_hardly_grows(both):
    for sweep in sweeps(runs(both)[0], "graph"):
        plain = [s for s in sentences(sweep) if "grows only" in s]
        assert bool(plain) == (sweep.axis == "tokens")
        if sweep.name == "qwen3-gate-up":  # 8 and 16 … experts before, all 128 from 16 tokens on
            times = {v: c.best.time_s for v, c in sweep.points}
            end = max(v for v in times if times[v] <= 1.25 * times[16])
            assert plain[0].startswith(f"From 16 to {end} tokens, {end // 16} times as many")


def test_skew_is_held_against_the_twin(both):
    cases = skew_cases(runs(both)[1])
    assert len(cases) == 13
    for case in cases:
        assert case.ratio("slow") == pytest.approx(1.5)
        assert case.ratio("quick") == case.best_ratio == pytest.approx(1.0)
        assert case.ratio("nobody") is None
    text = scaling_text(both)["skew"]
    assert "at most 1.00× the fastest time on even groups" in text and "on 13 of 13 cases within 1.05×" in text
    assert "`slow`: 1.50× to 1.50× its own time" in text


def test_only_the_newest_run_counts():
    old = _records("skew", run="old", skewed=9.0, date="2026-01-01T00:00:00Z")
    new = _records("skew", run="new", skewed=2.0, date="2026-02-01T00:00:00Z")
    assert newest(new + old, "skew").name == "new" and newest(new, "scaling") is None
    assert "`slow`: 2.00×" in scaling_text(new + old)["skew"]


def test_no_records_no_figures():
    assert scaling_svg([]) == {} and scaling_text([]) == {}
    assert set(scaling_text(_records("skew"))) == {"skew"}


def test_every_figure_stands_in_a_section(both):
    texts = blocks(both)
    assert texts.keys() == set(SECTIONS) and "Imaginary GPU" in texts["tokens"]
    assert all(any(f"(figures/{name}.svg)" in text for text in texts.values()) for name in scaling_svg(both))
    assert blocks(_records("skew"))["tokens"] == NOT_MEASURED
