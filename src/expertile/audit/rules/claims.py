"""Claims in words that the report's own figures or plain arithmetic refute."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding, si
from expertile.audit.pattern import regex, says
from expertile.audit.quantity import Quantity, quantities
from expertile.audit.report import Report, Row
from expertile.audit.rules.told import may_be

_MEMORY = r"(?:memory|smaller|compress|footprint|storage|vram|saving|shr[aiu]nk|size of (?:the|all|its) )"
_AFTER = regex(rf"(?i)\W*(?:(?:the|in|of|lower|less|fewer|reduction)\W+)*{_MEMORY}")
_LESS = regex(r"(?i)\W*(?:less|smaller|fewer|lower)\b")
_SHRUNK = regex(r"(?i)(?:compress|shrink|shrank|reduc|sav|smaller|cut|footprint)[^.;]{0,40}$")
_FASTER = regex(r"(?i)speed|faster|throughput|latency|quick|tokens|bandwidth|flops|accura|perplex")
_CHANGED = regex(
    r"(?i)(?:bits?|bf16|(?:fp|int|float|bfloat)\d+|half|weights|values|\d ?Gi?B\)?)\)?,? ?(?:down )?(?:to|→|->|into) |"
    r"instead of|\bvs\b|versus|compared (?:to|with)|relative to|(?:over|than) (?:the )?(?:fp|bf|float|half|\d+)|"
    r"(?:brings?|shrink|shrank|shrunk|reduc|compress|cuts?\b|quanti[sz]).* to "
)
_NOT_BITS = regex(
    r"(?i)lora|prun|spars|evict|offload|distill|activation|gradient|optim\b|optimi[sz]er|batch|communicat|gpus?\b|network|"
    r"\badam|\bgqa\b|(?<!\d )heads|momentum|\bmaster\b|\bmoments?\b|\bin all\b|\bplus\b|[a-z] \+ [a-z]"
)
_OBJECT = regex(
    r"(?<!\d )\b(?:kv )?(?:cache|activation|gradient|optimi[sz]er|buffer|embedding|state|lora|adapter|layer|batch)"
)
_SCALES = regex(
    r"(?i)\b(?:fp|bf|float|int)\d+ (?:(?:group|block) )?(?:scales?|zeros?|zero[ -]points?)\b(?: ?(?:\+|and) ?zeros?)?"
)
_FORMAT = regex(
    r"\b(?:group[ _-]?size\W*\d+|(?:fp|bf|int|uint|w|q|nf)\d+\w*|awq|gptq|quantized|baseline|\d+-?bit|half|float\d*|"
    r"original|a?symmetric|reference|g\d+|group\d*|per|tensor|channel|scales?|zeros?|weights?|memory|model|size|"
    r"checkpoint|vram|to|with)\b"
)
_WIDTH = regex(r"(?i)(?<![.,\d])\b(?:([1-68]|16|32|64)[ -]?bits?(?! scales| zero)|(?:u?int|q|nf|w)([1-68]))\b")
_KV_TYPE = regex(
    r"(?i)kv[-_ ]?cache(?:[-_ ]d?type\W+| in | to )(?:fp8|int[48])|\b(?:fp8|int[48]|[48][- ]bit) kv[- ]cache"
)
_SWITCHED = regex(r"(?i)switch|instead|with|down to|bring|shr[iau]nk|reduc|cuts?\b|in (?:fp|int|\d)|quanti|after")
_WORD = regex(r"[a-z0-9.]+")
_EQUAL = regex(r"(?i)\b(?:equivalent|equal|same|identical)\s+(?:total\s+|amount of\s+)?(?:work|flops?|compute)\b")
_SHAPE = regex(
    r"(?i)(?:(?P<n>\d+)\s*(?:[x×]\s+)?(?:separate |small )?(?:gemms?|matmuls?|matrices|products?)\D{0,12})?"
    r"(?<!\d)(?P<a>\d{2,6})\s*[x×]\s*(?P<b>\d{2,6})(?:\s*[x×]\s*(?P<c>\d{2,6}))?"
)
_PRODUCTS = regex(r"(?i)gemm|matmul|matri|product")
_QUICKER = regex(r"(?i)improve|speed-?\s?up|faster|quicker|sooner|as fast")
_MEANT = regex(
    r"(?i)\bper (?:token|sample|image|item|request|sequence|row)|normali|halv|smaller|shorter|truncat|prun|separate|"
    r"total work|equivalent|(?:reduc|lower|cut|shrink)\w* (?:the )?(?:batch|seq|context|length|size|number)"
)
_PARTED = "[;.\n]| against| vs\\.?| versus| while| whereas| than"
_PAUSES = [regex(rf"(?s)(?:{mark})\s(?!.*(?:{mark})\s)") for mark in (_PARTED, ",| and")]
_COUNT = regex(r"(?i)\b(?:tokens|images|samples|requests|prompts|sequences|steps|iterations|frames|rows|points)\b")
_LENGTH = regex(r"(?i)batch|seq|context|ctx|len|tokens|users|requests")
_WORK = ("m", "n", "k", "size", "batch", "seq", "tokens", "items", "hidden", "ffn", "elements", "prompts")


def _bits(text: str) -> list[int]:
    """The widths of the number formats that a text names, but for those of scales."""
    text = _SCALES.sub("", text)
    counted = (int(a or b) for a, b in _WIDTH.findall(text))
    return list(dict.fromkeys((*(BITS[f] for f in facts(text).of("formats")), *counted)))


def compression(report: Report) -> Iterator[Finding]:
    """Less memory than the bits of the formats allow: a ratio of it, two sizes, the size of so many parameters."""
    lines = report.lines_of_text
    wide = list({BITS[f] for f in report.everything.of("formats") if BITS[f] >= 16})
    for i, row in enumerate(lines):
        shares = row.of("ratio", "percent")
        near = [r for r in lines[max(0, i - 3) : i + 1] if row.line - r.line <= 3]
        for q in shares if shares and (row.of("bytes") or re.search(rf"(?i){_MEMORY}", row.text)) else ():
            yield from _ratio(row, q, near, wide)
        # "12 GB in FP16 and 2 GB in INT4", "40 GiB in FP16. After switching to FP8 it's at 12 GiB."
        both = [row.before, row] if row.before and _SWITCHED.search(row.text) else []
        for some in ([row], both):
            held = [b for r in some for b in r.of("bytes") if b.value.mid > 1e3]
            held = [b for b in held if not re.match(r"(?i)(?:cards?|gpus?|vram)\b", b.after)]
            if len(held) != 2:
                continue
            text = " ".join(r.text for r in some)
            bits = _bits(text)
            one = len({*_OBJECT.findall(text.lower())}) < 2 and not says(_NOT_BITS, text)
            known = len(bits) == 2
            bits += [max(wide)] if len(bits) == 1 and bits[0] <= 8 and wide and _CHANGED.search(text) else []
            if one and len(bits) == 2 and all(b.exact for b in held):
                large, small = sorted(held, key=lambda b: -b.value.mid)
                wider = any((large.plain / small.plain).meets(w / min(bits), 0.05) for w in wide)
                yield from () if wider else _beyond(large, small, bits, known and some is not both, 1.08)
    for grid in report.grids:
        for c in grid.columns("bytes", "B/token", "B/param"):
            if re.search(r"(?i)per|mem|size|vram|footprint|storage|weights|cache", grid.header[c]):
                sizes = [(row, replace(x, value=x.plain)) for row in grid.rows if (x := row.figure(c))]
                yield from _column(sizes, wide)


def _ratio(row: Row, q: Quantity, near: list[Row], wide: list[int]) -> Iterator[Finding]:
    """The two formats stand in the sentence or the lines just before it; where one alone is named it asks."""
    before, after = row.text[: q.start], row.text[q.end : q.end + 24]
    of_memory = _AFTER.match(after) or _SHRUNK.search(before) or (row.of("bytes") and _LESS.match(after))
    text = row.text if len(_bits(row.text)) > 1 else "\n".join(r.text for r in near)
    bits = sorted(_bits(text))
    known = len(bits) == 2 and bits[1] >= 16 and _CHANGED.search(text)
    bits = bits if known else [*bits[:1], *wide]
    told = known and len(_bits(row.text)) > 1
    kv = "kv" in row.text.lower() and not (told or (_KV_TYPE.search(row.text) and len(_bits(row.text)) == 1))
    other = kv or re.search(r"(?i)\b[gm]qa\b", row.text)
    other = other or _NOT_BITS.search(before[-60:] + after) or re.search(r"\bto\W*$", before)  # "to 54 % of it" is left
    less = q.kind == "ratio" or re.search(r"(?i)sav|reduc|less|smaller|lower|few|cut|shr[iau]nk", before[-60:] + after)
    sizes = itertools.combinations([b for b in row.of("bytes") if b.value.mid], 2)
    if not _bits(row.text) and any(may_be(q, a.value / b.value) for a, b in sizes):
        return  # its own make it
    if len(bits) != 2 or bits[0] > 8 or not (of_memory and less and q.value.mid) or other or _FASTER.search(after):
        return
    most, saved = bits[1] / bits[0], q.value.lo if q.exact else q.value.mid
    if (saved if q.kind == "ratio" else 1 / max(1 - saved, 1e-9)) > most * 1.06:
        at_most = f"at most {most:.3g}x smaller ({100 * (1 - 1 / most):.3g} % less), not {q.text}"
        message = f"{bits[1]} to {bits[0]} bits is {at_most}" + ("" if known else ": smaller than what?")
        yield finding(INCONSISTENT if known else QUESTION, "compression", message, q, lines=tuple(r.line for r in near))


def _beyond(base: Quantity, q: Quantity, bits: list[int], sure: bool, slack: float = 1.03) -> Iterator[Finding]:
    most = max(bits) / min(bits)
    if most > 1 and 4 * max(most, 4) > (base.value / q.value).lo > slack * most:  # else of other things
        ratio = f"{base.text} / {q.text} is {base.value.mid / q.value.mid:.3g}x"
        message = f"{ratio}; the bits give at most {most:.3g}x"
        yield finding(INCONSISTENT if sure else QUESTION, "compression", message, q, base)


def _column(held: list[tuple[Row, Quantity]], wide: list[int]) -> Iterator[Finding]:
    """Rows of one memory column that differ in their format only; of a row that names none, it asks."""
    named: list[tuple[list[int], list[object], Quantity]] = []
    of_all: list[str] = []
    for row, q in held:
        bits = [int(row.bare["bits"])] if "bits" in row.bare else _bits(row.label)
        label = f"{row.label} {' '.join(x.text for x in row.of('params'))}".lower()
        name = _WORD.findall(_FORMAT.sub(" ", label))
        of_all = name or of_all * label.strip().startswith("- ")  # "- int8" is of the row above
        work = [*row.own.items(), *((n, v) for n, v in row.bare.items() if _LENGTH.search(n))]
        named += [(bits, [*(name or of_all), *work], q)] * (len(bits) < 2 and not row.summary)
    for (to, name, q), (of, other, base) in itertools.permutations(named, 2):
        if (
            [len(to), len(of or wide)] == [1, 1]
            and to[0] <= min(8, (of or wide)[0])
            and (name == other or not (of or name))
        ):
            yield from _beyond(base, q, [to[0], (of or wide)[0]], bool(of))
            if q.text == base.text and 2 * to[0] == (of or wide)[0] and of and q.value.width < 0.05:
                message = f"{q.text} in {to[0]} bits is as large as in {of[0]}: is it of that format?"
                yield finding(QUESTION, "compression", message, q, base)


def equal_work(report: Report) -> Iterator[Finding]:
    """Two products called equal work that are not."""
    lines = report.lines_of_text
    for i, row in enumerate(lines):
        said = _EQUAL.search(row.text)
        near = [r for r in lines[i : i + 8] if r.line - row.line <= 8] if said else []
        shapes = [(r.line, m) for r in near for m in _SHAPE.finditer(r.text) if m["c"] or m["a"] == m["b"]]
        of_products = all(m["c"] for _, m in shapes) or any(_PRODUCTS.search(r.text) for r in near)
        if said is None or len(shapes) != 2 or not of_products:
            continue
        work = [2.0 * int(m["n"] or 1) * int(m["a"]) * int(m["b"]) * int(m["c"] or m["b"]) for _, m in shapes]
        if max(work) > 1.1 * min(work):
            each = " and ".join(f"{m[0].strip()} = {si(w, 'FLOP')}" for (_, m), w in zip(shapes, work, strict=True))
            message = f"{each}: {max(work) / min(work):.3g} times the work"
            yield Finding(INCONSISTENT, "equal work", row.line, said[0], message, tuple(line for line, _ in shapes))


def unequal_work(report: Report) -> Iterator[Finding]:
    """A speed-up of two times, of which the shorter is of less work: it asks."""
    for i, row in enumerate(report.rows):
        gains = [q for q in row.of("ratio") if q.exact and q.value.lo > 1]
        said = [q for q in gains if _QUICKER.search(q.words + row.text[q.start :][:40])]
        near = [r for r in report.rows[max(0, i - 3) : i] if row.block - r.block < 3 and r.kind == row.kind == "line"]
        text = "\n".join(r.text for r in (*near, row))
        if len(said) != 1 or _MEANT.search(text):
            continue
        body = [r for g in report.grids for r in g.body if abs(r.line - row.line) < 40]
        runs = [(t, r.bare | r.own) for r in body if (t := r.only("time") or r.only("s_per_item"))]
        known = {t.line for t, _ in runs}
        runs += [
            (t, _work(r.text)) for r in near if (t := r.only("time") or r.only("s_per_item")) and t.line not in known
        ]
        # Of all pairs the one whose quotient is nearest is meant.
        pairs = sorted(itertools.combinations(runs, 2), key=lambda pair: _off(said[0], pair[0][0], pair[1][0]))
        meant = [p for p in pairs if abs(_off(said[0], p[0][0], p[1][0])) < 0.006] or pairs[:1]
        of_pairs = [[*_unequal(said[0], (), *pair)] for pair in meant]
        yield from of_pairs[0] if all(of_pairs) and of_pairs else ()
        times = [q for q in quantities(text, row.line) if q.kind == "time" and q.exact]
        if len(times) == 2:
            (a, b), lines = times, tuple(q.line for r in (*near, row) for q in r.quantities)
            at = next((pause.end() for form in _PAUSES if (pause := form.search(text, a.end, b.start))), a.end)
            yield from _unequal(said[0], lines, (a, _work(text[:at])), (b, _work(text[at:])))
    for grid in report.grids:
        cells = [(r, q, t) for r in grid.body if (q := r.only("ratio")) and (t := r.only("time"))]
        bases = [(r, t) for r, q, t in cells if q.value.meets(1.0, 0.001)]
        before = {
            r.line: [(s, t)] for s, r in itertools.pairwise(grid.body) if (t := s.only("time")) and not s.of("ratio")
        }
        for r, q, t in cells:
            above = bases if len(bases) == 1 else [b for b in bases if b[0].line < r.line][-1:]
            above = above or before.get(r.line, [])
            for base, of in above:
                yield from _unequal(q, (), (of, base.own | base.bare), (t, r.own | r.bare))


def _off(q: Quantity, a: Quantity, b: Quantity) -> float:
    return abs(abs(math.log(a.value.mid / b.value.mid)) - math.log(q.value.mid))


def _work(text: str) -> dict[str, float]:
    """The sizes that a part of a sentence states."""
    counted = {q.kind: q.value.mid for q in quantities(text, 0) if q.kind in ("tokens", "items")}
    return facts(text).sizes | counted | {"elements": float(prod(t)) for t in facts(text).of("tuples")[:1]}  # noqa: B035


def _unequal(q: Quantity, lines: tuple[int, ...], *runs: tuple[Quantity, dict[str, float]]) -> Iterator[Finding]:
    (slow, long), (fast, short) = sorted(runs, key=lambda run: -run[0].value.mid)
    names = [n for n in long if n.strip(".") in _WORK or _COUNT.search(n)]
    other = [n for n in names if n in short and long[n] != short[n]]
    if other and all(short[n] < long[n] for n in other) and q.value.meets(slow.value / fast.value, 0.06):
        n = other[0]
        message = f"{slow.text} is of {n} {long[n]:.0f}, {fast.text} of {n} {short[n]:.0f}"
        yield finding(QUESTION, "equal work", f"{message}: is {q.text} of the same work?", q, slow, fast, lines=lines)
