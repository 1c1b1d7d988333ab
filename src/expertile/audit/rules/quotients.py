"""A ratio column as the quotient of two others, or of one and a row of it: speed-ups, shares, changes, scaling."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations

from expertile.audit.facts import facts
from expertile.audit.finding import INCONSISTENT, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, Interval, exact
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Row

Pair = tuple[Quantity, Quantity]
Cells = dict[int, Quantity]
TYPED = ("time", "rate", "bandwidth", "tokens_per_s", "items_per_s", "s_per_token", "s_per_item", "bytes")


@dataclass
class Made:
    """How a column may follow: `expected` of each row, up to the factor `by`; where it was `free` to be any the
    audit asks. `also`: factors by which a row may be counted otherwise. `direct`: of figures of the same row."""

    name: str
    rule: str
    expected: dict[int, Interval]
    text: dict[int, str] = field(default_factory=dict)
    lines: dict[int, tuple[int, ...]] = field(default_factory=dict)
    also: dict[int, tuple[float, ...]] = field(default_factory=dict)
    pairs: dict[int, Pair] = field(default_factory=dict)
    direct: bool = True
    free: bool = False
    slack: float = 0.15

    def fits(self, r: int, q: Quantity, slack: float) -> bool:
        if self.pairs:
            a, b = self.pairs[r]
            # "1.1x slower" stands among those that are faster.
            turned = re.match(r"(?i)\W*(?:faster|slower|better|worse)", q.after) and follows(q, (b, a), slack)
            return bool(turned) or follows(q, (a, b), slack)
        return q.plain.meets(self.expected[r], slack)

    def excused(self, r: int, q: Quantity) -> bool:
        """Whether another convention gives the figure."""
        off = q.plain / self.expected[r]
        whole = (max(1.0, round(off.mid)), 1 / max(1.0, round(1 / off.mid))) if self.free else ()
        return any(off.meets(f, FIT) for f in self.also.get(r, ())) or any(off.meets(f, 0.04) for f in whole)

    def width(self, r: int) -> float:
        return sum(x.plain.width for x in self.pairs[r]) if self.pairs else self.expected[r].width

    def score(self, targets: Cells, telling: list[int]) -> int:
        """The rows that confirm it; 0 where more than one in three does not."""
        held = [r for r in telling if r in self.expected]
        bad = good = 0
        for r in held:
            if not self.fits(r, targets[r], FIT if self.pairs else 2 * FIT):
                bad += 1
            elif targets[r].value.width < 0.3 and self.width(r) < 0.2:
                good += 1  # a wide one confirms nothing
            if bad > max(targets[r].kind == "ratio" or not self.pairs or self.name.endswith("1x"), 0.34 * len(held)):
                return 0
        return good


_UNIT = re.compile(r"[\d., ]|[kKMGT](?=i?B)")


def follows(q: Quantity, pair: Pair, slack: float, change: str = "") -> bool:
    """Whether `q` may be what is printed for the quotient of `pair`; as a "change" or a "loss" only if that is said."""
    a, b = pair
    alike = _UNIT.sub("", a.text) == _UNIT.sub("", b.text)
    x = a.plain / b.plain if alike else a.value / b.value
    gain = Interval(max(x.lo - 1, 0), max(x.mid - 1, 0), max(x.hi - 1, 0))
    loss = Interval(max(1 - x.hi, 0), max(1 - x.mid, 0), max(1 - x.lo, 0))
    forms = {"": [x, gain, loss], "change": [gain, loss], "loss": [loss]}[change]
    if q.kind in ("ratio", "number"):
        forms = [x, gain] if re.search(r"(?i)improve|gain", q.label) else [x]
    return any(form.hi > 0 and q.value.meets(form, slack) for form in forms)


def quotients(grid: Grid, target: int, body: list[int], ones: list[int]) -> Iterator[Made]:
    """A ratio as the quotient of two columns, or of a column and one of its rows."""
    bare = ("number",) * bool(re.search(r"(?i)speed|gain", grid.header[target]))
    mixed = not any(grid.columns(k) for k in TYPED) and len(grid.columns(*TYPED)) == 2
    for kind in (*TYPED, *bare, *(("any",) * mixed)):  # rows of several units: "req/s", then "ms"
        if kind == "any" or any(c != target for c in grid.columns(kind)):
            for name, pairs, direct in _pairs(grid, kind, target, body, ones):
                expected = {r: exact(1.0) for r in pairs}
                yield Made(name, "ratio", expected, pairs=pairs, direct=direct)


def _pairs(
    grid: Grid, kind: str, target: int, body: list[int], ones: list[int]
) -> Iterator[tuple[str, dict[int, Pair], bool]]:
    blank = [r for r in body if grid.column(target)[r] is None and grid.rows[r].own]
    columns = {
        c: {r: q for r, q in enumerate(grid.column(c)) if q is not None and kind in (q.kind, "any") and q.value.mid > 0}
        for c in grid.columns(*(TYPED if kind == "any" else (kind,)))
        if c != target
    }
    for a, b in permutations(columns, 2) if len(columns) < 13 else ():
        both = {r: (columns[a][r], columns[b][r]) for r in columns[a].keys() & columns[b].keys()}
        yield f"{grid.header[a]} / {grid.header[b]}", both, True
    each = [*_each(grid, columns)]
    for (a, x), (b, y) in permutations(each, 2):
        if a != b:
            yield (
                f"{grid.header[a]} / {grid.header[b]} of each GPU",
                {r: (x[r], y[r]) for r in x.keys() & y.keys()},
                True,
            )
    some = body if len(body) <= 24 else [body[0], body[-1]]
    bases = [
        ("the row of 1x", {r: max((o for o in ones if o < r), default=-1) for r in body}),
        ("the next row of 1x", {r: min((o for o in ones if o > r), default=-1) for r in body}),
        ("its like", {r: next((b for b in blank if grid.rows[b].own == grid.rows[r].own), -1) for r in body}),
        *((f"line {grid.rows[s].line}", dict.fromkeys(body, s)) for s in some),
        ("the row before", {r: r - 1 for r in body}),
    ]
    for c, held in [*columns.items(), *each]:
        part = re.search(r"(?i)share|fraction|%|pct|percent", grid.header[target])
        if part and not any(row.summary for row in grid.rows) and len(body) > 2 and all(r in held for r in body):
            whole = sum((held[r].value for r in body[1:]), held[body[0]].value)
            total = replace(held[body[0]], value=whole, text="sum")
            yield f"the sum of {grid.header[c]}", {r: (held[r], total) for r in body}, False
        for s, row in enumerate(grid.rows):
            if row.summary and s in held:
                shares = {r: (held[r], held[s]) for r in body if r in held}
                yield f"{grid.header[c]} of line {row.line}", shares, True
        for name, base in bases:
            pairs = [(r, s) for r, s in base.items() if r in held and s in held and s != r]
            there = {r: (held[s], held[r]) for r, s in pairs if _same_work(grid.rows[r], grid.rows[s])}
            yield f"{grid.header[c]} of {name}", there, False
            yield f"{grid.header[c]} over {name}", {r: (b, a) for r, (a, b) in there.items()}, False


_SHAPES = re.compile(r"\b[A-Za-z]{1,3}=?\d+\b|\d+(?:[x×]\d+)+")


def _same_work(a: Row, b: Row) -> bool:
    """Whether two rows may be of one problem: "B4 N512" and "B1 N1024" are not."""
    shapes = [{re.sub(r"\d", "", s): s for s in _SHAPES.findall(row.label)} for row in (a, b)]
    shared = shapes[0].keys() & shapes[1].keys()
    return len(shared) < 2 or all(shapes[0][s] == shapes[1][s] for s in shared)


def _each(grid: Grid, columns: dict[int, Cells]) -> Iterator[tuple[int, Cells]]:
    """The columns for each GPU, which a scaling efficiency compares."""
    gpus = {r: row.own.get("gpus", 0.0) for r, row in enumerate(grid.rows)}
    for c, held in columns.items():  # "tokens/s (8 GPUs)"
        if len(n := facts(grid.header[c]).of("gpus")) == 1:
            yield c, {r: replace(q, value=q.value * (n[0] if q.kind == "time" else 1 / n[0])) for r, q in held.items()}
    for c, held in columns.items() if len({*gpus.values()}) > 1 else ():
        by = {r: gpus[r] if q.kind == "time" else 1 / gpus[r] for r, q in held.items() if gpus[r]}
        yield c, {r: replace(held[r], value=held[r].value * x) for r, x in by.items()}


def wrong(q: Quantity, pair: Pair, name: str = "") -> Finding:
    """`q` is not what its two figures make."""
    x, unit = pair[0].value.mid / pair[1].value.mid, UNIT_OF.get(pair[0].kind, "")
    more = f"{100 * (x - 1):.3g} % more, " * (x > 1) + f"{100 * (1 - min(x, 1 / x)):.3g} % less"
    should, meant = f"{x:.3g}x" if q.kind != "percent" else f"{100 * x:.3g} % ({more})", f" ({name})" if name else ""
    message = f"{si(pair[0].value.mid, unit)} / {si(pair[1].value.mid, unit)} is {should}, not {q.text}{meant}"
    return finding(INCONSISTENT, "ratio", message, q, lines=(pair[0].line, pair[1].line))
