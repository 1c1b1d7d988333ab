"""docs/results/grouped_mm.md: ratios of one run, means by kind of product, and what the checks said."""

from pathlib import Path

import pytest

from expertile.device import Device
from expertile.lab.race.record import shipped_records, shipped_root
from tests.lab.report.samples import record
from tools.pages.grouped import PRESETS, against, blocks, checked, read_checks

ROOT = Path(__file__).parents[3]


def lines(text):
    return [line for line in text.splitlines() if line.startswith("| ")][2:]


def rows(workload, **times):
    return [record(f"anchors/{workload}", backend, t * 1e-6) for backend, t in times.items()]


def test_our_best_against_the_best_peer_of_the_row():
    found = rows("up", gluon_hopper=100, triton_tma=90, quack=99, loop=120, dense=81)
    (line,) = lines(against(found))
    assert "`triton_tma` | 90.0 |" in line and "| `quack` | 99.0 | 1.10× | 0.90× `dense` |" in line


def test_means_by_kind():
    found = [
        *rows("up", gluon_hopper=100, quack=121),
        *rows("down", gluon_hopper=100, quack=100),
        *rows("wgrad-up", gluon_hopper=100, quack=50),
        *rows("dgrad-up", gluon_hopper=100, loop=102),
    ]
    text = against(found)
    assert "products 1.100 (2 rows, worst 1.000)" in text
    assert "weight gradients 0.500 (1 row, worst 0.500)" in text and "input gradients 1.020 (1 row" in text


def test_what_ran_only_on_one_side_has_no_line():
    assert not lines(against([*rows("up", gluon_hopper=100, dense=90), *rows("down", quack=90)]) or "")
    assert against([]) == "Not measured yet."


def test_only_the_last_run_and_replayed_graphs_count():
    old = [record("anchors/up", "gluon_hopper", 1e-6, run="old"), record("anchors/up", "quack", 9e-6, run="old")]
    (line,) = lines(against([*old, *rows("up", gluon_hopper=100, quack=110)]))
    assert "1.10×" in line


def test_a_later_run_that_was_cut_short_stands_below():
    whole = [*rows("up", gluon_hopper=100, quack=110), *rows("down", gluon_hopper=100, quack=90)]
    cut = [record("anchors/up", "gluon_hopper", 1e-6, run="cut"), record("anchors/up", "quack", 0.95e-6, run="cut")]
    text = against([*whole, *cut])
    assert len(lines(text)) == 2 and "products 0.995 (2 rows" in text
    assert "A later run of 1 row, `cut`, against the best peer: up 0.95×." in text


def test_failures_are_told():
    shapes = {
        "env": {"gpu": "NVIDIA H200"},
        "date": "2026-01-02T03",
        "seed": 7,
        "cases": 1000,
        "runs": {"a": 1500, "b": 500},
        "failures": [{}, {}],
        "worst": {"a": {"of_allowed": 0.5}, "b": {"of_allowed": 1.25}},
        "repeated": 9,
    }
    text = checked({"random-shapes": shapes})
    assert "1,000 problems" in text and "2,000 results" in text and "2 failures" in text and "1.25 of what" in text
    runs = [
        {"tool": "racecheck", "backend": "a", "outcome": "not clean"},
        {"tool": "racecheck", "backend": "b", "outcome": "clean"},
    ]
    text = checked({"sanitize": {"env": {"gpu": "X"}, "date": "2026-01-02", "runs": runs}})
    assert "racecheck" in text and "not clean: `a`; clean: `b`" in text
    assert checked({}) == "Not checked yet."


@pytest.fixture(scope="module")
def shipped():
    device = Device.by_name("h200")
    records = [r for preset in PRESETS for r in shipped_records(preset, device.slug)]
    return records, read_checks(shipped_root() / device.slug), device.name


def test_every_workload_of_the_records_has_its_line(shipped):
    records, checks, gpu = shipped
    found = blocks(records, checks, gpu)
    for preset in PRESETS:
        named = {r.workload.partition("/")[2] for r in records if r.workload.startswith(f"{preset}/")}
        assert {line.split("|")[1].strip() for line in lines(found[preset])} == named
