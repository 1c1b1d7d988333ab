"""Changes told within one line: "201 MB → 134 MB, 33% less", "0.16x (6.3x slower)", "0.5x slower"."""

from __future__ import annotations

import re
from itertools import pairwise

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.formulas import Term, follows
from expertile.lab.audit.interval import Interval, printed
from expertile.lab.audit.quantities import Quantity, show

_ARROW = r"→|->|=>|⟶"
_JOIN = re.compile(
    rf"^[\s)]*(?:\w[\w-]*\s+){{0,2}}(?:{_ARROW}|to\b|down to\b|up to\b|vs\.?\s|versus\b|compared (?:to|with)\b"
    r"|instead of\b|against\b)[\s(~≈]*(?:\w[\w-]*[:\s]\s*)?$",
    re.I,
)
_CHANGE = re.compile(
    r"reduc|sav|fast|slow|speed|improv|less|more|lower|higher|increas|decreas|drop|gain|cut|better|worse|smaller"
    r"|larger",
    re.I,
)
_COUNTS = re.compile(rf"(?<![\w.])(?P<a>\d{{1,9}})\s*(?:{_ARROW})\s*(?P<b>\d{{1,9}})(?![\w.%×])")
_KEYED_SPEEDUP = re.compile(r"\b(?:speed-?\s?up|ratio)\s*[:=]", re.I)
_LESS = re.compile(r"reduc|sav|less|lower|decreas|drop|\bcut|smaller|fewer", re.I)
_GREATER = re.compile(r"increas|improv|more|higher|speed|fast|gain|greater|grow", re.I)
_COUNTED = re.compile(r"launch|kernel|pass(?:es)?\b|operation|calls?\b|reads?\b|writes?\b|\bops\b", re.I)
_PAIR_KINDS = ("time", "bytes", "flop_rate", "byte_rate", "token_rate", "event_rate")


def changes(context: Context) -> list[Finding]:
    """A ratio or percentage beside the two figures it is the change of."""
    found: list[Finding] = []
    for line in context.by_sentence:
        text = line[0].place.text
        told = [c for c in line if c.kind in ("ratio", "percent")]
        pairs = _pairs(line, text)
        if len(told) != 1 or len(pairs) != 1 or not (_CHANGE.search(line[0].sentence) or told[0].kind == "ratio"):
            continue
        a, b, words, unit = pairs[0]
        claim = told[0]
        terms = change_terms(a, b, claim.kind, unit)
        if claim.kind == "percent" and _LESS.search(line[0].sentence) and not _GREATER.search(line[0].sentence):
            terms = [t for t in terms if t.value.lo < 1 and "− 1 =" not in t.words]  # a saving is a share of the larger
        fit = next((t for t in terms if _meets(claim.quantity, t)), None)
        if fit is not None:
            found.append(context.finding(claim, POSSIBLE, "change_in_line", fit.words))
        if fit is not None or not terms:
            continue
        nearest = sorted(terms, key=lambda t: abs(t.value.mid - abs(claim.quantity.value)))
        said = " or ".join(t.words for t in nearest[:2])
        found.append(
            context.finding(
                claim,
                INCONSISTENT,
                "change_in_line",
                f"printed {claim.quantity.text}, but {words} give {said}",
                claim.quantity.value,
                nearest[0].value.mid,
                "x" if claim.kind == "ratio" else "",
            )
        )
    return found


def change_terms(a: Interval, b: Interval, kind: str, unit: str = "number") -> list[Term]:
    """Every way to state the change from `a` to `b` (of kind `unit`) as a ratio or percentage."""
    if a.lo <= 0 or b.lo <= 0:
        return []
    ratios = [(a / b, a, b), (b / a, b, a)]
    found = []
    for value, x, y in ratios:
        shown = f"{show(unit, x.mid)} / {show(unit, y.mid)}"
        if kind == "ratio":
            found.append(Term(value, f"{shown} = {value.mid:.4g}"))
        else:
            less = Interval(1 - value.hi, 1 - value.lo)
            found.append(Term(less, f"1 − {shown} = {less.mid:.1%}"))
            found.append(Term(value - 1.0, f"{shown} − 1 = {value.mid - 1:.1%}"))
            found.append(Term(value, f"{shown} = {value.mid:.1%}"))
    plausible = [t for t in found if t.value.hi > 0]
    return sorted(plausible, key=lambda t: kind == "ratio" and t.value.mid < 1)


def _meets(q: Quantity, term: Term) -> bool:
    if q.bound == "<":
        return True
    positive = Term(
        Interval(min(abs(term.value.lo), abs(term.value.hi)), max(abs(term.value.lo), abs(term.value.hi))), term.words
    )
    if q.value < 0:
        q = Quantity(
            q.kind,
            q.text,
            Interval(-q.interval.hi, -q.interval.lo),
            q.scale,
            q.start,
            q.end,
            q.approximate,
            value_si=-q.value,
        )
    return follows(q, positive)


