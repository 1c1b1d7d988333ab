"""compare: verdicts with confidence, normalised by the speed of light of each run; losses are regressions."""

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from expertile.lab.measure.env import Env
from expertile.lab.race.compare import compare, environment_changes, exit_code, render
from expertile.lab.race.record import read
from tests.lab.records import record_files, timed, untimed


def _one(old, new, **options):
    rows = compare(old, new, **options)
    return next(r for r in rows if r.backend == "loop")


@pytest.mark.parametrize(
    ("new_time", "spread", "verdict"),
    [
        (0.90e-3, 0.01, "faster"),
        (1.10e-3, 0.01, "slower"),
        (1.02e-3, 0.001, "tie"),  # certain, but less than 3 %
        (1.06e-3, 0.05, "tie"),  # more than 3 %, but not certain
        (1.10e-3, 0.10, "inconclusive"),  # so uncertain that it may be 25 %
        (1.00e-3, 0.01, "tie"),
    ],
)
def test_a_verdict_needs_an_effect_and_confidence(new_time, spread, verdict):
    row = _one([timed(1e-3, spread)], [timed(new_time, spread)])
    assert row.verdict == verdict
    assert row.speedup == row.raw_speedup == pytest.approx(1e-3 / new_time)
    assert row.regression == (verdict == "slower")
    assert row.ci95[0] < row.speedup < row.ci95[1]


def test_min_effect_is_the_callers():
    old, new = [timed(1e-3, 0.001)], [timed(1.02e-3, 0.001)]
    assert _one(old, new, min_effect=0.01).verdict == "slower"
    assert _one(old, new, min_effect=0.10).verdict == "tie"
    with pytest.raises(ValueError, match="min_effect: expected 0 or more, got -1"):
        compare(old, new, min_effect=-1)


def test_a_slower_machine_is_not_a_slower_kernel():
    old = [timed(1.0e-3), timed(0.8e-3, backend="dense")]
    new = [timed(1.2e-3), timed(0.96e-3, backend="dense")]
    rows = {r.backend: r for r in compare(old, new)}
    assert rows["loop"].verdict == "tie" and rows["loop"].normalised_by == "dense"
    assert rows["loop"].raw_speedup == pytest.approx(1 / 1.2)
    assert rows["loop"].speedup == pytest.approx(1.0)
    assert rows["dense"].verdict == "slower" and not rows["dense"].regression
    assert exit_code(rows.values()) == 0


def test_a_kernel_that_fell_behind_its_machine_is_slower():
    row = _one([timed(1e-3), timed(0.8e-3, backend="dense")], [timed(1e-3), timed(0.7e-3, backend="dense")])
    assert row.raw_speedup == pytest.approx(1.0) and row.speedup == pytest.approx(0.875)
    assert row.verdict == "slower" and row.regression


def test_memory_bound_rows_are_normalised_by_copy():
    def run(time_s, dense, copy):
        return [timed(time_s, limiter="memory"), timed(dense, backend="dense"), timed(copy, backend="copy")]

    row = _one(run(1e-3, 1e-3, 0.9e-3), run(1.1e-3, 0.5e-3, 0.99e-3))
    assert row.normalised_by == "copy" and row.verdict == "tie"


@pytest.mark.parametrize(
    ("old_way", "new_way", "by"),
    [("", "", "copy"), ("", "memcpy", "copy"), ("", "kernel", ""), ("kernel", "", ""), ("memcpy", "kernel", "copy")],
)
def test_copies_of_before_their_ways_were_raced_serve_where_memcpy_is_the_faster(old_way, new_way, by):
    def run(way):
        config = {"way": way} if way else {}
        return [timed(limiter="memory"), timed(0.9e-3, backend="copy", config=config)]

    assert _one(run(old_way), run(new_way)).normalised_by == by


def test_a_normaliser_of_another_run_or_policy_does_not_serve():
    old = [timed(1e-3), timed(0.8e-3, backend="dense")]
    for change in ({"run": "other"}, {"policy": "eager"}, {"workload": "v"}):
        new = [timed(1.2e-3), timed(0.96e-3, backend="dense", **change)]
        assert _one(old, new).normalised_by == ""
    assert _one(old, [timed(1.2e-3), untimed("wrong", backend="dense")]).normalised_by == ""


