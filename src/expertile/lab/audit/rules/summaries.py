"""Rows that sum up others: averages, geometric means, totals, and ratios printed beside averages."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.columns import MEASURED, Column, TypedTable
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.formulas import COMPARABLE, Formula, Term, follows, ratio_of_columns, support
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import Quantity, show
from expertile.lab.audit.rules.columns import formulas_for

_Aggregate = Callable[[Sequence[float]], float]


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values)) if min(values) > 0 else 0.0


def _harmonic(values: Sequence[float]) -> float:
    return len(values) / sum(1 / v for v in values) if min(values) > 0 else 0.0


_MEANS: dict[str, tuple[tuple[str, _Aggregate], ...]] = {
    "average": (("mean", statistics.fmean), ("geometric mean", _geomean), ("harmonic mean", _harmonic)),
    "overall": (("mean", statistics.fmean), ("geometric mean", _geomean), ("harmonic mean", _harmonic), ("sum", sum)),
    "geomean": (("geometric mean", _geomean),),
    "median": (("median", statistics.median),),
    "total": (("sum", sum), ("mean", statistics.fmean)),
    "min": (("least", min),),
    "max": (("greatest", max),),
}


def summaries(context: Context) -> list[Finding]:
    """Every figure of a row labelled average, geomean, median, total, min or max."""
    found: list[Finding] = []
    for t, typed in enumerate(context.report.tables):
        for row in range(len(typed.cells)):
            what = typed.summary(row)
            if what in _MEANS:
                for column in typed.of_kind(*MEASURED, "number"):
                    claim = context.in_cell(t, row, column.index)
                    if claim is not None:
                        found.append(_judge(context, t, typed, column, row, what, claim))
    return found


def averages_in_text(context: Context) -> list[Finding]:
    """ "Average speedup: 1.53x" below a table: the mean of its one column of ratios."""
    found = []
    for claim in context.claims:
        if claim.kind != "ratio" or claim.place.table is not None or claim.quantity.bound or claim.quantity.high:
            continue
        match = _TOLD.search(claim.place.text[: claim.quantity.start])
        tables = [t for t in context.report.tables if t.table.section == claim.place.section and t.of_kind("ratio")]
        if not match or len(tables) != 1 or len(tables[0].of_kind("ratio")) != 1 or tables[0].elided:
            continue
        typed, column = tables[0], tables[0].of_kind("ratio")[0]
        figures = [q for r in typed.body() if (q := typed.at(r, column)) is not None]
        what = "geomean" if match["what"].lower().startswith("geo") else match["what"].lower()
        means = _aggregates(figures, {"mean": "average"}.get(what, what)) if len(figures) > 1 else []
        fit = next((m for m in means if follows(claim.quantity, m)), None)
        if fit is not None:
            found.append(context.finding(claim, POSSIBLE, "average_in_text", f"the {fit.words}"))
        elif means:
            told = "; ".join(m.words for m in means)
            text = f"printed {claim.quantity.text}, but of the table at line {typed.table.line}: {told}"
            value, limit = claim.quantity.value, means[0].value.mid
            found.append(context.finding(claim, INCONSISTENT, "average_in_text", text, value, limit, "x"))
    return found


_TOLD = re.compile(r"\b(?P<what>average|mean|geo(?:metric[- ])?mean|median)\b(?: \w+){0,2}\s*[:=]\s*[~≈]?\s*$", re.I)


def _judge(context: Context, t: int, typed: TypedTable, column: Column, row: int, what: str, claim: Claim) -> Finding:
    printed = claim.quantity
    own = _own_formula(context, t, typed, column, row) if column.kind == "ratio" else None
    term = own.at(row) if own is not None else None
    if term is not None and own is not None and follows(printed, term):
        return context.finding(claim, POSSIBLE, "summary_row", f"{own.name}: {term.words}")
    groups = [g for g in _groups(typed, column, row) if g]
    means = [m for g in groups for m in _aggregates(g, what)]
    fit = next((m for m in means if follows(printed, m)), None)
    if term is not None and own is not None:
        explanation = f"printed {printed.text}; {own.name} of this row's own figures: {term.words}"
        if fit is not None:
            explanation += f". It is the {fit.words}: averaging ratios of unequal rows is not the ratio of the averages"
        if fit is not None and what not in ("average", "overall", "total"):
            return context.finding(claim, POSSIBLE, "summary_row", f"the {fit.words}")
        return context.finding(claim, INCONSISTENT, "summary_row", explanation, printed.value, term.value.mid, "x")
    if fit is not None:
        return context.finding(claim, POSSIBLE, "summary_row", f"the {fit.words}")
    if (
        typed.elided
        or not means
        or len(groups[0]) < 2
        or column.kind == "percent"
        or not _sure_of(what, column, typed, row)
    ):
        text = (
            f"{printed.text}: the rows it sums up are not all shown" if means else f"{printed.text}: no rows to sum up"
        )
        return context.finding(claim, NOT_CHECKABLE, "summary_row", text)
    tried = "; ".join(m.words for m in means[:3])
    explanation = f"printed {printed.text}, but of the rows above: {tried}"
    return context.finding(claim, INCONSISTENT, "summary_row", explanation, printed.value, means[0].value.mid)


def _sure_of(what: str, column: Column, typed: TypedTable, row: int) -> bool:
    """Whether a mismatch must be an error: the label is plain, and another column shows which rows are meant."""
    if what in ("overall", "total") and column.kind not in ("time", "bytes"):
        return False
    others = [c for c in typed.of_kind(*MEASURED, "number") if c is not column]
    confirmed = 0
    for other in others:
        quantity = typed.at(row, other)
        if quantity is None:
            continue
        groups = [g for g in _groups(typed, other, row) if g]
        confirmed += any(follows(quantity, m) for g in groups for m in _aggregates(g, what))
    return confirmed > 0 or not others


def _own_formula(context: Context, t: int, typed: TypedTable, column: Column, row: int) -> Formula | None:
    """The within-row formula that explains this ratio in the other rows, if one does."""
    printed = {r: q for r in typed.body() if (q := typed.at(r, column)) is not None}
    formulas = [f for f in formulas_for(context, t, typed, column) if " / " in f.name]
    rivals = typed.of_kind(*COMPARABLE)
    direct = {ratio_of_columns(typed, a, b).name for a in rivals for b in rivals if a is not b and a.kind == b.kind}
    formulas = [f for f in formulas if f.name in direct]
    named = [f for f in formulas if f.named]
    scored = [(support(f, printed), f) for f in named or formulas]
    best = max(scored, key=lambda x: x[0][0], default=None)
    if best is None or best[0][0] < max(1, 0.6 * best[0][1]):
        return None
    return best[1]


def _groups(typed: TypedTable, column: Column, row: int) -> list[list[Quantity]]:
    """The rows it may sum up: all of them, or those since the last summary above, or those below."""
    body = typed.body()
    last = max((r for r in range(row) if typed.summary(r)), default=-1)
    chosen = [body, [r for r in body if last < r < row], [r for r in body if r > row]]
    unique = []
    for rows in chosen:
        figures = [q for r in rows if (q := typed.at(r, column)) is not None]
        if figures and figures not in unique:
            unique.append(figures)
    return unique


def _aggregates(figures: list[Quantity], what: str) -> list[Term]:
    found = []
    for name, function in _MEANS[what]:
        low = function([q.interval.lo for q in figures])
        high = function([q.span.hi for q in figures])
        value = function([q.value for q in figures])
        if math.isinf(high):
            continue
        shown = show(figures[0].kind, value)
        listed = ", ".join(q.text for q in figures) if len(figures) <= 6 else f"{len(figures)} rows"
        found.append(Term(Interval(min(low, high), max(low, high)), f"{name} of {listed} = {shown}"))
    return found
