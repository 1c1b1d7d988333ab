"""What sentences say of columns and lines near by: bounds that a row passes, a cell's digits in another unit, a gain
in the rate taken for one in the time, "times faster than" of named runs, counts that add up, bytes of each item."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, Finding, finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.hardware import memory_of
from expertile.audit.rules.told import APART, words_of
from expertile.audit.units import RATES, TIMES

_BOUND = re.compile(
    r"(?i)\b(?:(?P<low>(?:stays?|remains?|is|are|keeps?|holds?|never (?:drops?|falls?|goes)|"
    r"(?:does|do) not (?:drop|fall))"
    r" (?:always |well )?(?:(?P<not>below|under)|above|over|at least|at or above|no (?:less|lower) than))|"
    r"(?P<high>(?:stays?|remains?|is|are|keeps?|never (?:exceeds?|goes|rises)|(?:does|do) not (?:exceed|rise))"
    r"(?: (?:always |well )?(?:(?:below|under|at most|within|no (?:more|higher) than)|(?P<over>above|over)))?))\W+$"
)
_NEVER = re.compile(r"(?i)\b(?:never|not)\b")
_SOME = re.compile(r"(?i)\b(?:except|apart from|other than|but for|most|beyond|until|when|if|where|small|large|only)\b")
_UP_TO = re.compile(r"(?i)(?:up to|all the way to|to|through|until|at|from) (?:\w+ ?= ?)?(\d[\d,]*)\b")
_OFF_TIME = re.compile(
    r"(?i)^\W*(?:off|less|shorter|reduction (?:in|of)|lower)\b[^.;]*\b(?:time|latency|hours|duration)\b"
)
_THAN = re.compile(r"(?i)^\W*(?:± ?[\d.]+ )?(?:times |x )?(?:faster|slower) than (?P<name>\S.*?)\s*$")
_COUNTS = (
    r"(?<![\w.])(\d{1,3}(?:,\d{3})+|\d+) (passed|failed|skipped|errors?|xfailed|xpassed|"
    r"succeeded|completed|rejected|timed out|cancelled)\b"
)
_ALL = re.compile(r"(?i)\b(?:collected|submitted|sent|total(?: of)?|ran|issued|scheduled)\W+(\d[\d,]*)\b")
_THING = r"(?:\w+ )?(?:update|point|cell|key|element|item|site|lookup)"
_ITEM_BYTES = re.compile(
    rf"(?i)\b(\d+)[ -]?(?:bytes|B)\b[^.;\d]{{0,60}}?\b(?:per|for (?:each|every)|each|an?) {_THING}\b|"
    rf"\b(?:each|every|an?) {_THING} (?:reads|moves|needs|touches|takes) (?:at least )?(\d+) ?(?:bytes|B)\b"
)
_CACHED = re.compile(
    r"(?i)(?<!no )temporal|(?<!no )(?<!without )compression|l2.resident|on.chip|"
    r"cache.resident|in.cache|fits? in (?:the )?l2"
)


def spoken(report: Report) -> Iterator[Finding]:
    for row in report.lines_of_text:
        near = [g for g in report.tables if len(g.body) > 1 and min(abs(r.line - row.line) for r in g.rows) < 30]
        if near and not APART.search(row.text):
            yield from _bounded(row, near)
            yield from _in_unit(row, near)
            yield from _off_time(row, near)
        yield from _faster_than(row)
    yield from _counts(report)
    yield from _item_bytes(report)


def _bounded(row: Row, near: list[Grid]) -> Iterator[Finding]:
    """ "Efficiency stays above 85 % up to 512 ranks" beside a row of 71 %."""
    for q in row.quantities:
        m = _BOUND.search(row.text[: q.start])
        if not m or _SOME.search(row.text.replace(m[0], "")) or q.text[0] in "+-−":
            continue
        down = (m["low"] and not m["not"]) or (m["not"] and _NEVER.search(m["low"]))
        down = bool(down) and not (m["high"] and m["over"])
        down = not down if m["high"] and m["over"] and _NEVER.search(m["high"]) else down
        if m["high"] and not m["over"] and re.fullmatch(r"(?i)(?:is|are|stays?|remains?|keeps?)\W+", m["high"] + " "):
            continue  # "is 85 %"
        if re.match(r"(?i)\W*(?:for|at|on|in|with) (?:[a-z]+ )?\d", row.text[q.end :]):
            continue  # of some
        names = {*words_of(row.text[: m.start()])}
        for g in near:
            heads = [c for c in g.columns(q.kind) if {w for w in words_of(g.header[c]) if len(w) > 3} & names]
            to = _UP_TO.search(row.text[q.end :])
            last = float(to[1].replace(",", "")) if to else float("inf")
            for c in heads if len(heads) == 1 else ():
                for r in g.body:
                    f = r.figure(c)
                    first = r.figure(0)
                    if f and first and to and first.value.mid > last:
                        continue
                    if f and (f.value.hi < 0.999 * q.value.mid if down else f.value.lo > 1.001 * q.value.mid):
                        bound = "at least" if down else "at most"
                        message = f"line {f.line} has {f.text}, {bound} {q.text} is said: of which rows is it?"
                        yield finding(QUESTION, "headline", message, q, f)
                        break


def _in_unit(row: Row, near: list[Grid]) -> Iterator[Finding]:
    """ "338 ms" of a cell with 338.0 µs."""
    for q in row.of(*TIMES, "bytes", *RATES):
        cells = [x for g in near for r in g.rows for x in r.of(q.kind) if x.value.mid and x.exact]
        off = [(x, max(q.value.mid / x.value.mid, x.value.mid / q.value.mid)) for x in cells if q.value.mid]
        same = any(x.value.meets(q.value, 0.02) for x in cells)
        slips = [
            x for x, o in off if any(abs(o / s - 1) < 0.0005 for s in (1e3, 1e6)) and len(re.sub(r"\D", "", x.text)) > 2
        ]
        keys = {*re.findall(r"\d[\d^,.]*", row.text)} - {q.text.split(" ")[0]}
        of = [
            x
            for x in slips
            for g in near
            for r in g.rows
            if x in r.quantities and {*r.text.replace(";", " ").split()} & keys
        ]
        if slips and not same and q.exact and len({x.line for x in slips}) == 1 and (of or len(cells) < 9):
            yield finding(
                QUESTION, "unit", f"line {slips[0].line} has {slips[0].text}, not {q.text}: in which unit?", q, slips[0]
            )


def _off_time(row: Row, near: list[Grid]) -> Iterator[Finding]:
    """ "59 % off the training time" of 1.59 times the rate."""
    said = " ".join(words_of(row.text))
    for p in (p for p in row.of("percent") if p.exact and _OFF_TIME.match(row.text[p.end :])):
        for g in near:
            named = [
                r
                for r in g.rows
                if (w := words_of(r.label or r.text)[:1]) and re.search(rf"\b{re.escape(w[0])}\b", said)
            ]
            if len(named) != 2:
                continue
            pairs = [(a, b) for k in TIMES for a, b in [(named[0].only(k), named[1].only(k))] if a and b]
            shares = [1 - min(a.value.mid, b.value.mid) / max(a.value.mid, b.value.mid) for a, b in pairs]
            if pairs and not any(p.value.meets(s, 0.02) for s in shares) and not _other_time(p, g):
                a, b = pairs[0]
                apart = f"{a.text} and {b.text} are {100 * shares[0]:.3g} % apart"
                message = f"{apart}, not {p.text}: is it the gain in the rate?"
                yield finding(QUESTION, "ratio", message, p, a, b)


def _other_time(p: Quantity, g: Grid) -> bool:
    """Whether two other rows make it."""
    times = [[t for r in g.rows if (t := r.only(k))] for k in TIMES]
    pairs = itertools.chain(*(itertools.combinations(some, 2) for some in times))
    return any(p.value.meets(1 - min(a.value.mid, b.value.mid) / max(a.value.mid, b.value.mid), 0.01) for a, b in pairs)


def _faster_than(row: Row) -> Iterator[Finding]:
    """hyperfine's summary: "3.17 times faster than ./scan" of the means of the runs named."""
    q = row.only("ratio") or next((x for x in row.quantities[:1] if x.kind == "number"), None)
    m = _THAN.match(row.text[q.end :]) if q else _THAN.match(re.sub(r"^\s*[\d.]+", "", row.text))
    text = re.match(r"\s*(\d+\.\d+)", row.text)
    lines = row.report.lines
    first = next(
        (n for n in range(row.line - 1, max(0, row.line - 9), -1) if lines[n - 1].rstrip().endswith(" ran")), 0
    )
    if not m or not text or not first:
        return
    base, other = (_timed(row.report, name, first) for name in (lines[first - 1].strip()[:-4], m["name"]))
    if base and other:
        made = max(base.value.mid, other.value.mid) / min(base.value.mid, other.value.mid)
        if abs(float(text[1]) / made - 1) > 0.03:
            message = f"{other.text} / {base.text} is {made:.3g}, not {text[1]}: is it of these two?"
            yield Finding(QUESTION, "ratio", row.line, text[1], message, (row.line, base.line, other.line))


