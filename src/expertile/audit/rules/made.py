"""How a table's column may be made.

It may be the product or quotient of two others whose units make its own, of one and a row of it, of what the rows'
sizes mean, with every count that the rows state between; a sum; a share of a peak; a constant times another.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from expertile.audit.facts import facts
from expertile.audit.interval import FIT, Interval, exact, odd_ones, printed
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity, quantities, same_statistic
from expertile.audit.report import Grid
from expertile.audit.rules.hardware import peaks_of
from expertile.audit.rules.terms import NO_RUN, combine, derived, law_of
from expertile.audit.rules.work import ONE, PLAIN, Term, total_of, work_of
from expertile.audit.units import RATES, TYPED, UNTYPED, kind_of, powers_of, product, unit_of_name

Cells = dict[int, Quantity]
Terms = dict[int, Term]
Counts = dict[str, dict[int, float]]
_THOUSANDS = (1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9)
_SUM = regex(r"(?i)\btotal|\bsum\b|end[ _-]?to[ _-]?end|\be2e\b|overall")
_AVERAGE = regex(r"(?i)(?:\b|_)(?:mean|avg|average)(?:\b|_)")
_TOTALS: dict[str, Callable[[list[float]], float]] = {"": sum, "sum": sum, "mean": fmean}
_TOTALS |= {"median": median, "max": max, "min": min}
_EXTREMES = {"median": "median", "max": "max", "min": r"min(?:imum)?\b(?!s)"}
_SUMMARIES = {"sum": _SUM, "mean": _AVERAGE} | {n: regex(rf"(?i)^\W*{form}") for n, form in _EXTREMES.items()}
_RANKED = regex(r"(?i)\b(?:p\d\d|\d\dth|min|max|median|mean|avg|average|std|stddev|total|best|worst)\b|±|\d\d ?%")
_OF_PEAK = regex(r"(?i)peak|theor|auslastung|of (?:hbm|max|\d)|\bmfu\b|roof|\bsol\b")


@dataclass(frozen=True)
class Source:
    """What a column may be made of: another `column`, a sum of several, the work of the rows' sizes."""

    name: str
    kind: str
    cells: Terms
    column: int = -1


@dataclass
class Made:
    """How a column may follow: `cells` of each row, and the `forms` in which they may be printed; where it was `free`
    to be any the audit asks. `also`: factors by which a row may be counted otherwise. `direct`: of figures of the same
    row."""

    name: str
    rule: str
    cells: Terms
    forms: dict[int, list[Interval]] = field(default_factory=dict)
    also: tuple[float, ...] = ()
    counts: dict[int, list[float]] = field(default_factory=dict)
    direct: bool = True
    off: float = 1.0  # by which power of a thousand every row is off

    @property
    def quotient(self) -> bool:
        return self.rule == "ratio"

    def all_forms(self, r: int) -> list[Interval]:
        return self.forms.get(r) or [self.cells[r].value]

    def fits(self, r: int, q: Quantity, slack: float) -> bool:
        value = q.value if self.quotient else q.plain
        return any(f.hi > 0 and value.meets(f, slack) for f in self.all_forms(r))

    def excused(self, r: int, q: Quantity) -> bool:
        """Whether another convention gives the figure."""
        off = q.plain / self.all_forms(r)[0]
        counted = (f for n in self.counts.get(r, ()) for f in (n, 1 / n))
        return any(off.meets(f, FIT) for f in (*self.also, *counted))

    def score(self, targets: Cells, telling: list[int]) -> int:
        """The rows that confirm it; 0 where more than one in three does not. A wide one confirms nothing."""
        held = [r for r in telling if r in self.cells]
        fits = [self.fits(r, targets[r], FIT if self.quotient else 2 * FIT) for r in held]
        plain = any(targets[r].kind == "ratio" or targets[r].text[0] in "+-−" for r in held)
        one = not self.quotient or self.name.endswith("1x") or plain
        if fits.count(False) > max(one, 0.34 * len(held)):
            return 0

        def tight(q: Quantity, x: Interval) -> bool:  # "4x" of 440 and 110 is no wide one
            same = q.kind == "ratio" and abs(x.mid / q.value.mid - 1) < 0.005
            return same or (q.value.width < 0.3 and x.width < 0.2)

        return sum(f and tight(targets[r], self.all_forms(r)[0]) for f, r in zip(fits, held, strict=True))


