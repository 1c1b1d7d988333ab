import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.lab.audit.interval import Interval, printed

finite = st.floats(0.01, 1e6)


@pytest.mark.parametrize(
    ("text", "lo", "hi"),
    [
        ("0.21", 0.205, 0.215),
        ("15", 14.5, 15.5),
        ("1,842", 1841.5, 1842.5),
        ("990", 985, 995),
        ("3.7e-09", 3.65e-9, 3.75e-9),
    ],
)
def test_printed_digits_allow_half_a_unit(text, lo, hi):
    assert printed(text).lo == pytest.approx(lo)
    assert printed(text).hi == pytest.approx(hi)


def test_round_whole_numbers_may_be_rounded_by_one_per_cent_at_most():
    assert printed("4000").hi == pytest.approx(4040)
    assert printed("100").hi == pytest.approx(101)


def test_an_approximate_figure_is_wider():
    assert printed("4.5", approximate=True).lo == pytest.approx(4.05)
    assert printed("0.01", approximate=True) == Interval(0.0, 0.02)


def test_rejects_an_empty_interval():
    with pytest.raises(ValueError, match="lo <= hi"):
        Interval(2.0, 1.0)


def test_division_by_an_interval_that_reaches_zero_is_unbounded():
    assert (Interval(1, 2) / Interval(0, 1)).hi == math.inf
    assert (Interval(1, 2) / Interval(-1, 1)) == Interval(-math.inf, math.inf)


@given(finite, finite, finite, finite)
def test_arithmetic_encloses_every_pair(a, b, c, d):
    x, y = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    for p in (x.lo, x.hi, x.mid):
        for q in (y.lo, y.hi, y.mid):
            for result, value in ((x + y, p + q), (x - y, p - q), (x * y, p * q), (x / y, p / q)):
                assert result.widened(1e-9).lo - 1e-9 <= value <= result.widened(1e-9).hi + 1e-9
