"""What the text says of a whole table: its mean, its best row, its range; it asks where no column has it so."""

import math
import re
import statistics
from collections.abc import Callable, Iterator

from expertile.audit.finding import QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.told import APART, near_grids

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
                yield from _mean(row, q, grids)
                yield from _extreme(row, q, grids)
                yield from _sum(row, q, grids)


def _columns(q: Quantity, grids: list[Grid]) -> list[tuple[Grid, list[Quantity]]]:
    found = []
    for g in grids:
        columns = ([x for r in g.body if (x := r.figure(c, q.kind))] for c in g.columns(q.kind))
        found += [(g, held) for held in columns if len(held) > 2]
    return found


_OVER = r"(?i)\b(?:over|across|all|geo\w*|on average|of the (?:\w+ )?\w+s)\b"


def _is_end(q: Quantity, grids: list[Grid]) -> bool:
    """Whether a figure is the least or the most of a column."""
    columns = [sorted(held, key=lambda x: x.value.mid) for _, held in _columns(q, grids)]
    return any(x.value.meets(q.value) for held in columns for x in (held[0], held[-1]))


def _mean(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    over = re.search(_OVER, row.text) or any(o is not q and _is_end(o, grids) for o in row.of(q.kind))
    said = over and next((ways for form, ways in _SAID if re.search(f"(?i){form}[^.;]*$", q.label[-40:])), ())
    columns = _columns(q, grids)
    if not said or not 0 < len(columns) < 3:
        return
    made = [(ways([x.value.mid for x in held]), held) for _, held in columns for ways in said]
    # Of half the rows each, of sums.
    open_ = max((x.value.width for _, held in columns for x in held), default=0.0) / 4
    if not any(q.value.meets(Interval(m * (1 - open_), m, m * (1 + open_)), 0.012) for m, _ in made):
        m, held = min(made, key=lambda each: abs(each[0] / q.value.mid - 1))
        if 0.5 < m / q.value.mid < 2:
            message = (
                f"the mean of lines {held[0].line}–{held[-1].line} is {si(m, UNIT_OF.get(q.kind, ''))}, not {q.text}"
            )
            yield finding(
                QUESTION, "total", f"{message}: which rows does it count?", q, lines=tuple(x.line for x in held)
            )


_WHOLE = re.compile(r"(?i)\b(?:whole|total|in all|(?:al)?together|end[- ]to[- ]end|adds? up|sum)\b")


def _sum(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    """The total of the one column of a table right above."""
    words = f"{q.label[-40:]}|{row.text[q.end : q.end + 16]}"
    above = [g for g in grids if g.drawn and 0 < row.line - g.rows[-1].line < 5 and not any(r.summary for r in g.rows)]
    columns = _columns(q, above) if q.kind in ("time", "bytes", "money", "energy") and _WHOLE.search(words) else []
    if len(columns) == 1 and len(columns[0][1]) == len(columns[0][0].rows):
        held = columns[0][1]
        total = Interval(*(sum(getattr(x.plain, end) for x in held) for end in ("lo", "mid", "hi")))
        if max(x.value.mid for x in held) < q.value.mid < 1.5 * total.mid and not q.value.meets(total, 0.015):
            message = f"the sum of lines {held[0].line}–{held[-1].line} is {si(total.mid, UNIT_OF.get(q.kind, ''))}"
            yield finding(QUESTION, "total", f"{message}, not {q.text}: which rows does it count?", q, *held)


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
