"""The FLOPs that a row's sizes mean; rate = work / time; bytes / time; TFLOP/s against GB/s of one row."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from expertile.audit.finding import INCONSISTENT, Finding, finding, si
from expertile.audit.interval import odd_ones
from expertile.audit.quantity import Quantity, same_statistic
from expertile.audit.report import Cells, Report, Row, Size
from expertile.roofline import Work


@dataclass(frozen=True)
class Reading:
    """`named`: every size by its name; else the shape is a guess that other rows must confirm. `near`: all sizes stand
    with the row. `counts`: what a report may multiply by (batch, experts); `causal`: half of the work may be masked.

    For a product `work.nbytes` counts elements, as the format is not known here."""

    work: Work
    formula: str
    named: bool
    near: bool
    lines: tuple[int, ...]
    counts: tuple[float, ...] = ()
    causal: bool = False


_GEMM = re.compile(r"gemm|matmul|mat-?mul|matrix[ -]mul|\bb?mm\b|cublas|cutlass|\blinear\b|tensor core")
_NOT_GEMM = re.compile(
    r"attention|softmax|conv|fft|norm|transpose|reduc|spars|spmm|gemv|elementwise|add\b|copy|sort|scan"
)
_ATTENTION = re.compile(r"attention|\bfa[23]?\b|sdpa|flash|mha|gqa")
_BACKWARD = re.compile(r"\bbwd\b|backward|fwd ?\+ ?bwd|training")


def readings(row: Row) -> Reading | None:
    """What the row computed; None where its sizes are not known."""
    text = row.text.lower()
    counts = tuple(s.value for name in ("batch", "experts", "gpus", "heads") if (s := row.size(name)) and s.value > 1)

    def sizes(*names: str) -> list[Size]:
        found = [s for name in names if (s := row.size(name))]
        return found if len(found) == len(names) else []

    if (mnk := sizes("m", "n", "k")) and not _ATTENTION.search(text) and not re.search(r"conv|sparse", row.words):
        return _gemm(mnk, counts)
    if (bhsd := sizes("batch", "heads", "seq", "head_dim")) and _ATTENTION.search(row.words):
        b, h, length, d = (size.value for size in bhsd)
        work = Work(4 * b * h * length**2 * d, 8 * b * h * length * d)
        formula = f"4·{b:.0f}·{h:.0f}·{length:.0f}²·{d:.0f}"
        return Reading(work, formula, True, all(x.near for x in bhsd), tuple(x.line for x in bhsd), causal=True)
    if layer := sizes("tokens", "ffn", "hidden"):
        topk = row.size("topk")
        return _gemm(layer, tuple(c * (topk.value if topk else 1) for c in (1, 2, 3)))
    if not _GEMM.search(row.words) or _NOT_GEMM.search(text):
        return None
    side = row.own.get("size") or (None if {"m", "k"} & row.own.keys() else row.own.get("n")) or row.own.get("m")
    shape = row.stated("tuples")[0] if len(set(row.stated("tuples"))) == 1 else ()
    if not side and len(shape) == 3:
        return _gemm(
            [Size(x, row.line, True) for x in shape], counts, row.kind == "line" and shape in row.facts.of("tuples")
        )
    side = side or (shape[0] if shape and shape[0] == shape[1] else None)
    size = Size(side, row.line, True) if side else row.size("size")
    return _gemm([size] * 3, counts, False) if size else None


def largest_run(report: Report) -> Reading | None:
    """The largest run ("--config mixtral --batch 16 --seq 512") of the one model of a table that any line runs."""
    models = [r for g in report.grids for r in g.rows if {"hidden", "ffn", "topk"} <= r.own.keys()]
    lines = [r for r in report.lines_of_text if models and {"batch", "seq"} <= r.facts.stated.keys()]
    runs = [(m, r) for m in models for r in lines if {*m.label.lower().split()} & {*r.text.lower().split()}]
    if len({m.line for m, _ in runs}) != 1:
        return None
    model = runs[0][0]
    tokens, line = max((r.facts.of("batch")[0] * r.facts.of("seq")[0], r.line) for _, r in runs)
    sizes = ((model.own["topk"] * tokens, line), (model.own["ffn"], model.line), (model.own["hidden"], model.line))
    return _gemm([Size(value, at, False) for value, at in sizes], ())


def _gemm(sizes: list[Size], counts: tuple[float, ...], named: bool = True) -> Reading:
    m, n, k = (s.value for s in sizes)
    work, lines = Work(2 * m * n * k, m * k + k * n + m * n), tuple(s.line for s in sizes)
    return Reading(work, f"2·{m:.0f}·{n:.0f}·{k:.0f}", named, all(s.near for s in sizes), lines, counts)


def conventions(reading: Reading, words: str) -> tuple[float, ...]:
    """Factors by which a report may count `reading` otherwise: multiply-adds as one, 2^30 for 10^9, backward passes,
    every product of a batch."""
    base = [1.0, 0.5, 1 / 1.0737, 1 / 1.0995, 1.0737, 1.0486, 1.024, 4.0]
    if reading.causal or _BACKWARD.search(words):
        base += [2.0, 2.5, 3.0, 3.5, 1.25, 1.75, 1.5]
    counts = reading.counts
    products = [1.0, *counts, *(a * b for i, a in enumerate(counts) for b in counts[i + 1 :])]
    return tuple(dict.fromkeys(b * p for b in base for p in products))


_WIDE = 0.08  # a rate and a time are often of different runs: mean of rates, rate of the median
_NO_RUN = re.compile(r"peak|theoretical|roofline|limit|bound|expected|model|estimate|predict|ideal|\bmax\b")


def grids(report: Report) -> Iterator[Finding]:
    """Per table: each column of rates with its column of times, of bandwidths."""
    for grid in report.grids:
        for other in ("time", "bandwidth"):
            for cells in grid.pairs("rate", other):
                if not _NO_RUN.search(f"{cells[0][1].label} {cells[0][2].label}".lower()):
                    yield from _against(cells, other, alone=len(grid.body) <= 2)


def _against(cells: Cells, other: str, alone: bool) -> Iterator[Finding]:
    timed = other == "time"
    works = [readings(row) for row, _, _ in cells]
    both = [a.value * b.value if timed else a.value / b.value for _, a, b in cells]
    sized = [f / (w.work.flops if timed else w.work.intensity) if w else None for f, w in zip(both, works, strict=True)]
    found = odd_ones(sized, (1.0,) if timed else ()) if all(works) else None
    known, factors = found is not None, sized if found else both
    found = found or odd_ones(both)
    if found is None:
        # Rows that agree on nothing: each by itself, if it names its sizes.
        for (row, a, b), w in zip(cells, works, strict=True):
            if alone and timed and w and w.named and w.near:
                yield from _single(row, w, a, b)
        return
    alike = odd_ones(both) or (0.0, found[1])
    for r in found[1]:
        (row, a, b), w, f = cells[r], works[r], factors[r]
        if f is None or r not in alike[1]:
            continue  # "tiled 16x16" names no size: the row does the work of the others
        off = f / found[0]
        # The rows share a convention; a backward pass, a causal mask or a batch may be one row's own.
        own = known and w and (w.counts or w.causal or not w.named)
        more = conventions(w, row.words) if w and own else ()
        # A row of another format moves other bytes.
        more = more if timed else (*more, 0.25, 0.5, 2.0, 4.0)
        # A row that does twice the work of the others, by its name, says so with a whole number.
        more = more if known else (*more, max(1.0, round(off.mid)), 1 / max(1.0, round(1 / off.mid)))
        if off.meets(1.0, _WIDE if known or len(found[1]) == 1 else 0.15) or any(off.meets(c, 0.015) for c in more):
            continue
        if known and w and timed:
            message = f"{w.formula} FLOP in {b.text} is {si(w.work.flops * found[0] / b.value.mid, 'FLOP/s')}"
            message += f", not {a.text}"
        else:
            of = "FLOP" if timed else "FLOP per byte"
            message = f"{a.text} and {b.text} give {off.mid:.3g} times the {of} of the other rows"
        yield finding(INCONSISTENT, "rate", message, a, b)


def _single(row: Row, w: Reading, a: Quantity, b: Quantity, sure: bool = False) -> Iterator[Finding]:
    f, words = a.value * b.value / w.work.flops, row.words
    if row.size("m") is None and not 0.01 < f.mid < 100:
        return  # "128x128x8: 1.05 ms" is a tile
    if (not sure and any(f.meets(c, _WIDE) for c in conventions(w, words))) or re.search(
        r"sparse|winograd|strassen|effective", words
    ):
        return
    would, needs = si(w.work.flops / b.value.mid, "FLOP/s"), si(w.work.flops / a.value.mid, "s")
    message = f"{w.formula} = {si(w.work.flops, 'FLOP')} in {b.text} is {would}; {a.text} would take {needs}"
    yield finding(INCONSISTENT, "rate", message, a, b, lines=w.lines)


def lines(report: Report) -> Iterator[Finding]:
    """A line or record with one time, one rate and all its sizes named; several such lines confirm one another."""
    held: list[tuple[Row, Reading, Quantity, Quantity]] = []
    for row in report.rows:
        a, b = row.only("rate"), row.only("time")
        if a and b and not _NO_RUN.search(a.words) and same_statistic(a.label, b.label) and (w := readings(row)):
            held.append((row, w, a, b))
    factors = [a.value * b.value / w.work.flops for _, w, a, b in held]
    shared = odd_ones(factors, (1.0,))
    for r, (row, w, a, b) in enumerate(held):
        sure = w.named or (shared is not None and len(held) - len(shared[1]) >= 3)
        if w.near and sure and (shared is None or r in shared[1]):
            # Where the other lines count 2·M·N·K, so does this one.
            plain = shared is not None and shared[0] == 1.0 and len(held) - len(shared[1]) > 1 and not w.counts
            yield from _single(row, w, a, b, plain and not factors[r].meets(1.0, _WIDE))


_MOVED = re.compile(
    r"transfer|size|data|\bmove|copied|cop(?:y|ies)|traffic|read|writ|buffer|message|bytes|payload|memcpy|h2d|d2h"
)
_HELD = re.compile(r"usage|alloc|vram|footprint|peak|model|param|weights|cache|reserved")
_ONCE = re.compile(r"(?i)to (?:the )?(?:device|gpu|host|cpu)|h2d|d2h|\bmove[sd]\b|traffic|transferred")
_FACTORS = (1.0, 2.0, 3.0, 4.0, 0.5)  # each byte may be read and written


def transfers(report: Report) -> Iterator[Finding]:
    """A sentence or record that moves so many bytes in so much time at such a rate; "reads 2 GB and writes 2 GB"."""
    for row in report.rows:
        w, t, text = row.only("bandwidth"), row.only("time"), row.text.lower()
        parts = [n for n in row.of("bytes") if n.exact and n.value.mid]
        if not (w and parts and t) or any(_HELD.search(n.words) for n in parts) or _NO_RUN.search(w.words):
            continue
        # "512 MiB (536.9 MB)" are the same bytes.
        if len(parts) > 2 or (len(parts) == 2 and not re.search(r"reads?\b.*\bwrit", text)):
            continue
        f = w.value * t.value / (total := sum((p.value for p in parts[1:]), parts[0].value))
        several = not _MOVED.search(text) or re.search(r"nccl|all-?reduce|ranks|gpus", text)
        if not several and not any(f.meets(c, _WIDE) for c in ((1.0,) if _ONCE.search(text) else _FACTORS)):
            moved, rate = " + ".join(p.text for p in parts), si(total.mid / t.value.mid, "B/s")
            yield finding(INCONSISTENT, "bandwidth", f"{moved} in {t.text} is {rate}, not {w.text}", w, *parts, t)


def copies(report: Report) -> Iterator[Finding]:
    """A table's bytes, times and bandwidths: the rows count each byte alike, but for one."""
    for grid in report.grids:
        sized, timed = grid.columns("bytes"), grid.columns("time")
        known = len(sized) == len(timed) == 1 and not _HELD.search(grid.header[sized[0]].lower())
        for c in grid.columns("bandwidth") if known else ():
            cells = [(row.figure(c), row.figure(timed[0], "time"), row.figure(sized[0], "bytes")) for row in grid.body]
            held = [(w, t, n) for w, t, n in cells if w and t and n]
            factors = [w.value * t.value / n.value for w, t, n in held]
            found = odd_ones(factors, (1.0, 2.0))
            for r in found[1] if found and len(held) > 2 else ():
                (w, t, n), off = held[r], factors[r] / (found[0] if found else 1.0)
                # A copy's bytes may be counted once or twice.
                twice = any(abs(off.mid / x - 1) < 0.02 for x in (2, 0.5, 1.5, 2 / 3, 3, 1 / 3))
                if not twice and not off.meets(1.0, _WIDE):
                    message = f"{n.text} in {t.text} is {si(n.value.mid / t.value.mid, 'B/s')}; {w.text} counts"
                    message += f" {off.mid:.3g} times the bytes of the other rows"
                    yield finding(INCONSISTENT, "bandwidth", message, w, n, t)
