"""Sentences and lines against the figures beside them: reductions, gains on top of each other, what was saved, what is
left of a count, parts of a range, another unit, so many of so much each."""

import itertools
import math
import re
from collections.abc import Iterator
from statistics import median_high

from expertile.audit.facts import NUMBERS
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import NUMBER, Interval, printed
from expertile.audit.quantity import Quantity
from expertile.audit.records import series, sheets
from expertile.audit.report import Report, Row
from expertile.audit.units import product, unit_of_name

_N = r"(?P<n>\d{3,4}(?:\.\d+)?) ?(?:%|percent)"
_REDUCED = re.compile(
    rf"(?i)\b(?:reduc(?:e[sd]?|ing|tion)|lower(?:s|ed)|decreas\w+|shr[aiu]nk\w*|cuts?|dropp?\w*|fell|falls|smaller|less)\b"
    rf"(?: [\w-]+){{0,5}}? (?:by|of) (?:about |~)?{_N}|"
    rf"(?<![-–\d.])\b{_N.replace('<n>', '<m>')} (?:[a-z]+ )?(?:reduction|decrease|less|fewer|smaller|"
    rf"shorter)\b(?! (?:likely|than \d))"
)
_STACKED = re.compile(
    r"(?i)on top of (?:each other|one another|that)|(?:relative to|over|against) the (?:step|one|version|"
    r"stage) before|cumulative|"
    r"(?:relative to|over|against) the previous|successive|one after the other|multipl"
)
_ALL = re.compile(r"(?i)\b(?:all in all|overall|in total|together|altogether|combined|in all|the whole|compound)\b")
_BEFORE = re.compile(r"(?i)\b(?:previous|prior|prev|last (?:step|row)|(?:step|row) before)\b")
_SAVED = re.compile(
    r"(?i)\b(?:gain(?:s|ed)?|sav(?:e|es|ed|ing)|los(?:e|es|t|ing)|shav(?:e|es|ed) off|difference of|differ by)"
    r"(?: of| us| about| another| roughly)?\W*$"
)
_MADE = re.compile(
    r"(?i)(?<![\d.,])(\d[\d,]*) ([a-z]{4,}s) (?:were |was )?(?:generated|enumerated|in the search space|in total|found|"
    r"created)\b"
)
_SENT = re.compile(r"(?i)\b(?:collected|submitted|sent|total(?: of)?|ran|issued|scheduled)\W+(\d[\d,]*)\b")
_PARTS = re.compile(
    r"(?i)(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d+) (?:[a-z]+ )?(?:were |was )?(passed|failed|skipped|errors?|xfailed|"
    r"xpassed|succeeded|completed|rejected|timed out|cancelled|pruned|dropped|removed|filtered|discarded|invalid)\b"
)
_LEFT = re.compile(r"(?i)\b(?:timed|measured|bench\w+|kept|remaining:?|left:?|ran|evaluated) (\d[\d,]*) ([a-z]{4,}s)\b")
_MORE = re.compile(r"(?i)deselected|rerun|warn|/ \d")
_INSIDE = re.compile(r"(?i)\b(?:inside|within|part) (?:of )?(?:the )?[\"'`]?(?P<name>[\w:.-]{4,})")
_COUNT = re.compile(
    r"(?i)(?<![\d.,])(\d{1,3}(?:,\d{3})+|\d{2,}) (?:[a-z]+ )?(kernels|launches|calls|iterations|steps|requests|"
    r"batches|tokens)\b"
)
_SAME = re.compile(
    r"(?i)^[\s,;(~≈]*(?:per \w+)?[\s,]*(?:=|i\.e\.,?|that is|which (?:is|makes|gives)|or|in other words,?"
    r"|equal to|thus)[\s~≈(]*$|^ ?\([~≈]?$"
)
# What is off where a unit was mistaken: bits for bytes, a binary prefix for a decimal one, the wrong way round.
_STEPS = [8.0, 1000.0, 1e6, *(1.024**k for k in (2, 3, 4, 6, 8)), 1024.0]
_BITS = re.compile(r"\d ?[KMGT](?:b|bit)(?:/s|ps|it)?\b")
_RISE = re.compile(  # "46 % -> 58 % (12 % more work)"
    rf"({NUMBER}) ?% ?(?:->|→|to) ?({NUMBER}) ?%(?: \w+)?\W+(?:[^()%.;\d]{{0,40}} )?({NUMBER}) ?% "
    r"(?:more|less|fewer|higher|lower|better|faster|increase|decrease)\b"
)
_BINARY = re.compile(r"\d ?[KMGT]iB\b")
# Two figures of which the report states the quotient elsewhere: what it lasted, cost, moved.
_PARTNERS = {("time", "tokens"): ("tokens_per_s", 1e8, 600.0), ("time", "energy"): ("power", 0.0, 60.0)}
_SPEAKS = re.compile(
    r"(?i)\b(?:at (?:this|that|the)|project\w*|takes?|took|lasts?|need\w*|draws?|drew|us(?:es|ed)|consum\w*|"
    r"costs?|for the (?:full|whole)|busy|in (?:all|total)|so|hence|thus)\b"
)
_OTHER = re.compile(r"(?i)\b(?:idle|host|cooling|pue|saved?|budget|limit of|earlier|previous|paper|others?)\b")
_STAGE = r"(?:a|per|each|every)[ -](?P<noun>[a-z]{3,})"
_MANY = re.compile(rf"(?i)\b(?P<n>\d{{1,5}}|{'|'.join(NUMBERS)}) (?P<noun>[a-z]{{3,}})s\b")
_SO = re.compile(r"(?i)\b(?:so|hence|thus|therefore|i\.e|(?:that|which) (?:is|makes)|makes?|takes?|occup\w+)\b|=")


