import io

import pytest
from rich.console import Console

from expertile.lab.measure.env import Env
from expertile.lab.race.record import append
from expertile.lab.report.history import history, history_page, show_history
from tests.lab.records import timed, untimed


def run_of(number, time_s, **more):
    """A run on day `number`; its commit is named after the run."""
    env = Env("NVIDIA H200", "580.1", "2.11", "3.6", "0.1", f"{number}" * 12, 1700.0, 690.0, "")
    return timed(time_s, **{"run": f"r{number}", "date": f"2026-11-0{number}", "env": env, **more})


def folder_of(tmp_path, *records):
    for index, record in enumerate(records):
        append(tmp_path / "gpu" / f"2026-11-0{index + 1}-x.jsonl", record)
    return tmp_path


def told(found, width=80, **more):
    console = Console(file=io.StringIO(), width=width)
    show_history(found, console, **more)
    return console.file.getvalue()


def test_a_workload_over_runs_and_commits(tmp_path):
    # written out of order: the days decide
    found = history(folder_of(tmp_path, run_of(3, 2e-3), run_of(1, 4e-3), run_of(2, 3e-3)))
    (one,) = found
    assert [run for _, _, run in one.runs] == ["r1", "r2", "r3"]
    text = told(found)
    assert "NVIDIA H200: 1 workload of two runs or more" in text and "█▅▁" in text
    assert "faster" in text and "2.000" in text and "2026-11-01 at 111111111111" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_last_run_is_judged_by_the_speed_of_light_of_its_own(tmp_path):
    slower_clock = [
        run_of(n, t, backend=b) for n, f in ((1, 1), (2, 2)) for b, t in (("loop", f * 4e-3), ("dense", f * 1e-3))
    ]
    (one,) = history(folder_of(tmp_path, *slower_clock))
    row = one.change()["loop"]
    assert (row.verdict, row.normalised_by) == ("tie", "dense") and row.raw_speedup == pytest.approx(0.5)


def test_devices_shapes_and_policies_stand_apart(tmp_path):
    other = Env("NVIDIA L4")
    records = [run_of(n, 1e-3) for n in (1, 2)] + [run_of(n, 1e-3, policy="eager") for n in (1, 2)]
    records += [run_of(n, 2e-3, env=other) for n in (1, 2)] + [run_of(2, 1e-3, shape={"groups": 3})]
    found = history(folder_of(tmp_path, *records))
    assert [(s.device, s.label) for s in found] == [
        ("NVIDIA H200", "w (bf16, graph)"),
        ("NVIDIA H200", "w (bf16, eager)"),
        ("NVIDIA L4", "w (bf16, graph)"),
    ]


def test_what_has_no_value_or_one_run_makes_no_series(tmp_path):
    wrong = untimed("wrong", run="r2", date="2026-11-02")
    assert history(folder_of(tmp_path, run_of(1, 1e-3), wrong)) == []


def test_those_that_changed_most_come_first_and_patterns_pick(tmp_path):
    records = [
        run_of(n, t, workload=name)
        for name, b in (("p/a", 1.1), ("p/b", 3), ("q/c", 2))
        for n, t in ((1, 1e-3), (2, b * 1e-3))
    ]
    folder = folder_of(tmp_path, *records)
    assert [s.label.split()[0] for s in history(folder)] == ["p/b", "q/c", "p/a"]
    assert [s.label.split()[0] for s in history(folder, ["p/*"])] == ["p/b", "p/a"]
    with pytest.raises(ValueError, match="only: expected a pattern of workloads .*, got 'z'"):
        history(folder, ["z"])


def test_a_folder_must_hold_records(tmp_path):
    with pytest.raises(FileNotFoundError, match="history: .* is no folder"):
        history(tmp_path / "none")
    with pytest.raises(ValueError, match="history: expected record files"):
        history(tmp_path)


def test_few_are_printed_and_all_are_drawn(tmp_path):
    records = [run_of(n, 1e-3, workload=f"p/<{i}>") for i in range(15) for n in (1, 2)]
    found = history(folder_of(tmp_path, *records))
    assert "and 3 more: --only PATTERN" in told(found) and "more:" not in told(found, every=True)
    page = history_page(found, tmp_path / "history.html").read_text()
    assert page.count('class="plot"') == 15 and "p/<" not in page and "NVIDIA H200" in page
