"""Averages and totals that their own rows do not give."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, UNIT_OF, Finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report
from expertile.audit.rules.ratios import is_summary
from expertile.audit.rules.relation import FIT, ODD

_TOTAL = re.compile(r"(?i)\btotal\b|\bsum\b")
_MEAN = re.compile(r"(?i)\baverage|\bavg|\bmean\b|geo-?\s?mean|\bmedian\b|\boverall\b")
_HIDDEN = re.compile(
    r"(?i)^\W*(?:\.\.\.|…|⋮|etc)|selected|excerpt|subset|first \d+ rows|top[- ]\d+|\ball \d+|omitted|truncated"
)


def _means(values: list[Interval]) -> list[Interval]:
    mids = [v.mid for v in values]
    n = len(values)
    if not all(mids):
        return [Interval(sum(v.lo for v in values) / n, sum(mids) / n, sum(v.hi for v in values) / n)]
    spread = max((v.hi - v.lo) / v.mid for v in values)
    found = [
        sum(mids) / n,
        math.exp(sum(map(math.log, mids)) / n),
        n / sum(1 / m for m in mids),
        statistics.median(mids),
    ]
    return [Interval(m * (1 - spread / 2), m, m * (1 + spread / 2)) for m in found]


def grids(report: Report) -> Iterator[Finding]:
    """A row called average or total, column by column."""
    for grid in report.grids:
        start = 0
        words = " ".join(row.text for row in grid.rows)
        hidden = any(_HIDDEN.search(row.label or row.text[:40]) for row in grid.rows) or _HIDDEN.search(words)
        for r, row in enumerate(grid.rows):
            if not is_summary(row):
                continue
            body, start = (
                grid.rows[start:r],
                r + 1 if not (r + 1 < len(grid.rows) and is_summary(grid.rows[r + 1])) else start,
            )
            if len(body) < 2 or hidden:
                continue
            total = bool(_TOTAL.search(row.label)) and not _MEAN.search(row.label)
            odd: list[tuple[Quantity, Interval]] = []
            good = 0
            for q in row.quantities:
                values = [v.value for b in body for v in b.quantities if v.column == q.column and v.kind == q.kind]
                if len(values) != len(body) or not q.exact:
                    continue
                whole = Interval(sum(v.lo for v in values), sum(v.mid for v in values), sum(v.hi for v in values))
                readings = [whole] if total else [*_means(values), whole]
                if q.kind in ("ratio", "percent", "share"):
                    good += any(q.value.meets(m, FIT) for m in readings)
                elif any(q.value.meets(m, FIT) for m in readings):
                    good += 1
                elif not any(q.value.meets(m, ODD) for m in readings) and not (
                    total and q.kind not in ("time", "bytes")
                ):
                    odd.append((q, readings[0]))
            # A rate's total is often work over time, and rows may have been left out: another column must fit.
            if odd and (good >= len(odd) or (len(odd) == 1 and not good and _plain(odd[0][0]) and len(body) >= 3)):
                for q, m in odd:
                    unit = UNIT_OF.get(q.kind, "")
                    what = "sum" if total else "mean"
                    yield Finding(
                        INCONSISTENT, "average", q.line, q.text,
                        f"the {what} of lines {body[0].line}–{body[-1].line} is {si(m.mid, unit)}, not {q.text}",
                        (body[0].line, body[-1].line),
                    )  # fmt: skip


def _plain(q: Quantity) -> bool:
    return q.kind in ("time", "rate", "tokens_per_s", "items_per_s")


_RUN = re.compile(r"(?i)^\W*(?:run|iter(?:ation)?|trial|rep(?:etition)?|round|pass|sample)\W{0,2}#?\d+\b")


def runs(report: Report) -> Iterator[Finding]:
    """Numbered runs, one a line, and the mean below them."""
    held: list[Quantity] = []
    for row in (r for r in report.rows if r.kind == "line"):
        if _RUN.match(row.text) and len(row.quantities) == 1:
            held.append(row.quantities[0])
            continue
        mean = [q for q in row.quantities if q.exact]
        if len(held) >= 2 and len(mean) == 1 and re.match(r"(?i)^\W*(?:average|avg|mean)\b", row.text):
            q = mean[0]
            same = [h.value for h in held if h.kind == q.kind]
            if (
                len(same) == len(held)
                and q.line - held[-1].line <= 3
                and not any(q.value.meets(m, ODD) for m in _means(same))
            ):
                yield Finding(
                    INCONSISTENT, "average", q.line, q.text,
                    f"the mean of the {len(held)} runs above is {si(_means(same)[0].mid, UNIT_OF.get(q.kind, ''))}, not {q.text}",
                    (held[0].line, held[-1].line),
                )  # fmt: skip
        held = held if not row.quantities and held else []
