"""Choosing: by neighbours, by the model, ties, what is missing, what is said, and how fast."""

import warnings
from dataclasses import dataclass, replace

import pytest

from expertile.device import Device
from expertile.lab.bench.presets import preset
from expertile.lab.race.workloads import GroupedWorkload, grouped, ragged_m
from expertile.ops.grouped_mm import choose as choosing
from expertile.ops.grouped_mm import relatives
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.choose import choose
from expertile.ops.grouped_mm.explain import explain_problem
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tuned import Measured, Table, Timed, features_of

H200 = Device.by_name("h200")


@dataclass(frozen=True)
class Config:
    block_m: int = 128
    tuned: bool = False


CACHES = (choosing.choose, choosing._choose, choosing._say_miss, relatives.table_for)
CONFIGS = (Config(tuned=True), Config(), Config(block_m=64))


def backend(name, supports=lambda p, d: None, configs=CONFIGS, **more):
    more.setdefault("speed", {b.name: b.speed for b in BACKENDS}.get(name))
    return Backend(name, "", lambda *a: a[1].a, supports, lambda p, d: configs, **more)


def problem(rows=4096, groups=8, k=1024, n=1024):
    return ragged_m("x", "", (rows // groups,) * groups, k, n, "bf16").problem("cuda").with_sizes(None)


def timed(name, seconds, **config):
    return Timed(name, {"block_m": 128, "tuned": False, **config}, seconds)


@pytest.fixture
def tables(monkeypatch):
    """Give `choose` a table of problem() with these times."""

    def install(*times, of=None, policy="graph", more=()):
        measured = Measured(features_of(of or problem()), policy, tuple(sorted(times, key=lambda t: t.seconds)))
        table = Table("NVIDIA H200", "2026-11-21", {"triton": "3.6.0"}, (measured, *more)) if times else None
        monkeypatch.setattr(relatives, "load_tables", lambda slug: (table,) if slug == H200.slug and table else ())
        for cached in CACHES:
            cached.cache_clear()

    yield install
    for cached in CACHES:
        cached.cache_clear()


def test_rows_are_rounded_to_the_nearest_of_32_steps_per_doubling():
    def rows(total):
        return choosing.rounded(problem(total, 1)).m

    assert [rows(t) for t in (1, 63, 64, 65, 66, 67)] == [1, 63, 64, 66, 66, 68]
    assert [rows(t) for t in (4159, 4160, 4351, 4352, 8191)] == [4096, 4224, 4352, 4352, 8192]
    for total in range(65, 5000, 7):
        assert abs(rows(total) - total) <= total / 64 and rows(rows(total)) == rows(total)
    sizes = problem(4154, 1).with_sizes((4154,))
    assert choosing.rounded(sizes) is sizes


def test_the_fastest_neighbour_wins_with_its_config(tables):
    tables(timed("b", 1e-4, block_m=64), timed("a", 1.3e-4), timed("b", 1.5e-4))
    choice = choose(problem(rows=8192), H200, (backend("a"), backend("b")))
    assert (choice.backend.name, choice.config, choice.measured) == ("b", Config(block_m=64), True)
    assert choice.estimates[1].seconds < choice.estimates[0].seconds
    assert "measured on NVIDIA H200 2026-11-21 with Triton 3.6.0: nearest ragged_m 8x4096 1024->1024" in choice.why
    assert "next best a at 1." in choice.why
    assert [e.backend for e in choice.estimates] == ["a", "b"]


def test_a_measured_problem_goes_by_its_own_times(tables):
    around = [problem(rows=4096 + 128 * i) for i in (-2, -1, 1, 2)]
    times = (timed("b", 1e-4), timed("a", 1.5e-4))
    tables(timed("a", 1e-4), timed("b", 1.1e-4), more=[Measured(features_of(p), "graph", times) for p in around])
    rivals = (backend("a"), backend("b"))
    assert choose(problem(), H200, rivals).backend.name == "a"
    assert choose(problem(rows=4160), H200, rivals).backend.name == "b"


def test_a_tie_goes_to_the_first_backend_and_its_first_config(tables):
    tables(timed("b", 1e-4), timed("a", 1e-4), timed("a", 1e-4, block_m=64))
    choice = choose(problem(), H200, (backend("a"), backend("b")))
    assert (choice.backend.name, choice.config) == ("a", Config())


def test_a_config_that_is_hardly_faster_than_the_default_of_its_backend_is_taken(tables):
    tables(timed("b", 1e-4, block_m=64), timed("b", 1.01e-4), timed("a", 1.2e-4))
    choice = choose(problem(), H200, (backend("a"), backend("b")))
    assert (choice.backend.name, choice.config) == ("b", Config(block_m=64))


@pytest.mark.parametrize(("slower", "name"), [(1.03, "ours"), (1.06, "peer")])
def test_a_peer_has_to_win_clearly(tables, slower, name):
    tables(timed("peer", 1e-4), timed("ours", slower * 1e-4), timed("ours", 1.2e-4, block_m=64))
    choice = choose(problem(), H200, (backend("peer", peer=True), backend("ours")))
    assert (choice.backend.name, choice.config) == (name, Config())
    assert f"next best {'peer at 0.97' if name == 'ours' else 'ours at 1.06'}×" in choice.why


def test_a_config_that_tunes_itself_is_never_chosen(tables):
    tables(timed("a", 1e-6, tuned=True), timed("a", 1e-4))
    assert not choose(problem(), H200, (backend("a"),)).config.tuned
    tables()
    named = [backend(b.name) for b in BACKENDS if b.name == "quack"]
    assert not choose(problem(), H200, tuple(named), quiet=True).config.tuned


def test_what_is_missing_or_unknown_is_passed_over(tables):
    tables(timed("gone", 1e-5), Timed("a", {"block_q": 7}, 1e-5), timed("b", 1e-4))
    refusing = backend("b", supports=lambda p, d: "not here")
    choice = choose(problem(), H200, (backend("a"), refusing))
    assert choice.backend.name == "a" and choice.config in CONFIGS
    assert {e.backend: e.reason for e in choice.estimates}["b"] == "not here"
    with pytest.raises(ValueError, match="none supports this problem .b: not here."):
        choose(problem(), H200, (refusing,))


def test_nobody_waits_for_the_gpu_unless_nothing_else_runs(tables):
    tables()
    loop, kernel = backend("loop", reads_offs_on_host=True), backend("triton_pointer")
    assert choose(problem(), H200, (loop, kernel), quiet=True).backend.name == "triton_pointer"
    assert choose(problem(), H200, (loop,), quiet=True).backend.name == "loop"
    tables(timed("loop", 1e-6), timed("triton_pointer", 1e-4))
    assert choose(problem(), H200, (loop, kernel)).backend.name == "triton_pointer"
    batched = grouped("b", "", Layout.BATCHED, (64,) * 8, 64, 512, 512, "bf16").problem("cuda").with_sizes(None)
    bmm = backend("padded_bmm", reads_offs_on_host=True)
    tables(timed("padded_bmm", 1e-6), timed("triton_pointer", 1e-4), of=batched)
    assert choose(batched, H200, (kernel, bmm)).backend.name == "padded_bmm"


def test_a_miss_is_said_once_and_only_where_it_matters(tables):
    ours = (backend("triton_pointer"),)
    tables()
    with pytest.warns(UserWarning, match="nothing has been measured on NVIDIA H200.*expertile tune") as seen:
        choose(problem(), H200, ours)
        choose(problem(rows=64), H200, ours)
    assert len(seen) == 1
    tables(timed("triton_pointer", 1e-4))
    with pytest.warns(UserWarning, match="no problem like this one"):
        choice = choose(problem(rows=8, groups=8, k=16, n=131072), H200, ours)
    assert "by the model" in choice.why and not choice.measured
    tables()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(replace(problem(), device_type="cpu"), Device.current("cpu"))
        choose(problem(), H200, ours, quiet=True)
        explain_problem(problem(), Device.by_name("a100"))


@pytest.mark.parametrize("gpu", ["a100", "rtx 3090", "rtx 4090", "l40s", "h100", "b200"])
def test_explain_says_that_it_is_a_model(gpu, tables):
    tables()
    device = Device.by_name(gpu)
    text = str(explain_problem(problem().with_sizes((512,) * 8), device))
    assert f"by the model, not measured on {device.name}" in text


def test_policies_have_their_own_answers(tables, monkeypatch):
    tables(timed("a", 1e-4))
    eager = Measured(features_of(problem()), "eager", (timed("b", 1e-4), timed("a", 9e-4)))
    graph = Measured(features_of(problem()), "graph", (timed("a", 1e-4), timed("b", 9e-4)))
    monkeypatch.setattr(
        relatives, "load_tables", lambda slug: (Table("NVIDIA H200", "2026-11-21", {}, (eager, graph)),)
    )
    both = (backend("a"), backend("b"))
    assert choose(problem(), H200, both).backend.name == "a"
    assert choose(problem(), H200, both, "eager").backend.name == "b"


def test_changing_row_counts_are_chosen_once_a_step(tables):
    tables(timed("a", 1e-4))
    ours = (backend("a"), backend("b"))
    problems = [problem(rows=8 * r) for r in range(1000, 1400)]
    for p in problems:
        choose(p, H200, ours)
    assert choosing._choose.cache_info().misses <= 16


def on_cpu(workload: GroupedWorkload, **changes):
    return choose(replace(workload.problem("cpu"), **changes), Device.current("cpu")).backend.name


def test_on_a_cpu_equal_groups_are_one_product_and_others_one_each():
    padded = {w.name for w in preset("cpu") if on_cpu(w) == "padded_bmm"}
    others = {w.name: on_cpu(w) for w in preset("cpu") if w.name not in padded}
    assert padded == {"cpu-16x128", "cpu-many-experts"} and set(others.values()) == {"torch_grouped"}
    for dtype, groups, name in (("bf16", 4, "padded_bmm"), ("fp32", 4, "torch_grouped"), ("fp32", 8, "padded_bmm")):
        assert on_cpu(ragged_m("x", "", (64,) * groups, 128, 128, dtype)) == name
    some = ragged_m("x", "", (30, 32) * 8, 128, 128, "bf16")
    assert (
        on_cpu(some) == "padded_bmm" and on_cpu(ragged_m("x", "", (30, 32) * 8, 4096, 128, "bf16")) == "torch_grouped"
    )
    assert on_cpu(ragged_m("x", "", (0, 32) * 8, 128, 128, "bf16")) == "torch_grouped"
    assert on_cpu(ragged_m("x", "", (30, 62), 128, 128, "fp32"), has_bias=True) == "loop"
    assert on_cpu(ragged_m("x", "", (64,) * 16, 128, 128, "bf16"), layout=Layout.RAGGED_N) != "padded_bmm"
