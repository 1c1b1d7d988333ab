"""Rate = work / time; bytes / time; TFLOP/s against GB/s of one row."""

from __future__ import annotations

import re
from collections.abc import Iterator

from expertile.audit.facts import BITS
from expertile.audit.finding import INCONSISTENT, Finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.ratios import is_summary
from expertile.audit.rules.relation import odd_ones, same_owner, stem
from expertile.audit.rules.work import Reading, conventions, readings

_WIDE = 0.08  # a rate and a time are often of different runs: mean of rates, rate of the median
_NO_RUN = re.compile(r"peak|theoretical|roofline|limit|bound|expected|model|estimate|predict|ideal|\bmax\b")


def grids(report: Report) -> Iterator[Finding]:
    """Per table: each column of rates with its column of times."""
    for grid in report.grids:
        body = [row for row in grid.rows if not is_summary(row)]
        if len(body) < 2:
            continue
        scopes = [report.scope(row) for row in body]
        works = [found[0] if len(found := readings(s, row)) == 1 else None for s, row in zip(scopes, body, strict=True)]
        yield from _against(grid, body, works, "rate", "time", report)
        yield from _against(grid, body, works, "rate", "bandwidth", report)
        yield from _bytes(grid, body)


def _pairs(grid: Grid, a: str, b: str) -> list[tuple[int, int]]:
    first, second = grid.columns(a), grid.columns(b)
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    return [(i, j) for i in first for j in second if stem(grid.header[i]) == stem(grid.header[j])]


def _cell(row: Row, column: int) -> Quantity | None:
    q = next((q for q in row.quantities if q.column == column), None)
    return q if q is not None and q.exact and q.value.mid > 0 else None


def _against(
    grid: Grid, body: list[Row], works: list[Reading | None], kind: str, other: str, report: Report
) -> Iterator[Finding]:
    for i, j in _pairs(grid, kind, other):
        if _NO_RUN.search(f"{grid.header[i]} {grid.header[j]}".lower()):
            continue
        cells = [(_cell(row, i), _cell(row, j)) for row in body]
        both = [(a.value * b.value if other == "time" else a.value / b.value) if a and b else None for a, b in cells]
        known = sum(w is not None for w in works)
        sized: list[Interval | None] = both
        if known == len(body):
            sized = [f / (w.work.flops if other == "time" else w.work.flops / w.work.nbytes) if f and w else None
                     for f, w in zip(both, works, strict=True)]  # fmt: skip
        found, by_work = (odd_ones(sized, (1.0,)), True) if known == len(body) and other == "time" else (None, False)
        if found is None:
            found, by_work = odd_ones(sized), known == len(body)
        if found is None and known == len(body):
            found, by_work = odd_ones(both), False
        if found is None:
            yield from _named(body, works, cells, other, report)
            continue
        common, odd = found
        for r in odd:
            a, b = cells[r]
            w = works[r]
            if a is None or b is None or (sized[r] or both[r]) is None:
                continue
            f = sized[r] if by_work else both[r]
            off = f.mid / common if f else 1.0
            if not by_work and 0.85 < off < 1.18:
                continue
            if by_work and w is not None and f is not None:
                # The rows share a convention; a backward pass, a causal mask or a batch may be one row's own.
                more = conventions(w, report.scope(body[r]).words) if w.extra or not w.named else ()
                if (f / common).meets(1.0, _WIDE) or any((f / common).meets(c, 0.015) for c in more):
                    continue
                total = w.work.flops * common
                text = f"{w.formula} FLOP in {b.text} is {si(total / b.value.mid, 'FLOP/s')}, not {a.text}"
                text = (
                    text
                    if other == "time"
                    else f"{a.text} beside {b.text} is {off:.3g} times what {w.formula} and the other rows give"
                )
            else:
                product = "FLOP" if other == "time" else "FLOP per byte"
                text = f"{a.text} and {b.text} give {off:.3g} times the {product} of the other rows"
            yield Finding(INCONSISTENT, "rate", a.line, f"{a.text}, {b.text}", text, (a.line, b.line))


def _named(
    body: list[Row],
    works: list[Reading | None],
    cells: list[tuple[Quantity | None, Quantity | None]],
    other: str,
    report: Report,
) -> Iterator[Finding]:
    """Rows that agree on nothing: each by itself, if it names its sizes."""
    if other != "time" or len(body) > 2:
        return
    for row, w, (a, b) in zip(body, works, cells, strict=True):
        if w is not None and w.named and w.near and a is not None and b is not None:
            yield from _single(report, row, w, a, b)


def _single(report: Report, row: Row, w: Reading, a: Quantity, b: Quantity) -> Iterator[Finding]:
    f = a.value * b.value / w.work.flops
    words = report.scope(row).words
    if any(f.meets(c, _WIDE) for c in conventions(w, words)) or re.search(r"sparse|winograd|strassen|effective", words):
        return
    would = w.work.flops / b.value.mid
    yield Finding(
        INCONSISTENT, "rate", a.line, f"{a.text}, {b.text}",
        f"{w.formula} = {si(w.work.flops, 'FLOP')} in {b.text} is {si(would, 'FLOP/s')}; {a.text} would take "
        f"{si(w.work.flops / a.value.mid, 's')}", (a.line, b.line, *w.lines),
    )  # fmt: skip


