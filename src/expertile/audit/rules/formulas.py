"""Published formulas over named figures: each figure that a formula makes, against what the others of its scope make.

A figure's row comes first, then its block, then the whole report, where a name must have one value. What follows from
one row or one block accuses where the formula is a definition; anything else asks.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, si
from expertile.audit.interval import Interval, exact
from expertile.audit.pattern import regex, says
from expertile.audit.report import Report, Row
from expertile.audit.rules.named import Named, named
from expertile.audit.rules.published import ASK, FORMULAS, FUNCTIONS, HOLDS, Formula

_PART = regex(r"\b(?:train|val|valid|test|eval)\b")
_FAR = 40.0  # off by more, a figure is of something else


@lru_cache(maxsize=256)
def _compiled(expression: str) -> tuple[CodeType, tuple[str, ...]]:
    names = dict.fromkeys(re.findall(r"[a-z_][a-z_0-9]*", expression))
    return compile(expression, "formula", "eval"), tuple(n for n in names if n not in (*FUNCTIONS, "if", "else"))


@dataclass(frozen=True)
class _Scope:
    """Values of a formula's names, and how far from its figure the furthest stands: 0 in its row, 1 in its block."""

    held: dict[str, Named]
    distance: int


def formulas(report: Report) -> Iterator[Finding]:
    """Every figure that a formula makes."""
    for formula in FORMULAS:
        left, sign, right = re.split(r" (<?=) ", formula.text, maxsplit=1)
        target = _compiled(left)[1][0]
        some = named(report, target)
        if not some:
            continue
        ways = right.split(" | ")
        broken, kept = [], 0
        for figure in {(f.line, f.value.mid): f for f in some}.values():
            several = [_made(report, figure, formula, left, way) for way in ways]
            made = [m for m in several if m] if several[0] else []  # the others excuse
            if made and any(_keeps(m, sign, formula.slack) for m in made):
                kept += 1
            elif made and not any(_keeps(m, sign, formula.far) for m in made):
                broken.append((figure, min(made, key=lambda m: abs(math.log(m[0].mid / m[1].mid)))))
        # Where several keep it no word of the report excuses the one that does not.
        few = bool(broken) and kept < 3 * len(broken) and formula.unless
        if kept < formula.fit or len(broken) > max(kept, 2) or (few and says(re.compile(few), report.text)):
            continue  # another convention
        near = 2 if formula.sure < ASK else 1
        alone = len({f.value.mid for f in some if f.key} or {f.value.mid for f in some}) == 1 or kept > 1
        yield from (_broken(formula, sign, kept, *each) for each in broken if alone or each[1][2].distance < near)


_Made = tuple[Interval, Interval, _Scope, str]


def _made(report: Report, figure: Named, formula: Formula, left: str, way: str) -> _Made | None:
    """Both sides of one way to make the figure; None where a name has no value, or the sides are far apart."""
    (made, names), (said, of) = _compiled(way), _compiled(left)
    scope = _scope(report, of[0], figure, tuple(dict.fromkeys((*names, *of[1:]))), formula)
    if scope is None or any(re.search(formula.keys, f.key or f.row.text) for f in (figure, *scope.held.values())):
        return None
    target, given = {of[0]: figure.value}, {n: f.value for n, f in scope.held.items()}
    try:
        sides = [_value(code, target | given) for code in (said, made)]
    except (ArithmeticError, ValueError):
        return None
    if min(s.lo for s in sides) <= 0 or not 1 / _FAR < sides[0].mid / sides[1].mid < _FAR:
        return None
    shown = re.sub(r"[a-z_][a-z_0-9]*", lambda m: given_text(m[0], scope), way.split(" if ")[0])
    return sides[0], sides[1], scope, shown


def given_text(name: str, scope: _Scope) -> str:
    return _text(scope.held[name]) if name in scope.held else name


def _text(f: Named) -> str:
    """A figure with its unit, where its column or key has that."""
    return si(f.value.mid, UNIT_OF[f.kind]) if f.kind in UNIT_OF and not re.search(r"[^\d.,]", f.text) else f.text


def _value(code: CodeType, given: dict[str, Interval]) -> Interval:
    """The least and the largest value, at the ends of what was printed: every formula grows or falls with each name."""
    names = code.co_names
    free = {n: v for n, v in given.items() if n in names}

    def at(values: dict[str, float]) -> float:
        return float(eval(code, {"__builtins__": {}, **FUNCTIONS}, values))

    mid = at({n: v.mid for n, v in free.items()})
    open_ = [n for n, v in free.items() if v.lo < v.hi]
    ends = [
        at({n: v.mid for n, v in free.items()} | dict(zip(open_, some, strict=True)))
        for some in itertools.product(*((free[n].lo, free[n].hi) for n in open_))
    ]
    return Interval(min(mid, *ends, mid), mid, max(mid, *ends, mid))


def _keeps(made: _Made, sign: str, slack: float) -> bool:
    said, of = made[:2]
    return said.meets(of, slack) if sign == "=" else said.lo <= of.hi * (1 + slack)


