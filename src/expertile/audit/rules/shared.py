"""So many things of so much each are so much together: workers, shards, users, runs. It asks."""

import re
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.facts import DIGITS
from expertile.audit.finding import QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import NUMBER, exact, printed
from expertile.audit.quantity import Quantity, quantities
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import on_sheet
from expertile.audit.rules.terms import multiples

_WORDS = DIGITS | {"five": "5", "seven": "7", "nine": "9", "ten": "10", "one": "1"}
_NUMBERS = "|".join(_WORDS)
_COUNT = re.compile(
    rf"(?i)(?<![\w.,-])(\d{{1,3}}(?:,\d{{3}})+|\d+|{_NUMBERS}) (?:[a-z][\w-]* ){{0,2}}?([a-z]{{3,}}s)\b"
)
_EACH_OF = re.compile(r"(?i)\b(?:each|every one) of (?:the|our|these) ")
_PER = re.compile(r"(?i)(?:/ ?|\b(?:per|for each|for every|each|every|and|an?) )([a-z]{3,})")
_TOGETHER = re.compile(
    r"(?i)\b(?:total|together|altogether|in all|overall|combined|aggregate|sum|so|thus|hence|i\.e|that is|or)\b|=|→|\("
)
_KINDS = (
    "time",
    "tokens_per_s",
    "items_per_s",
    "bandwidth",
    "rate",
    "bytes",
    "tokens",
    "power",
    "energy",
    "money",
    "items",
)
_TIMED = re.compile(r"(?i)\b(?:mean|avg|average|per \w+)\W*(?:time|latency)?\W*(?:of|is|was)?\W*$")
_WHOLE = re.compile(
    r"(?i)\b(?:total|elapsed|altogether|took|takes|in all|overall|wall)\W*(?:time)?\W*(?:of|is|was|in)?\W*$"
)
_RUNS = re.compile(
    r"(?i)\b(?:n|iters?|runs?|repeats?|calls|launches|iterations)\b ?[=:] ?(\d+)|"
    r"(\d[\d,]*) (?:iters|runs|calls|launches|iterations)"
)


def _counts(text: str) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for n, noun in _COUNT.findall(text):
        found.setdefault(noun.lower().rstrip("s"), set()).add(float(_WORDS.get(n.lower(), n).replace(",", "")))
    return found


def shared(report: Report) -> Iterator[Finding]:
    """ "With eight workers the loader delivers 5,200 samples/s, or 650 samples/s per worker"."""
    for row in report.lines_of_text:
        for kind in _KINDS:
            held = [q for q in row.of(kind) if q.exact and q.value.mid and not on_sheet(row, q)]
            each = [q for q in map(_of_one, row.of("other")) if q and q.kind == kind]
            if len(held) + len(each) == 2:
                yield from _one(row, sorted([*held, *each], key=lambda q: q.start))
        yield from _repeated(row)
        yield from (*_portion(row), *_bare_each(row), *_streamed(row))


_OF_ONE = re.compile(r"(.*?) ?(?:/|\bper\b) ?(?:core|node|thread|socket|sm|block)$")


def _of_one(q: Quantity) -> Quantity | None:
    """ "25 MB/s per core" as a bandwidth."""
    m = _OF_ONE.fullmatch(q.text)
    found = quantities(m[1], q.line) if m and q.exact else []
    return replace(q, kind=found[0].kind, value=found[0].value) if len(found) == 1 else None


_OF_SOME = re.compile(
    r"\b(?:[Oo]f (?:the |all )?(\d[\d,]*) [a-z]+,? (?:only )?(\d[\d,]*)|"
    r"(\d[\d,]*) (?:out )?of (?:the |all )?(\d[\d,]*))\b(?![.,]\d)"
)


def _portion(row: Row) -> Iterator[Finding]:
    """ "41,000 of 50,000 requests (82 %)"."""
    shares = [q for q in row.of("percent") if q.exact]
    m = _OF_SOME.findall(row.text) if len(shares) == 1 else []
    if len(shares) != 1 or len(m) != 1:
        return
    whole, part = (float(x.replace(",", "")) for x in ((m[0][0], m[0][1]) if m[0][0] else (m[0][3], m[0][2])))
    at = re.search(r"\bof\b", row.text[max(0, shares[0].start - 70) : shares[0].end + 70])
    if 0 < part <= whole and whole > 9 and at:
        made = part / whole
        off = shares[0].value / made
        if not any(shares[0].value.meets(x, 0.02) for x in (made, 1 - made)) and off.meets(1.0, 1.0):
            message = f"{part:.0f} of {whole:.0f} are {100 * made:.3g} %, not {shares[0].text}: is it of these?"
            yield finding(QUESTION, "ratio", message, shares[0])