def _timed(report: Report, name: str, before: int) -> Quantity | None:
    at = [n for n in range(1, before) if report.lines[n - 1].rstrip().endswith(name.strip())]
    held = [q for r in report.rows for q in r.of("time") if at and at[0] < q.line <= at[0] + 2 and r.kind == "line"]
    return held[0] if held and len(at) == 1 else None


def _counts(report: Report) -> Iterator[Finding]:
    """Tests or requests that passed, failed and were skipped, and how many there are in all."""
    whole: tuple[int, float] | None = None
    for number, line in enumerate(report.lines, 1):
        parts = re.findall(rf"(?i){_COUNTS}", line)
        if (m := _ALL.search(line)) and not whole:
            whole = number, float(m[1].replace(",", ""))
            whole = None if re.search(r"(?i)deselected|/ \d+", line) else whole
        if len(parts) > 1 and whole and len({p[1] for p in parts}) == len(parts) and number - whole[0] < 60:
            total = sum(float(n.replace(",", "")) for n, _ in parts)
            if total != whole[1] and 0.3 < total / whole[1] < 3 and not re.search(r"(?i)deselected|rerun|warn", line):
                text = " + ".join(n for n, _ in parts)
                message = f"{text} is {total:,.0f}, not {whole[1]:,.0f}: are there others?"
                yield Finding(QUESTION, "total", number, parts[0][0], message, (number, whole[0]))
            whole = None


def _item_bytes(report: Report) -> Iterator[Finding]:
    """ "16 bytes for each update" at so many updates a second: more than the memory carries."""
    said = {(float(m[1] or m[2]), r.line) for r in report.lines_of_text if (m := _ITEM_BYTES.search(r.text))}
    if len({n for n, _ in said}) != 1 or _CACHED.search(re.sub(r"(?i)\bno\b[^.;]*", "", report.text)):
        return
    (n, at), *_ = said
    for row in report.all_rows:
        q = row.only("items_per_s") if row.devices else None
        most = memory_of(row) * max(report.everything.of("gpus") or (1.0,)) if q else 0.0
        if q and q.noun in ("", "other", "element") and 1.05 * most < q.value.lo * n < 40 * most:
            moved = si(q.value.mid * n, "B/s")
            message = f"{q.text} × {n:.0f} bytes are {moved}, more than the memory carries"
            yield finding(QUESTION, "traffic", f"{message}, {si(most, 'B/s')}: did a cache hold it?", q, lines=(at,))
