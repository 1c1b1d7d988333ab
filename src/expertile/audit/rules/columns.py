"""Down a table: what a column is made of is found out from the rows that agree; the row that does not is accused.

A column may be the quotient of two others, or of one and a row of it (speed-ups, shares, changes, scaling); a product of
two others whose units make its own; the work of the rows' sizes in a time; a sum; or a constant times another column.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FAR, FIT, ODD, Interval, exact, odd_ones
from expertile.audit.quantity import Quantity, same_statistic
from expertile.audit.report import RATIO, Grid, Report, Row
from expertile.audit.rules.laws import NO_RUN, derived, law_of
from expertile.audit.rules.peaks import peaks_of
from expertile.audit.rules.work import conventions, readings
from expertile.audit.units import UNTYPED, product

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
    """What a column may be made of: `expected` of each row, up to the factor `by`; where it was `free` to be any the
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
            if not self.fits(r, targets[r], FIT):
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
    for r in telling:
        # Another baseline of the same table may be meant in this row.
        q, other = targets[r], any(r in m.expected and m.fits(r, targets[r], 0.0) for m in rivals)
        if r in best.expected and not best.fits(r, q, slack) and not other and not best.excused(r, q):
            yield _broken(best, q, r)
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


def _products(grid: Grid, target: int, kind: str, targets: Cells) -> Iterator[Made]:
    """Columns whose units make the target's, with every count that a row states between."""
    of: dict[int, Cells] = {}
    for c in range(len(grid.header)):
        held = {r: q for r in targets if (q := grid.column(c)[r]) is not None and q.exact and q.value.mid > 0}
        if c != target and len({q.kind for q in held.values()}) == 1 and 2 * len(held) >= len(targets):
            if same_statistic(grid.header[c], grid.header[target]):
                of[c] = held
    typed = {c: held for c, held in of.items() if next(iter(held.values())).kind not in UNTYPED}
    kinds = {c: next(iter(held.values())).kind for c, held in typed.items()}
    counts = _counts(grid, targets, of)
    yield from _steady(grid, target, kind, targets, of) if grid.drawn else ()
    if kind == "percent":
        yield from _shares(grid, target, targets, typed, kinds)
    if kind in ("ratio", "percent"):
        return
    for (a, x), (b, y) in permutations(typed.items(), 2):
        times, by = product(kinds[a], kinds[b]), product(kinds[a], kinds[b], -1)
        if ((times == kind and a < b) or by == kind) and derived((kinds[a], kinds[b], kind)) == kind:
            law, sign = law_of(kinds[a], kinds[b], kind), "×" if times == kind else "÷"
            if re.search(NO_RUN, f"{grid.header[a]} {grid.header[b]}"):
                continue
            rows = [r for r in targets if r in x and r in y]
            values = {r: x[r].plain * y[r].plain if sign == "×" else x[r].plain / y[r].plain for r in rows}
            text = {r: f"{x[r].text} {sign} {y[r].text}" for r in rows}
            name = f"{grid.header[a]} {sign} {grid.header[b]}"
            for label, count in (("", None), *counts.items()) if law.several else (("", None),):
                yield from _made(name + label, law.rule, targets, values, text, count, law.also)
    if kind == "rate":
        for c in (c for c, k in kinds.items() if k == "bandwidth"):
            yield from _made(
                f"{kind} ÷ {kinds[c]}",
                "intensity",
                targets,
                {r: q.plain for r, q in typed[c].items()},
                {},
                None,
                (),
                0.4,
            )
    for c, held in typed.items():
        yield from _of_sizes(grid, kind, kinds[c], targets, held, counts, grid.header[c])
    if kind in ("time", "bytes", "money", "energy", "items", "tokens") and _SUM.search(grid.header[target]):
        parts = [held for c, held in typed.items() if kinds[c] == kind and c < target and len(held) == len(targets)]
        for k in range(2, len(parts) + 1):
            for some in (parts[:k], parts[-k:]):
                sums = {r: sum((p[r].plain for p in some[1:]), some[0][r].plain) for r in targets}
                yield Made("the sum of the columns before", "sum", sums)


