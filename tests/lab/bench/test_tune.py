"""Tuning for real on the CPU with a tiny budget, and the table that records make."""

import itertools
import re
from dataclasses import dataclass, replace

import pytest
import torch

from expertile.lab.bench import tune_verify
from expertile.lab.bench.tune import Session, alone, measure, table_of, tune
from expertile.lab.bench.tune_verify import AUTO, FIRST_SEED, summary, verdicts, verify
from expertile.lab.race.record import read
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.ops.grouped_mm import choose as choosing
from expertile.ops.grouped_mm import relatives
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.transfer import Rival
from expertile.ops.grouped_mm.tuned import Table
from expertile.ops.measure import MEASURE
from tests.ops.grouped_mm.reference import reference

SMALL = (
    ragged_m("first", "t", (12, 0, 20), 32, 24, "fp32", routing="by hand"),
    wgrad("second", "t", (8, 16), 16, 24, "bf16"),
    ragged_m("third", "t", (5, 5), 64, 32, "bf16", b_layout="kn"),
)


@dataclass(frozen=True)
class Config:
    slow: bool = False
    tuned: bool = False


def correct(problem, operands, config, out):
    for _ in range(30 if config.slow else 1):
        right = reference(operands.a, operands.b, operands.offs).to(problem.out_dtype)
    if out is None:
        return right
    live = ~torch.isnan(right)
    out[live] = right[live]
    return out


def wrong(problem, operands, config, out):
    result = correct(problem, operands, config, out)
    result[0] += 1.0
    return result


def backend(name, run=correct, configs=(Config(slow=True), Config(), Config(tuned=True))):
    return Backend(name, "", run, configs=lambda p, d: configs)


def run_tune(path, *backends, **options):
    options = {"workloads": iter(SMALL), "device": "cpu", "seed": 3, **options}
    return tune(1.0, path, backends=backends, **options)


def test_tune_gates_screens_and_times(tmp_path):
    path, said = tmp_path / "tune.jsonl", []
    made = run_tune(path, backend("good"), backend("bad", wrong), most=2, say=said.append)
    assert read(path) == made
    assert {r.workload for r in made} == {"t/first", "t/second"}, "no more than most"
    good = [r for r in made if r.backend == "good"]
    assert {str(dict(r.config)) for r in good} == {"{'slow': False, 'tuned': False}"}, (
        "the slow config was screened out"
    )
    assert all(r.status == "ok" and r.rel_error < 1e-2 and r.policy == "eager" for r in good)
    assert {r.status for r in made if r.backend == "bad"} == {"wrong"}
    assert any("t/first: good" in line and "4 screened" in line for line in said)
    rates = [float(found[1]) for line in said if (found := re.search(r"([\d.]+) [GT]FLOP/s", line))]
    assert rates and all(rates), "a CPU's small rates are not rounded to 0"
    table = table_of(made, (backend("good"), backend("bad")))
    assert len(table.problems) == 2 and {t.backend for m in table.problems for t in m.times} == {"good"}
    assert table.problems[0].features.skew == "one" and table.problems[1].features.layout == "ragged_k"
    loaded = Table.from_json(table.to_json())
    assert [m.features for m in loaded.problems] == [m.features for m in table.problems]


def test_resume_goes_on_with_the_rest(tmp_path):
    path = tmp_path / "tune.jsonl"
    first = run_tune(path, backend("good"), most=1)
    both = run_tune(path, backend("good"), most=2, resume=True)
    assert both[: len(first)] == first and both == read(path)
    assert [r.workload for r in both] == ["t/first", "t/second", "t/third"]
    assert len({r.run for r in both}) == 1


def test_a_failing_config_is_a_record_and_a_failing_problem_is_said(tmp_path):
    def explode(problem, operands, config, out):
        raise RuntimeError("no such instruction")

    said = []
    made = run_tune(tmp_path / "t.jsonl", backend("good"), backend("dies", explode), most=1)
    (dead,) = [r for r in made if r.backend == "dies"]
    assert dead.status == "failed" and "no such instruction" in dead.reason
    session, _ = Session.begin(None, "cpu", say=said.append)
    assert measure(SMALL[0], session, [Rival(backend("dies", explode), Config())])[0].time_s is None
    huge = ragged_m("huge", "t", (1 << 30,), 1 << 20, 1 << 20, "fp32")
    assert measure(huge, session, [Rival(backend("good"), Config())]) == []
    assert "t/huge: out of memory: needs" in said[-1]


def test_real_backends_on_a_cpu(tmp_path):
    made = run_tune(tmp_path / "t.jsonl", *BACKENDS, most=1)
    assert {r.backend for r in made} == {"loop", "padded_bmm", "torch_grouped"}
    assert table_of(made).gpu == made[0].env.gpu


def test_pairs_never_wait_or_tune_themselves():
    session, _ = Session.begin(None, "cpu", backends=(backend("a"), by_name("loop")))
    found = session.pairs(SMALL[0])
    assert [e.config for e in found[:2]] == [Config(slow=True), Config()] and found[2].backend.name == "loop"
    assert [len(alone(e).configs(None, None)) for e in found] == [1, 1, 1]


@pytest.mark.parametrize("minutes", [0, -1.0, float("nan")])
def test_minutes_must_be_positive(minutes, tmp_path):
    with pytest.raises(ValueError, match="minutes: expected more than 0"):
        tune(minutes, tmp_path / "t.jsonl")
    with pytest.raises(ValueError, match="minutes: expected more than 0"):
        verify(3, tmp_path / "t.jsonl", minutes)
    with pytest.raises(ValueError, match="verify: expected 1 problem or more, got 0"):
        verify(0, tmp_path / "t.jsonl", 1.0)


