"""Sentences and lines against the figures beside them: reductions, gains on top of each other, what was saved, what is
left of a count, totals, parts of a range, so much per thing."""

import itertools
import math
import re
from collections.abc import Iterator

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.records import series, sheets
from expertile.audit.report import Report, Row
from expertile.audit.units import unit_of_name

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
_SAVED = re.compile(
    r"(?i)\b(?:gain(?:s|ed)?|sav(?:e|es|ed|ing)|los(?:e|es|t|ing)|shav(?:e|es|ed) off|difference of|differ by)"
    r"(?: of| us| about| another| roughly)?\W*$"
)
_MADE = re.compile(
    r"(?i)(?<![\d.,])(\d[\d,]*) ([a-z]{4,}s) (?:were |was )?(?:generated|enumerated|in the search space|"
    r"in total|found|created)\b"
)
_GONE = re.compile(
    r"(?i)(?<![\d.,])(\d[\d,]*) (?:[a-z]+ )?(?:were |was )?(?:rejected|pruned|failed|dropped|skipped|removed|"
    r"filtered|discarded|invalid|timed out)\b"
)
_LEFT = re.compile(
    r"(?i)\b(?:timed|measured|benchmarked|kept|remaining:?|left:?|ran|evaluated) (\d[\d,]*) ([a-z]{4,}s)\b"
)
_INSIDE = re.compile(r"(?i)\b(?:inside|within|part) (?:of )?(?:the )?[\"'`]?(?P<name>[\w:.-]{4,})")
_OF_COUNT = re.compile(
    r"(?i)(?:(?<![\d.,])(?P<whole>\d[\d,]*) [a-z]+: (?P<part>\d[\d,]*) [a-z]+,? (?:i\.e\.|that is|or|which is|"
    r"=) (?:about )?)$"
)
_COUNT = re.compile(
    r"(?i)(?<![\d.,])(\d{1,3}(?:,\d{3})+|\d{2,}) (?:[a-z]+ )?(kernels|launches|calls|iterations|steps|requests|"
    r"batches|tokens)\b"
)


def sentences(report: Report) -> Iterator[Finding]:
    for row in report.lines_of_text:
        yield from _reduced(row)
        yield from _less(row)
        yield from _share_of(row)
    yield from _stacked(report)
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
    if not _STACKED.search(report.text):
        return
    for _, rows in itertools.groupby(report.lines_of_text, lambda r: report.sections[r.block]):
        held = [q for row in rows for q in ((row, q) for q in row.of("ratio") if q.exact and q.value.mid)]
        last = next((i for i, (row, q) in enumerate(held) if i > 2 and _ALL.search(row.text[: q.start])), 0)
        parts = [q for _, q in held[:last]]
        if 3 <= len(parts) <= 9:
            q, made = held[last][1], math.prod(p.value.mid for p in parts)
            some = [
                math.prod(p.value.mid for p in c)
                for k in range(2, len(parts))
                for c in itertools.combinations(parts, k)
            ]
            if not any(q.value.meets(x, 0.025) for x in (made, *some)) and 0.3 < q.value.mid / made < 3:
                text = " × ".join(p.text for p in parts)
                yield finding(
                    QUESTION, "product", f"{text} is {made:.3g}x, not {q.text}: of which steps is it?", q, *parts
                )


def _saved(report: Report) -> Iterator[Finding]:
    """ "6.07 ms, so we gain 2.48 ms" of the time before: it asks."""
    lines = report.lines_of_text
    for i, row in enumerate(lines):
        for q in (
            q
            for q in row.of("time", "s_per_item", "bytes", "money", "energy")
            if q.exact and _SAVED.search(row.text[max(0, q.start - 40) : q.start])
        ):
            kinds = ("time", "s_per_item") if q.kind in ("time", "s_per_item") else (q.kind,)
            own = [x for x in row.of(*kinds) if x.end <= q.start and x.exact]
            near = [x for r in lines[max(0, i - 6) : i] if row.line - r.line < 9 for x in r.of(*kinds) if x.exact]
            if (
                len(own) != 1
                or not 1 <= len(near) <= 3
                or re.search(r"(?i)\b(?:per|each|every)\b", row.text[: q.start])
            ):
                continue
            pairs = itertools.combinations([*near, *own], 2)
            if not any(_difference(q, x, y) for x, y in pairs) and q.value.mid < max(x.value.mid for x in near):
                x = near[-1]
                made = si(abs(x.value.mid - own[0].value.mid), UNIT_OF.get(q.kind, ""))
                yield finding(
                    QUESTION,
                    "difference",
                    f"{x.text} less {own[0].text} is {made}, not {q.text}: of which two is it?",
                    q,
                    x,
                    own[0],
                )


