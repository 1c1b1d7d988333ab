"""Closed intervals of positive numbers: what a printed figure may stand for, and the relation that several keep."""

from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:[eE][-+]?\d{1,2}(?!\d))?|\.\d+)"
FIT = 0.02  # rows within this agree
ODD = 0.06  # a row this far beyond its printed digits breaks the relation
FAR = 1.25  # a miss by less may be another convention, clock or part
_LARGEST = 1e30  # what is printed above is no figure; products of several stay finite
_TIGHT = 0.15  # an interval wider than this confirms nothing


@dataclass(frozen=True)
class Interval:
    """All numbers from `lo` to `hi`; `mid` is what was printed."""

    lo: float
    mid: float
    hi: float

    def __post_init__(self) -> None:
        if not self.lo <= self.mid <= self.hi:
            raise ValueError(f"interval: expected lo <= mid <= hi, got {self.lo}, {self.mid}, {self.hi}")

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.lo + other.lo, self.mid + other.mid, self.hi + other.hi)

    def __mul__(self, other: "Interval | float") -> "Interval":
        by = exact(other)
        return Interval(self.lo * by.lo, self.mid * by.mid, self.hi * by.hi)

    def __truediv__(self, other: "Interval | float") -> "Interval":
        by = exact(other)
        if by.lo > 0:
            return Interval(self.lo / by.hi, self.mid / by.mid, self.hi / by.lo)
        parts = ((self.lo, by.hi), (self.mid, by.mid), (self.hi, by.lo))
        return Interval(*(a / b if b > 0 else float("inf") for a, b in parts))

    def meets(self, other: "Interval | float", slack: float = 0.0) -> bool:
        """Whether both may be the same number when each may be off by the share `slack`."""
        lo, hi = (other.lo, other.hi) if isinstance(other, Interval) else (other, other)
        return self.lo <= hi * (1 + slack) and lo <= self.hi * (1 + slack)

    def beyond(self, factor: float) -> bool:
        """Whether every number of it is off 1 by more than `factor`."""
        return self.lo > factor or self.hi * factor < 1

    @property
    def width(self) -> float:
        """Relative: 0.1 means that the print leaves a tenth open."""
        return (self.hi - self.lo) / self.mid if self.mid > 0 else float("inf")


def exact(value: Interval | float) -> Interval:
    return value if isinstance(value, Interval) else Interval(value, value, value)


def printed(digits: str) -> Interval:
    """What `digits` ("1,234.50", "1.2e-3", "1300") may stand for: rounded, so half a unit of the last digit to either
    side, or cut off, so a whole one above. The zeros of 4,000 may be rounded too, up to 2.5 %."""
    text = digits.replace(",", "").replace("_", "").lstrip("+")
    value = min(abs(float(text)), _LARGEST)
    mantissa, _, exponent = text.lower().partition("e")
    fraction = mantissa.partition(".")[2]
    unit = 10.0 ** (max(-99, min(int(exponent or 0), 99)) - len(fraction))
    if "." not in mantissa and not exponent:
        zeros = len(mantissa) - len(mantissa.rstrip("0")) if value else 0
        unit = max(1.0, min(0.5 * 10.0**zeros, 0.025 * value) if zeros > 1 else 1.0)
    return Interval(max(0.0, value - unit / (2 if unit <= 1 else 1)), value, value + unit)


def odd_ones(
    factors: Sequence[Interval | None], usual: Sequence[float] = (), fit: float = FIT
) -> tuple[float, list[int]] | None:
    """The factor that nearly all rows share, and the rows that do not; None where there is no such factor.

    A factor of `usual` needs two rows that agree beside one that does not, any other three. Two in three must agree.
    """
    held = [(i, f) for i, f in enumerate(factors) if f is not None and 0 < f.mid < float("inf")]
    tight = [f for _, f in held if f.width < _TIGHT]
    fits, common, value = 0, True, 1.0
    for common_here, candidate in [*((True, u) for u in usual), *((False, f.mid) for f in tight)]:
        agree = sum(f.meets(candidate, fit) for f in tight)
        if agree > fits:
            fits, common, value = agree, common_here, candidate
    for u in usual:  # to the last digit in all rows but one
        if len(tight) > 3 and sum(f.meets(u, 0.001) for f in tight) == len(tight) - 1:
            fits, common, value = len(tight) - 1, True, u
    odd = [i for i, f in held if not f.meets(value, ODD)]
    enough = fits >= (2 if common else 3) and fits >= 0.65 * len(held)
    alone = common and fits == 1 and len(held) == 2 and len(odd) == 1
    return (value, odd) if enough or alone else None
