"""The FLOPs that a row's sizes mean; rate = work / time; products of columns that the rows count alike."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from expertile.audit.finding import INCONSISTENT, Finding, finding, si
from expertile.audit.interval import FAR, Interval, exact, odd_ones
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
    """Per table: each column of rates with its column of times, over rows that name their sizes."""
    for grid in report.grids:
        for cells in grid.pairs("rate", "time"):
            works = [w for row, _, _ in cells if (w := readings(row))]
            if len(works) == len(cells) and not _NO_RUN.search(f"{cells[0][1].label} {cells[0][2].label}".lower()):
                yield from _against(cells, works, alone=len(grid.body) <= 2)


def _against(cells: Cells, works: list[Reading], alone: bool) -> Iterator[Finding]:
    factors = [a.value * b.value / w.work.flops for (_, a, b), w in zip(cells, works, strict=True)]
    found = odd_ones(factors, (1.0,))
    # Rows that agree on nothing: each by itself, if it names its sizes.
    for (row, a, b), w in zip(cells, works, strict=True) if alone and found is None else ():
        if w.named and w.near:
            yield from _single(row, w, a, b)
    for r in found[1] if found else ():
        (row, a, b), w = cells[r], works[r]
        off = factors[r] / (found[0] if found else 1.0)
        # The rows share a convention; a backward pass, a causal mask or a batch may be one row's own.
        more = conventions(w, row.words) if w.counts or w.causal or not w.named else ()
        # Where the others count 2·M·N·K so does this one.
        far = 1.1 if found and found[0] == 1.0 and w.named else FAR
        if off.beyond(far) and not any(off.meets(c, 0.015) for c in more):
            would = si(a.value.mid / off.mid, "FLOP/s")
            yield finding(INCONSISTENT, "rate", f"{w.formula} FLOP in {b.text} is {would}, not {a.text}", a, b)


def _single(row: Row, w: Reading, a: Quantity, b: Quantity, sure: bool = False) -> Iterator[Finding]:
    f, words = a.value * b.value / w.work.flops, row.words
    if row.size("m") is None and not 0.01 < f.mid < 100:
        return  # "128x128x8: 1.05 ms" is a tile
    if (
        not f.beyond(1.1 if row.size("m") else FAR)
        or (not sure and any(f.meets(c, _WIDE) for c in conventions(w, words)))
        or re.search(r"sparse|winograd|strassen|effective", words)
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


_HELD = re.compile(r"usage|alloc|vram|footprint|peak|model|param|weights|cache|reserved")


def products(report: Report) -> Iterator[Finding]:
    """Bandwidth × time = bytes, throughput × latency = batch: a table's rows count alike, but for one."""
    for grid in report.grids:
        sized = grid.columns("bytes")
        if len(sized) == 1 and not _HELD.search(grid.header[sized[0]].lower()):
            for i, j in itertools.product(grid.columns("bandwidth"), grid.columns("time")):
                three = [(r.figure(i), r.figure(j, "time"), r.figure(sized[0], "bytes")) for r in grid.body]
                held = [(a, b, n.value) for a, b, n in three if a and b and n]
                yield from _alike(held, "bandwidth", (1.0, 2.0), (2, 0.5, 1.5, 2 / 3, 3, 1 / 3))
        for kind, time in itertools.product(("items_per_s", "tokens_per_s"), ("time", "s_per_item")):
            for cells in grid.pairs(kind, time):
                batch = [(a, b, exact(n.value)) for row, a, b in cells if (n := row.size("batch"))]
                if len({n.mid for _, _, n in batch}) > 1:
                    yield from _alike(batch, "throughput", (1.0,), ())


def _alike(
    held: list[tuple[Quantity, Quantity, Interval]], rule: str, usual: Sequence[float], more: Sequence[float]
) -> Iterator[Finding]:
    factors = [a.value * b.value / n for a, b, n in held]
    found = odd_ones(factors, usual)
    for r in found[1] if found and len(held) - len(found[1]) > 1 else ():
        (a, b, _), off = held[r], factors[r] / (found[0] if found else 1.0)
        # A row's bytes may be counted once or twice.
        if off.beyond(1.1) and not any(abs(off.mid / x - 1) < 0.02 for x in more):
            message = f"{a.text} × {b.text} is {off.mid:.3g} times what the other rows give for their size"
            yield finding(INCONSISTENT, rule, message, a, b)
