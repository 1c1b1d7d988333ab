"""The FLOPs that a row's sizes mean."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from expertile.audit.finding import Lines
from expertile.audit.interval import Interval, exact
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.report import Row, Size

_GEMM = regex(r"gemm|matmul|mat-?mul|matrix[ -]mul|\bb?mm\b|cublas|cutlass|\blinear\b|tensor core")
_NOT_GEMM = regex(r"attention|softmax|conv|fft|norm|transpose|reduc|spars|spmm|gemv|elementw|add\b|copy|sort|scan")
_SEVERAL = regex(r"group(?:ed)?[ _-]?(?:gemm|mm|size)|batched|\bbmm\b")
_OTHER = regex(r"attention|softmax|_?norm|qo_|\bkv_|[qkv]\.shape|(?<![a-z])moe(?![a-z])|quantiz|transpose|copy")
_ATTENTION = regex(r"attention|\bfa[23]?\b|sdpa|flash|mha|gqa")
_FULL = regex(r"non-?causal|causal ?[=:] ?(?:false|no|0)\b|no causal")
_HALVED = regex(
    r"(?:/ ?2|by (?:2|two)|hal[fv]\w*)\b[^.\n]{0,24}\bcausal|\bcausal\b[^.\n]{0,24}(?:/ ?2|by (?:2|two)|hal[fv])"
)
# Multiply-adds as one, 2^30 for 10^9, several passes; backward passes and masks.
PLAIN = (1.0, 0.5, 1 / 1.0737, 1 / 1.0995, 1.0737, 1.0486, 1.024, 4.0)
CAUSAL = (2.0, 2.5, 3.0, 3.5, 1.25, 1.75, 1.5)


@dataclass(frozen=True)
class Term:
    """A factor of a law: a figure, or what the row's sizes mean. `also`: factors by which others count it; `near`: it
    stands in the row; `named`: every size by its name, else the shape is a guess that other rows must confirm."""

    kind: str
    value: Interval
    text: str
    lines: Lines
    figure: Quantity | None = None
    also: tuple[float, ...] = (1.0,)
    near: bool = True
    named: bool = True


ONE = Term("ratio", exact(1.0), "1", ())


def total_of(some: list[Term]) -> Term:
    """The sum of figures of one kind."""
    total, lines = sum((t.value for t in some[1:]), some[0].value), tuple(n for t in some for n in t.lines)
    return Term(some[0].kind, total, " + ".join(t.text for t in some), lines)


@dataclass(frozen=True)
class Formula:
    """`work` of the columns that have these `names`, one of several each; `words` must stand near the row."""

    words: str
    names: str
    work: Callable[..., float]
    text: str


def _conv(n: float, c: float, h: float, w: float, k: float, r: float, s: float, stride: float, pad: float) -> float:
    p, q = ((x + 2 * (pad if pad >= 0 else (f - 1) // 2) - f) // stride + 1 for x, f in ((h, r), (w, s)))
    return 2 * n * k * c * r * s * p * q


# A size in square brackets may be missing; then it is the number behind the sign.
FORMULAS = (
    Formula(
        "", "n|batch c|cin|in_channels h w k|cout|out_channels r s [stride=1] [pad|padding=-1]", _conv, "2·NKCRSPQ"
    ),
    Formula(r"hpl|linpack|\blu\b", "n", lambda n: 2 / 3 * n**3 + 2 * n**2, "2/3·{:.0f}³"),
    Formula(
        r"fft|\bc2c\b",
        "length|n|size|nx|points [batch|batches=1]",
        lambda n, b: 5 * b * n * math.log2(max(n, 2)),
        "5·{:.0f}·log2·{:.0f}",
    ),
    Formula(r"cholesky|potrf", "n", lambda n: n**3 / 3, "{:.0f}³/3"),
    Formula(r"gemv|matvec", "m|rows n|cols|columns", lambda m, n: 2 * m * n, "2·{:.0f}·{:.0f}"),
    Formula(r"spmv|sparse", "nnz|nonzeros|non-zeros", lambda nnz: 2 * nnz, "2·{:.0f}"),
)


def _by_formula(row: Row) -> Term | None:
    for of in FORMULAS:
        sizes = []
        for names in of.names.split():
            forms, _, default = names.strip("[]").partition("=")
            held = [row.bare[n] for n in forms.split("|") if n in row.bare]
            sizes += held[:1] or ([float(default)] if default else [])
        if len(sizes) == len(of.names.split()) and re.search(of.words, f"{row.words} {row.lead.lower()}"):
            text = of.text.format(*sizes) + " FLOP"
            return Term("flop", exact(of.work(*sizes)), text, (row.line,), None, PLAIN)
    return None


@lru_cache(maxsize=1 << 14)
def work_of(row: Row) -> Term | None:
    """What the row computed; None where its sizes are not known."""
    if row.kind == "table" and (made := _by_formula(row)):
        return made
    text, words = row.text.lower(), f"{row.words} {row.lead.lower()}"
    counts = tuple(s.value for name in ("batch", "experts", "gpus", "heads") if (s := row.size(name)) and s.value > 1)

    def sizes(*names: str) -> list[Size]:
        found = [s for name in names if (s := row.size(name))]
        lines = [s.line for s in found]
        # Of a log's lines far apart each may be another run's, but what the report says once.
        log = row.report.blocks[row.block].kind == "code"
        told = [s.line for name in names if (s := row.size(name)) and len(row.report.everything.of(name)) > 1]
        apart = log and max(told, default=0) - min(told, default=0) > 12
        shape = row.report.nearest(row.block, "tuples", row.line) if log else None
        far = shape is not None and any(n < shape[0] < row.line for n in lines)  # another shape stands between
        found = [replace(s, near=False) for s in found] if far else found
        return found if len(found) == len(names) and not apart else []

    def gemm(of: list[Size], named: bool = True) -> Term | None:
        # "Doubling M to 16384 takes …" is of another shape than the one above.
        inherited = any(f"{s.value:.0f}" not in row.text.replace(",", "") for s in of)
        changed = row.kind == "line" and inherited and _other_size(row, of)
        return None if changed else product_of(of, conventions(words, counts), named)

    other = _OTHER.search("" if row.own.keys() | row.facts.stated.keys() >= {"m", "n", "k"} else row.lead.lower())
    conv = re.search(r"conv|sparse", row.words)
    mnk, experts = sizes("m", "n", "k"), row.own.get("experts")
    if mnk and experts and re.search(rf"(?:/|per|each) ?expert\b[^:;]*: {mnk[0].value:.0f}\b", text.replace(",", "")):
        mnk[0] = replace(mnk[0], value=mnk[0].value * experts)
    if mnk and not _ATTENTION.search(text) and not other and not conv:
        return gemm(mnk)
    lettered = {"batch", "heads", "seq", "head_dim"} <= row.own.keys()
    if (of := sizes("batch", "heads", "seq", "head_dim")) and (
        lettered or _ATTENTION.search(words) or re.search(r"\bcausal\b", words)
    ):
        b, h, length, d = (size.value for size in of)
        masked = row.bare.get("causal")  # a column says which rows are, or a log's line, where the text halves them
        halved = masked is None and _HALVED.search(row.report.text)
        said = re.findall(r"causal ?[=:] ?(true|false|yes|no|[01])", row.lead.lower()) if halved else []
        masked = float(said[-1] in ("true", "yes", "1")) if said else masked
        also = conventions(words if masked is None or said else text, (), masked is None and not _FULL.search(words))
        half, formula = (0.5, "2") if masked == 1 else (1.0, "4")
        formula += f"·{b:.0f}·{h:.0f}·{length:.0f}²·{d:.0f}"
        near, lines = all(x.near for x in of), tuple(x.line for x in of)
        return Term("flop", exact(4 * half * b * h * length**2 * d), f"{formula} FLOP", lines, None, also, near)
    # A column of shapes and another of TFLOPS are products; the rows must confirm it.
    shaped = row.kind == "table" and row.of("rate") and [len(t) for t in row.facts.of("tuples")] == [3]
    prose = row.report.blocks[row.block].kind == "prose"
    before = row.before.text.lower() if prose and row.before else ""
    if not (_GEMM.search(f"{row.words} {before}") or shaped) or _NOT_GEMM.search(text):
        return None
    n = None if row.size("m") or row.size("k") else row.size("n")
    side = row.own.get("size") or (n.value if n and n.near else None) or row.own.get("m")
    shape = row.stated("tuples")[0] if len(set(row.stated("tuples"))) == 1 else ()
    if not side and len(shape) == 3:
        own = row.kind != "line" or shape in row.facts.of("tuples")
        named = row.kind == "line" and (own or (row.before and shape in row.before.facts.of("tuples")))
        return gemm([Size(x, row.line, own) for x in shape], bool(named))
    side = side or (shape[0] if shape and shape[0] == shape[1] else None)
    size = Size(side, row.line, True) if side else row.size("size")
    return gemm([size] * 3, False) if size else None


def _other_size(row: Row, of: list[Size]) -> bool:
    """Whether a sentence has a whole number of three to six digits that is neither a figure nor one of these sizes."""
    found = re.finditer(r"(?<![\w.,:-])\d{3,6}(?![\w%]|[.,:-]\d)", row.text)
    own = {s.value for s in of}
    return any(float(m[0]) not in own and not any(q.start <= m.start() < q.end for q in row.quantities) for m in found)


def product_of(sizes: list[Size], also: tuple[float, ...] = (1.0,), named: bool = True) -> Term:
    m, n, k = (s.value for s in sizes)
    lines, near = tuple(s.line for s in sizes), all(s.near for s in sizes)
    return Term("flop", exact(2 * m * n * k), f"2·{m:.0f}·{n:.0f}·{k:.0f} FLOP", lines, None, also, near, named)


def conventions(words: str, counts: tuple[float, ...], causal: bool = False) -> tuple[float, ...]:
    """Factors by which a report may count work otherwise, every product of a batch among them."""
    base = (*PLAIN, *(CAUSAL if causal or re.search(r"\bbwd\b|backward|fwd ?\+ ?bwd|training", words) else ()))
    counts = (*counts, *((2.0, 3.0, 4.0, 8.0, 16.0, 32.0) if _SEVERAL.search(words) else ()))
    products = [1.0, *counts, *(a * b for i, a in enumerate(counts) for b in counts[i + 1 :])]
    return tuple(dict.fromkeys(b * p for b in base for p in products))
