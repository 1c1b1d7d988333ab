"""Down a table: what a column is made of is found out from the rows that agree; the row that does not is accused.

A column may be the quotient of two others, or of one and a row of it (speed-ups, shares, changes, scaling); a product of
two others whose units make its own; the work of the rows' sizes in a time; a sum; or a constant times another column.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from expertile.audit.facts import facts
from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FAR, FIT, ODD, Interval, exact, odd_ones
from expertile.audit.quantity import Quantity, same_statistic
from expertile.audit.report import RATIO, Grid, Report, Row
from expertile.audit.rules.laws import NO_RUN, derived, law_of
from expertile.audit.rules.peaks import peaks_of
from expertile.audit.rules.work import conventions, readings
from expertile.audit.units import UNTYPED, kind_of, powers_of, product

Pair = tuple[Quantity, Quantity]
Cells = dict[int, Quantity]
TYPED = ("time", "rate", "bandwidth", "tokens_per_s", "items_per_s", "s_per_token", "s_per_item", "bytes")
PART = re.compile(
    r"(?i)^of\b|\bpeak|efficien|\bmfu\b|\bshare\b|scal|sav|reduc|overhead|(?:%|percent) of|"
    r"less|more|diff|delta|Δ|chang|incr"
)
_NO_QUOTIENT = re.compile(r"(?i)\bhit|occupancy|active|stall|utili[sz]")  # counters of a profiler
_OF_PEAK = re.compile(r"(?i)peak|theor|of (?:hbm|max)|\bmfu\b|roof|\bsol\b")
_SUM = re.compile(r"(?i)\btotal|\bsum\b|end[ _-]?to[ _-]?end|\be2e\b|overall")


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


def columns(report: Report) -> Iterator[Finding]:
    """Every column of every table that may be made of others."""
    for grid in report.tables:
        for index, name in enumerate(grid.header):
            cells = [q for q in grid.column(index) if q is not None]
            kinds = {q.kind for q in cells}
            if not cells or len(kinds) != 1 or len(grid.header) > 24:
                continue
            kind = kinds.pop()
            if kind in ("ratio", "percent"):
                drawn = grid.drawn or (kind == "ratio" and len(grid.header) < 4)
                said = name.strip() == "%" or RATIO.search(name) or PART.search(name) or kind == "ratio"
                if drawn and said and not _NO_QUOTIENT.search(name) and 2 * len(cells) >= len(grid.rows):
                    yield from _column(grid, index, kind)
            elif kind not in ("number", "other") and 2 * len(cells) >= len(grid.rows):
                yield from _column(grid, index, kind)


def _column(grid: Grid, index: int, kind: str) -> Iterator[Finding]:
    cells = grid.column(index)
    body = [r for r, row in enumerate(grid.rows) if not row.summary]
    targets = {r: q for r in body if (q := cells[r]) is not None and q.exact and q.value.mid > 0}
    quotient = kind in ("ratio", "percent")
    # A row whose ratio is 1 is a baseline: that it equals itself confirms nothing.
    ones = [r for r, q in targets.items() if quotient and q.value.meets(1.0) and q.value.width < 0.3]
    telling = [r for r in targets if r not in ones and not (quotient and targets[r].value.mid == 1)]
    if not telling or (len(telling) > 2 and len({targets[r].text for r in telling}) == 1):
        return
    # So is the one row that has none.
    blank = [r for r in body if cells[r] is None and grid.rows[r].quantities]
    ones = ones or (blank if len(blank) == 1 and len(telling) == len(body) - 1 else [])
    made = [*_products(grid, index, kind, targets), *(_quotients(grid, index, body, ones) if quotient else ())]
    scored = [(m.score(targets, telling), m) for m in made]

    def rank(scored: tuple[int, Made]) -> tuple[int, bool, bool]:
        score, m = scored
        exactly = sum(r in m.expected and m.fits(r, targets[r], 0.0) for r in telling)
        return score + 2 * exactly - m.free, m.direct, m.name.endswith("1x")

    if any(s > 2 and not m.free for s, m in scored):
        scored = [(s, m) for s, m in scored if not m.free]
    score, best = max(((s, m) for s, m in scored if s), key=rank, default=(0, None))
    if best is None:
        return
    based = best.direct or best.name.endswith("1x")
    if score < 3 and (best.free or not (based or targets[telling[0]].kind == "ratio")):
        return
    # One row that agrees is enough beside one that does not, where nothing else can be meant.
    only = best.direct and not best.free and (not quotient or any(len(grid.columns(k)) == 2 for k in TYPED))
    if score < 2 and not (len(telling) == 2 and (only or (ones and best.name.endswith("1x")))):
        return
    # Where the rows agree to their last digit, so must every other. A pair that suits another better is its own.
    exactly = sum(r in best.expected and best.fits(r, targets[r], 0.0) for r in telling)
    if quotient and best.direct:
        others = [enumerate(grid.column(c)) for c in grid.columns("ratio", "percent") if c != index]
        for held in others:
            if sum(bool(q and r in best.expected and best.fits(r, q, 0.0)) for r, q in held) > exactly:
                return
    slack = 0.01 if score >= 3 and exactly >= score else ODD / 2 if exactly >= score > 1 else ODD
    slack = slack if quotient else best.slack if best.free else max(slack, 0.04 if score > 2 else 0.1)
    rivals = [m for s, m in scored if (score < 2 or m.direct or s > 1) and m is not best and m.direct == best.direct]
    odd = [r for r in telling if r in best.expected and not best.fits(r, targets[r], slack)]
    several = not quotient and len(odd) > 1  # of one error, one row
    for r in telling:
        # Another baseline of the same table may be meant in this row.
        q, other = targets[r], any(r in m.expected and m.fits(r, targets[r], 0.0) for m in rivals)
        if r in best.expected and not best.fits(r, q, slack) and not other and not best.excused(r, q):
            yield _broken(best if not several else replace(best, free=True), q, r)
    for r in range(len(grid.rows)) if quotient else ():
        s = cells[r]
        if s is None or r in body or not s.exact or r not in best.pairs or best.fits(r, s, FIT):
            continue
        if s.value.meets(sum(t.value.mid for t in targets.values()) / len(targets), FIT):
            a, b = best.pairs[r]
            x = f"{a.text} / {b.text} of this row is {a.value.mid / b.value.mid:.3g}"
            message = f"{s.text} is the mean of the rows' ratios; {x}: which of the two is meant?"
            yield finding(QUESTION, "mean of ratios", message, s)


def _broken(best: Made, q: Quantity, r: int) -> Finding:
    if best.pairs:
        return wrong(q, best.pairs[r], best.name)
    should = (
        si(best.expected[r].mid, UNIT_OF.get(q.kind, ""))
        if q.kind != "percent"
        else f"{100 * best.expected[r].mid:.3g} %"
    )
    ask = ": is it of the same work?" if best.free else ""
    like = f"the other rows' {best.name}" if best.free else best.text.get(r) or best.name
    message = f"{like} is {should}, not {q.text}{ask}"
    return finding(QUESTION if best.free else INCONSISTENT, best.rule, message, q, lines=best.lines.get(r, ()))


@dataclass(frozen=True)
class _Source:
    """What a column may be made of: another column, a sum of several, the work of the rows' sizes. `also`: factors by
    which each row may be counted otherwise."""

    name: str
    kind: str
    values: dict[int, Interval]
    text: dict[int, str]
    column: int = -1
    also: tuple[float, ...] = (1.0,)
    lines: dict[int, tuple[int, ...]] = field(default_factory=dict)
    plain: bool = False


def _sources(grid: Grid, target: int, targets: Cells) -> list[_Source]:
    found = []
    for c, header in enumerate(grid.header):
        held = {r: q for r in targets if (q := grid.column(c)[r]) is not None and q.exact and q.value.mid > 0}
        kinds = {q.kind for q in held.values()}
        if (
            c != target
            and len(kinds) == 1
            and 2 * len(held) >= len(targets)
            and same_statistic(header, grid.header[target])
        ):
            values, text = {r: q.plain for r, q in held.items()}, {r: q.text for r, q in held.items()}
            found.append(_Source(header, kinds.pop(), values, text, c))
    for kind in ("bytes", "tokens"):
        parts = [s for s in found if s.kind == kind and len(s.values) == len(targets)]
        if 1 < len(parts) < 4:  # read and written, prompt and answer
            sums = {r: sum((p.values[r] for p in parts[1:]), parts[0].values[r]) for r in targets}
            text = {r: " + ".join(p.text[r] for p in parts) for r in targets}
            found.append(_Source(" + ".join(p.name for p in parts), kind, sums, text))
    work = {r: w for r in targets if (w := readings(grid.rows[r])) is not None}
    if work and len(work) == len(targets):
        first = next(iter(work))
        also = conventions(work[first], grid.rows[first].words)
        plain = all(w.named and not w.counts and not w.causal for w in work.values())
        text = {r: f"{w.formula} FLOP" for r, w in work.items()}
        values, lines = {r: exact(w.work.flops) for r, w in work.items()}, {r: w.lines for r, w in work.items()}
        found.append(_Source("work", "flop", values, text, -1, also, lines, plain))
    return found


def _counts(grid: Grid, targets: Cells, sources: list[_Source]) -> dict[str, dict[int, float]]:
    """What rows may be multiplied or divided by: sizes by their names, whole numbers without a unit, two of them."""
    found: dict[str, dict[int, float]] = {}
    for name in ("batch", "seq", "gpus", "concurrency", *(n for r in targets for n in grid.rows[r].own)):
        sizes = {r: s.value for r in targets if (s := grid.rows[r].size(name)) and s.near}
        if len(sizes) == len(targets):
            found[name] = sizes
    for s in sources:
        whole = s.kind == "number" and all(v.mid == int(v.mid) for v in s.values.values())
        if whole and len(s.values) == len(targets):
            found[s.name] = {r: v.mid for r, v in s.values.items()}
    one = {"": dict.fromkeys(targets, 1.0)}
    some = {f" × {name}": held for name, held in list(found.items())[:5]}
    over = {f" ÷ {name[3:]}": {r: 1 / v for r, v in held.items()} for name, held in some.items()}
    pairs = {
        a + b: {r: x[r] * y[r] for r in x}
        for (a, x), (b, y) in itertools.combinations({**some, **over}.items(), 2)
        if a[3:] != b[3:]
    }
    return {**one, **some, **over, **pairs}


_APART = {"time", "bytes", "tokens", "items"}
_RUN = ("rate", "bandwidth", "tokens_per_s", "items_per_s")


def _products(grid: Grid, target: int, kind: str, targets: Cells) -> Iterator[Made]:
    """Columns whose units make the target's, with every count that a row states between; one column times a constant."""
    sources = _sources(grid, target, targets)
    typed = [s for s in sources if s.kind not in UNTYPED]
    counts = _counts(grid, targets, sources)
    for x, y in permutations(typed, 2) if kind not in UNTYPED else ():
        times, by = product(x.kind, y.kind), product(x.kind, y.kind, -1)
        law = law_of(x.kind, y.kind, kind)
        silent = re.search(NO_RUN, f"{x.name} {y.name}") or derived((x.kind, y.kind, kind)) != kind
        for sign in (1, -1) if not silent else ():
            if (times if sign > 0 else by) == kind and (sign < 0 or x.column < y.column):
                also = x.also if x.name == "work" else law.also
                for name in counts if law.several else ("",):
                    yield from _made(law.rule, targets, (x, y, sign), (name, counts[name]), also)
    for s in typed:
        if kind == "percent" and s.kind in ("rate", "bandwidth"):
            yield from _shares(grid, target, targets, s)
        each = re.search(r"(?i)per|each|/ ?(?:gpu|device|node|user|req)", f"{s.name} {grid.header[target]}")
        makes = (s.kind == kind in _RUN and each) or (kind not in UNTYPED and s.kind != kind)
        for sign in (1, -1) if makes and ("*" in kind or derived((kind, s.kind)) == kind) else ():
            # Tokens and requests are counts too: tokens/s are sequences at once over the time of a token.
            if _loose(kind) == _loose(product("ratio", s.kind, sign)) and not re.search(NO_RUN, s.name):
                rule = "throughput" if "item" in kind else "tokens/s"
                for name, count in counts.items() if _loose(kind) else ():
                    if name or (sign < 0 and kind != s.kind):
                        yield from _made(rule, targets, (s, None, sign), (name, count), (1.0,))
        if s.column >= 0:
            yield from _constant(grid, target, kind, targets, s, counts)
    if kind in ("time", "bytes", "money", "energy", "items", "tokens") and _SUM.search(grid.header[target]):
        like = [s for s in typed if s.kind == kind and 0 <= s.column < target and len(s.values) == len(targets)]
        for some in (part for k in range(2, len(like) + 1) for part in (like[:k], like[-k:])):
            sums = {r: sum((s.values[r] for s in some[1:]), some[0].values[r]) for r in targets}
            yield Made("the sum of the columns before", "sum", sums)