def printed_as(q: Quantity, x: Interval, change: str = "") -> list[Interval]:
    """What may be printed for the quotient `x`; a "change" or a "loss" only if that is said."""
    gain = Interval(max(x.lo - 1, 0), max(x.mid - 1, 0), max(x.hi - 1, 0))
    loss = Interval(max(1 - x.hi, 0), max(1 - x.mid, 0), max(1 - x.lo, 0))
    if q.text[:1] in ("-", "−", "+"):  # a change that is written as one
        return [gain] if q.text[0] == "+" else [loss, gain] if change == "loss" else [loss]
    if q.kind in ("ratio", "number"):
        return [x, gain] if re.search(r"(?i)improve|gain", q.label) else [x]
    return {"": [x, gain, loss], "change": [gain, loss], "loss": [loss], "gain": [gain]}[change]


def sources_of(grid: Grid, target: int, targets: Cells, quotient: bool) -> list[Source]:
    found = []
    for c, header in enumerate(grid.header):
        held = {r: q for r, q in enumerate(grid.column(c)) if q is not None and q.value.mid > 0 and q.exact}
        kinds = Counter(q.kind for q in held.values())
        of_run = quotient or same_statistic(header, grid.header[target])
        if c == target or 2 * len(held) < len(grid.rows) or not of_run:
            continue
        kind, n = kinds.most_common(1)[0]
        mixed = quotient and len(kinds) > 1 and {*kinds} <= {*TYPED, "power", "energy", "money"}
        kind = "mixed" if mixed else kind if 2 * n >= len(grid.rows) else ""
        cells = {r: Term(q.kind, q.plain, q.text, (q.line,)) for r, q in held.items() if kind in (q.kind, "mixed")}
        found.append(Source(header, "bare" if kind == "number" and quotient else kind, cells, c))
    if quotient:
        return found
    above: dict[str, list[Quantity]] = {}  # what the lines above say of every row: "tokens per step: 524288"
    stated = [q for row in grid.rows[0].above_lines for q in row.quantities]
    stated += [q for row in grid.rows[0].report.lines_of_text for q in row.of("$/gpu*s") if q not in stated]
    for q in (*stated, *quantities(grid.header[target], grid.rows[0].line)):
        if q.kind in ("tokens", "token/item", "bytes", "flop", "items", "params", "$/gpu*s"):
            above.setdefault(q.kind.replace("token/item", "tokens"), []).append(q)
    for kind, (q, *others) in above.items():
        if not others and q.exact and not any(s.kind == kind for s in found):
            found.append(Source(q.text, kind, dict.fromkeys(targets, Term(kind, q.value, q.text, (q.line,)))))
    for kind in ("bytes", "tokens"):
        parts = [s for s in found if s.kind == kind and s.cells.keys() >= targets.keys()]
        if 1 < len(parts) < 4:  # read and written, prompt and answer
            found.append(Source("", kind, {r: total_of([p.cells[r] for p in parts]) for r in targets}))
    work = {r: w for r in targets if (w := work_of(grid.rows[r])) is not None}
    if work and len(work) == len(targets):
        plain = all(w.named and w.also == PLAIN for w in work.values())
        found.append(Source("work", "flop", work, -1 - plain))
    return found


def _quotient(target: Cells, x: Source, y: Source, name: str, direct: bool) -> Made:
    cells, forms = {}, {}
    for r in (r for r in x.cells.keys() & y.cells.keys() if x.cells[r].kind == y.cells[r].kind):
        cells[r] = replace(combine(x.cells[r], y.cells[r], -1), text=f"{x.cells[r].text} / {y.cells[r].text}")
        if q := target.get(r):
            change = "loss" if re.search(r"(?i)(?:\b|_)(?:sav(?:ing|ed)|reduction)", q.label) else ""
            forms[r] = printed_as(q, cells[r].value, change)
            # "1.1x slower" stands among those that are faster; of rates and times one is turned.
            if x.kind == "mixed" or re.match(r"(?i)\W*(?:faster|slower|better|worse)", q.after):
                forms[r] += printed_as(q, y.cells[r].value / x.cells[r].value)
    return Made(name, "ratio", cells, forms, direct=direct)


