"""A backend joins a table, on the CPU."""

import math
from dataclasses import replace

import pytest

from expertile.device import Device
from expertile.lab.bench import tune_add
from expertile.lab.bench.tune import table_of
from expertile.lab.bench.tune_add import add, workload_like
from expertile.lab.bench.tune_problems import mixed
from expertile.lab.race.record import read
from expertile.ops.grouped_mm.tuned import Table, features_of
from tests.lab.bench.test_tune import Config, backend, run_tune, wrong


@pytest.fixture
def table(tmp_path, monkeypatch) -> Table:
    """Of three problems, all run by "good"; it runs them again, alike however long it takes."""
    good = backend("good", configs=(Config(),))
    monkeypatch.setattr(tune_add, "_ALIKE", math.inf)
    monkeypatch.setattr(tune_add, "BACKENDS", (good,))
    return table_of(run_tune(tmp_path / "tune.jsonl", good), (good,))


@pytest.fixture
def second(table) -> Table:
    """`table`, in which "good" took a second."""
    return replace(table, problems=tuple(replace(m, times=(replace(m.times[0], seconds=1.0),)) for m in table.problems))


def test_times_are_scaled_by_what_was_fastest(table, second, tmp_path):
    slow = backend("slow", configs=(Config(slow=True),))
    said: list[str] = []
    found = add(second, (slow,), tmp_path / "add.jsonl", 1.0, device="cpu", say=said.append)
    assert [m.features for m in found.problems] == [m.features for m in table.problems]
    for m in found.problems:
        (first, _), (second, seconds) = ((t.backend, t.seconds) for t in m.times)
        assert (first, second) == ("good", "slow") and 2 < seconds < 1000, "as slow beside the second that good took"
    records = read(tmp_path / "add.jsonl")
    assert {r.backend for r in records} == {"good", "slow"} and all(r.status == "ok" for r in records)
    assert said[0].startswith("3 problems of 3") and said[-1] == "3 of 3 problems measured"


def test_nothing_joins_where_the_fastest_takes_another_time_now(second, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_add, "_ALIKE", 1.2)
    assert add(second, (backend("new", configs=(Config(),)),), tmp_path / "add.jsonl", 1.0, device="cpu") == second


def test_problems_that_know_it_are_passed_over(table, tmp_path):
    new, path = backend("new", configs=(Config(),)), tmp_path / "add.jsonl"
    found = add(table, (new,), path, 1.0, least_rows=12, device="cpu")
    assert {m.features.mean for m in found.problems if "new" in m.backends} == {12.0}
    assert add(found, (new,), path, 1.0, least_rows=12, device="cpu") == found


def test_only_what_is_right_joins(table, tmp_path):
    assert add(table, (backend("bad", wrong),), tmp_path / "add.jsonl", 1.0, device="cpu") == table


def test_refusals(table, tmp_path):
    with pytest.raises(ValueError, match="minutes: expected more than 0"):
        add(table, (), tmp_path / "add.jsonl", 0.0, device="cpu")
    with pytest.raises(ValueError, match="table: expected one of"):
        add(replace(table, gpu="NVIDIA H200"), (), tmp_path / "add.jsonl", 1.0, device="cpu")


def test_a_workload_has_the_features_it_is_made_of():
    """All but the spread of rows, which a draw meets or not."""
    device = Device.by_name("h200")
    for _, w in zip(range(60), mixed(device, 5), strict=False):
        f = features_of(w.problem("cuda").with_sizes(w.group_sizes))
        like = workload_like(f, "like", 0)
        again = features_of(like.problem("cuda").with_sizes(like.group_sizes))
        assert replace(again, skew=f.skew) == f