def _one(row: Row, held: list[Quantity]) -> Iterator[Finding]:
    text = f"{row.before.text if row.before else ''} {row.text}"
    counts, said = _counts(text), []
    for q in held:
        each = [m[1].lower().rstrip("s") for m in _PER.finditer(f"{q.text[-24:]}{row.text[q.end : q.end + 20]}")]
        said.append(next((n for n in each if n in counts), ""))
    all_of = _EACH_OF.search(row.text[: held[0].start])
    if all_of and not any(said):
        noun = next((n for n in counts if row.text.find(n, all_of.end()) > 0), "")
        said = [noun, ""]
    between = row.text[held[0].end : held[1].start] + row.text[held[1].end : held[1].end + 20]
    sure = bool(_TOGETHER.search(between) or all_of)
    if not any(said):  # "eight 80 GB cards (640 GB)", "an epoch takes 4 min, 90 epochs 6 hours"
        first, second = row.text[: held[0].start], row.text[held[0].end : held[1].start]
        direct = re.search(rf"(?i)\b(\d+|{_NUMBERS}) $", first) if re.match(r" [a-z]+s\b", second) else None
        one_of = re.search(r"(?i)\b(?:an?|one|each|every) (\w+)\b[^.;]*$", first)
        many = re.search(rf"(?i)\b(\d[\d,]*|{_NUMBERS}) (?:of them|(\w+?)s?)\b[^.;]*$", second) if one_of else None
        named = many and (not many[2] or many[2].lower() == one_of[1].lower())  # type: ignore[index]
        n = direct[1] if direct and sure else many[1] if many and named else ""
        said, sure = (["this", ""], True) if n else (said, sure)
        counts = {"this": {float(_WORDS.get(n.lower(), n).replace(",", ""))}} if n else counts
    if bool(said[0]) == bool(said[1]) or not sure:
        return
    one, whole = held if said[0] else held[::-1]
    ns = counts[said[0] or said[1]]
    if len(ns) == 1 and not any((whole.plain / one.plain).meets(n, 0.06) for n in ns):
        (n,) = ns
        made = si((one.value * n).mid, UNIT_OF.get(one.kind, ""))
        if (whole.plain / one.plain).meets(exact(n), 4.0):
            message = f"{n:.0f} × {one.text} is {made}, not {whole.text}: of how many is it?"
            yield finding(QUESTION, "product", message, one, whole)


def _repeated(row: Row) -> Iterator[Finding]:
    """ "100 iters, total 2.31 s, mean 23.1 ms"."""
    times = [q for q in row.of("time", "s_per_item") if q.exact and q.value.mid]
    runs = [float((a or b).replace(",", "")) for a, b in _RUNS.findall(row.text)] if len(times) == 2 else []
    if len(times) != 2 or len(runs) != 1 or runs[0] < 2:
        return
    mean = [q for q in times if _TIMED.search(q.label) or q.kind == "s_per_item"]
    whole = [
        q for q in times if _WHOLE.search(q.label) or re.match(r"\W*(?:total|in total|elapsed)", row.text[q.end :])
    ]
    if len(mean) == len(whole) == 1 and mean[0] is not whole[0]:
        made = whole[0].value / runs[0]
        if not mean[0].value.meets(made, 0.04) and mean[0].value.meets(made, 4.0):
            message = f"{whole[0].text} over {runs[0]:.0f} runs is {si(made.mid, 's')} each, not {mean[0].text}"
            yield finding(QUESTION, "product", f"{message}: is it of the same runs?", mean[0], whole[0])


_BARE_EACH = re.compile(
    r"(?i)\b(?:or|i\.e\.|that is|so|=|,) (\d[\d,]*(?:\.\d+)?) (?:per|for each|for every|a) ([a-z]{3,})\b"
)


def _bare_each(row: Row) -> Iterator[Finding]:
    """ "On 8 GPUs: 1,170 documents per second, or 146 per GPU"."""
    for m in _BARE_EACH.finditer(row.text) if row.of(*_KINDS[1:5]) else ():
        before = [q for q in row.of(*_KINDS[1:5]) if q.exact and 0 <= m.start() - q.end < 12]
        ns = _counts(row.text).get(m[2].lower().rstrip("s"), set())
        ns |= set(row.facts.of("gpus")) if re.match(r"(?i)gpu|card", m[2]) else set()
        shown = re.match(NUMBER, before[-1].text) if before else None
        each = printed(m[1]) * (before[-1].value.mid / printed(shown[0]).mid) if shown else None
        if each and len(ns) == 1 and not (before[-1].plain / each).meets(n := next(iter(ns)), 0.05):
            message = (
                f"{before[-1].text} over {n:.0f} is {(before[-1].value / n).mid:.4g}, not {m[1]}: of how many is it?"
            )
            yield finding(QUESTION, "product", message, before[-1])


def _streamed(row: Row) -> Iterator[Finding]:
    """ "14,042 questions; at 31 questions per second it runs 12 minutes"."""
    times = [t for t in row.of("time") if t.exact and t.value.mid]
    rates = [q for q in row.of("items_per_s") if q.exact and q.value.mid]
    noun = re.search(r"([a-z]{3,}s) ?(?:/|per) ?s", rates[0].text) if len(rates) == len(times) == 1 else None
    counts = re.findall(rf"({NUMBER})( million| M|k|M)? {noun[1]}\b(?! ?(?:/|per))", row.text) if noun else []
    if len(counts) == 1 and not row.of("items"):
        scale = {"": 1.0, "k": 1e3}.get(counts[0][1].strip(), 1e6)
        made = printed(counts[0][0]) * scale / rates[0].value
        near = any(times[0].value.meets(made * f, 0.05) for f in multiples(row))
        if not near and times[0].value.meets(made, 9.0):
            message = f"{counts[0][0]}{counts[0][1]} at {rates[0].text} take {si(made.mid, 's')}, not {times[0].text}"
            yield finding(QUESTION, "throughput", f"{message}: is this the same run?", times[0], rates[0])