def quotients(grid: Grid, target: int, sources: list[Source], ones: list[int]) -> Iterator[Made]:
    """Two columns of a kind, or a column and one of its rows."""
    cells = {r: q for r, q in enumerate(grid.column(target)) if q is not None}
    typed = [s for s in sources if s.kind not in ("", "ratio", "percent", "other", "number")]
    # What is the same in all rows is no measure of them.
    varying = [s for s in typed if len({t.value.mid for t in s.cells.values()}) > 1]
    each = [*_each(grid, varying)]
    for some, of in ((typed, ""), (each, " of each GPU")) if len(typed) < 13 else ():
        for x, y in itertools.permutations(some, 2):
            if x.kind == y.kind:
                yield _quotient(cells, x, y, f"{x.name} / {y.name}{of}", True)
    for s in (*varying, *each):
        for base, direct in _bases(grid, target, s, ones):
            yield _quotient(cells, s, base, f"{s.name} of {base.name}", direct)
            if not direct:
                yield _quotient(cells, base, s, f"{s.name} over {base.name}", direct)


def _bases(grid: Grid, target: int, s: Source, ones: list[int]) -> Iterator[tuple[Source, bool]]:
    """A column's value in the row that others may be compared with, or all of it."""
    rows, body = grid.rows, [r for r, row in enumerate(grid.rows) if not row.summary]
    part = re.search(r"(?i)share|fraction|%|pct|percent|^\W*$", grid.header[target])
    if part and len(body) == len(rows) > 2 and all(r in s.cells for r in body):
        total = replace(total_of([s.cells[r] for r in body]), text="the sum", lines=())
        yield Source("the sum", s.kind, dict.fromkeys(body, total)), False
    own = grid.column(target)  # a baseline is once itself, or changed by nothing
    unlike = {b for b, q in enumerate(own) if q and q.exact and not q.value.meets(1.0)}
    unlike -= {b for b, q in enumerate(own) if q and q.value.lo == 0 and q.kind == "percent"}
    may = [b for b in (body if len(body) <= 24 else (body[0], body[-1])) if b not in unlike]
    bases = [
        ("the row of 1x", {r: max((o for o in ones if o < r), default=-1) for r in body}),
        *((f"line {rows[b].line}", dict.fromkeys(body, b)) for b in may),
        ("the row before", {r: r - 1 for r in body}),
        *((f"line {row.line}", dict.fromkeys(body, b)) for b, row in enumerate(rows) if row.summary),
    ]
    for name, base in bases:
        whole = any(b >= 0 and rows[b].summary for b in base.values())
        to = {r: b for r, b in base.items() if b in s.cells and b != r}
        yield Source(name, s.kind, {r: s.cells[b] for r, b in to.items()}), whole


def _each(grid: Grid, sources: list[Source]) -> Iterator[Source]:
    """The columns for each GPU, which a scaling efficiency compares."""
    workers = ("gpus", "threads", "cores", "nodes", "ranks", "workers", "processes")
    each = [{r: (row.own | row.bare).get(name, 0.0) for r, row in enumerate(grid.rows)} for name in workers]
    gpus = next(filter(lambda some: any(some.values()), each), each[0])
    for s in sources:  # "tokens/s (8 GPUs)"
        held = facts(s.name).of("gpus")
        counts = dict.fromkeys(gpus, held[0]) if len(held) == 1 else gpus if len({*gpus.values()}) > 1 else {}
        by = {r: n if s.kind == "time" else 1 / n for r, n in counts.items() if n and r in s.cells}
        if by:
            yield replace(s, cells={r: replace(s.cells[r], value=s.cells[r].value * x) for r, x in by.items()})


def _counts(grid: Grid, targets: Cells, sources: list[Source]) -> Counts:
    """What rows may be multiplied or divided by: sizes by their names, whole numbers without a unit, two of them."""
    found: Counts = {}
    for name in dict.fromkeys(("batch", "seq", "gpus", "concurrency", *(n for r in targets for n in grid.rows[r].own))):
        sizes = {r: n.value for r in targets if (n := grid.rows[r].size(name)) and n.near}
        if len(sizes) == len(targets) and all(sizes.values()):
            found[name] = sizes
    for s in sources:
        if s.kind in ("number", "items") and all(r in s.cells and s.cells[r].value.mid % 1 == 0 for r in targets):
            found[s.name] = {r: s.cells[r].value.mid for r in targets}
    some = {f" × {name}": held for name, held in list(found.items())[:5]}
    some |= {f" ÷ {name[3:]}": {r: 1 / v for r, v in held.items()} for name, held in some.items()}
    two = itertools.combinations(some.items(), 2)
    pairs = {a + b: {r: x[r] * y[r] for r in x} for (a, x), (b, y) in two if a[3:] != b[3:]}
    return {"": dict.fromkeys(targets, 1.0), **some, **pairs}


