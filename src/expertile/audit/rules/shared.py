"""So many things of so much each are so much together: GPUs, users, shards, layers, runs. It asks."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.facts import DIGITS
from expertile.audit.finding import QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import on_sheet

_WORDS = DIGITS | {"five": "5", "seven": "7", "nine": "9", "ten": "10", "one": "1"}
_N = rf"(?<![\w.,-])(?P<n>\d{{1,3}}(?:,\d{{3}})+|\d+|{'|'.join(_WORDS)})"
# "32 concurrent users", "the 32-GPU job", "the eight of them"
_COUNT = re.compile(
    rf"(?i){_N}(?:-(?P<one>[a-z]{{3,}})| (?:(?:[a-z][\w-]* ){{0,2}}?(?P<noun>[a-z]{{3,}}s)|of them))\b(?! ?/)"
)
_EACH = re.compile(
    r"(?i)(?:/ ?|\b(?:per[ -]|(?:for )?(?:each|every) |(?:each|every one) of (?:the|our|these) |and |an? |one ))"
    r"(?:\d+ )?([a-z]{3,}|[AHBLV]\d{2,3})|\beach\b"
)
_MEAN = re.compile(r"(?i)\b(?:mean|avg|average)\W*(?:time|latency)?\W*(?:of|is|was)?\W*$")
_TOGETHER = re.compile(
    r"(?i)\b(?:total|together|altogether|in all|overall|combined|aggregate|sum|so|thus|hence|i\.e|that is|or|which|"
    r"across|evenly|mean\w*|giv\w+|delivers?|reach\w*|elapsed)\b|=|→|\("
)
_SERVED = ("user", "stream", "request", "sequence", "client", "session", "slot")
_KINDS = ("time", "tokens_per_s", "items_per_s", "bandwidth", "rate", "bytes", "tokens", "power", "energy", "money")


def shared(report: Report) -> Iterator[Finding]:
    """ "With eight workers the loader delivers 5,200 samples/s, or 650 samples/s per worker"."""
    for row in report.lines_of_text:
        for kind in _KINDS if any(c.isdigit() for c in row.text) else ():
            of = (kind, "s_per_item") if kind == "time" else (kind,)
            held = [q for q in row.of(*of) if q.exact and q.value.mid and not on_sheet(row, q)]
            for a, b in itertools.pairwise(sorted(held, key=lambda q: q.start)) if len(held) < 4 else ():
                yield from _pair(row, a, b)


def _name(noun: str | None) -> str:
    """A counted thing in the singular; every GPU by that name."""
    gpu = re.fullmatch(r"(?i)gpus?|cards?|devices?|[ahblv]\d{2,3}", noun or "")
    return "gpu" if gpu else (noun or "").lower().rstrip("s")


def _counts(row: Row) -> dict[str, set[float]]:
    """How many of what a sentence and the one before count."""
    found: dict[str, set[float]] = {}
    for r in filter(None, (row.before, row)):
        for m in _COUNT.finditer(r.text):
            n = float(_WORDS.get(m["n"].lower(), m["n"]).replace(",", ""))
            found.setdefault(_name(m["noun"] or m["one"]), set()).add(n)
        found.setdefault("gpu", set()).update(r.facts.of("gpus"))
        for noun in _SERVED:
            found.setdefault(noun, set()).update((*r.facts.of("batch"), *r.facts.of("concurrency")))
    return {noun: ns - {1.0} for noun, ns in found.items() if ns - {1.0}}


def _noun(row: Row, q: Quantity, past: int, counts: dict[str, set[float]]) -> str:
    """Of which counted thing a figure is said to be one's; "" where it is not."""
    before, behind = row.text[past : q.start], row.text[q.end : q.end + 20]
    before = re.split(r"[,;:(=]|\b(?:so|or|hence|and)\b", before, maxsplit=1)[-1] if past else before
    for m in (*_EACH.finditer(f"{q.text[-24:]}{re.split(r'[;,(]', behind)[0]}"), *_EACH.finditer(before)):
        if _name(m[1]) in counts or (m[1] and "" in counts):
            return _name(m[1])
        # "24 workers each doing 85 images/s", "8 GPUs with 80 GB each"
        told = [*_COUNT.finditer(row.text[: q.start])] if not m[1] or m[1].endswith("ing") else []
        if told:
            return _name(told[-1]["noun"] or told[-1]["one"])
    runs = {"iter", "run", "call", "launche", "iteration", "repeat"} & counts.keys()
    return min(runs) if runs and (_MEAN.search(q.label) or q.kind == "s_per_item") else "gpu" * q.per_device


def _pair(row: Row, a: Quantity, b: Quantity) -> Iterator[Finding]:
    counts, earlier = _counts(row), max((q.end for q in row.quantities if q.end <= a.start), default=0)
    said = (_noun(row, a, earlier, counts), _noun(row, b, a.end, counts))
    if bool(said[0]) == bool(said[1]):
        return
    one, whole, noun = (a, b, said[0]) if said[0] else (b, a, said[1])
    between = row.text[a.end : b.start]
    them = _COUNT.search(between) if whole is b else None  # "90 epochs 9.2 hours", "the eight of them draw 6.4 kW"
    direct = them is not None and _name(them["noun"] or them["one"]) in (noun, "")
    if not direct and not _TOGETHER.search(between + row.text[b.end : b.end + 20]):
        return
    times = whole.plain / one.plain
    ns = counts.get("" if direct and "" in counts else noun) or {*row.report.everything.of("gpus")} - {1.0}
    if ns and times.lo > 1 and not any(times.meets(n, 0.05) for n in ns):
        n = min(ns, key=lambda n: abs(times.mid / n - 1))
        made = si((one.value * n).mid, UNIT_OF.get(one.kind, ""))
        message = f"{n:.0f} × {one.text} is {made}, not {whole.text}: of how many is it?"
        if (times / n).meets(1.0, 3.0):
            yield finding(QUESTION, "product", message, one, whole)