def _pairs(line: list[Claim], text: str) -> list[tuple[Interval, Interval, str, str]]:
    found = []
    for x, y in pairwise(line):
        if x.kind == y.kind and x.kind in _PAIR_KINDS and _JOIN.match(text[x.quantity.end : y.quantity.start]):
            words = f"{show(x.kind, x.quantity.value)} and {show(y.kind, y.quantity.value)}"
            found.append((x.quantity.span, y.quantity.span, words, x.kind))
    if not found and _KEYED_SPEEDUP.search(line[0].sentence):
        keyed = [c for c in line if c.kind in _PAIR_KINDS and re.search(r"[\w)]\s*[:=]\s*$", text[: c.quantity.start])]
        rivals = [c for c in keyed if c.kind == keyed[0].kind and (c.kind != "time" or c.is_run)]
        if len(rivals) == 2:
            x, y = rivals
            words = f"{show(x.kind, x.quantity.value)} and {show(y.kind, y.quantity.value)}"
            found.append((x.quantity.span, y.quantity.span, words, x.kind))
    if not found:
        for match in _COUNTS.finditer(line[0].sentence):
            exact = bool(_COUNTED.search(line[0].sentence))
            a, b = (Interval.of(float(match[g])) if exact else printed(match[g]) for g in "ab")
            found.append((a, b, f"{match['a']} and {match['b']}", "number"))
    return found


_RECIPROCAL = re.compile(r"^[^.;|]{0,40}\(\s*$|^[^.;|]{0,30}(?:,|=|i\.e\.)\s*$")


def reciprocals(context: Context) -> list[Finding]:
    """ "0.16x of PyTorch (6.3x slower)": the second figure must be one over the first."""
    found = []
    for line in context.by_sentence:
        ratios = [c for c in line if c.kind == "ratio"]
        for x, y in pairwise(ratios):
            text = x.place.text
            between = text[x.quantity.end : y.quantity.start]
            after = text[y.quantity.end : y.quantity.end + 20]
            if not (x.quantity.value < 1 < y.quantity.value and re.match(r"\W*(?:slower|faster)", after, re.I)):
                continue
            if not _RECIPROCAL.match(between) and "(" not in between:
                continue
            inverse = Interval.of(1.0) / x.quantity.span
            verdict = POSSIBLE if y.quantity.span.meets(inverse.widened(0.01)) else INCONSISTENT
            # "2x faster" in round figures for 0.48x is fair; 3x would not be.
            text = f"1 / {x.quantity.text} = {show('ratio', 1 / x.quantity.value)}, printed {y.quantity.text}"
            found.append(context.finding(y, verdict, "reciprocal", text, y.quantity.value, 1 / x.quantity.value, "x"))
    return found


def slower_below_one(context: Context) -> list[Finding]:
    """ "0.5x slower": a factor below one cannot be how many times slower or faster something is."""
    found = []
    for c in context.claims:
        if c.kind != "ratio" or not 0 < c.quantity.value < 1 or c.quantity.high is not None:
            continue
        after = c.quote
        match = re.search(re.escape(c.quantity.text) + r"\W{0,3}(slower|faster)\b", after, re.I)
        if not match:
            continue
        word = match[1].lower()
        other = _same_subject(context, c, word)
        if other is not None:
            text = (
                f"{c.quantity.text} {word} says the opposite if taken at its word: 1 / {c.quantity.value:g} = "
                f"{1 / c.quantity.value:.3g}x {word} is meant, as line {other.place.line} says ({other.quote})"
            )
            found.append(
                context.finding(c, INCONSISTENT, "slower_below_one", text, c.quantity.value, other.quantity.value, "x")
            )
        else:
            text = (
                f"{c.quantity.text} {word}: taken at its word this is {'faster' if word == 'slower' else 'slower'}; "
                f"1 / {c.quantity.value:g} = {1 / c.quantity.value:.3g}x {word} may be meant"
            )
            found.append(context.finding(c, NOT_CHECKABLE, "slower_below_one", text))
    return found


def _same_subject(context: Context, claim: Claim, word: str) -> Claim | None:
    """Another claim of the same row label, told as "Nx slower" with N > 1."""
    if claim.place.table is None or claim.place.row is None:
        return None
    subject = context.report.tables[claim.place.table].label(claim.place.row).strip().lower()
    for other in context.claims:
        if other.kind != "ratio" or other.quantity.value <= 1 or other.place.table is None or other.place.row is None:
            continue
        label = context.report.tables[other.place.table].label(other.place.row).strip().lower()
        if label == subject and other is not claim and word in other.words.lower():
            return other
    return None