def test_a_table_needs_times_of_one_machine(tmp_path):
    with pytest.raises(ValueError, match="expected at least one with a time"):
        table_of([])
    made = run_tune(tmp_path / "t.jsonl", backend("good"), most=1)
    other = [type(r)(**{**vars(r), "env": type(r.env)(gpu="Abacus 9")}) for r in made]
    with pytest.raises(ValueError, match="expected those of one GPU, got .*Abacus 9"):
        table_of(made + other, (backend("good"),))


def test_of_a_problem_measured_twice_the_last_run_alone_counts(tmp_path):
    made = run_tune(tmp_path / "t.jsonl", backend("good"), most=1)
    again = [replace(r, run="again", config={**r.config, "tuned": True}) for r in made]
    (problem,) = table_of(made + again, (backend("good"),)).problems
    assert [t.config["tuned"] for t in problem.times] == [True]
    later = [replace(r, run="later", date="2999-01-01T00:00:00Z") for r in made]
    for records in (later + again, again + later):  # in whatever order the files are given
        (problem,) = table_of(records, (backend("good"),)).problems
        assert [t.config["tuned"] for t in problem.times] == [False]


@pytest.fixture
def no_table(monkeypatch):
    monkeypatch.setattr(relatives, "load_tables", lambda slug: ())
    for cached in (choosing.choose, choosing._choose, relatives.table_for):
        cached.cache_clear()
    yield
    for cached in (choosing.choose, choosing._choose, relatives.table_for):
        cached.cache_clear()


def test_verify_times_the_choice_beside_its_rivals(tmp_path, no_table):
    path = tmp_path / "auto.jsonl"
    rivals = (backend("torch_grouped", configs=(Config(slow=True),)), backend("loop", configs=(Config(),)))
    options = {"backends": rivals, "device": "cpu", "minutes": 0.3}
    found = verify(1, path, workloads=iter(SMALL[:1]), **options)
    assert found == read(path)
    (auto,) = [r for r in found if r.backend == AUTO]
    assert auto.config == {"backend": "torch_grouped", "slow": True, "tuned": False} and "on a CPU" in auto.reason
    (verdict,) = verdicts(found)
    assert verdict.share < 0.5 and verdict.backend == "torch_grouped" and verdict.best.startswith("loop")
    lines = summary([verdict])
    assert "on 0 of 1 problems" in lines[0] and "t/first: best is loop" in lines[1]
    again = verify(2, path, workloads=iter(SMALL), resume=True, **options)
    assert [r.workload for r in again if r.backend == AUTO] == ["t/first", "t/second"]


def test_a_choice_that_fails_counts_as_nothing(tmp_path, no_table):
    rivals = (backend("torch_grouped", wrong, (Config(),)), backend("loop", configs=(Config(),)))
    found = verify(1, tmp_path / "a.jsonl", 0.3, workloads=iter(SMALL[:1]), backends=rivals, device="cpu")
    (verdict,) = verdicts(found)
    assert verdict.share == 0.0
    assert summary([]) == ["auto: nothing was measured"]


def test_verify_by_itself_measures_unseen_problems(tmp_path, no_table):
    found = verify(2, tmp_path / "a.jsonl", 0.3, backends=(by_name("loop"), by_name("torch_grouped")), device="cpu")
    assert {r.workload.split("/")[0] for r in found} == {"auto"}
    assert len(list(itertools.groupby(found, key=lambda r: r.workload))) >= 1


def test_problems_of_one_name_but_other_shapes_stay_apart(tmp_path):
    made = run_tune(tmp_path / "t.jsonl", backend("good"), most=1)
    shape = {**made[0].shape, "routing": "uniform seed=2001060037", "k": 48}
    other = [replace(r, shape=shape) for r in made]
    table = table_of(made + other, (backend("good"),))
    assert sorted(m.features.k for m in table.problems) == [32, 48]
    assert table.seeds == (20010,)
    assert Table.from_json(table.to_json()).seeds == (20010,)


def test_verify_draws_by_a_seed_of_its_own(tmp_path, no_table, monkeypatch):
    table = Table("GPU", "2026-11-21", {}, (), (3, FIRST_SEED))
    monkeypatch.setattr(tune_verify, "table_for", lambda device: table)
    with pytest.raises(ValueError, match="seed: expected one that drew no problem of the table, got 3"):
        verify(1, tmp_path / "a.jsonl", 0.3, seed=3, device="cpu")
    said = []
    rivals = (backend("loop", configs=(Config(),)),)
    found = verify(
        1, tmp_path / "a.jsonl", 0.3, workloads=iter(SMALL[:1]), backends=rivals, device="cpu", say=said.append
    )
    assert found and f"problems drawn by seed {FIRST_SEED + 1}" in said


def test_a_race_counts_beside_the_choice(tmp_path, no_table):
    """What backend="measure" took: of no account for `auto`'s share, nor where it did not race."""
    rivals = (backend("torch_grouped", configs=(Config(slow=True),)), backend("loop", configs=(Config(),)))
    found = verify(1, tmp_path / "a.jsonl", 0.3, workloads=iter(SMALL[:1]), backends=rivals, device="cpu")
    assert verdicts(found, MEASURE) == []
    fast = next(r for r in found if r.backend == "loop")
    found += [tune_verify._as(MEASURE, fast, "raced"), replace(fast, workload="t/second")]
    (raced,) = verdicts(found, MEASURE)
    assert (raced.workload, raced.backend, raced.share, raced.why) == ("t/first", "loop", 1.0, "raced")
    assert [v.share < 0.5 for v in verdicts(found)] == [True, True]
    assert summary([raced], MEASURE)[0].startswith("measure is at 0.97 or more of the best on 1 of 1 problems")
