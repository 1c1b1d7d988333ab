"""Closed intervals of positive numbers: what a printed figure may stand for, and what follows from several of them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """All numbers from `lo` to `hi`; `mid` is what was printed."""

    lo: float
    mid: float
    hi: float

    def __post_init__(self) -> None:
        if not self.lo <= self.mid <= self.hi:
            raise ValueError(f"interval: expected lo <= mid <= hi, got {self.lo}, {self.mid}, {self.hi}")

    def __mul__(self, other: Interval | float) -> Interval:
        if isinstance(other, Interval):
            return Interval(self.lo * other.lo, self.mid * other.mid, self.hi * other.hi)
        return Interval(self.lo * other, self.mid * other, self.hi * other)

    def __truediv__(self, other: Interval | float) -> Interval:
        if not isinstance(other, Interval):
            return self * (1 / other)
        infinity = float("inf")
        return Interval(
            self.lo / other.hi, self.mid / other.mid if other.mid else infinity,
            self.hi / other.lo if other.lo > 0 else infinity,
        )  # fmt: skip

    def meets(self, other: Interval | float, slack: float = 0.0) -> bool:
        """Whether both may be the same number when each may be off by the share `slack`."""
        lo, hi = (other.lo, other.hi) if isinstance(other, Interval) else (other, other)
        return self.lo <= hi * (1 + slack) and lo <= self.hi * (1 + slack)

    @property
    def width(self) -> float:
        """Relative: 0.1 means that the print leaves a tenth open."""
        return (self.hi - self.lo) / self.mid if self.mid > 0 else float("inf")


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def printed(digits: str, approximate: bool = False) -> Interval:
    """What `digits` ("1,234.50", "1.2e-3", "1300") may stand for: rounded or cut off, so one unit of the last digit to
    either side; a tenth more where the text says "about". The zeros of 4,000 may be rounded too, up to 2.5 %."""
    text = digits.replace(",", "").replace("_", "").lstrip("+")
    value = abs(float(text))
    mantissa, _, exponent = text.lower().partition("e")
    fraction = mantissa.partition(".")[2]
    unit = 10.0 ** (int(exponent or 0) - len(fraction))
    if "." not in mantissa and not exponent:
        zeros = len(mantissa) - len(mantissa.rstrip("0")) if value else 0
        unit = max(1.0, min(0.5 * 10.0**zeros, 0.025 * value) if zeros > 1 else 1.0)
    spread = unit + (0.1 * value if approximate else 0.0)
    return Interval(max(0.0, value - spread), value, value + spread)


NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)"


def number(text: str) -> float | None:
    """The value of `text` if all of `text` is a number."""
    return float(text.replace(",", "")) if re.fullmatch(NUMBER, text.strip()) else None
