"""The FLOPs and bytes that a row's sizes mean."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertile.audit.report import Row, Scope
from expertile.roofline import Work


@dataclass(frozen=True)
class Reading:
    """`named`: every size by its name; else the shape is a guess that other rows must confirm. `near`: all sizes stand
    with the row. `extra`: further factors that a report may count in (batch, experts, causal halves)."""

    work: Work
    formula: str
    named: bool
    near: bool
    extra: tuple[float, ...]
    lines: tuple[int, ...]


_GEMM = re.compile(r"gemm|matmul|mat-?mul|matrix[ -]mul|\bmm\b|\bbmm\b|cublas|cutlass|\blinear\b|tensor core")
_NOT_GEMM = re.compile(
    r"attention|softmax|conv|fft|norm|transpose|reduc|sparse|spmm|gemv|elementwise|add\b|copy|sort|scan"
)
_ATTENTION = re.compile(r"attention|\bfa[23]?\b|sdpa|flash|mha|gqa")
_BACKWARD = re.compile(r"\bbwd\b|backward|fwd ?\+ ?bwd|forward ?(?:\+|and) ?backward|training")


def readings(scope: Scope, row: Row) -> list[Reading]:
    """What the row may have computed; empty where no size is known."""
    m, n, k = (scope.size(name) for name in "mnk")
    words = scope.words
    counts = [s.value for name in ("batch", "experts", "gpus", "heads") if (s := scope.size(name)) is not None]
    extra = tuple(c for c in counts if c > 1)
    if m and n and k and not _ATTENTION.search(row.text.lower()) and not re.search(r"conv|sparse", words):
        near = m.near and n.near and k.near
        return [_gemm(m.value, n.value, k.value, True, near, extra, (m.line, n.line, k.line))]
    b, h, s, d = (scope.size(name) for name in ("batch", "heads", "seq", "head_dim"))
    if b and h and s and d and _ATTENTION.search(words):
        flops = 4 * b.value * h.value * s.value**2 * d.value
        work = Work(flops, 4 * 2 * b.value * h.value * s.value * d.value)
        formula = f"4·{b.value:.0f}·{h.value:.0f}·{s.value:.0f}²·{d.value:.0f}"
        near = all(x.near for x in (b, h, s, d))
        return [Reading(work, formula, True, near, (0.5,), tuple(x.line for x in (b, h, s, d)))]
    tokens, hidden, ffn = scope.size("tokens"), scope.size("hidden"), scope.size("ffn")
    if tokens and hidden and ffn:
        near = tokens.near and hidden.near and ffn.near
        found = _gemm(tokens.value, ffn.value, hidden.value, True, near, (), (tokens.line, hidden.line, ffn.line))
        topk = scope.size("topk")
        more = tuple(c * (topk.value if topk else 1) for c in (1, 2, 3))
        return [Reading(found.work, found.formula, True, near, more, found.lines)]
    if not _GEMM.search(words) or _NOT_GEMM.search(row.text.lower()):
        return []
    size = row.own.get("size") or (row.own.get("n") if not {"m", "k"} & row.own.keys() else None) or row.own.get("m")
    if size:
        return [_gemm(size, size, size, False, True, extra, (row.line,))]
    shapes = set(scope.tuples)
    if len(shapes) == 1:
        shape = next(iter(shapes))
        if len(shape) == 3:
            return [_gemm(*shape, False, True, extra, (row.line,))]
        if shape[0] == shape[1]:
            return [_gemm(shape[0], shape[0], shape[0], False, True, extra, (row.line,))]
    one = scope.size("size")
    return [_gemm(one.value, one.value, one.value, False, one.near, extra, (one.line,))] if one else []


def _gemm(
    m: float, n: float, k: float, named: bool, near: bool, extra: tuple[float, ...], lines: tuple[int, ...]
) -> Reading:
    work = Work(2 * m * n * k, m * k + k * n + m * n)  # bytes: elements, as the format is the caller's
    return Reading(work, f"2·{m:.0f}·{n:.0f}·{k:.0f}", named, near, extra, lines)


def conventions(reading: Reading, words: str) -> tuple[float, ...]:
    """Factors by which a report may count `reading` otherwise: multiply-adds as one, 2^30 for 10^9, backward passes,
    every product of a batch."""
    base = [1.0, 0.5, 1 / 1.0737, 1 / 1.0995, 1.0737, 1.0486, 1.024, 4.0]
    if reading.extra == (0.5,) or _BACKWARD.search(words):
        base += [2.0, 2.5, 3.0, 3.5, 1.25, 1.75, 1.5]
    counts = [c for c in reading.extra if c != 0.5]
    products = [1.0, *counts, *(a * b for i, a in enumerate(counts) for b in counts[i + 1 :])]
    return tuple(dict.fromkeys(b * p for b in base for p in products))