def _loose(kind: str) -> str:
    """A kind without what can be counted."""
    powers = Counter({unit: p for unit, p in powers_of(kind).items() if unit not in ("token", "item", "gpu")})
    return kind_of(powers).replace("ratio", "")


def _made(
    rule: str,
    targets: Cells,
    of: tuple[_Source, _Source | None, int],
    counted: tuple[str, dict[int, float]],
    usual: tuple[float, ...],
) -> Iterator[Made]:
    """x × y, x ÷ y, x or 1 ÷ x, times a count, where most of the rows agree on a factor of `usual`."""
    x, y, sign = of
    name, count = counted
    rows = [r for r in targets if r in x.values and (y is None or r in y.values)]

    def value(r: int, at: Callable[[Interval], Any]) -> Any:
        a, b = (
            (at(x.values[r]), at(y.values[r])) if y else (1.0, at(x.values[r])) if sign < 0 else (at(x.values[r]), 1.0)
        )
        return a * b if y and sign > 0 else exact(a) / b if isinstance(b, Interval) else a / b if b else 0.0

    near = [targets[r].value.mid / (value(r, lambda v: v.mid) * count[r] or 1e-300) for r in rows]
    if not any(sum(0.96 < n / u < 1.042 for n in near) * 2 >= len(near) for u in usual):
        return
    expected = {r: value(r, lambda v: v) * count[r] for r in rows}
    # A rate is often the mean of rates, beside a mean of times.
    found = odd_ones([targets[r].plain / expected[r] for r in rows], usual, 2 * FIT)
    if found is None or (found[0] not in usual and x.name != "work"):
        return
    plain = x.plain and found[0] == 1.0
    also = {} if plain else dict.fromkeys(rows, tuple(f / found[0] for f in usual))
    mark = ("×" if sign > 0 else "in" if y.kind == "time" else "÷") if y else ""
    text = {r: f"{x.text[r]} {mark} {y.text[r]}" if y else f"1 ÷ {x.text[r]}" if sign < 0 else x.text[r] for r in rows}
    text = {r: f"{t}{f' × {count[r]:.4g}' if name else ''}" for r, t in text.items()}
    title = f"{x.name} {mark} {y.name if y else ''}".strip() + name
    yield Made(title, rule, {r: v * found[0] for r, v in expected.items()}, text, x.lines, also)


