"""The odd one out: rows that keep one relation, and the row that breaks it."""

from __future__ import annotations

from collections.abc import Sequence

from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity, statistic

FIT = 0.02  # rows within this agree
ODD = 0.06  # a row this far beyond its printed digits breaks the relation
_TIGHT = 0.15  # an interval wider than this confirms nothing


def odd_ones(factors: Sequence[Interval | None], usual: Sequence[float] = ()) -> tuple[float, list[int]] | None:
    """The factor that nearly all rows share, and the rows that do not; None where there is no such factor.

    A factor of `usual` needs two rows that agree beside one that does not, any other three. Two in three must agree.
    """
    held = [(i, f) for i, f in enumerate(factors) if f is not None and 0 < f.mid < float("inf")]
    tight = [(i, f) for i, f in held if f.width < _TIGHT]
    best: tuple[int, float, bool] = (0, 1.0, False)
    for value, common in [*((u, True) for u in usual), *((f.mid, False) for _, f in tight)]:
        fits = sum(f.meets(value, FIT) for _, f in tight)
        if fits > best[0]:
            best = (fits, value, common)
    fits, value, common = best
    odd = [i for i, f in held if not f.meets(value, ODD)]
    need = 2 if common else 3
    if fits < need or fits < 0.65 * len(held):
        return (value, odd) if common and fits == 1 and len(held) == 2 and len(odd) == 1 else None
    return value, odd


def same_owner(a: Quantity, b: Quantity) -> bool:
    """Whether two figures may be of one run: the mean of one and the best of the other are not."""
    extremes = {"min", "max", "best", "worst"}
    return statistic(a.label) == statistic(b.label) or not extremes & {statistic(a.label), statistic(b.label)}
