import io
import re

import pytest
from rich.console import Console

from expertile.lab.report.table import table
from tests.lab.report import samples


def printed(renderable, width):
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def small():
    return [
        samples.record("w/1", "a", 200e-6, rows=65536, n=512),
        samples.record("w/1", "b", 500e-6, rows=65536, n=512),
        samples.record("w/1", "dense", 180e-6, rows=65536, n=512),
        samples.record("w/1", "c", rows=65536, n=512, status="unsupported", reason="needs sm_90"),
    ]


def line(text, start):
    (found,) = [re.sub(r"\s+", " ", row).strip() for row in text.splitlines() if row.strip().startswith(start)]
    return found


def test_figures_of_a_row():
    text = printed(table(small()), 100)
    # 2 · 65536 · 512 · 1024 FLOP; 202.4 MB move in 101 µs and the FLOPs take 137 µs, so compute limits
    assert line(text, "bound ") == "bound 137 500 TFLOP/s 100 %"
    assert line(text, "a ") == "a 200 344 TFLOP/s 69 % 1.00"
    assert line(text, "b ") == "b 500 137 TFLOP/s 27 % 2.50"
    assert line(text, "dense ").endswith("0.90")
    assert "Not supported on any workload: c (needs sm_90)." in text


def test_a_backend_that_can_nothing_is_named_once_below_the_table():
    assert not [row for row in printed(table(small()), 100).splitlines() if row.startswith("  c ")]
    elsewhere = [samples.record("w/2", "c", 300e-6, rows=65536, n=512)]
    rows = [row.split() for row in printed(table([*small(), *elsewhere]), 100).splitlines() if row.startswith("  c ")]
    assert [row[2] for row in rows] == ["unsupported", "229"]


def test_a_backend_that_failed_is_shown_where_it_did():
    failed = samples.record("w/1", "f", rows=65536, n=512, status="failed", reason="RuntimeError: tile out of range")
    text = printed(table([*small(), failed]), 100)
    assert line(text, "f ") == "f – failed"
    assert "failed: f on 1 workload: RuntimeError: tile out of range" in text


def test_backends_come_in_order_of_time_with_baselines_last():
    text = printed(table(small()), 100)
    order = [row.split()[0] for row in text.splitlines() if row.startswith("  ") and row.split()[0] in "abc dense"]
    assert order == ["a", "b", "dense"]


def test_ties_are_marked():
    records = [samples.record("w/1", "a", 100e-6), samples.record("w/1", "b", 100.2e-6)]
    text = printed(table(records), 100)
    assert line(text, "a ").endswith("=1.00")
    assert "= ties with the best" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_no_line_is_wider_than_the_terminal(width):
    text = printed(table(samples.lab(seed=2, workloads=4)), width)
    assert max(len(row) for row in text.splitlines()) <= width


def test_policies_stand_side_by_side_from_100_columns():
    records = samples.lab(seed=2, workloads=1)
    both = [row for row in printed(table(records), 100).splitlines() if "CUDA-graph replay" in row]
    assert ["eager calls" in row for row in both] == [True]
    apart = [row for row in printed(table(records), 80).splitlines() if "CUDA-graph replay" in row]
    assert ["eager calls" in row for row in apart] == [False]


def test_a_bound_that_is_not_known():
    own = [samples.record("squares/1", "loop", 1.0, policy="eager", device="Some CPU", run="own", bounded=False)]
    assert "unknown" in line(printed(table(own), 200), "bound")


def test_markup_in_names_is_printed_as_it_is():
    text = printed(table([samples.record("w/[red]x[/red]", "[bold]b")]), 100)
    assert "[red]x[/red]" in text
    assert "[bold]b" in text


def test_no_records():
    assert "No records." in printed(table([]), 80)
