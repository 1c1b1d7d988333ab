"""Claims without a figure of their own: in how many rows of a table one of two wins."""

import re
from collections.abc import Iterator

from expertile.audit.facts import NUMBERS, size_of_name
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Row
from expertile.audit.units import RATES, TIMES

_ALL = regex(
    r"(?i)\b(?:faster|quicker|better|ahead|beats?|wins?|outperforms?|higher|lower)\b[^.;]{0,60}"
    r"\b(?:every|all|each|always|any|throughout|no exceptions?)\b|"
    r"\b(?:every|all|always|each|never)\b[^.;]{0,50}\b(?:faster|quicker|better|ahead|beats?|wins?|slower)\b"
)
_NOT_ALL = regex(r"(?i)\b(?:almost|nearly|not|most|except|but|other than|apart from|above|below|larger)\b")
_WORDS = NUMBERS | {"one": "1"}
_COUNT = rf"\d+|{'|'.join(_WORDS)}"
_OF = regex(rf"(?i)\b(?P<n>{_COUNT}) (?:out )?of (?:the |all |our )?(?P<m>{_COUNT})\b(?! ?%)")
_WON = regex(r"(?i)\b(?:ahead|wins?|won|faster|beats?|better|slower|loses?|lost|behind|outperforms?)\b")
_BY = regex(r"(?i)\bby\b|%|\dx|at least|more than|than \d|within|significant|other|both|each|either|except")
_ENDS = regex("[,;:(]")


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


def won(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """ "Ahead at 9 of the 10 sizes" beside a table of ten rows and two columns; "faster on every shape" where in one
    row it is not."""
    first, last = _clause(row.text, _ALL)  # "…, with the largest gain, 1.30x, at 4096 tokens" is no part of the claim
    beside = any(first <= q.start < last for q in row.of("ratio", "percent"))
    every = first < last and not beside and not _NOT_ALL.search(row.text[first:last])
    m = _OF.search(row.text) if _WON.search(row.text) else None
    for g in grids if every or m else ():
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
            yield Finding(INCONSISTENT, "headline", row.line, m[0], message, tuple(x.line for _, x, _ in pairs))
