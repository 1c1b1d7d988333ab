"""The average rows of shared report 000, in other words: ratios that are means of ratios."""

import pytest

from expertile.lab.audit import INCONSISTENT, audit
from tests.lab.audit.helpers import accusations, against

HEAD = "| case | loop | llm | llm/loop |\n|-|-|-|-|\n"
ROWS = (
    "| a | 0.3080 ms | 1.4432 ms | 0.21x |\n| b | 3.9383 ms | 28.2677 ms | 0.14x |\n| c | 2.4301 ms | 16.5123 ms | "
    "0.15x |\n"
)


def test_the_ratio_of_an_average_row_is_that_of_its_averages():
    assert against(f"{HEAD}{ROWS}| AVERAGE | 2.2255 ms | 15.4077 ms | 0.14x |\n") == []
    result = audit(f"{HEAD}{ROWS}| AVERAGE | 2.2255 ms | 15.4077 ms | 0.17x |\n")
    (finding,) = accusations(result)
    assert (finding.line, finding.rule, finding.verdict) == (6, "summary_row", INCONSISTENT)
    assert finding.limit == pytest.approx(2.2255 / 15.4077, rel=1e-3)
    assert "mean of 0.21x, 0.14x, 0.15x" in finding.explanation


def test_a_wrong_average():
    assert against(f"{HEAD}{ROWS}| AVERAGE | 3.2255 ms | 15.4077 ms | 0.21x |\n") == [(6, INCONSISTENT, "summary_row")]


@pytest.mark.parametrize(
    ("label", "figure"),
    [("Average", "2.0x"), ("Geomean", "1.86x"), ("Median", "2.0x"), ("Max", "3.0x"), ("Min", "1.0x")],
)
def test_means_of_a_lone_column_of_ratios(label, figure):
    table = "| case | speedup |\n|-|-|\n| a | 1.0x |\n| b | 2.0x |\n| c | 3.0x |\n| d | 2.0x |\n"
    assert against(f"{table}| {label} | {figure} |\n") == []
    assert against(f"{table}| {label} | 9.9x |\n") == [(7, INCONSISTENT, "summary_row")]


def test_totals_and_left_out_rows():
    table = "| part | time (ms) |\n|-|-|\n| a | 1.0 |\n| b | 2.5 |\n"
    assert against(f"{table}| Total | 3.5 |\n") == []
    assert against(f"{table}| Total | 9.5 |\n") == [(5, INCONSISTENT, "summary_row")]
    assert against(f"{table}| ... | ... |\n| Total | 9.5 |\n") == []


def test_several_groups_each_with_its_average():
    table = (
        "| x | ms |\n|-|-|\n| a | 1 ms |\n| b | 3 ms |\n| mean | 2 ms |\n| c | 10 ms |\n| d | 20 ms |\n| mean | 15 "
        "ms |\n"
    )
    assert against(table) == []


@pytest.mark.parametrize(
    ("line", "found"), [("Average speedup: 2.0x", 0), ("Geomean: 1.8x", 0), ("Mean speedup: 2.7x", 1)]
)
def test_averages_told_below_the_table(line, found):
    table = "| case | speedup |\n|-|-|\n| a | 1.0x |\n| b | 2.0x |\n| c | 3.0x |\n"
    assert len(against(f"# X\n\n{table}\n{line}\n")) == found
