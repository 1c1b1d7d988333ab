from dataclasses import replace

import pytest

from expertile.lab.report.contest import runs
from expertile.lab.report.figures import log_axis, share_figure, time_figure
from expertile.lab.report.figures_run import launch_figure, roofline_figure, roofs, scaling_figures
from expertile.lab.report.verdict import overhead
from tests.lab.report import samples


def run_of(records):
    (run,) = runs(records)
    return run


def test_share_bars_hold_the_shares_and_their_intervals():
    bound = samples.record(time_s=1.0).bound
    run = run_of([samples.record(backend="a", time_s=bound / 0.8, spread=0.1)])
    (bar,) = [mark for mark in share_figure(run.contests)["marks"] if mark["kind"] == "bar"]
    assert bar["x"] == [pytest.approx(0.8)]
    assert (bar["low"], bar["high"]) == ([pytest.approx(0.8 / 1.1)], [pytest.approx(0.8 / 0.9)])


def test_an_interval_may_reach_down_to_nothing():
    run = run_of([replace(samples.record(backend="a"), ci95=(0.0, 2e-4))])
    (bar,) = [mark for mark in share_figure(run.contests)["marks"] if mark["kind"] == "bar"]
    assert (bar["low"], bar["high"]) == ([pytest.approx(0.5)], [1.0])
    (dot,) = [mark for mark in time_figure(run.contests)["marks"] if mark["kind"] == "dots"]
    assert (dot["low"], dot["high"]) == ([100.0], [pytest.approx(200.0)])


def test_many_workloads_become_dots():
    few, many = (run_of(samples.lab(seed=7, workloads=n)).contests_of("graph") for n in (4, 40))
    assert "bar" in {mark["kind"] for mark in share_figure(few)["marks"]}
    assert {mark["kind"] for mark in share_figure(many)["marks"]} == {"dots", "line"}


def test_without_a_bound_the_fastest_is_the_measure():
    run = run_of([samples.record(backend="a", bounded=False), samples.record(backend="b", time_s=4e-4, bounded=False)])
    figure = share_figure(run.contests)
    shown = {mark["backend"]: mark["x"] for mark in figure["marks"] if mark["kind"] == "bar"}
    assert shown == {"a": [1.0], "b": [0.25]}
    assert figure["x"]["title"] == "speed relative to the fastest backend"


def test_nothing_timed_gives_no_figure():
    run = run_of([samples.record(status="unsupported", reason="no")])
    assert share_figure(run.contests) is None
    assert time_figure(run.contests) is None
    assert roofline_figure(run, run.contests) is None
    assert launch_figure(overhead(run)) is None


def test_roofs_come_from_the_records():
    compute, memory = roofs(
        run_of([samples.record(time_s=1e-2, rows=65536), samples.record("w/2", time_s=1e-2, rows=8)])
    )
    assert compute == {"bf16": pytest.approx(samples.PEAK_FLOPS / 1e12)}
    assert memory == pytest.approx(samples.MEMORY_BPS / 1e12)


def test_an_unknown_memory_roof_is_not_drawn():
    run = run_of([samples.record(time_s=1e-2, rows=65536)])
    assert roofs(run)[1] is None
    assert len([m for m in roofline_figure(run, run.contests)["marks"] if m["kind"] == "line"]) == 1


def test_scaling_needs_three_sizes_of_one_family():
    sizes = [samples.record(f"w/{rows}", rows=rows) for rows in (64, 512, 4096)]
    assert scaling_figures(run_of(sizes[:2]).contests) == {}
    ((title, figure),) = scaling_figures(run_of([*sizes, samples.record("w/wide", n=512)]).contests).items()
    assert title == "bf16, groups 8, n 4096, k 1024, uniform"
    assert [mark["x"] for mark in figure["marks"] if mark["backend"] == "loop"] == [[64, 512, 4096]]


@pytest.mark.parametrize("values", [[1.0], [3.0, 4.0], [0.5, 2e5], [1e-3, 1e9], [99, 101]])
def test_log_axis_has_few_ticks_inside_its_range(values):
    axis = log_axis(values, "µs")
    low, high = axis["range"]
    assert len(axis["ticks"]) <= 6 and all(low <= at <= high for at, _ in axis["ticks"])
    assert low < min(values) and high > max(values)


@pytest.mark.parametrize("share", [1e-4, 0.007, 0.08, 0.3, 1.0])
def test_ticks_of_shares_differ_and_fit(share):
    bound = samples.record(time_s=1.0).bound
    run = run_of([samples.record(backend="a", time_s=bound / share)])
    axis = share_figure(run.contests)["x"]
    texts = [text for _, text in axis["ticks"]]
    assert 2 <= len(texts) == len(set(texts)) <= 6 and texts[0] == "0 %"
    assert all(at <= axis["range"][1] for at, _ in axis["ticks"])


def test_the_highest_of_several_measured_roofs_is_drawn():
    rows = [samples.record(time_s=1.0, rows=65536), samples.record("w/2", time_s=1.0, rows=65536)]
    rows[1] = replace(rows[1], bound=2 * rows[1].bound)
    assert roofs(run_of(rows))[0] == {"bf16": pytest.approx(samples.PEAK_FLOPS / 1e12)}