def products(grid: Grid, targets: Cells, kind: str, target: int, sources: list[Source]) -> Iterator[Made]:
    """Columns whose units make the target's, with every count of a row between; one column times a constant."""
    typed, counts = [s for s in sources if s.kind not in ("", *UNTYPED)], _counts(grid, targets, sources)
    # Whole numbers in a row that may count: "Outputs/wave: 4".
    whole = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?![\d.,])")
    beside = {r: [float(n) for n in whole.findall(grid.rows[r].text)] for r in targets}
    for x, y in itertools.permutations(typed, 2):
        law = law_of(x.kind, y.kind, kind)
        if re.search(NO_RUN, f"{x.name} {y.name}") or derived((x.kind, y.kind, kind)) != kind:
            continue
        for sign in (1, -1):
            if product(x.kind, y.kind, sign) == kind and (sign < 0 or x.column < y.column):
                usual = next(iter(x.cells.values())).also if x.name == "work" else law.also
                some = counts if law.several else {"": counts[""]}
                yield from _usual(law.rule, targets, _times(x, y, sign), some, usual, beside if law.several else {})
    for s in typed:
        each = re.search(r"(?i)per|each|/ ?(?:gpu|device|chip|node|user|req)", f"{s.name} {grid.header[target]}")
        # The mean of so many calls is their total over the calls.
        calls = bool(kind == "time" and _AVERAGE.search(grid.header[target]) and _SUM.search(s.name))
        may = (
            len(targets) > 2
            and _loose(kind)
            and not re.search(NO_RUN, s.name)
            and (s.kind != kind or (kind in RATES and each) or calls)
        )
        for sign in (1, -1) if may and ("*" in kind or derived((kind, s.kind)) == kind) else ():
            # Tokens and requests are counts too: tokens/s are sequences at once over the time of a token.
            if _loose(kind) == _loose(product("ratio", s.kind, sign)):
                rule = "product" if calls else "throughput" if "item" in kind else "tokens/s"
                some = {n: c for n, c in counts.items() if n or (sign < 0 and kind != s.kind)}
                yield from _usual(rule, targets, _times(s, None, sign), some, (1.0,), beside)


def summaries(grid: Grid, targets: Cells, kind: str, target: int) -> Iterator[Made]:
    """The total, the mean, the median or an extreme of the columns right before or right behind."""
    name = next((n for n, form in _SUMMARIES.items() if form.search(grid.header[target])), "")
    # A column that is not called a total is one where all rows but one say so.
    adds = kind in ("time", "bytes", "money", "energy", "items", "tokens")
    of = _TOTALS[name]
    held = {r: {q.column: q for q in grid.rows[r].of(kind) if q.exact and q.value.mid > 0} for r in targets}
    held = {r: row for r, row in held.items() if len(row) > 2}
    like, adds_up = [c for c in range(len(grid.header)) if c != target], name in ("", "sum")
    like = [c for c in like if adds_up or not _RANKED.search(grid.header[c].replace("_", " "))]
    like = [c for c in like if not adds_up or same_statistic(grid.header[c], grid.header[target])]
    like = [c for c in like if all(c in row for row in held.values())]
    before, behind = [c for c in like if c < target], [c for c in like if c > target]
    sides = [before[:n] for n in range(2, len(before) + 1)] + [before[n:] for n in range(1, len(before) - 1)]
    sides += [behind[:n] for n in range(2, len(behind) + 1) if not adds_up]
    for some in sides if held and (adds or name) and (not adds_up or len(held) == len(targets)) else ():
        text = f"the {name or 'sum'} of the {len(some)} columns beside"
        made = {}
        for r, row in held.items():
            ends = (of([getattr(row[c].plain, end) for c in some]) for end in ("lo", "mid", "hi"))
            made[r] = Term(kind, Interval(*ends), text, (row[some[0]].line,))
        if name or sum(t.value.meets(targets[r].plain) for r, t in made.items()) >= max(3, len(targets) - 1):
            yield Made(text, "sum", made)


