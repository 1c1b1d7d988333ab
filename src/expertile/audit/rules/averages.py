"""Averages and totals that their own rows do not give."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, UNIT_OF, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.relation import FIT, ODD

_TOTAL = re.compile(r"(?i)\btotal\b|\bsum\b")
_MEAN = re.compile(r"(?i)\baverage|\bavg|\bmean\b|geo-?\s?mean|\bmedian\b|\boverall\b")
_HIDDEN = re.compile(
    r"(?i)^\W*(?:\.\.\.|…|⋮|etc)|selected|excerpt|subset|first \d+ rows|top[- ]\d+|\ball \d+|omitted|truncated"
)


def _means(values: list[Interval]) -> list[Interval]:
    """Every mean that may be meant, as far as the printed digits say."""
    mids, n = [v.mid for v in values], len(values)
    if not all(mids):
        return [Interval(sum(v.lo for v in values) / n, sum(mids) / n, sum(v.hi for v in values) / n)]
    half = max(v.width for v in values) / 2
    found = (
        sum(mids) / n,
        math.prod(m ** (1 / n) for m in mids),
        n / sum(1 / m for m in mids),
        statistics.median(mids),
    )
    return [Interval(m * (1 - half), m, m * (1 + half)) for m in found]


def grids(report: Report) -> Iterator[Finding]:
    """A row called average or total, column by column, over the rows since the last such row."""
    for grid in report.grids:
        if any(_HIDDEN.search(row.label or row.text[:40]) or _HIDDEN.search(row.text) for row in grid.rows):
            continue
        held: list[Row] = []
        for r, row in enumerate(grid.rows):
            if row.summary and len(held) > 1:
                yield from _summary(row, held)
            elif not row.summary:
                held = [*([] if r and grid.rows[r - 1].summary else held), row]


def _summary(row: Row, body: list[Row]) -> Iterator[Finding]:
    total = bool(_TOTAL.search(row.label)) and not _MEAN.search(row.label)
    odd: list[tuple[Quantity, Interval]] = []
    good = 0
    for q in row.quantities:
        values = [v.value for b in body for v in b.quantities if v.column == q.column and v.kind == q.kind]
        if len(values) != len(body) or not q.exact:
            continue
        whole = Interval(sum(v.lo for v in values), sum(v.mid for v in values), sum(v.hi for v in values))
        may_be = [whole] if total else [*_means(values), whole]
        if any(q.value.meets(m, FIT) for m in may_be):
            good += 1
        # A total of rates or of ratios is often work over time.
        elif q.kind in (
            ("time", "bytes") if total else ("time", "rate", "tokens_per_s", "items_per_s", "bytes", "bandwidth")
        ):
            odd += [(q, may_be[0])] if not any(q.value.meets(m, ODD) for m in may_be) else []
    # Rows may have been left out: another column must fit, or the table be whole by its look.
    if good >= len(odd) or (len(odd) == 1 and len(body) >= 3):
        for q, m in odd:
            span = f"the {'sum' if total else 'mean'} of lines {body[0].line}–{body[-1].line}"
            message = f"{span} is {si(m.mid, UNIT_OF.get(q.kind, ''))}, not {q.text}"
            yield finding(INCONSISTENT, "average", message, q, lines=(body[0].line, body[-1].line))


_RUN = re.compile(r"(?i)^\W*(?:run|iter(?:ation)?|trial|rep(?:etition)?|round|pass|sample)\W{0,2}#?\d+\b")


def runs(report: Report) -> Iterator[Finding]:
    """Numbered runs, one a line, and the mean below them."""
    held: list[Quantity] = []
    for row in (r for r in report.rows if r.kind == "line" and r.quantities):
        q = row.quantities[0]
        if _RUN.match(row.text) and len(row.quantities) == 1:
            held.append(q)
            continue
        if (
            len(held) > 1
            and q.exact
            and re.match(r"(?i)^\W*(?:average|avg|mean)\b", row.text)
            and q.line - held[-1].line <= 3
        ):
            may_be = _means([h.value for h in held])
            if {h.kind for h in held} == {q.kind} and not any(q.value.meets(m, ODD) for m in may_be):
                mean = si(may_be[0].mid, UNIT_OF.get(q.kind, ""))
                message = f"the mean of the {len(held)} runs above is {mean}, not {q.text}"
                yield finding(INCONSISTENT, "average", message, q, lines=(held[0].line, held[-1].line))
        held = []
