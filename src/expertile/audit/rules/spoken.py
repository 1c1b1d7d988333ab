"""What the text says of a whole table: its mean, its best row, its range; it asks where no column has it so."""

import math
import re
import statistics
from collections.abc import Callable, Iterator

from expertile.audit.finding import QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.retold import near_grids
from expertile.audit.rules.told import APART

_Of = Callable[[list[float]], float]


def _geomean(values: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


_MEANS: tuple[_Of, ...] = (statistics.mean, statistics.median, _geomean, statistics.harmonic_mean)
# What is said before a figure, and what it may be.
_SAID: tuple[tuple[str, tuple[_Of, ...]], ...] = (
    (r"geo(?:metric|\.)?[- ]?mean", (_geomean,)),
    (r"\b(?:mean|average|avg)\b", _MEANS),
    (r"\bmedian\b", (statistics.median,)),
)
_LEAST = re.compile(r"(?i)\b(?:min(?:imum)?|lowest|smallest|fastest|best|quickest|least)\b")
_MOST = re.compile(r"(?i)\b(?:max(?:imum)?|highest|largest|fastest|best|peaks? at|most)\b")
_LAST, _FIRST = re.compile(r"(?i)\b(?:slowest|worst)\b"), re.compile(r"(?i)\b(?:slowest|worst|min(?:imum)?|lowest)\b")
_ANY = re.compile(
    r"(?i)mean|average|avg|median|whole|total|together|in all|sum\b|adds? up|end[- ]to|best|worst|most|least|peaks? at|"
    r"fast|slow|quick|min|max|(?:low|high|small|larg)est"
)
_TIMES = ("time", "s_per_token", "s_per_item")
_RATES = ("rate", "bandwidth", "tokens_per_s", "items_per_s", "ratio")


def spoken(report: Report) -> Iterator[Finding]:
    """Every figure of the text that is called a mean, or the best or worst, of the rows of a table near by."""
    for row in (r for r in report.lines_of_text if r.quantities and _ANY.search(r.text)):
        grids = [g for g in near_grids(report, row) if len(g.body) > 2]
        for q in row.quantities if grids and not APART.search(row.text) else ():
            if q.exact and q.value.mid and q.line not in {r.line for g in grids for r in g.rows}:
                yield from _summary(row, q, grids)
                yield from _extreme(row, q, grids)


def _columns(q: Quantity, grids: list[Grid]) -> list[tuple[Grid, list[Quantity]]]:
    found = []
    for g in grids:
        columns = ([x for r in g.body if (x := r.figure(c, q.kind))] for c in g.columns(q.kind))
        found += [(g, held) for held in columns if len(held) > 2]
    return found


_OVER = r"(?i)\b(?:over|across|all|geo\w*|on average|of the (?:\w+ )?\w+s)\b"


_WHOLE = re.compile(r"(?i)\b(?:whole|total|in all|(?:al)?together|end[- ]to[- ]end|adds? up|sum)\b")


def _summary(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    """What is called the mean of a column, or the total of the one column of a table right above."""
    said = (ways for form, ways in _SAID if re.search(f"(?i){form}[^.;]*$", q.label[-40:]))
    ways = next(said, ()) if re.search(_OVER, row.text) else ()
    words = f"{q.label[-40:]}|{row.text[q.end : q.end + 16]}"
    total = not ways and q.kind in ("time", "bytes", "money", "energy") and bool(_WHOLE.search(words))
    if total:
        above = (g for g in grids if g.drawn and 0 < row.line - g.rows[-1].line < 5)
        grids, ways = [g for g in above if not any(r.summary for r in g.rows)], (sum,)
    columns = _columns(q, grids) if ways else []
    if not 0 < len(columns) < 3 - total or (total and len(columns[0][1]) != len(columns[0][0].rows)):
        return
    made = [(of([x.plain.mid for x in held]), held) for _, held in columns for of in ways]
    open_ = max(sum(x.plain.hi - x.plain.lo for x in held) / sum(x.plain.mid for x in held) for _, held in columns) / 2
    m, held = min(made, key=lambda each: abs(each[0] / q.value.mid - 1))
    least = max(x.value.mid for x in held) if total else 0.0
    near = 0.6 < m / q.value.mid < 1.8 and q.value.mid > least
    if near and not any(q.value.meets(Interval(x * (1 - open_), x, x * (1 + open_)), 0.013) for x, _ in made):
        name = f"the {'sum' if total else 'mean'} of lines {held[0].line}–{held[-1].line}"
        message = f"{name} is {si(m, UNIT_OF.get(q.kind, ''))}, not {q.text}: which rows does it count?"
        yield finding(QUESTION, "total", message, q, lines=tuple(x.line for x in held))


def _extreme(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    """The best row is said to be one that another beats."""
    before = row.text[max(0, q.start - 120) : q.start]
    low = (q.kind in _TIMES and _LEAST.search(before)) or (q.kind in _RATES and _FIRST.search(before))
    high = (q.kind in _RATES and _MOST.search(before)) or (q.kind in _TIMES and _LAST.search(before))
    if bool(low) == bool(high) or re.search(r"(?i)\b(?:at|for|with|second|next|of the|per|each)\b", before[-30:]):
        return
    for _, held in _columns(q, grids):
        same = [x for x in held if x.value.mid == q.value.mid]
        other = min(held, key=lambda x: x.value.mid) if low else max(held, key=lambda x: x.value.mid)
        beaten = other.value.hi < q.value.lo if low else other.value.lo > q.value.hi
        runs = [next(r for g in grids for r in g.body if x in r.quantities) for x in (*same[:1], other)]
        if same and beaten and runs[0].own == runs[1].own and runs[0].bare == runs[1].bare:
            which = "least" if low else "most"
            message = f"{q.text} is not the {which}: line {other.line} has {other.text}"
            yield finding(QUESTION, "headline", f"{message}: of which rows is it?", q, other)
