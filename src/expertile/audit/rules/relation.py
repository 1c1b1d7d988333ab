"""The odd one out: rows that keep one relation, and the row that breaks it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity

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


_METRIC = re.compile(
    r"\b(?:time|times|latency|duration|runtime|elapsed|execution|exec|kernel|gpu|cuda|throughput|bandwidth|bw|perf(?:ormance)?|"
    r"achieved|measured|effective|total|tflops?|gflops?|flops?|tflop|tops|gb|gib|mb|tb|ms|us|µs|ns|s|sec|secs|seconds?|per|"
    r"tokens?|tok|rate|speed|compute|wall|clock|memory|mem|iter(?:ation)?|step|value|images?|samples?|ips|tps)\b"
)
_STATISTIC = re.compile(
    r"\b(?:avg|average|mean|median|min(?:imum)?|max(?:imum)?|best|worst|p\d\d|std|first|last|peak)\b"
)


def stem(label: str) -> str:
    """Whose figure it is: the label without words for the quantity ("cuBLAS time (ms)" -> "cublas")."""
    plain = re.sub(r"[^a-zA-Z0-9µ.+]+", " ", label.lower().replace("flops/s", "flops").replace("flop/s", "flops"))
    return " ".join(_STATISTIC.sub(" ", _METRIC.sub(" ", plain)).split())


def statistic(label: str) -> str:
    found = _STATISTIC.findall(label.lower())
    return {"average": "mean", "avg": "mean", "median": "mean"}.get(found[0], found[0]) if found else ""


def same_owner(a: Quantity, b: Quantity, only: bool) -> bool:
    """Whether two figures of a row are of one run: alone of their kinds, or named alike; mean and best are not."""
    if {statistic(a.label), statistic(b.label)} & {"min", "max", "best", "worst"} and statistic(a.label) != statistic(
        b.label
    ):
        return False
    return only or stem(a.label) == stem(b.label)