def test_the_uncertainty_of_the_normaliser_counts():
    certain = _one([timed(1e-3), timed(1e-3, backend="dense")], [timed(1.1e-3), timed(1e-3, backend="dense")])
    assert certain.verdict == "slower"
    shaky = [timed(1e-3, 0.2, backend="dense")]
    assert _one([timed(1e-3), *shaky], [timed(1.1e-3), *shaky]).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("old", "new", "verdict", "regression"),
    [
        (timed(), untimed("wrong", "NaN"), "broken", True),
        (timed(), untimed("unsupported", "no TMA"), "broken", True),
        (timed(), timed(bound=1.0, status="refused", reason="below its bound"), "broken", True),
        (untimed("unsupported"), untimed("wrong"), "broken", True),
        (untimed("wrong"), timed(), "fixed", False),
        (untimed("unsupported"), timed(), "fixed", False),
        (untimed("wrong"), untimed("wrong"), "untimed", False),
        (untimed("wrong"), untimed("unsupported"), "untimed", False),
        (timed(), None, "missing", False),  # the workload as a whole
        (timed(backend="copy"), None, "missing", False),
        (untimed("unsupported"), None, "missing", False),
        (None, timed(), "new", False),
        (None, untimed("wrong"), "new", False),
    ],
)
def test_lost_and_won_rows(old, new, verdict, regression):
    rows = compare([] if old is None else [old], [] if new is None else [new])
    assert [(r.verdict, r.regression) for r in rows] == [(verdict, regression)]
    assert exit_code(rows) == int(regression)
    assert rows[0].speedup is None


@pytest.mark.parametrize(
    ("backend", "status", "regression"), [("a", "ok", True), ("a", "unsupported", False), ("copy", "ok", False)]
)
def test_a_backend_that_a_race_has_lost_is_a_regression_if_it_had_a_time(backend, status, regression):
    gone = timed(backend=backend) if status == "ok" else untimed(status, backend=backend)
    rows = compare([timed(), gone], [timed()])
    assert [(r.verdict, r.regression, r.alone) for r in rows] == [("tie", False, False), ("missing", regression, False)]
    assert exit_code(rows) == int(regression)


@pytest.mark.parametrize(
    "change", [{"workload": "v"}, {"shape": {"groups": 3}}, {"policy": "eager"}, {"op": "softmax"}]
)
def test_what_only_one_side_measured_is_no_regression(change):
    more = [timed(**change), timed(backend="a", **change)]
    for old, new, verdict in (([timed(), *more], [timed()], "missing"), ([timed()], [timed(), *more], "new")):
        rows = compare(old, new)
        assert [(r.verdict, r.alone) for r in rows] == [("tie", False), (verdict, True), (verdict, True)]
        assert exit_code(rows) == 0
        text = _printed(rows)
        assert text.startswith("no regression: 1 tie; ")
        assert f"only in the {'old' if verdict == 'missing' else 'new'} records, not compared: " in text


def test_a_backend_that_now_fails_is_broken_and_one_that_always_did_is_not():
    failing = untimed("failed", "RuntimeError: tile out of range")
    assert [(r.verdict, r.regression) for r in compare([timed()], [failing])] == [("broken", True)]
    assert [(r.verdict, r.regression) for r in compare([failing], [failing])] == [("untimed", False)]
    assert [(r.verdict, r.regression) for r in compare([untimed("unsupported")], [failing])] == [("untimed", False)]


def test_another_shape_dtype_or_policy_is_another_row():
    for change in ({"shape": {"groups": 3}}, {"dtype": "fp16"}, {"policy": "eager"}, {"op": "scaled_grouped_mm"}):
        assert {r.verdict for r in compare([timed()], [timed(**change)])} == {"missing", "new"}
    same = timed(shape={"group_sizes": [3, 4], "groups": 2})
    assert [r.verdict for r in compare([timed()], [same])] == ["tie"]


def test_the_last_of_several_counts_and_configs_are_told():
    rows = compare([timed(5e-3), timed(1e-3)], [timed(1e-3, config={"block_m": 64})])
    assert [(r.verdict, r.reason) for r in rows] == [("tie", "another config")]


_times = st.floats(1e-6, 1e-1)


@given(_times, _times, _times, _times, st.floats(0.001, 0.3))
@settings(max_examples=100, deadline=None)
def test_swapping_old_and_new_swaps_the_verdict(t_old, t_new, dense_old, dense_new, spread):
    old = [timed(t_old, spread, bound=0.0), timed(dense_old, spread, backend="dense", bound=0.0)]
    new = [timed(t_new, spread, bound=0.0), timed(dense_new, spread, backend="dense", bound=0.0)]
    there, back = _one(old, new), _one(new, old)
    assert math.isclose(there.speedup * back.speedup, 1.0, rel_tol=1e-9)
    assert {there.verdict, back.verdict} in ({"faster", "slower"}, {"tie"}, {"inconclusive"})
    assert _one(old, old).verdict in ("tie", "inconclusive") and not _one(old, old).regression


