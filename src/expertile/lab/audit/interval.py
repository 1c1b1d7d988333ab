"""Closed intervals of real numbers: what a printed figure may have been before it was rounded.

Source of the arithmetic: Moore, Kearfott, Cloud, "Introduction to Interval Analysis", SIAM 2009, chapter 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """All numbers from `lo` to `hi`, both included. Either end may be infinite."""

    lo: float
    hi: float

    def __post_init__(self) -> None:
        if math.isnan(self.lo) or math.isnan(self.hi) or self.lo > self.hi:
            raise ValueError(f"interval: expected lo <= hi, got [{self.lo}, {self.hi}]")

    @staticmethod
    def of(value: float | Interval) -> Interval:
        """The interval that holds exactly `value`; an interval is returned as it is."""
        return value if isinstance(value, Interval) else Interval(float(value), float(value))

    @property
    def mid(self) -> float:
        """The middle, or the finite end of a half-infinite interval."""
        if math.isinf(self.hi):
            return self.lo
        return (self.lo + self.hi) / 2

    def __add__(self, other: float | Interval) -> Interval:
        o = Interval.of(other)
        return Interval(self.lo + o.lo, self.hi + o.hi)

    def __sub__(self, other: float | Interval) -> Interval:
        o = Interval.of(other)
        return Interval(self.lo - o.hi, self.hi - o.lo)

    def __mul__(self, other: float | Interval) -> Interval:
        o = Interval.of(other)
        ends = [0.0 if 0.0 in (a, b) else a * b for a in (self.lo, self.hi) for b in (o.lo, o.hi)]
        return Interval(min(ends), max(ends))

    def __truediv__(self, other: float | Interval) -> Interval:
        """The quotient; a divisor that may be zero makes the far end infinite."""
        o = Interval.of(other)
        if o.lo < 0 < o.hi:
            return Interval(-math.inf, math.inf)
        low = 1 / o.hi if o.hi else -math.inf
        high = 1 / o.lo if o.lo else math.inf
        return self * Interval(min(low, high), max(low, high))

    def __contains__(self, value: float) -> bool:
        return self.lo <= value <= self.hi

    def meets(self, other: Interval) -> bool:
        """Whether one number lies in both. A relative 1e-9 absorbs floating-point error at the ends."""
        slack = 1e-9 * max(abs(x) for x in (self.lo, self.hi, other.lo, other.hi, 0.0) if not math.isinf(x))
        return self.lo <= other.hi + slack and other.lo <= self.hi + slack

    def widened(self, relative: float) -> Interval:
        """Both ends moved outwards by `relative` of their size."""
        return Interval(self.lo - abs(self.lo) * relative, self.hi + abs(self.hi) * relative)


def printed(text: str, approximate: bool = False) -> Interval:
    """What the printed number `text` ("0.21", "1,842", "3.7e-09") may stand for before rounding.

    Half a unit of the last printed digit each way: "0.21" is [0.205, 0.215]. Trailing zeros of a whole number may
    be rounding too ("990"), but by no more than 1 %. An approximate figure ("~4.5") gets a full unit, or 10 %.
    """
    plain = text.replace(",", "").lstrip("+")
    mantissa, _, exponent = plain.lower().partition("e")
    scale = 10.0 ** int(exponent or 0)
    value = float(mantissa) * scale
    digits = mantissa.partition(".")[2]
    unit = 10.0 ** -len(digits) * scale
    half = unit / 2
    if not digits and not exponent:
        zeros = len(mantissa) - len(mantissa.rstrip("0"))
        half = max(0.5, min(0.5 * 10.0**zeros, 0.01 * abs(value)))
    if approximate:
        half = max(2 * half, 0.1 * abs(value))
    lo = value - half
    return Interval(max(lo, 0.0) if value >= 0 else lo, value + half)
