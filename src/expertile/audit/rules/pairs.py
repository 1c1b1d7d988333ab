"""Figures of a sentence or line of which one follows from the other: the same in another unit, a time at a rate that
the report states elsewhere, a part of a named limit, so many of so much each. It asks, but for units."""

import itertools
import math
import re
from collections.abc import Iterator

from expertile.audit.facts import NUMBERS
from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.units import product

_SAME = re.compile(
    r"(?i)^[\s,;(~≈]*(?:per \w+)?[\s,]*(?:=|i\.e\.,?|that is|which (?:is|makes|gives)|or|in other words,?"
    r"|equal to|thus)[\s~≈(]*$|^ ?\([~≈]?$"
)
# What is off where a unit was mistaken: bits for bytes, a binary prefix for a decimal one, the wrong way round.
_STEPS = [8.0, 1000.0, 1e6, *(1.024**k for k in (2, 3, 4, 6, 8)), 1024.0]
_BITS = re.compile(r"\d ?[KMGT](?:b|bit)(?:/s|ps|it)?\b")
_BINARY = re.compile(r"\d ?[KMGT]iB\b")
# Two figures of which the report states the quotient elsewhere: what it lasted, cost, moved.
_PARTNERS = {("time", "tokens"): ("tokens_per_s", 1e8, 600.0), ("time", "energy"): ("power", 0.0, 60.0)}
_SPEAKS = re.compile(
    r"(?i)\b(?:at (?:this|that|the)|project\w*|takes?|took|lasts?|need\w*|draws?|drew|us(?:es|ed)|consum\w*|"
    r"costs?|for the (?:full|whole)|busy|in (?:all|total)|so|hence|thus)\b"
)
_OTHER = re.compile(r"(?i)\b(?:idle|host|cooling|pue|saved?|budget|limit of|earlier|previous|paper|others?)\b")
_LIMITED = re.compile(
    r"(?i)\W*of (?:the |its |their |our )?(?:\w+ )?(?:line rate|wire speed|link rate|port speed|nominal rate)\b"
)
_STAGE = r"(?:a|per|each|every)[ -](?P<noun>[a-z]{3,})"
_MANY = re.compile(rf"(?i)\b(?P<n>\d{{1,5}}|{'|'.join(NUMBERS)}) (?P<noun>[a-z]{{3,}})s\b")
_SO = re.compile(
    r"(?i)\b(?:so|hence|thus|therefore|i\.e|that (?:is|makes)|which (?:is|makes)|makes?|takes?|occup\w+)\b|="
)


def pairs(report: Report) -> Iterator[Finding]:
    for row in report.lines_of_text:
        yield from _same(row)
        yield from _partnered(row)
        yield from _limited(row)
    yield from _relabelled(report)
    yield from _each(report)
    yield from _alike(report)


def _same(row: Row) -> Iterator[Finding]:
    """ "375.2 Gb/s, in other words 469 GB/s"."""
    for a, b in itertools.pairwise(row.quantities):
        between = row.text[a.end : b.start]
        if (
            a.kind == b.kind
            and a.kind in ("bandwidth", "bytes", "time")
            and _SAME.search(between)
            and a.exact
            and b.exact
            and not re.search(r"[×x*·/+−-] ?$", row.text[: a.start])  # "1000 batches x 261.4 ms = 261.4 s"
        ):
            yield from _converted(a, b, INCONSISTENT if "(" not in between else QUESTION)


def _converted(a: Quantity, b: Quantity, verdict: str) -> Iterator[Finding]:
    off = max(a.value.mid, 1e-30) / max(b.value.mid, 1e-30)
    spelled = [bool(form.search(q.text)) for q in (a, b) for form in (_BITS, _BINARY)]
    units = [re.sub(r"[\d.,\s]", "", q.text) for q in (a, b)]
    if units[0] == units[1] or (a.value.meets(b.value, 0.004)) or not b.value.mid:
        return
    steps = [s for s in _STEPS if s > 1.2 or spelled[1] != spelled[3]] if spelled[:2] != spelled[2:] else _STEPS[1:3]
    if any(abs(max(off, 1 / off) / s - 1) < 0.004 for s in steps if s > 1.04):
        made = si(a.value.mid, UNIT_OF.get(a.kind, ""))
        yield finding(verdict, "conversion", f"{a.text} is {made}, not {b.text}", b, a)


def _relabelled(report: Report) -> Iterator[Finding]:
    """ "raw 184.3 TB" above "raw as seen by OS 202.7 TiB": decimal and binary, the wrong way round."""
    lines = [r for r in report.lines_of_text if len(r.of("bytes")) == 1]
    for r, s in itertools.pairwise(lines):
        (a,), (b,) = r.of("bytes"), s.of("bytes")
        head = [re.match(r"\W*([a-z]+)", x.text.lower()) for x in (r, s)]
        alike = head[0] and head[1] and head[0][1] == head[1][1] and r.block == s.block and s.line - r.line == 1
        if alike and bool(_BINARY.search(a.text)) != bool(_BINARY.search(b.text)):
            yield from _converted(a, b, QUESTION)