def _counts(grid: Grid, targets: Cells, of: dict[int, Cells]) -> dict[str, dict[int, float]]:
    """Whole numbers that every row states: sizes by their names, and columns without a unit."""
    found: dict[str, dict[int, float]] = {}
    rows = grid.rows
    for name in dict.fromkeys(n for r in targets for n in rows[r].own):
        held = {r: rows[r].own[name] for r in targets if name in rows[r].own}
        if len(held) == len(targets):
            found[f" × {name}"] = held
    for c, cells in of.items():
        if all(q.kind == "number" and q.value.mid == int(q.value.mid) for q in cells.values()) and len(cells) == len(
            targets
        ):
            found[f" × {grid.header[c]}"] = {r: q.value.mid for r, q in cells.items()}
    turned = {
        name.replace("×", "÷"): {r: 1 / v for r, v in held.items()}
        for name, held in found.items()
        if all(held.values())
    }
    return found | turned if len(found) < 7 else {}


def _made(
    name: str,
    rule: str,
    targets: Cells,
    values: dict[int, Interval],
    text: dict[int, str],
    count: dict[int, float] | None,
    usual: tuple[float, ...],
    slack: float = 0.15,
) -> Iterator[Made]:
    """`values` as what the column is made of, times the factor on which most of the rows agree."""
    expected = {r: v * count[r] if count else v for r, v in values.items() if v.mid > 0}
    rows = list(expected)
    found = odd_ones([targets[r].plain / expected[r] for r in rows], usual)
    if found is None or (not usual and (len(rows) < 4 or len(found[1]) > 1)):
        return
    if usual and found[0] not in usual:
        return
    by = found[0]
    also = dict.fromkeys(rows, tuple(f / by for f in usual))
    yield Made(name, rule, {r: v * by for r, v in expected.items()}, text, {}, also, free=not usual, slack=slack)


_APART = {"time", "bytes", "tokens", "items", "flop", "params", "number", "other"}