def sentences(report: Report) -> Iterator[Finding]:
    """Reductions, stacked gains, what was saved, what is left, parts of a range, so much per thing."""
    for row in report.lines_of_text:
        yield from _reduced(row)
    yield from _stacked(report)
    yield from _of_steps(report)
    yield from _saved(report)
    yield from _remaining(report)
    yield from _inside(report)
    for _, rows in itertools.groupby(report.lines_of_text, lambda r: r.block):
        held = [*rows]
        if report.blocks[held[0].block].kind == "list":
            yield from _each(report, held)


def _reduced(row: Row) -> Iterator[Finding]:
    """Nothing falls by more than all of it."""
    for m in _REDUCED.finditer(row.text):
        q = next((q for q in row.of("percent") if m.start() <= q.start < m.end()), None)
        said = row.text[max(0, m.start() - 30) : m.end()]
        if q and q.value.lo > 1.001 and not re.search(r"(?i)\b(?:not?|never|would|speed\w*)\b|n't|cannot", said):
            yield finding(IMPOSSIBLE, "ratio", f"nothing is reduced by {q.text}, more than all of it", q)


def _stacked(report: Report) -> Iterator[Finding]:
    """Gains that multiply, and what they are said to come to."""
    for _, rows in itertools.groupby(report.lines_of_text, lambda r: report.sections[r.block]):
        held = [(row, q) for row in rows for q in row.of("ratio") if q.exact and q.value.mid]
        last = next((i for i, (row, q) in enumerate(held) if i > 2 and _ALL.search(row.text[: q.start])), 0)
        parts = [q for _, q in held[:last]] if _STACKED.search(report.text) else []
        some = [c for k in range(2, len(parts) + 1) for c in itertools.combinations(parts, k)] if last < 10 else []
        products = [math.prod(p.value.mid for p in c) for c in some]
        q, made = held[last][1] if held else None, products[-1] if products else 0.0
        if q and made and not any(q.value.meets(x, 0.025) for x in products) and 0.3 < q.value.mid / made < 3:
            yield _other_product(q, parts, made)


def _other_product(q: Quantity, parts: list[Quantity], made: float) -> Finding:
    message = f"{' × '.join(p.text for p in parts)} is {made:.3g}x, not {q.text}: of which steps is it?"
    return finding(QUESTION, "product", message, q, *parts)


def _of_steps(report: Report) -> Iterator[Finding]:
    """ "All five together are worth 7.9x" beside a column of gains, each over the row before."""
    for row in report.lines_of_text:
        q = row.only("ratio") if _ALL.search(row.text) else None
        if q is None or not q.exact:
            continue
        for g in report.tables:
            for c in g.columns("ratio"):
                parts = [x for r in g.body if (x := r.figure(c)) and x.value.mid]
                made = math.prod(p.value.mid for p in parts)
                near = len(parts) > 2 and abs(g.rows[-1].line - row.line) < 40 and 0.3 < q.value.mid / made < 3
                if near and _BEFORE.search(g.header[c]) and not q.value.meets(made, 0.04):
                    yield _other_product(q, parts, made)


