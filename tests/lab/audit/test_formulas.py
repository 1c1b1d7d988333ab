import pytest

from expertile.lab.audit.columns import understand
from expertile.lab.audit.document import parse
from expertile.lab.audit.formulas import Term, follows, named_pair, ratio_of_columns, support
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import find_quantities


@pytest.mark.parametrize(("value", "ok"), [(1.5, True), (1.54, True), (1.59, True), (1.61, False), (1.44, False)])
def test_printed_figures_may_be_rounded_or_cut_off(value, ok):
    assert follows(find_quantities("1.5x")[0], Term(Interval.of(value), "")) is ok


def test_headers_name_pairs_of_columns():
    typed = understand(
        parse("| c | PyTorch (loop) | Expert Triton | LLM Triton |\n|-|-|-|-|\n| a | 1 ms | 2 ms | 3 ms |\n").tables[0]
    )
    times = typed.of_kind("time")
    assert named_pair("LLM/Expert", times) == (times[2], times[1])
    assert named_pair("LLM vs PyTorch", times) == (times[2], times[0])
    assert named_pair("Speedup", times) is None
    assert named_pair("Triton/PyTorch", times) is None  # two Tritons


def test_figures_rounded_to_nothing_are_no_evidence():
    typed = understand(
        parse("| a | x (ms) | y (ms) | r |\n|-|-|-|-|\n| p | 1 | 2 | 0.0x |\n| q | 2 | 1 | 2.0x |\n").tables[0]
    )
    x, y = typed.of_kind("time")
    printed = {r: typed.at(r, typed.columns[3]) for r in (0, 1)}
    assert support(ratio_of_columns(typed, x, y), printed) == (1, 1)
