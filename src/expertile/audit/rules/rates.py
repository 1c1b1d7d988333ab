"""Rate = work / time; bytes / time; TFLOP/s against GB/s of one row."""

from __future__ import annotations

import re
from collections.abc import Iterator

from expertile.audit.facts import BITS
from expertile.audit.finding import INCONSISTENT, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.relation import odd_ones, same_owner
from expertile.audit.rules.work import Reading, conventions, readings

_WIDE = 0.08  # a rate and a time are often of different runs: mean of rates, rate of the median
_NO_RUN = re.compile(r"peak|theoretical|roofline|limit|bound|expected|model|estimate|predict|ideal|\bmax\b")


def grids(report: Report) -> Iterator[Finding]:
    """Per table: each column of rates with its column of times, of bandwidths; bytes with both."""
    for grid in report.grids:
        if grid.body:
            works = [readings(row) for row in grid.body]
            for other in ("time", "bandwidth"):
                for i, j in grid.pairs("rate", other):
                    if not _NO_RUN.search(f"{grid.header[i]} {grid.header[j]}".lower()):
                        yield from _against(grid, works, i, j, other)
        if len(grid.body) > 1:
            yield from _bytes(grid)


def _against(grid: Grid, works: list[Reading | None], i: int, j: int, other: str) -> Iterator[Finding]:
    cells = [(row.figure(i, "rate"), row.figure(j, other)) for row in grid.body]
    both = [(a.value * b.value if other == "time" else a.value / b.value) if a and b else None for a, b in cells]
    sized: list[Interval | None] = [
        f / (w.work.flops if other == "time" else w.work.flops / w.work.nbytes) if f and w else None
        for f, w in zip(both, works, strict=True)
    ]
    known = all(works)
    found, factors = (odd_ones(sized, (1.0,) if other == "time" else ()), sized) if known else (None, both)
    if found is None:
        found, factors = odd_ones(both), both
    if found is None:
        # Rows that agree on nothing: each by itself, if it names its sizes.
        for row, w, (a, b) in zip(grid.body, works, cells, strict=True):
            if len(grid.body) <= 2 and other == "time" and w and w.named and w.near and a and b:
                yield from _single(row, w, a, b)
        return
    for r in found[1]:
        (a, b), w, f = cells[r], works[r], factors[r]
        if a is None or b is None or f is None:
            continue
        off = f / found[0]
        # The rows share a convention; a backward pass, a causal mask or a batch may be one row's own.
        own = w and (w.counts or w.causal or not w.named)
        more = conventions(w, grid.body[r].scope.words) if w and own and factors is sized else ()
        if off.meets(1.0, _WIDE if factors is sized else 0.15) or any(off.meets(c, 0.015) for c in more):
            continue
        if factors is sized and w and other == "time":
            would = si(w.work.flops * found[0] / b.value.mid, "FLOP/s")
            message = f"{w.formula} FLOP in {b.text} is {would}, not {a.text}"
        else:
            of = "FLOP" if other == "time" else "FLOP per byte"
            message = f"{a.text} and {b.text} give {off.mid:.3g} times the {of} of the other rows"
        yield finding(INCONSISTENT, "rate", message, a, b)


def _single(row: Row, w: Reading, a: Quantity, b: Quantity) -> Iterator[Finding]:
    f, words = a.value * b.value / w.work.flops, row.scope.words
    if any(f.meets(c, _WIDE) for c in conventions(w, words)) or re.search(r"sparse|winograd|strassen|effective", words):
        return
    would, needs = si(w.work.flops / b.value.mid, "FLOP/s"), si(w.work.flops / a.value.mid, "s")
    message = f"{w.formula} = {si(w.work.flops, 'FLOP')} in {b.text} is {would}; {a.text} would take {needs}"
    yield finding(INCONSISTENT, "rate", message, a, b, lines=w.lines)