def _saved(report: Report) -> Iterator[Finding]:
    """ "6.07 ms, so we gain 2.48 ms" of the time before: it asks."""
    lines = report.lines_of_text
    for i, row in enumerate(lines):
        for q in row.of("time", "s_per_item", "bytes", "money", "energy"):
            before = row.text[: q.start]
            if not q.exact or not _SAVED.search(before[-40:]) or re.search(r"(?i)\b(?:per|each|every)\b", before):
                continue
            kinds = ("time", "s_per_item") if q.kind in ("time", "s_per_item") else (q.kind,)
            own = [x for x in row.of(*kinds) if x.end <= q.start and x.exact]
            near = [x for r in lines[max(0, i - 6) : i] if row.line - r.line < 9 for x in r.of(*kinds) if x.exact]
            pairs = itertools.combinations([*near, *own], 2)
            one = len(own) == 1 <= len(near) <= 3 and q.value.mid < max(x.value.mid for x in near)
            if one and not any(_difference(q, x, y) for x, y in pairs):
                made = si(abs(near[-1].value.mid - own[0].value.mid), UNIT_OF.get(q.kind, ""))
                message = f"{near[-1].text} less {own[0].text} is {made}, not {q.text}: of which two is it?"
                yield finding(QUESTION, "difference", message, q, near[-1], own[0])


def _difference(q: Quantity, x: Quantity, y: Quantity) -> bool:
    made, off = abs(x.value.mid - y.value.mid), x.value.hi - x.value.lo + y.value.hi - y.value.lo
    return abs(q.value.mid - made) <= q.value.hi - q.value.lo + off + 0.02 * made


def _remaining(report: Report) -> Iterator[Finding]:
    """So many jobs, tests or variants in all, those that failed or went, and those that are left."""
    whole, gone = (0, 0.0, ""), list[tuple[int, float]]()
    for number, line in enumerate(report.lines, 1):
        m = _MADE.search(line) or (None if whole[0] else _SENT.search(line))
        if m:
            whole, gone = (number, float(m[1].replace(",", "")), "".join(m.groups()[1:]).lower()), []
        parts = [(float(n.replace(",", "")), word) for n, word in _PARTS.findall(line)]
        left = _LEFT.search(line) if gone and not m else None
        several = len({word for _, word in parts}) == len(parts) > 1
        gone = [*(gone if not several else []), *((number, n) for n, _ in parts)]
        if not whole[0] or not (several or (left and left[2].lower() == whole[2])):
            continue
        n, of = float(left[1].replace(",", "")) if left else 0.0, len(gone)
        sizes = range(of + 1) if left and of < 6 else [of]
        sums = [n + sum(x for _, x in c) for k in sizes for c in itertools.combinations(gone, k)]
        if whole[1] not in sums and 0.3 < sums[-1] / whole[1] < 3 and not _MORE.search(line):
            text = " + ".join(f"{x:,.0f}" for x in (*[n] * bool(left), *(x for _, x in gone)))
            message = f"{text} is {sums[-1]:,.0f}, not {whole[1]:,.0f}: are there others?"
            quote = left[1] if left else f"{parts[0][0]:.0f}"
            yield Finding(QUESTION, "total", number, quote, message, (whole[0], *(at for at, _ in gone)))
        whole = (0, 0.0, "")


def _inside(report: Report) -> Iterator[Finding]:
    """A part of a range that is longer than the range."""
    cells = [(key, f) for t in sheets(report) for key, row in zip(t.keys, t.rows, strict=True) for f in row.values()]
    serial = re.search(r"single stream|one stream|serial|sequential", report.text)
    for s in series(report):
        m, unit = _INSIDE.search(s.name), unit_of_name(s.name)
        whole = [f for key, f in cells if m and key == m["name"] and f.kind == "time"]
        bare = s.table < 0 and all(f.kind == "number" for f in s.figures)
        for f in s.figures if len(whole) == 1 and bare and unit and unit.kind == "time" else ():
            if unit and (f.value - f.off) * unit.low > whole[0].value + whole[0].off:
                message = f"{f.name}, {f.text}, is longer than {s.name.strip()[:40]}: {whole[0].text}"
                yield finding(INCONSISTENT if serial else QUESTION, "order", message, f, lines=(whole[0].line,))