def _less(row: Row) -> Iterator[Finding]:
    """ "120 ms and 95 ms, i.e. 35 ms less": of a sentence's only three figures."""
    for kind in ("time", "bytes", "power", "energy"):
        held = [q for q in row.of(kind) if q.exact and q.value.mid]
        q = held[-1] if len(held) == 3 and len(row.of(kind)) == 3 else None
        said = q and re.match(r"\W*(?:less|more|faster|slower|longer|shorter)\b(?! than)", row.text[q.end :])
        hence = q and re.search(r"(?i)\b(?:i\.e\.|that is|which is|so)\W*$", row.text[held[1].end : q.start])
        if q and said and hence and not _difference(q, held[0], held[1]):
            made = si(abs(held[0].value.mid - held[1].value.mid), UNIT_OF.get(kind, ""))
            message = f"{held[0].text} and {held[1].text} differ by {made}, not {q.text}"
            yield finding(INCONSISTENT, "difference", message, q, held[0], held[1])


def _share_of(row: Row) -> Iterator[Finding]:
    """ "500 problems: 431 correct, i.e. 88.2 %": of a sentence's only two counts it asks."""
    shares, m = (
        [q for q in row.of("percent") if q.exact],
        _OF_COUNT.search(row.text[: next((q.start for q in row.of("percent")), 0)]),
    )
    if m and len(shares) == 1 and m.end() == shares[0].start:
        whole, part = (float(m[g].replace(",", "")) for g in ("whole", "part"))
        forms = (part / whole, 1 - part / whole) if part < whole else ()
        if forms and not any(shares[0].value.meets(x, 0.006) for x in forms):
            message = f"{m['part']} of {m['whole']} are {100 * forms[0]:.3g} %, not {shares[0].text}: of what is it?"
            yield finding(QUESTION, "ratio", message, shares[0])


def _difference(q: Quantity, x: Quantity, y: Quantity) -> bool:
    made, off = abs(x.value.mid - y.value.mid), x.value.hi - x.value.lo + y.value.hi - y.value.lo
    return abs(q.value.mid - made) <= q.value.hi - q.value.lo + off + 0.02 * made


def _remaining(report: Report) -> Iterator[Finding]:
    """So many generated, so many rejected and failed, and those that were timed."""
    made, gone = list[tuple[int, float, str]](), list[tuple[int, float]]()
    for number, line in enumerate(report.lines, 1):
        if m := _MADE.search(line):
            made, gone = [(number, float(m[1].replace(",", "")), m[2].lower())], []
        elif made and (m := _GONE.search(line)):
            gone.append((number, float(m[1].replace(",", ""))))
        elif made and gone and (m := _LEFT.search(line)) and m[2].lower() == made[0][2]:
            n, (at, all_of, noun) = float(m[1].replace(",", "")), made[0]
            some = [sum(x for _, x in c) for k in range(len(gone) + 1) for c in itertools.combinations(gone, k)]
            if len(gone) < 6 and not any(n == all_of - x for x in some):
                text = " − ".join(f"{x:.0f}" for x in (all_of, *(x for _, x in gone)))
                message = f"{text} is {all_of - sum(x for _, x in gone):.0f} {noun}, not {m[1]}: were others left out?"
                yield Finding(QUESTION, "total", number, m[1], message, (at, *(x for x, _ in gone)))
            made = []


def _inside(report: Report) -> Iterator[Finding]:
    """A part of a range that is longer than the range."""
    tables = sheets(report)
    for s in series(report):
        m, unit = _INSIDE.search(s.name), unit_of_name(s.name)
        rows = [
            f
            for t in tables
            for r, key in enumerate(t.keys)
            if m and key == m["name"]
            for f in t.rows[r].values()
            if f.kind == "time"
        ]
        if (
            len(rows) != 1
            or not unit
            or unit.kind != "time"
            or s.table >= 0
            or any(f.kind != "number" for f in s.figures)
        ):
            continue
        for f in s.figures:
            if (f.value - f.off) * unit.low > rows[0].value + rows[0].off:
                message = f"{f.name}, {f.text}, is longer than {s.name.strip()[:40]}: {rows[0].text}"
                serial = re.search(r"single stream|one stream|serial|sequential", report.text)
                yield Finding(
                    INCONSISTENT if serial else QUESTION, "order", f.line, f.text, message, (rows[0].line, f.line)
                )


def _each(report: Report, rows: list[Row]) -> Iterator[Finding]:
    """Two times of a list and what they are for each of the things counted before it: it asks."""
    times = [q for r in rows for q in r.of("time") if q.exact]
    each = [(r, q) for r in rows for q in r.of("s_per_item") if q.exact]
    counts = {
        float(m[1].replace(",", ""))
        for r in report.lines_of_text
        if 0 <= rows[0].block - r.block < 2
        for m in _COUNT.finditer(r.text)
    }
    if len(times) != 2 or len(each) < 2 or len(counts) != 1:
        return
    (n,) = counts
    made = [times[0].value.mid / n, times[1].value.mid / n, abs(times[0].value.mid - times[1].value.mid) / n]
    odd = [q for _, q in each if not any(q.value.meets(x, 0.04) for x in made)]
    if len(odd) == 1 and len(each) - 1 >= 1:
        text = ", ".join(si(x, "s") for x in made)
        yield finding(
            QUESTION,
            "difference",
            f"the two times and their difference are {text} for each of {n:.0f}, not {odd[0].text}: of what is it?",
            odd[0],
            *times,
        )
