"""The FLOPs and bytes that a row's sizes mean."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertile.audit.report import Row
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
    scope, text = row.scope, row.text.lower()
    sizes = [scope.size(name) for name in "mnk"]
    m, n, k = sizes
    counts = tuple(s.value for name in ("batch", "experts", "gpus", "heads") if (s := scope.size(name)) and s.value > 1)
    if m and n and k and not _ATTENTION.search(text) and not re.search(r"conv|sparse", scope.words):
        return _gemm(m.value, n.value, k.value, True, all(s.near for s in (m, n, k)), (m.line, n.line, k.line), counts)
    b, h, s, d = (scope.size(name) for name in ("batch", "heads", "seq", "head_dim"))
    if b and h and s and d and _ATTENTION.search(scope.words):
        work = Work(4 * b.value * h.value * s.value**2 * d.value, 8 * b.value * h.value * s.value * d.value)
        formula = f"4·{b.value:.0f}·{h.value:.0f}·{s.value:.0f}²·{d.value:.0f}"
        near = all(x.near for x in (b, h, s, d))
        return Reading(work, formula, True, near, tuple(x.line for x in (b, h, s, d)), causal=True)
    tokens, hidden, ffn, topk = (scope.size(name) for name in ("tokens", "hidden", "ffn", "topk"))
    if tokens and hidden and ffn:
        near, lines = tokens.near and hidden.near and ffn.near, (tokens.line, hidden.line, ffn.line)
        layers = tuple(c * (topk.value if topk else 1) for c in (1, 2, 3))
        return _gemm(tokens.value, ffn.value, hidden.value, True, near, lines, layers)
    if not _GEMM.search(scope.words) or _NOT_GEMM.search(text):
        return None
    size = row.own.get("size") or (None if {"m", "k"} & row.own.keys() else row.own.get("n")) or row.own.get("m")
    shapes = set(scope.tuples)
    if not size and len(shapes) == 1:
        shape = next(iter(shapes))
        if len(shape) == 3:
            own = row.kind == "line" and shape in row.facts.tuples
            return _gemm(*shape, own, True, (row.line,), counts)
        size = shape[0] if shape[0] == shape[1] else None
    one = scope.size("size")
    if not size and not one:
        return None
    side = size or (one.value if one else 0.0)
    near, line = (True, row.line) if size or not one else (one.near, one.line)
    return _gemm(side, side, side, False, near, (line,), counts)


def _gemm(
    m: float, n: float, k: float, named: bool, near: bool, lines: tuple[int, ...], counts: tuple[float, ...]
) -> Reading:
    work = Work(2 * m * n * k, m * k + k * n + m * n)
    return Reading(work, f"2·{m:.0f}·{n:.0f}·{k:.0f}", named, near, lines, counts)


def conventions(reading: Reading, words: str) -> tuple[float, ...]:
    """Factors by which a report may count `reading` otherwise: multiply-adds as one, 2^30 for 10^9, backward passes,
    every product of a batch."""
    base = [1.0, 0.5, 1 / 1.0737, 1 / 1.0995, 1.0737, 1.0486, 1.024, 4.0]
    if reading.causal or _BACKWARD.search(words):
        base += [2.0, 2.5, 3.0, 3.5, 1.25, 1.75, 1.5]
    counts = reading.counts
    products = [1.0, *counts, *(a * b for i, a in enumerate(counts) for b in counts[i + 1 :])]
    return tuple(dict.fromkeys(b * p for b in base for p in products))
