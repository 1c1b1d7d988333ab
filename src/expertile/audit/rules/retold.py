"""What sentences say of the tables beside them: a figure that its row has otherwise, a ratio that no two cells make, a
best that no row reaches. They stand apart, so all of it asks."""

import itertools
import math
import re
import statistics
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, Finding, finding
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.hardware import on_sheet
from expertile.audit.rules.limits import NO_RUN_OF_ONE
from expertile.audit.rules.tables import TYPED

_GAIN = re.compile(
    r"(?i)faster|as fast|slower|speed|improve|reduc|\bless\b|lower|higher|\bmore\b|increas|gain|decreas|drop|\bsav|"
    r"better|smaller|\bcut"
)
_BEST = re.compile(
    r"(?i)\bup to|\bpeak|\bbest|\bmax|\bhighest|reach|\bhits?\b|sustain|achiev|\bat most|fastest|as high as"
)
_APART = re.compile(
    r"(?i)\bcould|\bwould|theor|expect|claim|paper|report(?:ed|s) |vendor|\bspec|ideal|earlier|previous|elsewhere|"
    r"other|goal|should|\bmay\b|if we|for example|e\.g\.|percentage point"
)
_MEAN = re.compile(r"(?i)\bav(?:era)?g|mean\b|\bmedian\b|\boverall\b|typical")
_WORDS = re.compile(r"[a-z0-9](?:[a-z0-9.+_-]*[a-z0-9+])?")


def retold(report: Report) -> Iterator[Finding]:
    """Each figure of a sentence against the tables within forty lines of it."""
    in_tables = {row.line for grid in report.tables for row in grid.rows}
    for row in (r for r in report.lines_of_text if r.line not in in_tables and not _APART.search(r.text)):
        near = [g for g in report.grids if 1 < len(g.rows) < 60 and min(abs(r.line - row.line) for r in g.rows) < 40]
        for q in row.quantities if near else ():
            if q.value.mid and not NO_RUN_OF_ONE.search(q.words.replace("peak", "")) and not on_sheet(row, q):
                yield from _figure(report, row, q, near)


def _figure(report: Report, row: Row, q: Quantity, near: list[Grid]) -> Iterator[Finding]:
    cells = [c for grid in report.tables for r in grid.rows for c in r.of(q.kind) if c.value.mid]
    named = [(g, rows) for g in near if (rows := _named(g, row, row.clause(q)))]
    around = row.text[max(0, q.start - 48) : q.end + 24]
    same = any(c.value.meets(q.value, 0.015) for c in cells)
    if q.kind in TYPED and q.exact and len(named) == 1 and not same:
        held = [c for r in named[0][1] for c in r.of(q.kind) if c.value.mid]
        sums = [x for a, b in itertools.combinations(map(_mid, held), 2) for x in (abs(a - b), a + b)]
        close = min(held, key=lambda c: abs(math.log(_mid(c) / _mid(q))), default=q)
        if 0.4 < _mid(close) / _mid(q) < 2.5 and close is not q and not any(q.value.meets(x, 0.03) for x in sums):
            message = f"line {close.line} has {close.text}, not {q.text}: is it of the same row?"
            yield finding(QUESTION, "retold", message, q, close)
            return
    if q.kind in TYPED[1:5] and len(cells) > 2 and _BEST.search(around) and not _MEAN.search(row.text):
        most = max(cells, key=lambda c: c.value.hi)
        if 1.04 * most.value.hi < q.value.lo < 3 * most.value.hi:
            message = f"{q.text} is more than {most.text}, the most of any row: which run is it?"
            yield finding(QUESTION, "headline", message, q, most)
    if (
        q.kind not in ("ratio", "percent")
        or not _GAIN.search(row.text[max(0, q.start - 32) : q.end + 24])
        or same
        or len(row.of("ratio", "percent")) > 3
    ):
        return
    kinds = [x.kind for x in row.of(*TYPED)]
    if any(kinds.count(k) > 1 for k in kinds):
        return  # the sentence has what makes it
    near_by = row.text[max(0, q.start - 24) : q.end + 24]
    fast = re.search(r"(?i)fast|slower|speed|throughput|latency", near_by)
    kinds = [k for k in TYPED if k != "bytes" or not fast or re.search("(?i)memory|small", near_by)]
    made = [x for g, rows in named or [(g, g.rows) for g in near] for x in _made(g, rows, kinds)]
    made = [x for g in near for x in _means(g)] if _MEAN.search(row.text) else made
    bound = not q.exact or _BEST.search(around)
    if bound and (
        q.kind == "percent" or not made or q.value.mid > 50 or q.value.lo <= 1.04 * max(max(x, 1 / x) for x in made)
    ):
        return
    by = bool(
        re.search(
            r"(?i)\bby\W*$|less|reduc|\bsav|\bcut", row.text[max(0, q.start - 24) : q.end + 10].replace(q.text, "")
        )
    )
    if made and not any(_is(q, max(x, 1 / x), by) for x in made):
        rule = "headline" if bound else "total" if _MEAN.search(row.text) else "retold"
        best = min(made, key=lambda x: abs(math.log(max(x, 1 / x)) - math.log(_mid(q) + (q.kind == "percent"))))
        message = f"no two figures of the table make {q.text}, the nearest {max(best, 1 / best):.3g}x: which rows?"
        yield finding(QUESTION, rule, message, q, lines=tuple(r.line for r in near[0].rows[:4]))