def _broken(formula: Formula, sign: str, kept: int, figure: Named, made: _Made) -> Finding:
    _, of, scope, shown = made
    sure = kept >= formula.sure and scope.distance < 2
    for spelled, mark in ((r" \*\* ", "^"), (r" \* ", " × "), (" / ", " ÷ "), (" - ", " − ")):
        shown = re.sub(spelled, mark, shown)
    shown = re.sub(" [×÷] 10{12}", "", shown)  # TFLOPs and FLOPs
    itself = formula.text.startswith(re.match(r"\w+", formula.text)[0] + " " + sign)  # type: ignore[index]
    value = _shown(of.mid, figure.kind) if itself else f"{of.mid:,.4g}"
    said = figure.text if not itself or _text(figure) == figure.text else f"{figure.text} ({_text(figure)})"
    shown = shown if shown in value else f"{shown} = {value}"
    shown = re.sub(r"resident\((.*), (.*), .*\) =", r"\1 registers × \2 threads:", shown)
    than = "most" if sign == "<=" else "least"
    message = f"{shown}, not {said}" if sign == "=" else f"{said} against at {than} {shown}"
    message += "" if sure else ": are they of the same run?"
    verdict = QUESTION if not sure else INCONSISTENT if sign == "=" else IMPOSSIBLE
    beside = [f for f in scope.held.values() if f.line]
    quote = ", ".join(dict.fromkeys(f.text for f in (figure, *beside)))
    return Finding(verdict, formula.rule, figure.line, quote, message, (figure.line, *(f.line for f in beside)))


def _shown(value: float, kind: str) -> str:
    if kind == "percent":
        return f"{100 * value:.3g} %"
    return si(value, UNIT_OF[kind]) if kind in UNIT_OF else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def _scope(report: Report, target: str, figure: Named, names: tuple[str, ...], formula: Formula) -> _Scope | None:
    found: dict[str, Named] = {}
    furthest = 0
    # What stands above the last figure of this name is of another run.
    others = named(report, target)
    above = [f.line for f in others if f.row.block == figure.row.block and f.line < figure.line]
    last = 0 if formula.fit else max(above, default=0)
    for name in names:
        at = _nearest(report, named(report, name), figure, last) or _of_device(figure.row, name)
        if at is None or at[1] > ("row", "block", "report").index(formula.reach):
            return None
        found[name] = at[0]
        furthest = max(furthest, at[1])
    return _Scope(found, furthest)


def _nearest(report: Report, some: tuple[Named, ...], figure: Named, last: int) -> tuple[Named, int] | None:
    """The one value of a name in the figure's row, its block, the report; and how far it stands."""
    row = figure.row
    part = _PART.findall(figure.key)
    if part:  # of training or of evaluation
        some = tuple(f for f in some if set(_PART.findall(f.key)) <= set(part))
    if len({f.value.mid for f in some}) > 1:  # those of the figure's own object
        alike = [_shared(f.key.split(), figure.key.split()) for f in some]
        some = tuple(f for f, n in zip(some, alike, strict=True) if n == max(alike) or max(alike) < 2)
    block = [f for f in some if f.row.block == row.block and not _in_grid(f.row) and f.line > last]
    for distance, of in enumerate(([f for f in some if f.row is row], block, [f for f in some if not _in_grid(f.row)])):
        if len({f.value.mid for f in of}) == 1 and not (distance == 1 and _in_grid(row)):
            return of[0], distance
        above = [f for f in of if f.line <= figure.line]
        if distance == 1 and above and len(of) > 1 and report.blocks[row.block].kind == "code":
            return max(above, key=lambda f: f.line), distance  # a log's
        if of and distance < 1:
            return None
    return None


def _shared(a: list[str], b: list[str]) -> int:
    """How many words two keys begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@lru_cache(maxsize=4096)
def _in_grid(row: Row) -> bool:
    """Whether it is one of several rows of a table, whose figures are their own."""
    return row.kind == "table" and any(len(g.rows) > 1 and g.header[2:] and row in g.rows for g in row.report.grids)


def _of_device(row: Row, name: str) -> tuple[Named, int] | None:
    """What the row's GPU has of warps, and of instructions a cycle."""
    if name not in ("warps_per_sm", "issue_slots"):
        return None
    told = {(int(a), int(b)) for a, b in re.findall(r"\b(?:cc|compute capability:?) +(\d+)\.(\d)\b", row.report.text)}
    of = {d.capability for d in row.devices} or {d.capability for d in row.report.everything.of("devices")}
    parts = told if len(told) == 1 else {c for c in of if c}
    if len(parts) != 1 or (most := HOLDS.get(parts.pop())) is None:
        return None
    if name == "issue_slots":  # four schedulers, one instruction each a cycle, from 7.0 on
        return Named("", "n", exact(4.0), "4 a cycle", 0, row), 0
    return Named("", "n", exact(float(most)), f"{most} warps", 0, row), 0
