"""The FLOPs that a row's sizes mean."""

import re
from dataclasses import dataclass, replace

from expertile.audit.report import Report, Row, Size
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
_SEVERAL = re.compile(r"group(?:ed)?[ _-]?(?:gemm|mm|size)|batched|\bbmm\b")
_OTHER = re.compile(r"attention|softmax|_?norm|qo_|\bkv_|[qkv]\.shape|(?<![a-z])moe(?![a-z])|quantiz|transpose|copy")
_ATTENTION = re.compile(r"attention|\bfa[23]?\b|sdpa|flash|mha|gqa")
_BACKWARD = re.compile(r"\bbwd\b|backward|fwd ?\+ ?bwd|training")


def readings(row: Row) -> Reading | None:
    """What the row computed; None where its sizes are not known."""
    text = row.text.lower()
    counts = tuple(s.value for name in ("batch", "experts", "gpus", "heads") if (s := row.size(name)) and s.value > 1)

    def sizes(*names: str) -> list[Size]:
        found = [s for name in names if (s := row.size(name))]
        lines = [s.line for s in found]
        # Of a log's lines far apart each may be another run's.
        log = row.report.blocks[row.block].kind == "code"
        apart = log and max(lines, default=0) - min(lines, default=0) > 12
        shape = row.report.nearest(row.block, "tuples", row.line) if log else None
        far = shape is not None and any(n < shape[0] < row.line for n in lines)  # another shape stands between
        found = [replace(s, near=False) for s in found] if far else found
        return found if len(found) == len(names) and not apart else []

    far = row.lead.lower() if not row.own.keys() | row.facts.stated.keys() >= {"m", "n", "k"} else ""
    if (
        (mnk := sizes("m", "n", "k"))
        and not _ATTENTION.search(text)
        and not _OTHER.search(far)
        and not re.search(r"conv|sparse", row.words)
    ):
        return _gemm(mnk, counts)
    words = f"{row.words} {row.lead.lower()}"
    if (bhsd := sizes("batch", "heads", "seq", "head_dim")) and (
        _ATTENTION.search(words) or {"batch", "heads", "seq", "head_dim"} <= row.own.keys()
    ):
        b, h, length, d = (size.value for size in bhsd)
        work = Work(4 * b * h * length**2 * d, 8 * b * h * length * d)
        formula = f"4·{b:.0f}·{h:.0f}·{length:.0f}²·{d:.0f}"
        full = re.search(r"non-?causal|causal ?[=:] ?(?:false|no|0)\b|no causal", words)
        return Reading(work, formula, True, all(x.near for x in bhsd), tuple(x.line for x in bhsd), causal=not full)
    if not _OTHER.search(far) and (layer := sizes("tokens", "ffn", "hidden")):
        topk = row.size("topk")
        return _gemm(layer, tuple(c * (topk.value if topk else 1) for c in (1, 2, 3)))
    # A column of shapes and another of TFLOPS are products; the rows must confirm it.
    shaped = row.kind == "table" and row.of("rate") and [len(t) for t in row.facts.of("tuples")] == [3]
    if not (_GEMM.search(row.words) or shaped) or _NOT_GEMM.search(text):
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
    counts = (*counts, *((2.0, 3.0, 4.0, 8.0, 16.0, 32.0) if _SEVERAL.search(words) else ()))
    products = [1.0, *counts, *(a * b for i, a in enumerate(counts) for b in counts[i + 1 :])]
    return tuple(dict.fromkeys(b * p for b in base for p in products))
