"""Rows called average, geometric mean or total that do not follow from the rows above them."""

import itertools
import math
import re
import statistics
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, ODD, Interval
from expertile.audit.report import Grid, Report, Row
from expertile.audit.units import unit_of_name

_TOTAL = re.compile(r"(?i)\b(?:total|sum)\b")
_MEAN = re.compile(r"(?i)\bav(?:era)?g|mean\b|\bmedian\b|\boverall\b")
# Rows may be left out, or be parts of one another.
_HIDDEN = re.compile(r"(?i)^\W*(?:\.\.\.|…|⋮)|selected|subset|first \d+ rows|top[- ]\d+|\ball \d+|omit|overlap|p9\d")
_ADDS, _AVERAGES = (
    ("time", "bytes", "percent"),
    ("time", "rate", "tokens_per_s", "items_per_s", "bytes", "bandwidth", "ratio"),
)


def totals(report: Report) -> Iterator[Finding]:
    """Column by column, over the rows since the last such row."""
    for grid in report.grids:
        held: list[Row] = []
        for row in grid.rows if not any(_HIDDEN.search(row.text) for row in grid.rows) else ():
            if row.summary and len(held) > 1 and unit_of_name(row.label) is None:
                yield from _summary(grid, row, held)
                held = []
            elif not row.summary:
                held.append(row)


def _may_be(values: list[Interval], total: bool) -> list[Interval]:
    mids, n = [v.mid for v in values], len(values)
    half = sum(v.hi - v.lo for v in values) / max(sum(mids), 1e-30) / 2
    found = [sum(mids)] if total else [sum(mids) / n, statistics.median(mids), sum(mids)]
    if all(mids) and not total:
        found += [math.prod(m ** (1 / n) for m in mids), n / sum(1 / m for m in mids)]
    return [Interval(m * (1 - min(half, 1)), m, m * (1 + half)) for m in found]


def _of_sums(grid: Grid, body: list[Row]) -> Iterator[Interval]:
    """The quotients of two columns' sums."""
    for kind in ("time", "rate", "bandwidth", "tokens_per_s", "items_per_s", "bytes"):
        columns = ([v.value for row in body if (v := row.figure(c, kind))] for c in grid.columns(kind))
        sums = [sum(of[1:], of[0]) for of in columns if len(of) == len(body)]
        yield from (a / b for a, b in itertools.permutations(sums, 2))


def _summary(grid: Grid, row: Row, body: list[Row]) -> Iterator[Finding]:
    total = bool(_TOTAL.search(row.label)) and not _MEAN.search(row.label)
    good, odd = 0, []
    for q in row.of(*(_ADDS if total else _AVERAGES)):
        values = [v.value for b in body if (v := b.figure(q.column, q.kind))]
        if len(values) != len(body) or not q.exact or not q.value.mid or q.text[0] in "+-−":
            continue
        means = _may_be(values, total)
        means[:0] = [*_of_sums(grid, body)] if q.kind == "ratio" and "geo" not in row.label.lower() else []
        good += any(q.value.meets(m, FIT) for m in means)
        if not any(q.value.meets(m, ODD) for m in means):
            odd.append((q, means[-2 if "geo" in row.label.lower() else -5 if q.kind == "ratio" else 0]))
    for q, m in odd if len(odd) <= max(good, 1) and len(body) > 2 else ():
        span_of = f"the {'sum' if total else 'mean'} of lines {body[0].line}–{body[-1].line}"
        ask = "" if good else ": which rows does it count?"
        message = f"{span_of} is {si(m.mid, UNIT_OF.get(q.kind, ''))}, not {q.text}{ask}"
        verdict = INCONSISTENT if good else QUESTION
        yield finding(verdict, "total", message, q, lines=tuple(b.line for b in body))