def _each(report: Report, rows: list[Row]) -> Iterator[Finding]:
    """Two times of a list and what they are for each of the things counted before it: it asks."""
    times = [q for r in rows for q in r.of("time") if q.exact]
    each = [q for r in rows for q in r.of("s_per_item") if q.exact]
    before = [r.text for r in report.lines_of_text if 0 <= rows[0].block - r.block < 2]
    counts = {float(m[1].replace(",", "")) for text in before for m in _COUNT.finditer(text)}
    if len(times) != 2 or len(each) < 2 or len(counts) != 1:
        return
    (n,), (a, b) = counts, (q.value.mid for q in times)
    made = [a / n, b / n, abs(a - b) / n]
    odd = [q for q in each if not any(q.value.meets(x, 0.04) for x in made)]
    if len(odd) == 1:
        all_of = f"the two times and their difference are {', '.join(si(x, 's') for x in made)} for each of {n:.0f}"
        yield finding(QUESTION, "difference", f"{all_of}, not {odd[0].text}: of what is it?", odd[0], *times)


def pairs(report: Report) -> Iterator[Finding]:
    """Figures of which one follows from another: in another unit, at a rate stated elsewhere, so many of so much."""
    for row in report.lines_of_text:
        yield from _same(row)
        yield from _points(row)
        yield from _partnered(row)
    yield from _relabelled(report)
    yield from _each_stage(report)
    yield from _alike(report)


def _same(row: Row) -> Iterator[Finding]:
    """ "375.2 Gb/s, in other words 469 GB/s"."""
    for a, b in itertools.pairwise(row.quantities):
        between = row.text[a.end : b.start]
        same = a.kind == b.kind and a.kind in ("bandwidth", "bytes", "time") and _SAME.search(between)
        product = re.search(r"[×x*·/+−-] ?$", row.text[: a.start])  # "1000 batches x 261.4 ms = 261.4 s"
        pair = {bool(_BINARY.search(q.text)) for q in (a, b)} == {True, False} and row.text[b.end : b.end + 1] == ")"
        if pair and between.strip() == "(" and a.kind == b.kind and not a.value.meets(b.value, 0.015):
            message = f"{a.text} is {si(a.value.mid, UNIT_OF.get(a.kind, ''))}, not {b.text}: which is it?"
            yield finding(INCONSISTENT if a.kind == "bandwidth" else QUESTION, "conversion", message, b, a)
        elif same and a.exact and b.exact and not product:
            yield from _converted(a, b, INCONSISTENT if "(" not in between else QUESTION)


def _points(row: Row) -> Iterator[Finding]:
    """ "46 % -> 58 %, 12 % more": percentage points as per cent."""
    for m in _RISE.finditer(row.text):
        a, b, c = (printed(m[i]).mid for i in (1, 2, 3))
        at = next((q for q in row.of("percent") if q.start == m.start(3)), None)
        if at and abs(abs(b - a) - c) < 0.06 and abs(abs(b / a - 1) - c / 100) > 0.01:
            message = f"from {m[1]} to {m[2]} % is {100 * abs(b / a - 1):.3g} %, not {at.text}: are points meant?"
            yield finding(QUESTION, "percent", message, at)


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


def _each_stage(report: Report) -> Iterator[Finding]:
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
            kind = of[0].kind if of else ""
            kinds = ("time", "s_per_item") if kind in ("time", "s_per_item") else (kind,)
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
                all_of = f"{m[0]} of {of[0].text} each are {si(made.mid, UNIT_OF.get(first.kind, 's'))}"
                yield finding(QUESTION, "each", f"{all_of}, not {first.text}: what does it count?", first, of[0])


def _alike(report: Report) -> Iterator[Finding]:
    """Lines that give the same two rates ("records/sec (77.5 MB/sec)"), of which one has another quotient."""
    for _, some in itertools.groupby(report.lines_of_text, lambda r: r.block):
        rows = [r for r in some if report.blocks[r.block].kind != "prose"]
        for a, b in (("items_per_s", "bandwidth"), ("items_per_s", "tokens_per_s"), ("tokens_per_s", "bandwidth")):
            held = [(x, y) for r in rows if (x := r.only(a)) and (y := r.only(b)) and product(b, a, -1)]
            if not 3 <= len(held) < 60:
                continue
            each = [y.value / x.value for x, y in held]
            middle = median_high(e.mid for e in each)
            odd = [i for i, e in enumerate(each) if not e.meets(middle, 0.01)]
            if len(odd) == 1 and abs(each[odd[0]].mid / middle - 1) > 0.1:
                x, y = held[odd[0]]
                made = si(x.value.mid * middle, UNIT_OF[b])
                message = f"{x.text} as on all other lines would be {made}, not {y.text}: is it of the same records?"
                yield finding(QUESTION, "proportion", message, y, x)