def _steady(grid: Grid, target: int, kind: str, targets: Cells, of: dict[int, Cells]) -> Iterator[Made]:
    """A column that is, to the last digit, in one proportion to another in all rows but one."""
    for c, held in of.items():
        other, rows = next(iter(held.values())).kind, [r for r in targets if r in held]
        if len(rows) < 4 or "number" in (kind, other) or (kind != other and {kind, other} <= _APART) or c > target:
            continue
        for sign in (1, -1) if kind != other else (1,):
            values = {r: held[r].plain if sign > 0 else exact(1.0) / held[r].plain for r in rows}
            factors = {r: targets[r].plain / values[r] for r in rows}
            middle = sorted(factors.values(), key=lambda f: f.mid)[len(rows) // 2].mid
            agree = [r for r in rows if factors[r].meets(middle, 0.002) and factors[r].width < 0.02]
            span = [values[r].mid for r in agree]
            if len(agree) == len(rows) - 1 and max(span) > 1.3 * min(span):
                name = f"proportion to {grid.header[c]}"
                yield Made(name, "proportion", {r: v * middle for r, v in values.items()}, free=True, slack=0.04)


def _of_sizes(
    grid: Grid, kind: str, of: str, targets: Cells, held: Cells, counts: dict[str, dict[int, float]], header: str
) -> Iterator[Made]:
    """The work, tokens, items or bytes that a row's sizes mean, in its time."""
    amount = product(kind, of)
    if derived((kind, of, amount)) != kind:
        return
    rows = [r for r in targets if r in held]
    inverse = {r: exact(1.0) / held[r].plain for r in rows}
    if amount == "flop":
        work = {r: w for r in rows if (w := readings(grid.rows[r])) is not None}
        if len(work) == len(rows) and rows:
            values = {r: inverse[r] * work[r].work.flops for r in rows}
            yield from _worked(grid, targets, held, values, work)
    elif amount in ("tokens", "items", "ratio", "token/item"):
        singles = {name: c for name, c in counts.items() if "×" in name}
        for name in ("batch", "seq", "gpus", "concurrency"):
            sizes = {r: s.value for r in rows if (s := grid.rows[r].size(name)) and s.near}
            if len(sizes) == len(rows) and f" × {name}" not in singles and len({*sizes.values()}) == 1:
                singles[f" × {name}"] = sizes
        pairs = {a + b: {r: x[r] * y[r] for r in x} for (a, x), (b, y) in itertools.combinations(singles.items(), 2)}
        one = {"": dict.fromkeys(rows, 1.0)} if amount in ("items", "ratio") else {}
        for name, count in {**one, **singles, **pairs}.items():
            text = {r: f"{count[r]:.0f} in {held[r].text}" for r in rows}
            rule = "throughput" if "item" in kind or len({*count.values()}) > 1 else "tokens/s"
            yield from _made(f"{name.strip(' ×')} / {header}", rule, targets, inverse, text, count, (1.0,))
        if amount != "ratio":
            yield from _made(f"{amount} in {header}", "tokens/s", targets, inverse, {}, None, ())
    if amount in ("flop", "bytes"):
        rule = "rate" if amount == "flop" else "bandwidth"
        for name, count in (
            (("", None), *((n, c) for n, c in counts.items() if "×" in n)) if amount == "bytes" else (("", None),)
        ):
            yield from _made(f"{kind} × {header}{name}", rule, targets, inverse, {}, count, ())


def _worked(grid: Grid, targets: Cells, held: Cells, values: dict[int, Interval], work: dict) -> Iterator[Made]:  # type: ignore[type-arg]
    """Rates of the products of named sizes. Where the others count 2·M·N·K so does every row."""
    rows = list(values)
    found = odd_ones(
        [targets[r].plain / values[r] for r in rows], next(iter(conventions(work[r], grid.rows[r].words) for r in rows))
    )
    if found is None:
        if len(rows) > 2:
            return
        found = 1.0, []
    by = found[0]
    plain = by == 1.0 and all(w.named and not w.counts and not w.causal for w in work.values())
    usual = conventions(work[rows[0]], grid.rows[rows[0]].words)
    if by not in usual and len(rows) - len(found[1]) < 3:
        return
    text = {r: f"{work[r].formula} FLOP in {held[r].text}" for r in rows}
    also = {} if plain else {r: tuple(f / by for f in conventions(work[r], grid.rows[r].words)) for r in rows}
    yield Made(
        "work / time", "rate", {r: v * by for r, v in values.items()}, text, {r: work[r].lines for r in rows}, also
    )


def _shares(grid: Grid, target: int, targets: Cells, typed: dict[int, Cells], kinds: dict[int, str]) -> Iterator[Made]:
    """Shares of one peak: of a known one it accuses, of another it asks."""
    name = grid.header[target]
    if (
        sum(k in ("rate", "bandwidth") for k in kinds.values()) > 1
        and "rate" in kinds.values()
        and "bandwidth" in kinds.values()
    ):
        return
    for c, held in typed.items():
        if kinds[c] not in ("rate", "bandwidth") or not _OF_PEAK.search(name):
            continue
        rows = list(held)
        factors = [held[r].plain / targets[r].plain for r in rows]
        known = {
            x
            for r in rows
            for d in grid.rows[r].devices
            for x in (peaks_of(d) if kinds[c] == "rate" else (d.memory_bps or 0.0,))
            if x
        }
        if (found := odd_ones(factors, tuple(known))) and len(found[1]) <= 1:
            expected = {r: held[r].plain / found[0] for r in rows}
            text = {r: f"{held[r].text} of the others' peak" for r in rows}
            also = {r: tuple(found[0] / x for x in known) for r in rows}
            sure = found[0] in known or len(rows) > 3
            yield Made(f"share of {grid.header[c]}", "share of peak", expected, text, also=also, free=not sure)


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
    some = body if len(body) <= 24 else [body[0], body[-1]]
    bases = [
        ("the row of 1x", {r: max((o for o in ones if o < r), default=-1) for r in body}),
        ("the next row of 1x", {r: min((o for o in ones if o > r), default=-1) for r in body}),
        ("its like", {r: next((b for b in blank if grid.rows[b].own == grid.rows[r].own), -1) for r in body}),
        *((f"line {grid.rows[s].line}", dict.fromkeys(body, s)) for s in some),
        ("the row before", {r: r - 1 for r in body}),
    ]
    for c, held in [*columns.items(), *_each(grid, columns)]:
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
