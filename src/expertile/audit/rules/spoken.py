"""What words say of figures: that one is the mean, the least or the most of a table, which of two is faster, and that
one is on every row. It asks."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.retold import near_grids
from expertile.audit.rules.told import APART, TIMES
from expertile.audit.rules.totals import MEAN, may_come_to

_RATES = ("rate", "bandwidth", "tokens_per_s", "items_per_s", "ratio")
_GAIN = re.compile(r"(?i)\W*(?:(faster|quicker|speed-?up|cheaper)|slower|slow-?down)")
_NAME = re.compile(
    r"(?i)\b(?!(?:is|are|was|makes?|takes|time|kernel|version|and|the|our|thus|while)\b)[a-z][\w.+-]{2,}"
)
_ALL = re.compile(
    r"(?i)\b(?:faster|quicker|better|ahead|beats?|wins?|outperforms?|higher|lower)\b[^.;]{0,60}"
    r"\b(?:every|all|each|always|any|throughout|no exceptions?)\b|"
    r"\b(?:every|all|always|each|never)\b[^.;]{0,50}\b(?:faster|quicker|better|ahead|beats?|wins?|slower)\b"
)
_NOT_ALL = re.compile(r"(?i)\b(?:almost|nearly|not|most|except|but|other than|apart from|above|below|larger)\b")
_LEAST = re.compile(r"(?i)\b(?:min(?:imum)?|lowest|smallest|fastest|best|quickest|least)\b")
_MOST = re.compile(r"(?i)\b(?:max(?:imum)?|highest|largest|fastest|best|peaks? at|most)\b")
_SLOWEST = re.compile(r"(?i)\b(?:slowest|worst)\b")
_WHOLE = re.compile(r"(?i)\b(?:whole|total|in all|(?:al)?together|end[- ]to[- ]end|adds? up|sum)\b")
_OVER = re.compile(r"(?i)\b(?:over|across|all|geo\w*|on average|of the (?:\w+ )?\w+s)\b")


def spoken(report: Report) -> Iterator[Finding]:
    """Every sentence against the tables near by, and the direction of its own ratios."""
    for row in report.lines_of_text:
        yield from _direction(row)
        grids = [g for g in near_grids(report, row) if len(g.body) > 2]
        if _ALL.search(row.text) and not _NOT_ALL.search(row.text) and not row.of("ratio", "percent"):
            yield from itertools.chain(*(_every(g, row) for g in grids if g.drawn))
        for q in row.quantities if grids and not APART.search(row.text) else ():
            if (
                q.exact
                and q.value.mid
                and q.text[0] not in "+-−"
                and q.line not in {r.line for g in grids for r in g.rows}
            ):
                yield from _summary(row, q, grids)
                yield from _extreme(row, q, grids)


def _direction(row: Row) -> Iterator[Finding]:
    """ "CUDA 3.21 ms, Triton 4.21 ms: Triton is 1.31x faster": the name before the ratio stands at one figure alone."""
    for q, m in ((q, m) for q in row.of("ratio") if q.exact and (m := _GAIN.match(row.text, q.end))):
        pair = next((held for r in (row, row.before) if r for k in TIMES if len(held := r.of(k)) == 2), None)
        names = {n.lower() for n in _NAME.findall(re.split(r"[,;:.] ", row.text[: q.start])[-1])}
        of = [{n for n in names if n in x.label[-24:].lower()} for x in pair or ()]
        if pair and all(x.exact and x.value.mid for x in pair) and bool(of[0]) != bool(of[1]):
            own, other = pair if of[0] else pair[::-1]
            gain = other.value.mid / own.value.mid
            if (gain > 1) != bool(m[1]) and 0.9 < max(gain, 1 / gain) / q.value.mid < 1.1:
                name = min(of[0] or of[1])
                message = f"{name} has {own.text}, the other {other.text}: is it {q.text} {m[0].strip()}?"
                yield finding(QUESTION, "ratio", message, q, own, other)


def _every(grid: Grid, row: Row) -> Iterator[Finding]:
    """ "Faster on every shape" beside a table of two columns with a row where it is not."""
    for kind in (*TIMES, *_RATES, "number"):
        columns = grid.columns(kind)
        pairs = [
            (x, y)
            for r in grid.body
            if len(columns) == 2 and (x := r.figure(columns[0])) and (y := r.figure(columns[1]))
        ]
        less = [(x, y) for x, y in pairs if x.value.hi < y.value.lo]
        more = [(x, y) for x, y in pairs if x.value.lo > y.value.hi]
        few = min(less, more, key=len)
        if len(pairs) > 2 and 0 < len(few) <= 0.4 * len(pairs):
            (x, y), *_ = few
            message = f"line {x.line} has {x.text} and {y.text}, the other way round than most rows: is it so on every?"
            yield finding(QUESTION, "headline", message, y, x, lines=(row.line,))


def _columns(q: Quantity, grids: list[Grid]) -> list[tuple[Grid, list[Quantity]]]:
    columns = ((g, [x for r in g.body if (x := r.figure(c, q.kind))]) for g in grids for c in g.columns(q.kind))
    return [(g, held) for g, held in columns if len(held) > 2]


def _summary(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    """What is called the mean of a column, or the total of the one column of a table right above."""
    mean = MEAN.search(q.label[-40:]) and _OVER.search(row.text)
    total = not mean and q.kind in ("time", "bytes", "money", "energy")
    if total:
        total = bool(_WHOLE.search(f"{q.label[-40:]}|{row.text[q.end : q.end + 16]}"))
        above = (g for g in grids if g.drawn and 0 < row.line - g.rows[-1].line < 5)
        grids = [g for g in above if not any(r.summary for r in g.rows)]
    columns = _columns(q, grids) if mean or total else []
    if not 0 < len(columns) < 3 - total or (total and len(columns[0][1]) != len(columns[0][0].rows)):
        return
    made = [(m, held) for _, held in columns for m in may_come_to([x.plain for x in held], total)]
    m, held = min(made, key=lambda each: abs(each[0].mid / q.value.mid - 1))
    least = max(x.value.mid for x in held) if total else 0.0
    if 0.6 < m.mid / q.value.mid < 1.8 and q.value.mid > least and not any(q.value.meets(x, 0.013) for x, _ in made):
        name = f"the {'sum' if total else 'mean'} of lines {held[0].line}–{held[-1].line}"
        message = f"{name} is {si(m.mid, UNIT_OF.get(q.kind, ''))}, not {q.text}: which rows does it count?"
        yield finding(QUESTION, "total", message, q, lines=tuple(x.line for x in held))


def _extreme(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    """The best row is said to be one that another of the same sizes beats."""
    before = row.text[max(0, q.start - 120) : q.start]
    low = q.kind in TIMES and _LEAST.search(before)
    high = (q.kind in _RATES and _MOST.search(before)) or (q.kind in TIMES and _SLOWEST.search(before))
    if bool(low) == bool(high) or re.search(r"(?i)\b(?:at|for|with|second|next|of the|per|each)\b", before[-30:]):
        return
    for grid, held in _columns(q, grids):
        same = [x for x in held if x.value.mid == q.value.mid]
        other = min(held, key=lambda x: x.value.mid) if low else max(held, key=lambda x: x.value.mid)
        beaten = other.value.hi < q.value.lo if low else other.value.lo > q.value.hi
        runs = [r for r in grid.body if other in r.quantities or (same[:1] and same[0] in r.quantities)]
        if same and beaten and runs[0].own == runs[-1].own and runs[0].bare == runs[-1].bare:
            message = f"{q.text} is not the {'least' if low else 'most'}: line {other.line} has {other.text}"
            yield finding(QUESTION, "headline", f"{message}: of which rows is it?", q, other)