def lines(report: Report) -> Iterator[Finding]:
    """A line or record with one time, one rate and all its sizes named; several such lines confirm one another."""
    held: list[tuple[Row, Reading, Quantity, Quantity]] = []
    for row in report.rows:
        rates, times = row.of("rate"), row.of("time")
        if len(rates) != 1 or len(times) != 1 or not rates[0].exact or not times[0].exact or not times[0].value.mid:
            continue
        if not rates[0].value.mid or _NO_RUN.search(rates[0].words) or not same_owner(rates[0], times[0], True):
            continue
        found = readings(report.scope(row), row)
        if len(found) == 1:
            held.append((row, found[0], rates[0], times[0]))
    factors = [a.value * b.value / w.work.flops for _, w, a, b in held]
    shared = odd_ones(factors, (1.0,))
    for r, (row, w, a, b) in enumerate(held):
        if shared is not None:
            unlike = r in shared[1] and not any((factors[r] / shared[0]).meets(c, _WIDE) for c in conventions(w, ""))
            if unlike and w.near and (w.named or len(held) - len(shared[1]) >= 3):
                yield from _single(report, row, w, a, b)
        elif w.named and w.near:
            yield from _single(report, row, w, a, b)


_MOVED = re.compile(
    r"transfer|size|data|moved|copied|cop(?:y|ies)|traffic|read|writ|buffer|message|bytes|payload|memcpy|h2d|d2h"
)
_HELD = re.compile(r"usage|alloc|vram|footprint|peak|model|param|weights|cache|reserved")
_FACTORS = (1.0, 2.0, 3.0, 4.0, 0.5)


def _bytes(grid: Grid, body: list[Row]) -> Iterator[Finding]:
    amounts, times, rates = grid.columns("bytes"), grid.columns("time"), grid.columns("bandwidth")
    if len(amounts) != 1 or len(times) != 1 or len(rates) != 1 or _HELD.search(grid.header[amounts[0]].lower()):
        return
    cells = [tuple(_cell(row, c) for c in (amounts[0], times[0], rates[0])) for row in body]
    factors = [w.value * t.value / n.value if n and t and w else None for n, t, w in cells]
    found = odd_ones(factors, (1.0, 2.0, 3.0))
    for r in found[1] if found else ():
        n, t, w = cells[r]
        f = factors[r]
        if n and t and w and found and f is not None and not any((f / found[0]).meets(c, _WIDE) for c in _FACTORS):
            yield Finding(
                INCONSISTENT, "bandwidth", w.line, f"{n.text}, {t.text}, {w.text}",
                f"{n.text} in {t.text} is {si(found[0] * n.value.mid / t.value.mid, 'B/s')} by the other rows' count, "
                f"not {w.text}", (w.line,),
            )  # fmt: skip


def transfers(report: Report) -> Iterator[Finding]:
    """A sentence or record that moves so many bytes in so much time at such a rate."""
    for row in report.rows:
        amounts = [q for q in row.of("bytes") if not _HELD.search(q.words)]
        times, rates = row.of("time"), row.of("bandwidth")
        if not (len(amounts) == len(times) == len(rates) == 1) or len(row.of("bytes")) != 1:
            continue
        n, t, w = amounts[0], times[0], rates[0]
        if (
            not all(q.exact and q.value.mid for q in (n, t, w))
            or not _MOVED.search(row.text.lower())
            or _NO_RUN.search(w.words)
        ):
            continue
        f = w.value * t.value / n.value
        # Each byte may be read and written, by several ranks.
        one = re.search(r"(?i)to (?:the )?(?:device|gpu|host|cpu)|h2d|d2h|\bmove[sd]\b|traffic|transferred", row.text)
        factors = (1.0,) if one else _FACTORS
        if any(f.meets(c, _WIDE) for c in factors) or re.search(r"(?i)nccl|all-?reduce|ranks|gpus", row.text):
            continue
        yield Finding(
            INCONSISTENT, "bandwidth", w.line, f"{n.text}, {t.text}, {w.text}",
            f"{n.text} in {t.text} is {si(n.value.mid / t.value.mid, 'B/s')}, not {w.text}", (n.line, t.line),
        )  # fmt: skip


def intensity(report: Report) -> Iterator[Finding]:
    """Named products whose TFLOP/s and GB/s leave fewer bytes than one pass over the operands needs."""
    for row in (*report.rows, *(row for grid in report.grids for row in grid.rows)):
        rates, widths = row.of("rate"), row.of("bandwidth")
        if len(rates) != 1 or len(widths) != 1 or not rates[0].exact or not widths[0].exact:
            continue
        scope = report.scope(row)
        found = readings(scope, row)
        formats = [BITS[f] for f in scope.formats if f in BITS]
        if len(found) != 1 or not found[0].named or not found[0].near or not formats or found[0].formula[0] != "2":
            continue
        least = found[0].work.nbytes * min(formats) / 8
        if not widths[0].value.mid or least < 2**28 or _NO_RUN.search(rates[0].words + widths[0].words):
            continue
        moved = found[0].work.flops / rates[0].value.lo * widths[0].value.hi
        if moved < 0.7 * least:
            yield Finding(
                INCONSISTENT, "intensity", row.line, f"{rates[0].text}, {widths[0].text}",
                f"at {rates[0].text} the product takes {si(found[0].work.flops / rates[0].value.mid, 's')}, in which "
                f"{widths[0].text} moves {si(moved, 'B')}; its operands are {si(least, 'B')}", found[0].lines,
            )  # fmt: skip
