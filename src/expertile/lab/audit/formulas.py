"""Ways in which a column of a table may follow from the others, and how well each explains what is printed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expertile.lab.audit.columns import Column, TypedTable
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import Quantity, show

COMPARABLE = ("time", "flop_rate", "byte_rate", "token_rate", "event_rate", "number", "bytes")


@dataclass(frozen=True)
class Term:
    """The value a formula gives for one row, and the arithmetic in words."""

    value: Interval
    words: str


@dataclass(frozen=True)
class Formula:
    """`at(row)` is the predicted value, or None where a figure is missing. `named` if the header says it."""

    name: str
    at: Callable[[int], Term | None]
    named: bool = False


def follows(printed: Quantity, term: Term) -> bool:
    """Whether the printed figure may be the rounded (or cut off) value of `term`."""
    span = printed.span
    half = (printed.interval.hi - printed.interval.lo) / 2
    if math.isinf(half):
        return span.meets(term.value)
    return Interval(span.lo - 0.02 * half, span.hi + 0.98 * half).meets(term.value)


def ratio_of_columns(typed: TypedTable, a: Column, b: Column, named: bool = False) -> Formula:
    """a / b within the row."""

    def at(row: int) -> Term | None:
        x, y = typed.at(row, a), typed.at(row, b)
        if x is None or y is None or y.interval.hi <= 0:
            return None
        value = x.interval / y.interval
        return Term(value, f"{_fig(x)} / {_fig(y)} = {_ratio(x, y)}")

    return Formula(f"{a.header} / {b.header}", at, named)


def ratio_to_row(typed: TypedTable, a: Column, base: Callable[[int], int | None], inverse: bool) -> Formula:
    """The figure of a baseline row over this row's (or the inverse)."""

    def at(row: int) -> Term | None:
        other = base(row)
        if other is None:
            return None
        x, y = typed.at(other, a), typed.at(row, a)
        if x is None or y is None:
            return None
        if inverse:
            x, y = y, x
        if y.interval.hi <= 0:
            return None
        return Term(x.interval / y.interval, f"{_fig(x)} / {_fig(y)} = {_ratio(x, y)}")

    return Formula(f"{a.header} against the baseline row" + (" (inverse)" if inverse else ""), at)


def change_of_columns(typed: TypedTable, a: Column, b: Column) -> Formula:
    """(a − b) / b within the row, a fraction."""

    def at(row: int) -> Term | None:
        x, y = typed.at(row, a), typed.at(row, b)
        if x is None or y is None or y.interval.lo <= 0:
            return None
        value = x.interval / y.interval - 1.0
        shown = (x.value / y.value - 1.0) if y.value else math.inf
        return Term(value, f"{_fig(x)} / {_fig(y)} − 1 = {shown:.1%}")

    return Formula(f"change from {b.header} to {a.header}", at)


def change_to_row(typed: TypedTable, a: Column, base: Callable[[int], int | None], inverse: bool) -> Formula:
    """Change against the baseline row, a fraction."""
    ratio = ratio_to_row(typed, a, base, inverse)

    def at(row: int) -> Term | None:
        term = ratio.at(row)
        return None if term is None else Term(term.value - 1.0, f"{term.words}, less 1")

    return Formula(f"change in {ratio.name}", at)


def negated(formula: Formula) -> Formula:
    """The same with the sign turned: a reduction instead of an increase."""

    def at(row: int) -> Term | None:
        term = formula.at(row)
        return None if term is None else Term(Interval(-term.value.hi, -term.value.lo), f"−({term.words})")

    return Formula(f"minus {formula.name}", at, formula.named)


def share_of(typed: TypedTable, a: Column, whole: float, words: str, named: bool = False) -> Formula:
    """a / a constant, such as the GPU's peak."""

    def at(row: int) -> Term | None:
        x = typed.at(row, a)
        # A peak is itself a rounded figure: half a per cent is allowed for it.
        return (
            None
            if x is None
            else Term(x.interval.widened(0.005) / whole, f"{_fig(x)} / {words} = {x.value / whole:.1%}")
        )

    return Formula(f"{a.header} / {words}", at, named)


def support(formula: Formula, printed: dict[int, Quantity]) -> tuple[int, int]:
    """(rows whose printed figure follows from the formula, rows where it can be evaluated).

    A figure rounded to almost nothing ("0.00%") follows from too much to count as evidence.
    """
    fits = evaluable = 0
    for row, quantity in printed.items():
        term = formula.at(row)
        if term is None or (quantity.interval.lo <= 0 < quantity.interval.hi):
            continue
        evaluable += 1
        fits += follows(quantity, term)
    return fits, evaluable


def named_pair(header: str, columns: Sequence[Column]) -> tuple[Column, Column] | None:
    """The two columns that a header such as "LLM/Expert" or "Speedup vs cuBLAS" names, if it names two clearly."""
    text = re.sub(r"\([^)]*\)", lambda m: " " + m[0][1:-1] + " ", header)
    parts = re.split(r"\s*/\s*|\bvs\.?\b|\bversus\b|\bover\b|\bagainst\b|\brelative to\b", text, maxsplit=1, flags=re.I)
    if len(parts) != 2:
        return None
    left, right = (_match(part, columns) for part in parts)
    if right is not None and left is None and len(columns) == 2:
        left = next(c for c in columns if c is not right)
    if left is None or right is None or left is right:
        return None
    return left, right


def _match(text: str, columns: Sequence[Column]) -> Column | None:
    words = set(re.findall(r"[a-z0-9]+", text.lower())) - {"speedup", "speed", "up", "ratio", "x", "the"}
    scores = [(len(words & set(re.findall(r"[a-z0-9]+", " ".join(c.system)))), c) for c in columns]
    best = max((s for s, _ in scores), default=0)
    chosen = [c for s, c in scores if s == best]
    return chosen[0] if best > 0 and len(chosen) == 1 else None


def _fig(q: Quantity) -> str:
    return show(q.kind, q.value) if q.kind != "number" else q.text


def _ratio(x: Quantity, y: Quantity) -> str:
    return show("ratio", x.value / y.value) if y.value else "∞"
