"""What sentences say of the tables beside them: a figure that its row has otherwise, a ratio that no two cells make.

They stand apart, so all of it asks.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, Finding, finding
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.peaks import NO_RUN_OF_ONE, on_sheet
from expertile.audit.rules.quotients import TYPED

_GAIN = re.compile(
    r"(?i)faster|as fast|slower|speed|improve|reduc|\bless\b|lower|higher|\bmore\b|increas|gain|decreas|drop|\bsav|"
    r"better|smaller|\bcut|\bhalv|doubl"
)
_APART = re.compile(
    r"(?i)\bcould|\bwould|theor|expect|claim|paper|report(?:ed|s) |vendor|\bspec|ideal|earlier|previous|elsewhere|"
    r"not shown|target|goal|should|\bmay\b|if we|for example|e\.g\.|per cent points|percentage point"
)
_MEAN = re.compile(r"(?i)\bav(?:era)?g|mean\b|\bmedian\b|\boverall\b|typical")
_WORDS = re.compile(r"[a-z0-9](?:[a-z0-9.+_-]*[a-z0-9+])?")
_NEAR = 40  # lines


def retold(report: Report) -> Iterator[Finding]:
    """Each figure of a sentence against the tables near it."""
    grids = [g for g in report.grids if g.drawn and 1 < len(g.rows) < 60]
    in_tables = {row.line for grid in report.tables for row in grid.rows}
    for row in (r for r in report.lines_of_text if grids and r.line not in in_tables):
        near = [g for g in grids if min(abs(r.line - row.line) for r in g.rows) < _NEAR]
        if near and not _APART.search(row.text):
            yield from _sentence(report, row, near)


def _sentence(report: Report, row: Row, near: list[Grid]) -> Iterator[Finding]:
    everything = [q for grid in report.grids for r in grid.rows for q in r.quantities if q.value.mid]
    named = [(g, rows) for g in near if (rows := _named(g, row))]
    ratios = row.of("ratio", "percent")
    for q in row.quantities:
        around = row.text[max(0, q.start - 32) : q.end + 24]
        if not q.exact or not q.value.mid or NO_RUN_OF_ONE.search(q.words.replace("peak", "")) or on_sheet(row, q):
            continue
        if q.kind in TYPED and len(named) == 1:
            grid, rows = named[0]
            cells = [c for r in rows for c in r.of(q.kind)]
            close = [c for c in cells if 0.4 < c.value.mid / q.value.mid < 2.5]
            same = [c for c in everything if c.kind == q.kind and c.value.meets(q.value, 0.012)]
            made = [
                x
                for a, b in itertools.combinations(cells, 2)
                for x in (abs(a.value.mid - b.value.mid), a.value.mid + b.value.mid)
            ]
            if len(close) and not same and not any(q.value.meets(x, 0.03) for x in made):
                c = min(close, key=lambda c: abs(math.log(c.value.mid / q.value.mid)))
                yield finding(
                    QUESTION, "retold", f"line {c.line} has {c.text}, not {q.text}: is it of the same row?", q, c
                )
        elif q.kind in ("ratio", "percent") and _GAIN.search(around) and len(ratios) < 4 and not _alone(row, q):
            held = [(g, rows) for g, rows in named] or [(g, g.rows) for g in near]
            made = [x for g, rows in held for x in (_means(g) if _MEAN.search(row.text) else _made(g, rows))]
            if (
                made
                and not any(_is(q, x) for x in made)
                and not any(c.kind == q.kind and c.value.meets(q.value, 0.02) for c in everything)
            ):
                best = min(made, key=lambda x: abs(math.log(x) - math.log(_factor(q))))
                yield finding(
                    QUESTION,
                    "total" if _MEAN.search(row.text) else "retold",
                    f"no two figures of the table make {q.text}; the nearest make {best:.3g}x",
                    q,
                    lines=tuple(r.line for _, rows in held[:1] for r in rows[:4]),
                )


def _alone(row: Row, q: Quantity) -> bool:
    """Whether the sentence has two figures that make its ratio, or should."""
    kinds = [x.kind for x in row.of(*TYPED)]
    return any(kinds.count(k) > 1 for k in kinds)


def _factor(q: Quantity) -> float:
    v = q.value.mid
    return max(v, 1 / v) if q.kind == "ratio" else 1 + v


def _is(q: Quantity, x: float) -> bool:
    x = max(x, 1 / x)
    forms = (x, 1 / x, x - 1) if q.kind == "ratio" else (x - 1, 1 - 1 / x, x, 1 / x)
    return any(f > 0 and q.value.meets(f, 0.04) for f in forms)


def _named(grid: Grid, row: Row) -> list[Row]:
    """The rows that a sentence names by a cell of theirs, or by a figure."""
    text = f" {' '.join(_WORDS.findall(row.text.lower()))} "
    found = []
    for r in grid.rows:
        names = {
            n.strip(" .") for n in (r.label.lower(), *(c.partition(": ")[2].lower() for c in r.text.split("; ")[:2]))
        }
        names = {" ".join(_WORDS.findall(n)) for n in names}
        hits = [n for n in names if len(n) > 1 and not re.fullmatch(r"[\d.]", n) and f" {n} " in text]
        found.append(max(hits, key=len, default=""))
    rows = [
        r
        for r, of in zip(grid.rows, found, strict=True)
        if of and not any(of != n and f" {of} " in f" {n} " for n in found)
    ]
    if not rows:
        cells = [
            [
                c
                for c in r.quantities
                if c.kind in TYPED
                and any(c.value.meets(q.value) and c.kind == q.kind and q.value.width < 0.1 for q in row.quantities)
            ]
            for r in grid.rows
        ]
        rows = [r for r, c in zip(grid.rows, cells, strict=True) if c]
    return rows if len(rows) < 4 else []


def _made(grid: Grid, rows: list[Row]) -> list[float]:
    """The quotients of two figures of a row, and of a row's and another's in its column."""
    found = [c.value.mid for r in rows for c in r.of("ratio") if c.value.mid]
    for r in rows:
        for kind in TYPED:
            held = [c for c in r.of(kind) if c.value.mid]
            found += [a.value.mid / b.value.mid for a, b in itertools.combinations(held, 2)]
            found += [
                a.value.mid / b.value.mid
                for a in held
                for s in grid.rows
                for b in s.of(kind)
                if s is not r and b.column == a.column and b.value.mid
            ]
    return found


def _means(grid: Grid) -> list[float]:
    """What an average over the rows may be: of a ratio column, of the quotients of two columns."""
    body, found = grid.body, []
    columns = [
        [q.value.mid for r in body if (q := r.figure(c, kind))]
        for kind in (*TYPED, "ratio")
        for c in grid.columns(kind)
    ]
    columns = [c for c in columns if len(c) == len(body) > 1]
    for held in [
        *([c for c in columns]),
        *([a / b for a, b in zip(x, y, strict=True)] for x, y in itertools.permutations(columns, 2)),
    ]:
        found += [statistics.mean(held), statistics.median(held), math.exp(statistics.mean(map(math.log, held)))]
    found += [sum(x) / sum(y) for x, y in itertools.combinations(columns, 2)]
    return found