@given(st.floats(0.5, 2.0))
@settings(deadline=None)
def test_a_machine_that_scales_all_times_changes_nothing(factor):
    old = [timed(1e-3), timed(0.8e-3, backend="dense")]
    new = [timed(1e-3 * factor), timed(0.8e-3 * factor, backend="dense")]
    assert _one(old, new).verdict == "tie"


def test_environment_changes():
    old, new = [timed()], [timed(env=Env("NVIDIA H200", "580.1", "2.13", "3.6", "0.1", "0123abcd4567", throttle=""))]
    assert environment_changes(old, new) == ["torch: 2.11 -> 2.13"]
    assert environment_changes(old, old) == environment_changes(old, []) == []


def _printed(rows, width=200, **options):
    console = Console(file=io.StringIO(), width=width)
    render(rows, console, **options)
    return console.file.getvalue()


def test_rendering_puts_the_verdict_first():
    old = [timed(), timed(backend="a"), timed(backend="b[1]")]
    new = [timed(2e-3), timed(backend="a"), untimed("wrong", "3 rows [of 7] differ", backend="b[1]")]
    text = _printed(compare(old, new))
    assert text.startswith("2 regressions: 1 slower, 1 tie, 1 broken; geometric mean speed-up 0.707 over 2 rows")
    lines = text.splitlines()
    rows = [line.split() for line in lines if line.startswith("  ") and line.split()[0] in ("loop", "b[1]", "a")]
    assert [row[0] for row in rows] == ["loop", "b[1]", "a"]
    assert rows[0][1:6] == ["1000.00", "µs", "2000.00", "µs", "0.500"]
    assert "wrong: 3 rows [of 7] differ" in text
    assert " tie" not in "".join(_printed(compare(old, new), ties=False).splitlines()[2:])
    assert _printed([]) == "no rows to compare\n"


def test_80_columns_hold_every_figure():
    long = "models/deepseek-v3-gate-up-prefill-with-a-long-name"
    reason = "wrong: relative error 3.12e-01, allowed 3.91e-03, on every second row of the third group"
    old = [timed(12345.67e-6, workload=long), timed(workload=long, backend="triton_tma"), timed(workload="small")]
    new = [
        timed(23456.78e-6, workload=long),
        untimed("wrong", reason, workload=long, backend="triton_tma"),
        timed(1.0e-3, workload="small", policy="eager"),
    ]
    text = _printed(compare(old, new), width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2:4] == ["only in the new records, not compared: small (bf16, eager)", f"{long} (bf16, graph)"]
    (row,) = [line for line in lines if line.startswith("  loop")]
    assert row.split() == ["loop", "12345.67", "µs", "23456.78", "µs", "0.526", "0.519–0.534", "slower"]
    assert " ".join(" ".join(line.split()) for line in lines if line).count("third group") == 1


def test_records_of_every_metric_are_compared():
    """Bytes are counted and have no interval; more tokens a second are better; a bare time tells nothing."""
    bytes_ = {"ci95": None, "bound": 0.0, "policy": "eager"}

    def records(peak, moved, rate, time):
        return [
            timed(metric="peak_bytes", value=peak, workload="peak", **bytes_),
            timed(metric="moved_bytes", value=moved, workload="moved", **bytes_),
            timed(metric="tokens/s", value=rate, ci95=(0.99 * rate, 1.01 * rate), bound=0.0, workload="rate"),
            timed(time, ci95=None, workload="once"),
        ]

    rows = compare(records(200 << 20, 100 << 20, 1000.0, 2e-3), records(100 << 20, 110 << 20, 1500.0, 1e-3))
    assert [(r.metric, r.verdict, round(r.speedup, 2)) for r in rows] == [
        ("peak_bytes", "faster", 2.0),
        ("moved_bytes", "slower", 0.91),
        ("tokens/s", "faster", 1.5),
        ("seconds", "inconclusive", 2.0),
    ]
    assert [r.regression for r in rows] == [False, True, False, False] and rows[-1].ci95 is None
    text = _printed(rows, width=160)
    assert all(figure in text for figure in ("200.00 MiB", "110.00 MiB", "1500 tokens/s", "2000.00 µs"))


def test_every_shipped_file_compares_with_itself():
    for path in record_files():
        if "tune" not in path.name and "auto" not in path.name:
            held = read(path)
            rows = compare(held, held)
            assert (
                rows
                and not any(r.regression for r in rows)
                and {r.verdict for r in rows} <= {"tie", "inconclusive", "untimed"}
            ), path