def _partnered(row: Row) -> Iterator[Finding]:
    """ "Flat out for 24 hours it draws 8.6 kWh" where no power of the report makes them."""
    for (time, of), (kind, least, shortest) in _PARTNERS.items():
        t, a = row.only(time), row.only(of)
        a = a or (row.before.only(of) if row.before and of == "tokens" else None)
        t = t or next((q for q in row.of(time)[:1] if re.search(r"(?i)\bover (?:the )?$", row.text[: q.start])), None)
        others = [q for q in row.quantities if q.kind in (kind, "gpu*s")]
        if not t or not a or others or a.value.mid < least or t.value.mid < shortest or not _SPEAKS.search(row.text):
            continue
        if _OTHER.search(row.text) or re.search(
            r"(?i)per |/ ?\w", (row if a in row.quantities else row.before or row).text[a.end : a.end + 6]
        ):
            continue
        every = [q for r in row.report.all_rows for q in r.of(kind) if q.exact and q.value.mid and not q.per_device]
        counts = (1.0, *row.report.everything.of("gpus"))
        made = [q.value * (t.value.mid * n) for q in every for n in counts]
        low, high = (f((m.mid for m in made), default=0.0) for f in (min, max))
        wide = len({q.text for q in every}) > 3 and kind != "power"  # a log's
        near = min(made, key=lambda m: abs(math.log(m.mid / a.value.mid)), default=None)
        if near is None or not 0.3 < near.mid / a.value.mid < 3.3 or any(m.meets(a.value, 0.012) for m in made):
            continue
        if not wide or not 0.97 * low < a.value.mid < 1.03 * high:
            partner = every[made.index(near) // len(counts)]
            message = f"{t.text} at {partner.text} make {_text(near, of)}, not {a.text}: of what is it?"
            yield finding(QUESTION, "energy" if of == "energy" else "tokens/s", message, a, t, lines=(partner.line,))


def _text(x: Interval, kind: str) -> str:
    return f"{x.mid / 3.6e6:.3g} kWh" if kind == "energy" else f"{x.mid:.4g}"


def _limited(row: Row) -> Iterator[Finding]:
    """ "That is 11.7 % of the line rate" where no two rates near by, nor the GPU's peak, make that share."""
    for p in (p for p in row.of("percent") if p.exact and p.value.mid and _LIMITED.match(row.text[p.end :])):
        near = [r for r in row.report.lines_of_text if 0 <= row.line - r.line < 8]
        for kind in ("bandwidth", "rate"):
            held = [q for r in near for q in r.of(kind) if q.value.mid]
            if not 2 <= len(held) <= 9:
                continue
            shares = [
                a.value / b.value for a, b in itertools.permutations(held, 2) if a.value.mid <= b.value.mid * 1.01
            ]
            shares += [a.value / d for a in held for d in _peaks(row, kind)]
            last = [s for s in shares if s.mid < 1.5]
            if last and not any(p.value.meets(s, 0.012) for s in last):
                text = ", ".join(f"{100 * s.mid:.3g} %" for s in sorted({*last}, key=lambda s: -s.mid)[:3])
                yield finding(
                    QUESTION, "share", f"the rates near by are {text} of one another, not {p.text}: of what is it?", p
                )


def _peaks(row: Row, kind: str) -> list[float]:
    return [d.memory_bps for d in row.report.everything.of("devices") if d.memory_bps] if kind == "bandwidth" else []


def _each(report: Report) -> Iterator[Finding]:
    """ "32 KB a stage. Five stages, so 80 KB"."""
    each = [
        (row, q, m["noun"].lower())
        for row in report.lines_of_text
        for q in row.of("bytes", "time", "energy", "power", "money", "s_per_item")
        if q.exact and (m := re.match(rf"(?i)\W{{0,2}}{_STAGE}\b", row.text[q.end :]))
    ]
    for row in report.lines_of_text if each else ():
        for m in _MANY.finditer(row.text):
            of = [q for r, q, noun in each if noun == m["noun"].lower() and 0 <= row.line - r.line < 8]
            kinds = (
                ("time", "s_per_item") if of and of[0].kind in ("time", "s_per_item") else tuple(q.kind for q in of[:1])
            )
            said = [q for q in row.of(*kinds) if q.start > m.end() and q.exact and q not in of]
            first = said[0] if len(of) == 1 and said and len({q.value.mid for q in of}) == 1 else None
            between = row.text[m.end() : first.start] if first else ""
            if not first or not _SO.search(between) or re.search(r"[.;]|\d", between):
                continue
            n = float(NUMBERS.get(m["n"].lower(), m["n"]))
            made = of[0].value * n
            own = re.match(rf"(?i)\W{{0,2}}{_STAGE}\b", row.text[first.end :])
            ways = [made, made + of[0].value]
            if n > 1 and not own and not any(first.value.meets(x, 0.03) for x in ways) and first.value.meets(made, 3.0):
                message = (
                    f"{m[0]} of {of[0].text} each are {si(made.mid, UNIT_OF.get(first.kind, 's'))}, not {first.text}"
                )
                yield finding(QUESTION, "each", f"{message}: what does it count?", first, of[0])


def _alike(report: Report) -> Iterator[Finding]:
    """Lines that give the same two rates ("records/sec (77.5 MB/sec)"), of which one has another quotient."""
    for _, some in itertools.groupby(report.lines_of_text, lambda r: r.block):
        rows = [r for r in some if report.blocks[r.block].kind != "prose"]
        for a, b in (("items_per_s", "bandwidth"), ("items_per_s", "tokens_per_s"), ("tokens_per_s", "bandwidth")):
            held = [(x, y) for r in rows if (x := r.only(a)) and (y := r.only(b)) and product(b, a, -1)]
            if not 3 <= len(held) < 60:
                continue
            each = [y.value / x.value for x, y in held]
            middle = sorted(e.mid for e in each)[len(each) // 2]
            odd = [i for i, e in enumerate(each) if not e.meets(middle, 0.01)]
            if len(odd) == 1 and abs(each[odd[0]].mid / middle - 1) > 0.1:
                x, y = held[odd[0]]
                made = si(x.value.mid * middle, UNIT_OF[b])
                message = f"{x.text} as on all other lines would be {made}, not {y.text}: is it of the same records?"
                yield finding(QUESTION, "proportion", message, y, x)
