import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from expertile.lab.report.contest import runs
from expertile.lab.report.leaderboard import NOTE, boards, leaderboard, tables
from expertile.lab.report.markdown import markdown
from expertile.lab.report.page import html
from tests.lab.report import samples


def board_of(records):
    (board,) = leaderboard(records)
    return {score.backend: score for score in board.scores}


def race(times, **more):
    """Records of workloads p/0, p/1, …: `times` of each backend in units of 100 µs; None is unsupported."""
    found = []
    for backend, values in times.items():
        for index, value in enumerate(values):
            given = {"time_s": value * 1e-4} if value else {"status": "unsupported", "reason": "no"}
            found.append(samples.record(f"p/{index}", backend, **{**given, **more}))
    return found


def test_the_score_is_the_geometric_mean_to_the_fastest_of_each_workload():
    found = board_of(race({"a": [1, 4, 9], "b": [2, 2, 9]}))
    assert found["a"].speed == pytest.approx((1 * 0.5 * 1) ** (1 / 3))
    assert found["b"].speed == pytest.approx((0.5 * 1 * 1) ** (1 / 3))


def test_intervals_of_the_times_add_in_squares():
    found = board_of(race({"a": [1] * 4, "b": [2] * 4}, spread=0.01))
    half = math.sqrt(4 * 2) * -math.log1p(-0.01) / 4  # of both times on four workloads
    assert found["b"].ci95 == pytest.approx((0.5 * math.exp(-half), 0.5 * math.exp(half)))
    assert found["a"].ci95 == (1.0, 1.0)  # the fastest everywhere is that by definition


def test_what_a_backend_cannot_run_is_counted_and_costs_its_rank():
    records = race({"whole": [2, 2, 2], "part": [1, 1, None]})
    records[-2] = replace(records[-2], workload="p/1", status="wrong", reason="no", value=None, ci95=None)
    found = board_of(records)
    assert (found["part"].speed, found["part"].rank, found["part"].timed) == (1.0, None, 1)
    assert dict(found["part"].missing) == {"wrong": 1, "unsupported": 1}
    assert (found["whole"].rank, found["whole"].timed, dict(found["whole"].missing)) == (1, 3, {})
    text = markdown(records)
    assert "1 of 3: 1 wrong, 1 unsupported" in text and NOTE in text


def test_one_without_any_time_is_named():
    (board,) = leaderboard(race({"a": [1, 1], "b": [2, 2], "c": [None, None]}))
    assert board.absent == "Without a right time: c (2 unsupported)."
    assert [score.backend for score in board.able] == ["a", "b"]


def test_overlapping_intervals_share_a_rank():
    found = board_of(race({"a": [1, 1.01], "b": [1.01, 1], "c": [3, 3]}, spread=0.02))
    assert [found[name].rank for name in "abc"] == [1, 1, 3]


@pytest.mark.parametrize(("spread", "mark"), [(0.02, "=1"), (0.3, "?1")])
def test_a_shared_rank_is_a_tie_or_inconclusive(spread, mark):
    text = markdown(race({"a": [1, 1.01], "b": [1.01, 1]}, spread=spread))
    assert text.count(f"| {mark} | ") == 2


def test_on_the_terminal_only_what_failed_is_named_again():
    console = Console(file=io.StringIO(), width=80)
    records = race({"a": [1, 1], "b": [2, 2], "c": [None, None], "d": [None, None]})
    records[-1] = replace(records[-1], status="failed")
    for board in (records, records[:-2]):
        console.print(*tables(leaderboard(board)), sep="\n")
    text = console.file.getvalue()
    assert text.count("Without a right time") == 1 and max(map(len, text.splitlines())) <= 80


def test_baselines_have_no_score_and_a_race_of_one_no_board():
    assert set(board_of(race({"a": [1], "b": [2], "dense": [0.5]}))) == {"a", "b"}
    assert leaderboard(race({"a": [1], "dense": [0.5]})) == []


def test_policies_and_operators_stand_apart(tmp_path):
    records = [*race({"a": [1], "b": [2]}), *race({"a": [3], "b": [2]}, policy="eager")]
    other = [replace(r, op="softmax", workload="p/s") for r in race({"a": [1], "b": [2]})]
    (run,) = runs([*records, *other])
    assert [(b.op, b.policy) for b in boards(run)] == [
        ("grouped_mm", "graph"),
        ("grouped_mm", "eager"),
        ("softmax", "graph"),
    ]
    page = html(records, tmp_path / "page.html").read_text()
    assert page.count('<table class="sortable scores">') == 2
    assert page.index("<h2>Leaderboard") < page.index("At a glance")


def test_names_are_escaped_on_the_page(tmp_path):
    page = html(race({"<img>": [1], "b": [2], "<c>": [None]}), tmp_path / "page.html").read_text()
    assert "<img>" not in page and "<c>" not in page and "&lt;img&gt;" in page
