"""A figure of a sentence that follows from figures of the sentences around it: it asks where no two of them make it."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import exact
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import EQUATION, is_limit, on_sheet, own_words
from expertile.audit.rules.terms import GIB, NO_RUN, combine, derived, law_of, multiples, terms
from expertile.audit.rules.work import Term
from expertile.audit.units import UNTYPED, product

_REACH = 12  # lines
_OTHER = re.compile(
    rf"{NO_RUN}|(?i:\bwould|latency of|could|should|instead of|compared|against|\bvs\b|before|previous|earlier|idle|"
    r"claim|if we|\bof (?:it|that|them)\b|target|budget|window|timeout|interval|at most|at least|upper|lower)"
)
_RANKED = re.compile(r"(?i)\b(?:avg|mean|median|min|max|p\d\d|std\w*)\b")
_SIDES = (re.compile(r"(?i)input|prompt|prefill"), re.compile(r"(?i)output|generat|decod"))
_KINDS = ("rate", "bandwidth", "tokens_per_s", "items_per_s", "energy", "money", "gpu*s", "intensity")


def _derived(q: Quantity) -> bool:
    return (q.kind in _KINDS or ("/" in q.kind and q.kind not in UNTYPED)) and q.exact and q.value.mid > 0


def wide(report: Report) -> Iterator[Finding]:
    """Every derived figure of a sentence or a log's line."""
    lines = report.lines_of_text
    places = {id(row): at for at, row in enumerate(lines)}
    for at, row in enumerate(lines):
        targets = [q for q in row.quantities if _derived(q) and not on_sheet(row, q)]
        targets = [q for q in targets if not EQUATION.search(row.text[: q.start])]
        targets = [q for q in targets if not _OTHER.search(own := own_words(row, q)) and not is_limit(own)]
        if not targets or not any(c.isdigit() for c in row.text):
            continue
        near = [r for r in lines[max(0, at - 8) : at + 5] if abs(r.line - row.line) <= _REACH]
        reach = report.blocks[row.block].kind != "code"
        near = [
            r
            for r in near
            if abs(r.block - row.block) <= reach and report.sections[r.block] == report.sections[row.block]
        ]
        pool: dict[str, list[tuple[int, Term]]] = {}
        for r in near:
            for t in terms(r):
                if t.kind not in UNTYPED and not any(t.value.mid == o.value.mid for _, o in pool.get(t.kind, ())):
                    pool.setdefault(t.kind, []).append((abs(places[id(r)] - at), t))
            for b in r.of("bytes"):  # also what a model holds
                if b.exact and b.value.mid and not any(b.value.mid == o.value.mid for _, o in pool.get("bytes", ())):
                    term = Term("bytes", b.plain, b.text, (b.line,), b)
                    pool.setdefault("bytes", []).append((abs(places[id(r)] - at), term))
            for n in r.facts.of("gpus"):
                gpus = Term("gpu", exact(n), f"{n:.0f} GPUs", (r.line,))
                pool.setdefault("gpu", []).append((abs(places[id(r)] - at), gpus))
        for q in targets:
            yield from _one(row, q, pool)


_TWICE = re.compile(r"(?i)copy|copied|read(?:s|ing)? (?:and|plus|\+) writ|both|triad|in and|bidir")


def _one(row: Row, q: Quantity, pool: dict[str, list[tuple[int, Term]]]) -> Iterator[Finding]:
    like: list[tuple[int, Term, Term, int]] = []
    counts = [n for n in multiples(row) if not any(q.text.startswith(f"{x:.0f}") for x in (n, 1 / n) if x > 1)]
    for (x, y), sign in itertools.product(itertools.permutations(pool, 2), (1, -1)):
        if product(x, y, sign) != q.kind or (sign > 0 and x > y) or derived((x, y, q.kind)) != q.kind:
            continue
        law = law_of(x, y, q.kind)
        also = law.also if law.rule != "bandwidth" or _TWICE.search(row.text) else GIB
        # What stands in the sentence itself is meant.
        own = {k: [each for each in pool[k] if each[0] == 0] for k in (x, y)}
        for (i, a), (j, b) in itertools.product(own[x] or pool[x], own[y] or pool[y]):
            made = combine(a, b, sign).value
            if any((q.value / made).meets(f * g, 0.06) for f in counts for g in (*also, *a.also, *b.also)):
                return
            text = f"{row.text} {a.figure.words if a.figure else ''} {b.figure.words if b.figure else ''}"
            beside = [t.figure for t in (a, b) if t.figure]
            sides = [any(form.search(f"{f.label} {f.text}") for f in (q, *beside)) for form in _SIDES]
            same = not all(sides) and not any(_RANKED.search(f.label) for f in beside if not _RANKED.search(q.label))
            close = (q.value / made).meets(1.0, 30.0) or any((q.value / made).meets(s, 0.03) for s in (1e3, 1e-3))
            figures = all(t.figure or t.kind == "gpu" for t in (a, b))
            text = re.sub(r"(?i)requests? ?(?:/|per|in\b)", "", text)  # they are what is counted
            if not re.search(law.unless, text) and not _OTHER.search(text) and same and close and figures:
                like.append((max(i, j), a, b, sign))
    if 0 < len(like) <= 3:
        far, a, b, sign = min(like, key=lambda each: each[0])
        if far <= (3 if row.report.blocks[row.block].kind == "prose" else 5):
            product_of = combine(a, b, sign)
            value = si(product_of.value.mid, UNIT_OF.get(q.kind, ""))
            beside = [t.figure for t in (a, b) if t.figure]
            rule, lines = law_of(a.kind, b.kind, q.kind).rule, (*a.lines, *b.lines)
            message = f"{product_of.text} is {value}, not {q.text}: is this the same run?"
            yield finding(QUESTION, rule, message, q, *beside, lines=lines)