def lines(report: Report) -> Iterator[Finding]:
    """A line or record with one time, one rate and all its sizes named; several such lines confirm one another."""
    held: list[tuple[Row, Reading, Quantity, Quantity]] = []
    for row in report.rows:
        a, b = row.only("rate"), row.only("time")
        if a and b and not _NO_RUN.search(a.words) and same_owner(a, b) and (w := readings(row)):
            held.append((row, w, a, b))
    factors = [a.value * b.value / w.work.flops for _, w, a, b in held]
    shared = odd_ones(factors, (1.0,))
    for r, (row, w, a, b) in enumerate(held):
        sure = w.named or (shared is not None and len(held) - len(shared[1]) >= 3)
        if w.near and sure and (shared is None or r in shared[1]):
            yield from _single(row, w, a, b)


_MOVED = re.compile(
    r"transfer|size|data|\bmove|copied|cop(?:y|ies)|traffic|read|writ|buffer|message|bytes|payload|memcpy|h2d|d2h"
)
_HELD = re.compile(r"usage|alloc|vram|footprint|peak|model|param|weights|cache|reserved")
_ONCE = re.compile(r"(?i)to (?:the )?(?:device|gpu|host|cpu)|h2d|d2h|\bmove[sd]\b|traffic|transferred")
_FACTORS = (1.0, 2.0, 3.0, 4.0, 0.5)  # each byte may be read and written


def _bytes(grid: Grid) -> Iterator[Finding]:
    kinds = ("bandwidth", "bytes", "time")
    columns = [grid.columns(kind) for kind in kinds]
    if any(len(c) != 1 for c in columns) or _HELD.search(grid.header[columns[1][0]].lower()):
        return
    cells = [[row.figure(c[0], kind) for c, kind in zip(columns, kinds, strict=True)] for row in grid.body]
    factors = [w.value * t.value / n.value if w and n and t else None for w, n, t in cells]
    found = odd_ones(factors, (1.0, 2.0, 3.0))
    for r in found[1] if found else ():
        (w, n, t), f = cells[r], factors[r]
        if w and n and t and f and found and not any((f / found[0]).meets(c, _WIDE) for c in _FACTORS):
            would = si(found[0] * n.value.mid / t.value.mid, "B/s")
            yield finding(
                INCONSISTENT,
                "bandwidth",
                f"{n.text} in {t.text} is {would} as the other rows count, not {w.text}",
                w,
                n,
                t,
            )


def transfers(report: Report) -> Iterator[Finding]:
    """A sentence or record that moves so many bytes in so much time at such a rate."""
    for row in report.rows:
        w, n, t = row.only("bandwidth"), row.only("bytes"), row.only("time")
        if (
            not (w and n and t)
            or _HELD.search(n.words)
            or not _MOVED.search(row.text.lower())
            or _NO_RUN.search(w.words)
        ):
            continue
        f = w.value * t.value / n.value
        factors = (1.0,) if _ONCE.search(row.text) else _FACTORS
        if not any(f.meets(c, _WIDE) for c in factors) and not re.search(r"(?i)nccl|all-?reduce|ranks|gpus", row.text):
            message = f"{n.text} in {t.text} is {si(n.value.mid / t.value.mid, 'B/s')}, not {w.text}"
            yield finding(INCONSISTENT, "bandwidth", message, w, n, t)


def intensity(report: Report) -> Iterator[Finding]:
    """Named products whose TFLOP/s and GB/s leave fewer bytes than one pass over the operands needs."""
    for row in report.all_rows:
        a, b = row.only("rate"), row.only("bandwidth")
        w = readings(row) if a and b and not _NO_RUN.search(a.words + b.words) else None
        bits = [BITS[f] for f in row.scope.formats] if w else []
        if not (a and b and w and bits) or not w.named or not w.near or w.causal:
            continue
        least = w.work.nbytes * min(bits) / 8
        moved = w.work.flops / a.value.lo * b.value.hi
        # Less than this may have stayed in a cache since the run before.
        if least > 2**28 and moved < 0.7 * least:
            message = (
                f"at {a.text} the product takes {si(w.work.flops / a.value.mid, 's')}, in which {b.text} moves "
                f"{si(moved, 'B')}; its operands are {si(least, 'B')}"
            )
            yield finding(INCONSISTENT, "intensity", message, a, b, lines=w.lines)
