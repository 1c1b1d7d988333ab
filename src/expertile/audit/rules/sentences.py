"""Sentences and lines against the figures beside them: reductions, what is left of a count, another unit, a
rate that the report states elsewhere."""

import itertools
import math
import re
from collections.abc import Iterator

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import NUMBER, Interval, printed
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row

_N = r"(?P<n>\d{3,4}(?:\.\d+)?) ?(?:%|percent)"
_REDUCED = re.compile(
    rf"(?i)\b(?:reduc(?:e[sd]?|ing|tion)|lower(?:s|ed)|decreas\w+|shr[aiu]nk\w*|cuts?|dropp?\w*|fell|falls|smaller|less)\b"
    rf"(?: [\w-]+){{0,5}}? (?:by|of) (?:about |~)?{_N}|"
    rf"(?<![-–\d.])\b{_N.replace('<n>', '<m>')} (?:[a-z]+ )?(?:reduction|decrease|less|fewer|smaller|"
    rf"shorter)\b(?! (?:likely|than \d))"
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


def sentences(report: Report) -> Iterator[Finding]:
    """Reductions beyond all of it, and what is left of a count."""
    for row in report.lines_of_text:
        yield from _reduced(row)
    yield from _remaining(report)


def _reduced(row: Row) -> Iterator[Finding]:
    """Nothing falls by more than all of it."""
    for m in _REDUCED.finditer(row.text):
        q = next((q for q in row.of("percent") if m.start() <= q.start < m.end()), None)
        said = row.text[max(0, m.start() - 30) : m.end()]
        if q and q.value.lo > 1.001 and not re.search(r"(?i)\b(?:not?|never|would|speed\w*)\b|n't|cannot", said):
            yield finding(IMPOSSIBLE, "ratio", f"nothing is reduced by {q.text}, more than all of it", q)


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


def pairs(report: Report) -> Iterator[Finding]:
    """Figures of which one follows from another: in another unit, at a rate stated elsewhere."""
    for row in report.lines_of_text:
        yield from _same(row)
        yield from _points(row)
        yield from _partnered(row)


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


def _points(row: Row) -> Iterator[Finding]:
    """ "46 % -> 58 %, 12 % more": percentage points as per cent."""
    for m in _RISE.finditer(row.text):
        a, b, c = (printed(m[i]).mid for i in (1, 2, 3))
        at = next((q for q in row.of("percent") if q.start == m.start(3)), None)
        if at and abs(abs(b - a) - c) < 0.06 and abs(abs(b / a - 1) - c / 100) > 0.01:
            message = f"from {m[1]} to {m[2]} % is {100 * abs(b / a - 1):.3g} %, not {at.text}: are points meant?"
            yield finding(QUESTION, "percent", message, at)


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
