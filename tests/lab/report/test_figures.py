import json

import plotly.graph_objects as go
import pytest

from expertile.lab.report.contest import runs
from expertile.lab.report.figures import log_axis, share_figure, time_figure
from expertile.lab.report.figures_run import launch_figure, roofline_figure, roofs, scaling_figures
from expertile.lab.report.verdict import overhead
from tests.lab.report import samples


def run_of(records):
    (run,) = runs(records)
    return run


def validated(figure):
    """Plotly's own schema check, with the page's colour tokens filled in."""
    return go.Figure(
        json.loads(
            json.dumps(figure)
            .replace('"@fg"', '"black"')
            .replace('"@bg"', '"white"')
            .replace('"@grid"', '"grey"')
            .replace('"@accent"', '"red"')
        )
    )


@pytest.mark.parametrize("workloads", [2, 40])
def test_every_figure_obeys_plotlys_schema(workloads):
    run = run_of(samples.lab(seed=6, workloads=workloads))
    contests = run.contests_of("graph")
    figures = [share_figure(contests), time_figure(contests), roofline_figure(run, contests)]
    figures += [launch_figure(overhead(run)), *scaling_figures(contests).values()]
    for figure in figures:
        assert validated(figure).data


def test_share_bars_hold_the_shares_and_their_intervals():
    bound = samples.record()["bound"]
    run = run_of([samples.record(backend="a", time_s=bound / 0.8, spread=0.1)])
    (bar,) = [trace for trace in share_figure(run.contests)["data"] if trace["type"] == "bar"]
    assert bar["x"] == [pytest.approx(0.8)]
    assert bar["error_x"]["array"] == [pytest.approx(0.8 / 0.9 - 0.8)]
    assert bar["error_x"]["arrayminus"] == [pytest.approx(0.8 - 0.8 / 1.1)]


def test_many_workloads_become_dots():
    few, many = (run_of(samples.lab(seed=7, workloads=n)).contests_of("graph") for n in (4, 40))
    assert "bar" in {trace["type"] for trace in share_figure(few)["data"]}
    assert {trace["type"] for trace in share_figure(many)["data"]} == {"scatter"}


def test_without_a_bound_the_fastest_is_the_measure():
    run = run_of([samples.record(backend="a", bounded=False), samples.record(backend="b", time_s=4e-4, bounded=False)])
    figure = share_figure(run.contests)
    shown = {trace["meta"]["backend"]: trace["x"] for trace in figure["data"] if trace["type"] == "bar"}
    assert shown == {"a": [1.0], "b": [0.25]}
    assert figure["layout"]["xaxis"]["title"]["text"] == "speed relative to the fastest backend"


def test_nothing_timed_gives_no_figure():
    run = run_of([samples.record(status="unsupported", reason="no")])
    assert share_figure(run.contests) is None
    assert time_figure(run.contests) is None
    assert roofline_figure(run, run.contests) is None
    assert launch_figure(overhead(run)) is None


def test_roofs_come_from_the_records():
    compute, memory = roofs(run_of([samples.record(rows=65536), samples.record("w/2", rows=8)]))
    assert compute == {"bf16": pytest.approx(samples.PEAK_FLOPS / 1e12)}
    assert memory == pytest.approx(samples.MEMORY_BPS / 1e12)


def test_an_unknown_memory_roof_is_not_drawn():
    run = run_of([samples.record(rows=65536)])
    assert roofs(run)[1] is None
    assert len([t for t in roofline_figure(run, run.contests)["data"] if t["mode"] == "lines"]) == 1


def test_scaling_needs_three_sizes_of_one_family():
    sizes = [samples.record(f"w/{rows}", rows=rows) for rows in (64, 512, 4096)]
    assert scaling_figures(run_of(sizes[:2]).contests) == {}
    ((title, figure),) = scaling_figures(run_of([*sizes, samples.record("w/wide", n=512)]).contests).items()
    assert title == "bf16, groups 8, n 4096, k 1024, uniform"
    assert [trace["x"] for trace in figure["data"] if trace["name"] == "loop"] == [[64, 512, 4096]]


@pytest.mark.parametrize("values", [[1.0], [3.0, 4.0], [0.5, 2e5], [1e-3, 1e9], [99, 101]])
def test_log_axis_has_few_ticks_inside_its_range(values):
    axis = log_axis(values)
    assert len(axis["tickvals"]) <= 6
    assert 10 ** axis["range"][0] < min(values)
    assert 10 ** axis["range"][1] > max(values)


def test_names_are_escaped_for_plotlys_markup():
    run = run_of([samples.record("w/<b>x", "<i>y"), samples.record("w/<b>x", "<i>y", policy="eager")])
    text = json.dumps(
        [
            share_figure(run.contests_of("graph")),
            time_figure(run.contests_of("graph")),
            launch_figure(overhead(run)),
            roofline_figure(run, run.contests_of("graph")),
        ]
    )
    assert "<b>x" not in text
    assert text.count("<i>y") == text.count('{"backend": "<i>y"}')  # the page's key, never drawn
