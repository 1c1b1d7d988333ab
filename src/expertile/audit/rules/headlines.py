"""Claims without a figure of their own, or with one alone: the best of a table, all of its rows, a bound that none
passes, a title above two lines. It asks only."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, Finding, finding
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.told import APART, may_be, mid, not_made, words_of
from expertile.audit.units import RATES, TIMES, TYPED

_ALL = re.compile(
    r"(?i)\b(?:faster|quicker|better|ahead|beats?|wins?|outperforms?|higher|lower)\b[^.;]{0,60}"
    r"\b(?:every|all|each|always|any|throughout|no exceptions?)\b|"
    r"\b(?:every|all|always|each|never)\b[^.;]{0,50}\b(?:faster|quicker|better|ahead|beats?|wins?|slower)\b"
)
_NOT_ALL = re.compile(r"(?i)\b(?:almost|nearly|not|most|except|but|other than|apart from|above|below|larger)\b")
_SUPERLATIVE = re.compile(
    r"(?i)(?P<name>[\w.+-]+(?:[ /][\w.+-]+){0,4}) (?:has|had|gives?|shows?|reach\w+|takes?|took|is) the "
    r"(?P<most>highest|lowest|best|fastest|slowest|largest|smallest|most|least|worst|shortest|longest) "
    r"(?P<what>[\w -]{4,40})"
)
_MEASURE = (
    (r"throughput|speed|rate", ("tokens_per_s", "items_per_s", "rate")),
    (r"latenc|time|duration", TIMES),
    (r"memory|footprint", ("bytes",)),
    (r"bandwidth", ("bandwidth",)),
)
_BEFORE = re.compile(r"(?i)\W*(?:before|old|was|main|master|baseline)\b")
_AFTER = re.compile(r"(?i)\W*(?:after|new|now|ours|(?:this )?pr|this (?:branch|patch|change))\b")
_BY_NO_MORE = re.compile(r"(?i)\b(?:none|no|never|nothing|neither)\b[^.;]*? by more than (\d+(?:\.\d+)?)\b(?! ?%)")


def said(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """A sentence against the tables of three rows and more near it."""
    drawn = [g for g in grids if g.drawn]
    if _ALL.search(row.text) and not _NOT_ALL.search(row.text) and not row.of("ratio", "percent"):
        yield from itertools.chain(*(_every(g, row) for g in drawn))
    yield from _within(row, grids)
    yield from _superlative(row, drawn)


def titles(report: Report) -> Iterator[Finding]:
    """ "3.9x for long contexts" above two lines, "before 812 us" and "after 305 us", that make another ratio."""
    lines = report.lines_of_text
    pairs = [
        (a, b)
        for r, s in itertools.pairwise(lines)
        if _BEFORE.match(r.text) and _AFTER.match(s.text) and s.line - r.line < 3
        for k in TYPED
        if (a := r.only(k)) and (b := next((x for x in s.of(k) if x.exact and mid(x)), None))
    ]
    for row in lines if pairs else ():
        q = row.only("ratio") if len(row.quantities) == 1 and not APART.search(row.text) else None
        near = [(a, b) for a, b in pairs if 0 < a.line - row.line < 20]
        other = q and any(c.value.meets(q.value, 0.02) for r in report.all_rows if r is not row for c in r.of("ratio"))
        if q and len(near) == 1 and not other and not may_be(q, near[0][0].value / near[0][1].value, "", 0.03):
            yield not_made(q, [*near[0]], False)


def _superlative(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """ "TP8 has the highest throughput" beside a table in which another row has more."""
    m = _SUPERLATIVE.search(row.text)
    if not m or row.of(*TYPED, "ratio") or re.search(r"(?i)\b(?:second|of these|at the|per|except|almost)\b", row.text):
        return
    words = [*words_of(m["what"])]
    kinds = [k for form, some in _MEASURE for k in some if re.search(form, m["what"].lower())]
    for g in grids:
        columns = [c for c, h in enumerate(g.header) if {*words_of(h)} & {w for w in words if len(w) > 3}]
        columns = [c for c in columns if any(r.figure(c) for r in g.body)] or g.columns(*kinds)
        named = [r for r in g.body if " ".join(words_of(r.label)) in _last_words(m["name"])]
        if len(columns) != 1 or len(named) != 1 or not (q := named[0].figure(columns[0])):
            continue
        low = m["most"].lower() in ("lowest", "smallest", "least", "shortest")
        low |= m["most"].lower() in ("best", "fastest") and q.kind in TIMES
        low |= m["most"].lower() in ("worst", "slowest") and q.kind in RATES
        cells = [x for r in g.body if (x := r.figure(columns[0]))]
        other = min(cells, key=mid) if low else max(cells, key=mid)
        if (other.value.hi < q.value.lo) if low else (other.value.lo > q.value.hi):
            message = f"{m[0]}: it has {q.text}, line {other.line} {other.text}: of which rows is it?"
            yield finding(QUESTION, "headline", message, q, other, lines=(row.line,))


def _last_words(text: str) -> list[str]:
    """The last words of a text, one to five of them."""
    words = words_of(text)
    return [" ".join(words[-n:]) for n in range(1, 6)]


def _within(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """ "None moves perplexity by more than 0.1 against fp16" beside a column of that name in which a row does."""
    m = _BY_NO_MORE.search(row.text)
    if m is None:
        return
    words, most = {*words_of(row.text)}, float(m[1])
    for g in grids:
        for c, name in enumerate(g.header):
            cells = [(r, q) for r in g.body if (q := r.figure(c))]
            if len(cells) < 3 or not {n for n in words_of(name) if len(n) > 3} & words:
                continue
            firsts = [{*words_of(r.text.partition(": ")[2].partition(";")[0])} for r, _ in cells]
            named = [q for (_, q), first in zip(cells, firsts, strict=True) if first <= words]
            # Of all that may be the base, the one from which they are least apart.
            bases = named or [q for _, q in cells]
            worst = [max(((abs(mid(q) - mid(b)), q, b) for _, q in cells), key=lambda of: of[0]) for b in bases]
            off, q, base = min(worst, key=lambda of: of[0])
            if 1.05 * most < off < 50 * most:
                message = f"{q.text} is {off:.3g} from {base.text}, more than {m[1]}: is it meant too?"
                yield finding(QUESTION, "headline", message, q, base, lines=(row.line,))


def _every(grid: Grid, row: Row) -> Iterator[Finding]:
    """ "Faster on every shape" beside a table of two columns with a row where it is not."""
    for kind in (*TIMES, *RATES, "ratio", "number"):
        both = grid.columns(kind)
        rows = grid.body if len(both) == 2 else []
        pairs = [(x, y) for r in rows if (x := r.figure(both[0])) and (y := r.figure(both[1]))]
        less = [(x, y) for x, y in pairs if x.value.hi < y.value.lo]
        more = [(x, y) for x, y in pairs if x.value.lo > y.value.hi]
        few = min(less, more, key=len)
        if len(pairs) > 2 and 0 < len(few) <= 0.4 * len(pairs):
            (x, y), *_ = few
            message = f"line {x.line} has {x.text} and {y.text}, the other way round than most rows: is it so on every?"
            yield finding(QUESTION, "headline", message, y, x, lines=(row.line,))