def _mid(q: Quantity) -> float:
    return q.value.mid


def _is(q: Quantity, x: float, by: bool) -> bool:
    forms = (x, 1 / x, x - 1) if q.kind == "ratio" else (x - 1, 1 - 1 / x, *(() if by else (x, 1 / x)))
    return any(f > 0 and q.value.meets(f, 0.04) for f in forms)


def _named(grid: Grid, row: Row, clause: str) -> list[Row]:
    """The rows that a sentence names by a cell of theirs, or else by a figure."""
    text, found = f" {' '.join(_WORDS.findall(clause.lower()))} ", []
    for r in grid.rows:
        cells = (r.label.lower(), *(c.partition(": ")[2].lower() for c in r.text.split("; ")[:2]))
        names = [" ".join(_WORDS.findall(c)) for c in cells]
        found.append(max((n for n in names if re.search(r"..|[a-z]", n) and f" {n} " in text), key=len, default=""))
    # "ours" within "ours fp8" names no row.
    rows = [
        r
        for r, of in zip(grid.rows, found, strict=True)
        if of and not any(of != n and f" {of} " in f" {n} " for n in found)
    ]
    told = [q for q in row.of(*TYPED) if q.value.width < 0.1 and q.text in clause]
    rows = rows or [
        r for r in grid.rows if any(c.kind == q.kind and c.value.meets(q.value) for q in told for c in r.quantities)
    ]
    return rows if len(rows) < 4 else []


def _made(grid: Grid, rows: list[Row], kinds: list[str]) -> list[float]:
    """The quotients of two figures of a row, and of a row's and another's in its column."""
    found = [_mid(c) for r in rows for c in r.of("ratio") if _mid(c)]
    for r, kind in itertools.product(rows, kinds):
        held = [c for c in r.of(kind) if _mid(c)]
        below = [c for s in grid.rows if s is not r for c in s.of(kind) if _mid(c)]
        found += [
            _mid(a) / _mid(b) for a in held for b in (*held, *(c for c in below if c.column == a.column)) if a is not b
        ]
    return found


def _means(grid: Grid) -> list[float]:
    """What an average over the rows may be: of a ratio column, of the quotients of two columns."""
    columns = [
        [_mid(q) for r in grid.body if (q := r.figure(c, k))] for k in (*TYPED, "ratio") for c in grid.columns(k)
    ]
    columns = [c for c in columns if len(c) == len(grid.body) > 1]
    found = [sum(x) / sum(y) for x, y in itertools.combinations(columns, 2)]
    quotients = ([a / b for a, b in zip(x, y, strict=True)] for x, y in itertools.permutations(columns, 2))
    for of in (*columns, *quotients):
        found += [statistics.mean(of), statistics.median(of), math.exp(statistics.mean(map(math.log, of)))]
    return found
