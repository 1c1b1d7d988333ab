import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.lab.report.contest import relative_speed, runs, tied
from expertile.lab.report.rows import rows
from tests.lab.report import samples


def contest(*records):
    (run,) = runs(records)
    (found,) = run.contests
    return found


def test_ranking_is_by_time_without_baselines_and_without_failures():
    found = contest(
        samples.record(backend="loop", time_s=300e-6),
        samples.record(backend="quack", time_s=200e-6),
        samples.record(backend="dense", time_s=100e-6),
        samples.record(backend="cublas_grouped", status="wrong", reason="NaN"),
    )
    assert [row.backend for row in found.ranked] == ["quack", "loop"]
    assert found.winner.backend == "quack"
    assert found.margin == pytest.approx(1.5)
    assert found.times_best(found.of("dense")) == pytest.approx(0.5)
    assert found.times_best(found.of("cublas_grouped")) is None


@pytest.mark.parametrize(
    ("ratio", "spread", "expected"), [(1.005, 0.0, True), (1.02, 0.0, False), (1.05, 0.03, True), (1.05, 0.02, False)]
)
def test_ties_by_closeness_or_overlap(ratio, spread, expected):
    first = samples.record(backend="a", time_s=100e-6, spread=spread)
    second = samples.record(backend="b", time_s=100e-6 * ratio, spread=spread)
    found = contest(first, second)
    assert (found.winner is None) is expected
    assert (len(found.leaders) == 2) is expected


@given(st.floats(0.5, 2.0), st.floats(0.0, 0.3))
def test_a_tie_has_no_direction(ratio, spread):
    first, second = rows(
        [
            samples.record(backend="a", time_s=100e-6, spread=spread),
            samples.record(backend="b", time_s=100e-6 * ratio, spread=spread),
        ]
    )
    assert tied(first, second) == tied(second, first)
    assert tied(first, first)


def test_runs_never_meet():
    found = runs([samples.record(run="a", backend="x"), samples.record(run="b", backend="y")])
    assert [run.name for run in found] == ["a", "b"]
    assert all(len(run.contests) == 1 and len(run.contests[0].rows) == 1 for run in found)


def test_policies_and_shapes_are_contests_of_their_own():
    (run,) = runs([samples.record(), samples.record(policy="eager"), samples.record(rows=64)])
    assert len(run.contests) == 3
    assert run.policies == ("graph", "eager")
    assert len(set(run.workloads)) == 2  # two shapes of one name are told apart


def test_last_record_of_a_config_counts_and_the_fastest_config_stands_for_the_backend():
    found = contest(
        samples.record(time_s=100e-6, config={"block_m": 64}),
        samples.record(time_s=150e-6, config={"block_m": 64}),
        samples.record(time_s=120e-6, config={"block_m": 128}),
    )
    assert [row.time_s for row in found.rows] == [120e-6]


def test_a_single_preset_is_not_repeated_in_every_name():
    (one,) = runs([samples.record("squares/4x512")])
    (two,) = runs([samples.record("squares/4x512"), samples.record("models/glm5")])
    assert one.workloads == ("4x512",)
    assert two.workloads == ("squares/4x512", "models/glm5")


def test_baselines_are_held_against_the_workloads_bound_and_only_where_they_apply():
    big = contest(
        samples.record(time_s=1e-3, rows=65536),
        samples.record(backend="dense", time_s=0.8e-3, rows=65536, bound=1e-9),
        samples.record(backend="copy", time_s=0.1e-3, rows=65536),
    )
    assert big.limiter == "compute"
    assert big.share(big.of("dense")) == pytest.approx(big.sample.bound_s / 0.8e-3)
    assert big.share(big.of("copy")) is None


def test_relative_speed_is_a_geometric_mean_over_what_a_backend_ran():
    (run,) = runs(
        [
            samples.record("w/1", "a", 100e-6),
            samples.record("w/1", "b", 400e-6),
            samples.record("w/2", "a", 100e-6),
            samples.record("w/2", "b", 100e-6),
            samples.record("w/3", "a", 100e-6),
        ]
    )
    speeds = relative_speed(run.contests)
    assert speeds["a"] == (pytest.approx(1.0), 3)
    assert speeds["b"] == (pytest.approx(0.5), 2)
