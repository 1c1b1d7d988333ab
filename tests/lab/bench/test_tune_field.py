"""Who is screened: everyone where nothing is known, then those expected in front and every backend's default."""

from dataclasses import dataclass

import pytest

from expertile.device import Device
from expertile.lab.bench import tune
from expertile.lab.bench.tune import narrowed
from expertile.lab.race.workloads import ragged_m
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.transfer import Rival
from expertile.ops.grouped_mm.tuned import Measured, Table, Timed, features_of

H200 = Device.by_name("h200")
PROBLEM = ragged_m("x", "", (512,) * 8, 1024, 1024, "bf16").problem("cuda").with_sizes(None)


@dataclass(frozen=True)
class Config:
    index: int


def pairs(name, count):
    backend = Backend(name, "", lambda *a: a[1].a, configs=lambda p, d: ())
    return [Rival(backend, Config(i)) for i in range(count)]


@pytest.fixture
def table(monkeypatch):
    def install(*times):
        measured = Measured(features_of(PROBLEM), "graph", tuple(Timed(n, {"index": i}, s) for n, i, s in times))
        found = Table("NVIDIA H200", "2026-11-21", {}, (measured,)) if times else None
        monkeypatch.setattr(tune, "load_tables", lambda slug: (found,) if found else ())

    return install


def test_everyone_without_a_table(table):
    table()
    everyone = pairs("a", 20) + pairs("b", 3)
    assert narrowed(everyone, PROBLEM, H200, "graph", 1) == tuple(everyone)


def test_the_expected_best_the_defaults_and_some_at_random(table):
    table(("a", 19, 1.0), ("a", 18, 1.05), ("b", 2, 3.0))
    everyone = pairs("a", 30) + pairs("b", 8)
    kept = narrowed(everyone, PROBLEM, H200, "graph", 1)
    named = [(e.backend.name, e.config.index) for e in kept]
    assert {("a", 19), ("a", 18), ("a", 0), ("b", 0)} <= set(named)
    assert named == sorted(named), "in their order"
    assert 10 <= len(kept) <= 14
    assert sum(name == "b" for name, _ in named) <= 3, "three times slower: its default, and who is drawn"
    assert kept == narrowed(everyone, PROBLEM, H200, "graph", 1)
    assert any(kept != narrowed(everyone, PROBLEM, H200, "graph", seed) for seed in range(2, 8))


def test_a_backend_that_nobody_measured_is_screened_in_full(table):
    table(("a", 0, 1.0))
    new = pairs("new", 15)
    assert set(new) <= set(narrowed(pairs("a", 20) + new, PROBLEM, H200, "graph", 1))


def test_a_pair_alone_has_its_config_only():
    (_, second) = pairs("a", 2)
    assert tune.alone(second).configs(PROBLEM, H200) == (Config(1),)