def _constant(
    grid: Grid, target: int, kind: str, targets: Cells, s: _Source, counts: dict[str, dict[int, float]]
) -> Iterator[Made]:
    """The target in proportion to a column or its inverse, to the last digit in all rows but one; for rates and times,
    which may be of one work, less exactly. It asks."""
    rows = [r for r in targets if r in s.values]
    work = {kind, s.kind} <= {*_RUN, "time"} and derived((kind, s.kind)) == kind and kind != s.kind
    named = grid.drawn or all(re.search("[a-z]{3}", n) for n in (s.name, grid.header[target]))
    exactly = named and s.column < target and (s.kind == kind or not {kind, s.kind} <= _APART)
    exactly = exactly and {kind, s.kind} not in ({"rate", "bandwidth"}, {"time"})
    sized = [n for n in counts if "÷" not in n] if work else [""]
    for sign, name in itertools.product((1, -1) if s.kind != kind else (1,), sized if len(rows) > 3 else ()):
        values = {r: (s.values[r] if sign > 0 else exact(1.0) / s.values[r]) * counts[name][r] for r in rows}
        factors = {r: targets[r].plain / values[r] for r in rows}
        middle = sorted(factors.values(), key=lambda f: f.mid)[len(rows) // 2].mid
        agree = [r for r in rows if factors[r].meets(middle, 0.002) and factors[r].width < 0.06]
        span = [values[r].mid for r in agree or rows]
        tight = len(agree) == len(rows) - 1 and max(span) > 1.2 * min(span)
        alike = len(agree) == len(rows) - 1 and work and sign < 0
        loose = work and (sign < 0) == (s.kind == "time")
        if not loose and not (exactly and tight and not name):
            continue
        if not (tight or alike):
            found = odd_ones([factors[r] for r in rows])
            if found is None or len(found[1]) > 1:
                continue
            middle = found[0]
        slack = 0.04 if tight or alike else 0.4 if s.kind != "time" else 0.15
        rule = {"rate": "rate", "bandwidth": "bandwidth", "items_per_s": "throughput"}.get(kind, "tokens/s")
        rule = "proportion" if not loose else "intensity" if s.kind != "time" else rule
        title = f"{'proportion to' if sign > 0 else 'product with'} {s.name}{name}"
        yield Made(title, rule, {r: v * middle for r, v in values.items()}, free=True, slack=slack)


def _shares(grid: Grid, target: int, targets: Cells, s: _Source) -> Iterator[Made]:
    """Shares of one peak: of a known one it accuses, of another it asks."""
    rows = [r for r in targets if r in s.values]
    peaks = (d for r in rows for d in grid.rows[r].devices)
    known = tuple({x for d in peaks for x in (peaks_of(d) if s.kind == "rate" else (d.memory_bps or 0.0,)) if x})
    if not _OF_PEAK.search(grid.header[target]) or {*grid.columns("rate")} and {*grid.columns("bandwidth")}:
        return
    found = odd_ones([s.values[r] / targets[r].plain for r in rows], known)
    if found and len(found[1]) < 2:
        expected = {r: s.values[r] / found[0] for r in rows}
        text = {r: f"{s.text[r]} of the others' peak" for r in rows}
        also = dict.fromkeys(rows, tuple(found[0] / x for x in known))
        free = found[0] not in known and len(rows) < 4
        yield Made(f"share of {s.name}", "share of peak", expected, text, also=also, free=free)


def _quotients(grid: Grid, target: int, body: list[int], ones: list[int]) -> Iterator[Made]:
    """A ratio as the quotient of two columns, or of a column and one of its rows."""
    bare = ("number",) * bool(re.search(r"(?i)speed|gain", grid.header[target]))
    for kind in (*TYPED, *bare):
        if any(c != target for c in grid.columns(kind)):
            for name, pairs, direct in _pairs(grid, kind, target, body, ones):
                expected = {r: exact(1.0) for r in pairs}
                yield Made(name, "ratio", expected, pairs=pairs, direct=direct)


def _pairs(
    grid: Grid, kind: str, target: int, body: list[int], ones: list[int]
) -> Iterator[tuple[str, dict[int, Pair], bool]]:
    blank = [r for r in body if grid.column(target)[r] is None and grid.rows[r].own]
    columns = {
        c: {r: q for r, q in enumerate(grid.column(c)) if q is not None and q.kind == kind and q.value.mid > 0}
        for c in grid.columns(kind)
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
        shares = re.search(r"(?i)share|fraction|%|pct|percent", grid.header[target])
        if shares and not any(row.summary for row in grid.rows) and len(body) > 2 and all(r in held for r in body):
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