def _loose(kind: str) -> str:
    """A kind without what can be counted."""
    powers = Counter({unit: p for unit, p in powers_of(kind).items() if unit not in ("token", "item", "gpu")})
    return kind_of(powers).replace("ratio", "")


def _times(x: Source, y: Source | None, sign: int) -> Source:
    """x × y, x ÷ y, x or 1 ÷ x."""
    if y is None:
        return x if sign > 0 else replace(x, cells={r: combine(ONE, t, -1) for r, t in x.cells.items()})
    rows = [r for r in x.cells.keys() & y.cells.keys() if sign > 0 or y.cells[r].value.mid]
    cells = {r: combine(x.cells[r], y.cells[r], sign) for r in rows}
    return replace(x, name=f"{x.name} {'×' if sign > 0 else '÷'} {y.name}", cells=cells)


def _usual(
    rule: str, targets: Cells, e: Source, counts: Counts, usual: tuple[float, ...], beside: dict[int, list[float]]
) -> Iterator[Made]:
    """`e` times a count, where most of the rows agree on a factor of `usual`."""
    rows, work = [r for r in targets if r in e.cells], e.name.startswith("work")
    for name, count in counts.items():
        off = [targets[r].value.mid / (e.cells[r].value.mid * count[r] or 1e-300) for r in rows]
        steps = () if name or work or len(rows) < 3 else _THOUSANDS
        if not rows or not any(sum(0.96 < n / u < 1.042 for n in off) * 2 >= len(off) for u in (*usual, *steps)):
            continue
        expected = {r: e.cells[r].value * count[r] for r in rows}
        # A rate is often the mean of rates, beside a mean of times.
        found = odd_ones([targets[r].plain / expected[r] for r in rows], (*usual, *steps), 2 * FIT)
        if found and (found[0] in (*usual, *steps) or work):
            thousand = found[0] if found[0] in steps else 1.0
            also = () if e.column == -2 and found[0] == 1.0 else tuple(f / found[0] for f in usual)
            by = {r: f" × {n:.4g}" if n >= 1 else f" ÷ {1 / n:.4g}" for r, n in count.items() if n and name}
            values = {r: v * found[0] for r, v in expected.items()}
            cells = {r: replace(e.cells[r], value=v, text=e.cells[r].text + by.get(r, "")) for r, v in values.items()}
            yield Made(e.name + name, rule, cells, {}, also, beside, off=thousand)


def shares(grid: Grid, target: int, targets: Cells, sources: list[Source]) -> Iterator[Made]:
    """Shares of one peak: of a known one it accuses, of another it asks."""
    header, both = grid.header[target], {*grid.columns("rate")} and {*grid.columns("bandwidth")}
    for s in sources if _OF_PEAK.search(header) and not both else ():
        rows = [r for r in targets if r in s.cells]
        if s.kind not in ("rate", "bandwidth") or not rows:
            continue
        devices = {d for r in rows for d in grid.rows[r].devices}
        stated = {q.value.mid for q in quantities(header, 0) if q.kind == s.kind}  # "% of 2039 GB/s"
        of, unit = re.search(r"(?:of |\()(\d[\d.,]*\d)\)?$", header), unit_of_name(s.name)
        stated |= {printed(of[1]).mid * unit.low} if of and unit else set()  # "% of 362"
        known = (*stated, *(x for d in devices for x in (peaks_of(d) if s.kind == "rate" else (d.memory_bps,)) if x))
        found = odd_ones([s.cells[r].value / targets[r].plain for r in rows], known)
        if found and len(found[1]) < 2 and (found[0] in known or len(rows) > 3):
            of_peak = {r: combine(s.cells[r], replace(ONE, value=exact(found[0])), -1) for r in rows}
            cells = {r: replace(t, text=f"{s.cells[r].text} of the others' peak") for r, t in of_peak.items()}
            also = tuple(found[0] / x for x in known)
            yield Made(f"share of {s.name}", "share of peak", cells, {}, also)
