"""Bytes of tensors, memory that a narrower format saves, memory that attention saves, and the GPU's capacity."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertile.lab.audit import vocabulary
from expertile.lab.audit.claims import Claim
from expertile.lab.audit.columns import TypedTable
from expertile.lab.audit.context import Context
from expertile.lab.audit.dims import Shape, shapes_in
from expertile.lab.audit.finding import IMPOSSIBLE, INCONSISTENT, POSSIBLE, Finding
from expertile.lab.audit.formulas import Term, follows
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import show

_WIDTHS = (8.0, 4.0, 2.0, 1.0, 0.5)
_SMALLER = re.compile(
    r"smaller|compress|memory|footprint|saving|size reduction|reduction in size|storage|weights? by", re.I
)
_FASTER = re.compile(r"speed|faster|slower|throughput|latency|bandwidth|batch|context|tokens", re.I)
_OTHER_MEANS = re.compile(
    r"\bbinary\b|\b[123]-bit|ternary|prun|spars|distill|low-rank|product quant|\bmla\b|cache|\bipad|embedding"
    r"|dedup|compared to gpu"
    r"|cpu|checkpoint|energy|cost|price|evict",
    re.I,
)
_NARROW = ("int8", "fp8", "int4", "fp4")


def tensor_bytes(context: Context) -> list[Finding]:
    """ "4096×4096 = 67.1 MB", "1024×1024 (2 MB in FP16)", and sizes stated beside a configuration."""
    found = []
    for claim in context.claims:
        if claim.kind != "bytes" or claim.place.table is not None:
            continue
        shapes = [s for s in shapes_in(claim.place.text) if s.end <= claim.quantity.start]
        if shapes:
            finding = _of_shape(context, claim, shapes[-1], claim.place.text[shapes[-1].end : claim.quantity.start])
        else:
            finding = _of_context(context, claim)
        if finding is not None:
            found.append(finding)
    return found


def _of_shape(context: Context, claim: Claim, shape: Shape, between: str) -> Finding | None:
    elements = shape.elements
    equated = bool(
        re.fullmatch(
            r"\s*(?:matrix|tensor|matrices|array)?\s*(?:=[\s\d,]*(?:elements)?\s*=?|\(|:|≈)\s*[~≈]?\s*", between
        )
    )
    here = vocabulary.formats(claim.place.text)
    widths = [vocabulary.FORMAT_BITS[f] / 8 for f in here] or list(_WIDTHS)
    for width in widths:
        if _is(claim, elements * width):
            text = f"{elements} elements × {width:g} B = {show('bytes', elements * width)}"
            return context.finding(claim, POSSIBLE, "tensor_bytes", text)
    if not equated or len(shape.sizes) > 4 or min(shape.sizes) < 16 or len(claim.sentence) > 200:
        return None  # a product of factors rather than a tensor, or figures that only stand close together
    tried = ", ".join(f"{w:g} B: {show('bytes', elements * w)}" for w in widths)
    return context.finding(
        claim, INCONSISTENT, "tensor_bytes", f"printed {claim.quantity.text}, but {elements} elements at {tried}"
    )


def _of_context(context: Context, claim: Claim) -> Finding | None:
    """ "Memory per tensor: 50.3 MB" in a list that states the shape."""
    if not re.search(r"memory|size|tensor|bytes", claim.words + claim.place.text, re.I):
        return None
    named = [vocabulary.FORMAT_BITS[f] / 8 for f in context.report.formats(claim.place)]
    widths = named or list(_WIDTHS)
    dims: dict[str, int] = {}
    shapes: tuple[int, ...] = ()
    for scope in context.report.scopes(claim.place):
        dims = {**scope.dims, **dims}
        if not shapes and scope.shapes:
            shapes = tuple(s.elements for s in scope.shapes)
    amounts = [(e, f"{e} elements") for e in shapes]
    if {"batch", "heads", "seq", "head_dim"} <= dims.keys():
        b, h, s, d = (dims[n] for n in ("batch", "heads", "seq", "head_dim"))
        amounts += [(b * h * s * s, f"{b}·{h}·{s}²"), (b * h * s * d, f"{b}·{h}·{s}·{d}")]
    for elements, words in amounts:
        for width in widths:
            for count in (1, 2, 3, 4):
                if _is(claim, elements * width * count):
                    times = f"{count} × " if count > 1 else ""
                    text = f"{times}{words} × {width:g} B = {show('bytes', elements * width * count)}"
                    return context.finding(claim, POSSIBLE, "tensor_bytes", text)
    return None


def _is(claim: Claim, nbytes: float) -> bool:
    slack = Term(Interval.of(nbytes).widened(0.002), "")
    return any(
        follows(claim.quantity, Term(Interval.of(v), "")) for v in (nbytes, nbytes / 1.024**2, nbytes / 1.024**3)
    ) or any(r.meets(slack.value) for r in claim.quantity.readings)


def compression(context: Context) -> list[Finding]:
    """ "8x smaller with INT4": a narrower format saves at most the ratio of the widths, less its scales."""
    found = []
    for claim in context.claims:
        if claim.kind != "ratio" or claim.place.table is not None or not _SMALLER.search(claim.sentence):
            continue
        if len(claim.sentence) > 120 and not _SMALLER.search(claim.words):
            continue
        if _FASTER.search(claim.words) or _OTHER_MEANS.search(claim.sentence) or len(claim.sentence) > 240:
            continue
        narrow = _narrow_format(context, claim)
        if narrow is None:
            continue
        wide, source = _wide_format(context, claim, narrow)
        limit = wide / vocabulary.FORMAT_BITS[narrow]
        if limit <= 1:
            continue
        name = f"{source} ({wide:g} bits) to {narrow} ({vocabulary.FORMAT_BITS[narrow]:g} bits)"
        text = f"{name} saves at most {wide:g} / {vocabulary.FORMAT_BITS[narrow]:g} = {limit:g}x, and less with scales"
        over = claim.quantity.interval.lo > limit * 1.02
        verdict = INCONSISTENT if over else POSSIBLE
        stated = _stated_bytes(context)
        if over and stated:
            text += f"; the report's own bytes per weight: {stated}"
        found.append(
            context.finding(
                claim,
                verdict,
                "compression",
                f"printed {claim.quantity.text}; {text}",
                claim.quantity.value,
                limit,
                "x",
            )
        )
    for typed_index, typed in enumerate(context.report.tables):
        found += _memory_column(context, typed_index, typed)
    return found


def _narrow_format(context: Context, claim: Claim) -> str | None:
    texts = [claim.sentence, claim.place.lead, *(s.title for s in context.report.doc.ancestors(claim.place.section))]
    for text in texts:
        named = [f for f in vocabulary.formats(text) if f in _NARROW]
        if named:
            return min(named, key=lambda f: vocabulary.FORMAT_BITS[f])
    return None


def _wide_format(context: Context, claim: Claim | None, narrow: str) -> tuple[float, str]:
    """(bits, name) of the format that was replaced: the widest one the text names nearby, else anywhere."""
    bits = vocabulary.FORMAT_BITS
    if claim is not None:
        for text in (claim.sentence, claim.place.lead):
            wider = [f for f in vocabulary.formats(text) if bits[f] > bits[narrow]]
            if wider and (
                bits[wider[0]] > 8 or re.search(r"\b(?:from|vs|than|over|relative|compared)\b|→|->", text, re.I)
            ):
                return bits[wider[0]], wider[0]
    everything = "\n".join(s.text for s in context.report.doc.statements if s.kind != "code")
    everything += "\n".join(c for t in context.report.doc.tables for row in (t.header, *t.rows) for c in row)
    wider = [f for f in vocabulary.formats(everything) if bits[f] > bits[narrow] and f not in ("tf32", "fp64")]
    return (bits[wider[0]], wider[0]) if wider else (32.0, "fp32")


def _stated_bytes(context: Context) -> str:
    lines = [
        c
        for c in context.claims
        if c.kind == "bytes"
        and c.quantity.value <= 8
        and re.search(r"per (?:weight|value|element|param)", c.place.text, re.I)
    ]
    return ", ".join(f"{c.quantity.text} (line {c.place.line})" for c in lines)


def _memory_column(context: Context, t: int, typed: TypedTable) -> list[Finding]:
    """Rows that differ only by a narrower format cannot differ more in memory than the formats do."""
    found = []
    for column in typed.of_kind("bytes"):
        if not re.search(r"mem|size|weights|footprint|vram", column.header, re.I) or re.search(
            r"saved|kv", column.header, re.I
        ):
            continue
        rows = [
            (r, q, [f for f in vocabulary.formats(typed.label(r)) if f in _NARROW])
            for r in typed.body()
            if (q := typed.at(r, column))
        ]
        wide_rows = [(r, q) for r, q, f in rows if not f]
        if len({q.value for _, q in wide_rows}) != 1 or len(typed.of_kind("dim")) > 0:
            continue
        base_row, base = wide_rows[0]
        named = vocabulary.formats(typed.label(base_row))
        for _, q, formats in rows:
            if not formats or q.interval.lo <= 0:
                continue
            bits, source = (
                (vocabulary.FORMAT_BITS[named[0]], named[0]) if named else _wide_format(context, None, formats[-1])
            )
            limit = bits / vocabulary.FORMAT_BITS[formats[-1]]
            ratio = base.interval / q.interval
            claim = context.of(q)
            if claim is None:
                continue
            text = (
                f"{base.text} / {q.text} = {base.value / q.value:.3g}x; {source} ({bits:g} bits) to {formats[-1]} "
                f"({vocabulary.FORMAT_BITS[formats[-1]]:g} bits) gives at most {limit:g}x"
            )
            verdict = INCONSISTENT if ratio.lo > limit * 1.02 else POSSIBLE
            found.append(context.finding(claim, verdict, "compression", text, base.value / q.value, limit, "x"))
    return found


def attention_memory(context: Context) -> list[Finding]:
    """Memory that fused attention saves is B·H·S² values; as a share of the total it must vary with S."""
    found = []
    for t, typed in enumerate(context.report.tables):
        for column in typed.of_kind("bytes"):
            if not re.search(r"sav|reduc", column.header, re.I):
                continue
            rows: list[tuple[Claim, float, _Attention]] = []
            for row in typed.body():
                cell = typed.cells[row][column.index]
                percents = [q for q in cell.extra if q.kind == "percent"]
                place = context.report.cell(t, row, column.index)
                if cell.value is None or len(percents) != 1 or context.report.operation(place) != "attention":
                    continue
                claim = context.of(percents[0])
                saved = context.of(cell.value)
                dims = _attention_dims(context, claim) if claim is not None else None
                if claim is not None and saved is not None and dims is not None:
                    rows.append((claim, cell.value.value, dims))
                    found += _matrix(context, saved, dims)
            found += _shares(context, rows)
    return found


@dataclass(frozen=True)
class _Attention:
    batch: int
    heads: int
    seq: int
    head_dim: int
    itemsize: float

    @property
    def tensor(self) -> float:
        """Bytes of one of Q, K, V or the output."""
        return self.batch * self.heads * self.seq * self.head_dim * self.itemsize

    @property
    def scores(self) -> float:
        """Bytes of the attention matrix."""
        return self.batch * self.heads * self.seq**2 * self.itemsize


def _attention_dims(context: Context, claim: Claim) -> _Attention | None:
    dims: dict[str, int] = {}
    for scope in context.report.scopes(claim.place):
        dims = {**scope.dims, **dims}
    if not {"batch", "heads", "seq", "head_dim"} <= dims.keys():
        return None
    bits = [vocabulary.FORMAT_BITS[f] for f in context.report.formats(claim.place)]
    return _Attention(dims["batch"], dims["heads"], dims["seq"], dims["head_dim"], min(bits) / 8 if bits else 2.0)


def _shares(context: Context, rows: list[tuple[Claim, float, _Attention]]) -> list[Finding]:
    """The printed share of every row under the one reading of "total" that most rows fit."""
    # What is saved beside 3 or 4 tensors (with the output); scores and probabilities may both count as saved.
    options = [(count, tensors) for count in (1, 2) for tensors in (3, 4)]

    def share(saved: float, a: _Attention, option: tuple[int, int]) -> float:
        count, tensors = option
        return count * saved / (count * saved + tensors * a.tensor)

    def fits(claim: Claim, saved: float, a: _Attention, option: tuple[int, int]) -> bool:
        return claim.quantity.span.widened(0.02).meets(Interval.of(share(saved, a, option)))

    if not rows:
        return []
    best = max(options, key=lambda o: sum(fits(c, s, a, o) for c, s, a in rows))
    found = []
    for claim, saved, a in rows:
        value = share(saved, a, best)
        count, tensors = best
        what = "Q, K, V" if tensors == 3 else "Q, K, V and the output"
        twice = "2 × " if count == 2 else ""
        text = (
            f"{twice}{show('bytes', saved)} saved beside {what} of {a.batch}·{a.heads}·{a.seq}·{a.head_dim} × "
            f"{a.itemsize:g} B = "
            f"{show('bytes', tensors * a.tensor)} is {value:.1%}"
        )
        verdict = POSSIBLE
        if not fits(claim, saved, a, best):
            verdict = INCONSISTENT
            text = (
                f"printed {claim.quantity.text}, but {text}; the saved matrix grows with S², the rest with S, so the "
                "share must vary"
            )
        printed = 100 * claim.quantity.value
        found.append(context.finding(claim, verdict, "attention_memory", text, printed, 100 * value, "%"))
    return found


def _matrix(context: Context, claim: Claim, a: _Attention) -> list[Finding]:
    for count in (1, 2):
        if _is(claim, a.scores * count):
            times = f"{count} × " if count > 1 else ""
            text = f"{times}{a.batch}·{a.heads}·{a.seq}² × {a.itemsize:g} B = {show('bytes', a.scores * count)}"
            return [context.finding(claim, POSSIBLE, "attention_memory", text)]
    return []


_USED = re.compile(
    r"peak mem|(?:memory|mem|vram|hbm)[ _-]?(?:used|usage|alloc\w*|consum\w*|footprint|reserved)|\bvram\b|gpu "
    r"mem\w*|^mem(?:ory)?\b",
    re.I,
)
_NOT_RESIDENT = re.compile(
    r"weight|model|param|total|cluster|node|traffic|moved|transfer|would|oom|need|requir|disk|\bram\b|host|cpu"
    r"|dataset|read|writ|offload|total traffic|bandwidth|sav",
    re.I,
)


def capacity(context: Context) -> list[Finding]:
    """Memory in use cannot exceed the memory of the GPU (or of all GPUs the text speaks of)."""
    found = []
    for claim in context.claims:
        words = claim.column.header if claim.column else claim.words
        if claim.kind != "bytes" or not _USED.search(words) or _NOT_RESIDENT.search(f"{words} {claim.quote}"):
            continue
        known, _ = context.report.devices(claim.place)
        if not known:
            continue
        most = max(d.memory_bytes for d in known) * context.report.gpus(claim.place)
        lowest = min(r.lo for r in claim.quantity.readings)
        name = max(known, key=lambda d: d.memory_bytes).name
        if lowest > most * 1.08:  # 80 GB boards hold up to 80 GiB
            text = f"{claim.quantity.text} is more than the {show('bytes', most)} of {name}"
            found.append(
                context.finding(claim, IMPOSSIBLE, "capacity", text, claim.quantity.value / 1e9, most / 1e9, "GB")
            )
        elif claim.column is not None:
            text = f"{claim.quantity.text} fits in the {show('bytes', most)} of {name}"
            found.append(
                context.finding(claim, POSSIBLE, "capacity", text, claim.quantity.value / 1e9, most / 1e9, "GB")
            )
    return found
