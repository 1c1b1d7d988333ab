"""Claims without a figure of their own, or with one alone: the best of a table, in how many of its rows, a bound that
none passes, a title above two lines."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.facts import NUMBERS, size_of_name
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.hardware import end_before, own_words
from expertile.audit.rules.told import APART, OUTCOME, change_of, may_be, mid, not_made
from expertile.audit.units import RATES, TIMES, TYPED

_ALL = re.compile(
    r"(?i)\b(?:faster|quicker|better|ahead|beats?|wins?|outperforms?|higher|lower)\b[^.;]{0,60}"
    r"\b(?:every|all|each|always|any|throughout|no exceptions?)\b|"
    r"\b(?:every|all|always|each|never)\b[^.;]{0,50}\b(?:faster|quicker|better|ahead|beats?|wins?|slower)\b"
)
_NOT_ALL = re.compile(r"(?i)\b(?:almost|nearly|not|most|except|but|other than|apart from|above|below|larger)\b")
_WORDS = NUMBERS | {"one": "1"}
_COUNT = rf"\d+|{'|'.join(_WORDS)}"
_OF = re.compile(rf"(?i)\b(?P<n>{_COUNT}) (?:out )?of (?:the |all |our )?(?P<m>{_COUNT})\b(?! ?%)")
_WON = re.compile(r"(?i)\b(?:ahead|wins?|won|faster|beats?|better|slower|loses?|lost|behind|outperforms?)\b")
_BY = re.compile(r"(?i)\bby\b|%|\dx|at least|more than|than \d|within|significant|other|both|each|either|except")
_MEASURE = (
    (r"throughput|speed|rate", ("tokens_per_s", "items_per_s", "rate")),
    (r"latenc|time|duration", TIMES),
    (r"memory|footprint|vram", ("bytes",)),
    (r"bandwidth", ("bandwidth",)),
)
_SAID = r"(?i)\W*(?:\d[\d:.T/-]*[])]?\s+){0,3}(?:@?[a-z][\w.-]*(?: \w+)?: )?\W*"  # "[10:05] ann: before: 61 GB"
_BEFORE = re.compile(rf"{_SAID}(?:before|old|was|main|master|baseline)\b")
_AFTER = re.compile(rf"{_SAID}(?:after|new|now|ours|(?:this )?pr|this (?:branch|patch|change))\b")
_OTHER_PART = re.compile(
    r"\b(?:on top|addition|another|activation|gradient|optimi[sz]er|kv|cache|weights|buffer|layer)"
)
_ENDS = re.compile("[,;:(]")


def said(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """A sentence against the tables of three rows and more near it."""
    yield from _won(row, grids)


def titles(report: Report) -> Iterator[Finding]:
    """ "3.9x for long contexts" above two lines, "before 812 us" and "after 305 us", that make another ratio; or, some
    lines below them, "latency down by 80 %"."""
    lines = report.lines_of_text
    befores = [(i, r) for i, r in enumerate(lines) if _BEFORE.match(r.text)]
    afters = ((r, s) for i, r in befores for s in lines[i + 1 : i + 4] if _AFTER.match(s.text))
    pairs = [
        (a, b)
        for r, s in afters
        if s.line - r.line < 5
        for k in TYPED
        if (a := r.only(k)) and (b := next((x for x in s.of(k) if x.exact and mid(x)), None))
    ]
    for row in lines if pairs else ():
        q = row.only("ratio") if len(row.quantities) == 1 and not APART.search(row.text) else None
        near = [(a, b) for a, b in pairs if 0 < a.line - row.line < 20]
        other = q and any(c.value.meets(q.value, 0.02) for r in report.all_rows if r is not row for c in r.of("ratio"))
        if q and len(near) == 1 and not other and not may_be(q, near[0][0].value / near[0][1].value, "", 0.03):
            yield not_made(q, [*near[0]], False)
        for q in row.of("percent", "ratio") if not APART.search(row.text) else ():
            words = own_words(row, q).lower()
            named = [some for form, some in _MEASURE if re.search(form, words) and not _OTHER_PART.search(words)]
            kinds = {*itertools.chain(*named)}
            near = [(a, b) for a, b in pairs if a.kind in kinds and 0 < row.line - b.line < 12]
            later = [x for r in lines if near and near[0][1].line < r.line <= row.line for x in r.of(*kinds)]
            if q.exact and len(near) == 1 and not later and (OUTCOME.search(words) or " by " in words):
                (a, b), change = near[0], change_of(row, q, False, q.start - end_before(row, q))
                yield from [] if may_be(q, a.value / b.value, change, 0.03) else [not_made(q, [a, b], False)]


def _at(row: Row, text: str, q: Quantity, *beside: Quantity, verdict: str = QUESTION, message: str = "") -> Finding:
    """A finding about some words of a sentence, which may run over several lines, and figures of a table."""
    lines = row.report.lines
    word = text.split()[0]
    line = next((n for n in range(row.line, min(row.line + 6, len(lines)) + 1) if word in lines[n - 1]), row.line)
    return Finding(verdict, "headline", line, text, message, tuple(x.line for x in (q, *beside)))


def _pairs(g: Grid) -> list[tuple[Row, Quantity, Quantity]]:
    """The rows of a table that has two columns of one kind, and what they have there."""
    for kind in (*TIMES, *RATES, "ratio", "number"):
        both = [c for c in g.columns(kind) if c and not size_of_name(g.header[c])]
        held = [(r, x, y) for r in g.body if len(both) == 2 and (x := r.figure(both[0])) and (y := r.figure(both[1]))]
        if len(held) > 2:
            return held
    return []


def _clause(text: str, form: re.Pattern[str]) -> tuple[int, int]:
    """Where the part of a sentence, between commas, colons and brackets, begins and ends that the form stands in."""
    m = form.search(text)
    end = _ENDS.search(text, m.end()) if m else None
    return (max(text.rfind(c, 0, m.start()) for c in ",;:(") + 1, end.start() if end else len(text)) if m else (0, 0)


def _won(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """ "Ahead at 9 of the 10 sizes" beside a table of ten rows and two columns; "faster on every shape" where in one
    row it is not."""
    first, last = _clause(row.text, _ALL)  # "…, with the largest gain, 1.30x, at 4096 tokens" is no part of the claim
    beside = any(first <= q.start < last for q in row.of("ratio", "percent"))
    every = first < last and not beside and not _NOT_ALL.search(row.text[first:last])
    m = _OF.search(row.text) if _WON.search(row.text) else None
    for g in grids:
        pairs = _pairs(g)
        less = [(x, y) for _, x, y in pairs if x.value.hi < y.value.lo]
        more = [(x, y) for _, x, y in pairs if x.value.lo > y.value.hi]
        few = min(less, more, key=len)
        if every and g.drawn and 0 < len(few) <= 0.4 * len(pairs):
            (x, y), *_ = few
            message = f"line {x.line} has {x.text} and {y.text}, the other way round than most rows: is it so on every?"
            yield finding(QUESTION, "headline", message, y, x, lines=(row.line,))
        n, of = (float(_WORDS.get(w.lower(), w)) for w in m.group("n", "m")) if m else (0.0, 0.0)
        counts = (len(less), len(more), len(pairs) - len(less), len(pairs) - len(more))
        alone = pairs and len({q.column for q in pairs[0][0].quantities}) < 4
        if m and alone and of == len(pairs) >= n not in counts and not _BY.search(row.text.replace(m[0], "")):
            each = f"{counts[0]} are less in the first column and {counts[1]} in the second"
            message = f"of {of:.0f} rows {each}, not {n:.0f}"
            yield _at(row, m[0], *(x for _, x, _ in pairs), verdict=INCONSISTENT, message=message)
