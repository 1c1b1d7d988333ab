"""README's table and chart: ratios of one run, the best rival of each workload, losses counted, absent rivals named."""

from pathlib import Path

import pytest

from tests.lab.records import timed
from tools.pages.headline import JOBS, PRESETS, SHOWN, bars, charts, standings, table
from tools.pages.headline_chart import Bar, chart
from tools.pages.markers import fill_file
from tools.pages.recorded import shipped

ROOT = Path(__file__).parents[3]
GPU = "NVIDIA H200"


def record(backend, time_s, workload="a", preset="anchors", op="grouped_mm", **changes):
    interval = (time_s * 0.999, time_s * 1.001)
    values = {"op": op, "workload": f"{preset}/{workload}", "backend": backend, "bound": 1e-6, "ci95": interval}
    return timed(time_s, **{**values, "policy": "graph", "run": "one", **changes})


def contest(workload, ours, theirs, **changes):
    return [record("triton_tma", ours, workload, **changes), record("quack", theirs, workload, **changes)]


def only(records):
    (standing,) = standings(records, GPU)
    return standing


def test_the_best_of_ours_is_set_beside_the_best_rival():
    found = [*contest("a", 20e-6, 10e-6), record("gluon_hopper", 5e-6), record("loop", 40e-6), record("dense", 1e-6)]
    standing = only(found)
    assert standing.ratios == (2.0,) and standing.rivals == ("quack",)


def test_wins_ties_and_losses_are_counted():
    found = [*contest("a", 10e-6, 20e-6), *contest("b", 10e-6, 10.05e-6), *contest("c", 10e-6, 5e-6)]
    standing = only(found)
    assert (standing.faster, standing.ties, standing.slower) == (1, 1, 1)
    assert min(standing.ratios) == 0.5 and standing.mean == pytest.approx((2 * 1.005 * 0.5) ** (1 / 3))
    assert "| **1.00×** | 0.50× | 1 / 1 / 1 |" in table([standing])


def test_two_runs_never_meet_and_the_one_with_most_workloads_counts():
    old = [*contest("a", 10e-6, 20e-6, run="old"), *contest("b", 10e-6, 20e-6, run="old")]
    assert only([*old, record("quack", 1e-6, run="new")]).ratios == (2.0, 2.0)
    assert only([*old, *contest("a", 10e-6, 30e-6, run="new")]).run.name == "old"
    new = [*contest("a", 10e-6, 30e-6, run="new"), *contest("b", 10e-6, 30e-6, run="new")]
    assert only([*old, *new]).ratios == (3.0, 3.0)


def test_other_gpus_eager_calls_and_weight_gradients_are_left_out():
    found = contest("a", 10e-6, 20e-6)
    assert standings(found, "NVIDIA B200") == []
    assert standings([record("triton_tma", 1e-5, policy="eager"), record("quack", 1e-5, policy="eager")], GPU) == []
    assert only([*found, *contest("wgrad-a", 10e-6, 1e-6)]).ratios == (2.0,)


def test_what_is_there_for_cpus_does_not_count():
    assert only([*contest("a", 10e-6, 20e-6), *contest("small-train", 1e-6, 9e-6)]).ratios == (2.0,)


def test_auto_alone_is_ours_where_it_was_raced_and_what_choosing_lost_is_said():
    records = [
        record("auto", 10e-6, preset="auto"),
        record("gluon_hopper", 8e-6, preset="auto"),
        record("torch_grouped", 15e-6, preset="auto"),
    ]
    standing = only(records)
    assert standing.ratios == (1.5,) and standing.rivals == ("torch_grouped",)
    assert "`auto` reaches 0.800 (worst 0.80)." in table([standing]) and "quack (Random" in table([standing])
    raced = [record("measure", 8e-6, preset="auto"), record("quack", 12e-6, preset="auto")]
    standing = only([*records, *raced])
    assert standing.ratios == (1.2,) and standing.rivals == ("quack",)
    said = table([standing])
    assert '`auto` reaches 0.800 (worst 0.80), and `backend="measure"`, ' in said and "1.000 (worst 1.00)." in said
    assert "quack in its one fixed configuration" in said and "quack (Random" not in said


def test_a_smaller_run_with_the_specialised_rival_stands():
    old = [record(b, t, w, preset="auto", run="old") for w in "ab" for b, t in (("auto", 2e-6), ("loop", 3e-6))]
    new = [record(b, t, "a", preset="auto", run="new") for b, t in (("auto", 2e-6), ("quack", 1e-6))]
    assert only(old).ratios == (1.5, 1.5)
    assert only([*old, *new]).ratios == (0.5,)


def test_a_specialised_rival_is_named_until_it_has_a_time_in_the_run():
    values = {"preset": "fp8-large", "op": "scaled_grouped_mm"}
    found = [record("expertile", 10e-6, **values), record("torch", 15e-6, **values)]
    assert only(found).absent == ["DeepGEMM"] and "DeepGEMM (FP8 products)" in table([only(found)])
    beside = only([*found, record("deepgemm", 9e-6, **values)])
    assert beside.absent == [] and beside.mean == pytest.approx(0.9) and "¹" not in table([beside])
    elsewhere = record("deepgemm", 9e-6, run="another", **values)
    assert only([elsewhere, *found]).absent == ["DeepGEMM"]


def test_every_job_has_a_row_of_shipped_records():
    found = standings(shipped(PRESETS, "nvidia-h200"), GPU)
    assert [standing.job for standing in found] == list(JOBS) and len(JOBS) == 10
    assert [bar.title for bar in bars(found)] == list(SHOWN.values())
    assert all(len({row.run for row in standing.run.rows}) == 1 for standing in found)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_has_every_bar_in_proportion(theme):
    text = chart([Bar("One", "quack", 1.5, 0.5, 2.0), Bar("Two", "torch", 0.75, 0.5, 1.0)], GPU, "a note", theme)
    widths = [float(part.split('"')[0]) for part in text.split("<rect ")[1:] for part in [part.split('width="')[1]]]
    assert widths[0] / widths[1] == pytest.approx(1.5, rel=1e-2) and widths[2] / widths[3] == pytest.approx(
        0.75, rel=1e-2
    )
    assert "1.50×" in text and "0.75×" in text and "a note" in text and "quack, 1×" in text


def update_page(page, figures, records, gpu, check=False):
    found = standings(records, gpu)
    files = {figures / f"{name}.svg": svg for name, svg in charts(found, gpu).items()}
    return fill_file(page, {"jobs": table(found)}, check, files=files)


def test_a_stale_chart_or_table_is_told_and_left_alone(tmp_path):
    page, figures = tmp_path / "README.md", tmp_path / "figures"
    page.write_text("<!-- expertile:jobs -->\n<!-- /expertile:jobs -->\n")
    found = contest("a", 10e-6, 20e-6)
    assert not update_page(page, figures, found, GPU, check=True) and not figures.exists()
    assert not update_page(page, figures, found, GPU) and update_page(page, figures, found, GPU, check=True)
    (figures / "headline-dark.svg").write_text("old")
    assert not update_page(page, figures, found, GPU, check=True)
    assert (figures / "headline-dark.svg").read_text() == "old"
