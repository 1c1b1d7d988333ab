"""What words say of the direction: which of two is faster, and that every row of a table is. It asks."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, Finding, finding
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.retold import near_grids

_LOW = ("time", "s_per_token", "s_per_item", "money", "energy", "$/token", "J/token")
_HIGH = ("rate", "bandwidth", "tokens_per_s", "items_per_s")
_FASTER = re.compile(r"(?i)faster|quicker|speed-?up|higher|better|cheaper|more efficient|improvement")
_SLOWER = re.compile(r"(?i)slower|worse|more expensive|slow-?down")
_NAME = re.compile(r"[A-Za-z][\w.+-]{2,}")
_COMMON = re.compile(
    r"(?i)the|and|for|with|from|this|that|our|its|takes|took|time|version|kernel|runs?|makes|made|while|now|needs|thus|"
    r"therefore|about|over|than|new|old|per|all|one|two|both|which|code|model|implementation|is|are|was|were|has|have"
)


def _names(text: str) -> list[str]:
    return [n.lower() for n in _NAME.findall(text) if not _COMMON.fullmatch(n)]


def directions(report: Report) -> Iterator[Finding]:
    """ "CUDA 3.21 ms, Triton 4.21 ms: Triton is 1.31x faster"."""
    for row in report.lines_of_text:
        for q in row.of("ratio", "percent"):
            after = row.text[q.end : q.end + 24]
            faster, slower = _FASTER.match(after.strip()), _SLOWER.match(after.strip())
            if q.exact and q.value.mid > (1 if q.kind == "ratio" else 0) and bool(faster) != bool(slower):
                yield from _direction(row, q, bool(faster))
        yield from _every(report, row)


def _direction(row: Row, q: Quantity, faster: bool) -> Iterator[Finding]:
    pair = next((held for r in (row, row.before) if r for k in (*_LOW, *_HIGH) if len(held := r.of(k)) == 2), None)
    if not pair or not all(x.exact and x.value.mid for x in pair):
        return
    # The subject stands before the ratio; its name stands at one of the figures alone.
    subject = _names(re.split(r"[,;:.] ", row.text[: q.start])[-1])
    rest = row.text[q.end :]
    if re.search(r"(?i)\bthan\b", rest):
        subject = [n for n in subject if n not in _names(re.split(r"(?i)\bthan\b", rest)[1][:40])]
    of = [[n for n in subject if n in _names(f"{x.label[-24:]}")] for x in pair]
    if bool(of[0]) == bool(of[1]):
        return
    own, other = (pair[0], pair[1]) if of[0] else (pair[1], pair[0])
    better = (own.value.mid < other.value.mid) == (own.kind in _LOW)
    gain = max(own.value.mid / other.value.mid, other.value.mid / own.value.mid)
    said = q.value.mid if q.kind == "ratio" else 1 + q.value.mid
    if better != faster and 0.9 < gain / said < 1.1:
        name, verb = (of[0] or of[1])[0], "faster" if faster else "slower"
        message = f"{name} has {own.text}, the other {other.text}: is it {q.text} {verb}?"
        yield finding(QUESTION, "ratio", message, q, own, other)


_ALL = re.compile(
    r"(?i)\b(?:faster|quicker|better|ahead|beats?|wins?|outperforms?|improves?|speed-?ups?|higher|lower|cheaper)\b[^.;]{0,60}"
    r"\b(?:every|all|each|always|any|consistently|across the board|throughout|no exceptions?)\b|"
    r"\b(?:every|all|always|each|consistently|in all cases|never)\b[^.;]{0,50}"
    r"\b(?:faster|quicker|better|ahead|beats?|wins?|outperforms?|slower|improves?)\b"
)
_NOT_ALL = re.compile(
    r"(?i)\b(?:almost|nearly|not|most|except|but|other than|apart from|beyond|above|below|from \d|larger)\b"
)


def _every(report: Report, row: Row) -> Iterator[Finding]:
    """ "Faster on every shape" beside a table with a row where it is not."""
    if not (said := _ALL.search(row.text)) or _NOT_ALL.search(row.text) or row.of("ratio", "percent"):
        return
    for grid in near_grids(report, row):
        if grid.drawn and len(grid.body) > 2:
            yield from _crossed(grid, row, said[0])


def _crossed(grid: Grid, row: Row, said: str) -> Iterator[Finding]:
    kinds = {c: {q.kind for r in grid.body if (q := r.figure(c))} for c in range(len(grid.header))}
    typed = [c for c, k in kinds.items() if len(k) == 1 and k <= {*_LOW, *_HIGH, "number"}]
    last = [c for c in typed if kinds[c] == kinds[typed[-1]]] if typed else []
    for a, b in itertools.combinations(last, 2) if len(last) == 2 else ():
        pairs = [(x, y) for r in grid.body if (x := r.figure(a)) and (y := r.figure(b))]
        less = [(x, y) for x, y in pairs if x.value.hi < y.value.lo]
        more = [(x, y) for x, y in pairs if x.value.lo > y.value.hi]
        few = min(less, more, key=len)
        if len(pairs) > 2 and 0 < len(few) <= 0.4 * len(pairs):
            x, y = few[0]
            message = f"line {x.line} has {x.text} and {y.text}, the other way round than most rows: {said.strip()}?"
            yield finding(QUESTION, "headline", message, y, x, lines=(row.line,))
