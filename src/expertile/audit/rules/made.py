"""How a table's column may be made.

It may be the product or quotient of two others whose units make its own, of one and a row of it, of what the rows'
sizes mean, with every count that the rows state between; a sum; a share of a peak; a constant times another.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from expertile.audit.facts import facts
from expertile.audit.finding import Lines
from expertile.audit.interval import FIT, Interval, exact, odd_ones, printed
from expertile.audit.quantity import Quantity, quantities, same_statistic
from expertile.audit.report import Grid, Row
from expertile.audit.rules.hardware import peaks_of
from expertile.audit.rules.terms import NO_RUN, derived, law_of
from expertile.audit.rules.work import PLAIN, work_of
from expertile.audit.units import UNTYPED, kind_of, powers_of, product, unit_of_name

TYPED = ("time", "rate", "bandwidth", "tokens_per_s", "items_per_s", "s_per_token", "s_per_item", "bytes")
_RUN, _APART = TYPED[1:5], {"time", "bytes", "tokens", "items"}
Cells = dict[int, Quantity]
Values = dict[int, Interval]
Counts = dict[str, dict[int, float]]


@dataclass(frozen=True)
class Source:
    """What a column may be made of: another, a sum of several, the work of the rows' sizes. `also`: factors by which
    each row may be counted otherwise."""

    name: str
    kind: str
    values: Values
    text: dict[int, str]
    column: int = -1
    also: tuple[float, ...] = (1.0,)
    lines: dict[int, Lines] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)


@dataclass
class Made:
    """How a column may follow: `forms` of each row, the first the plain one; where it was `free` to be any the audit
    asks. `also`: factors by which a row may be counted otherwise. `direct`: of figures of the same row."""

    name: str
    rule: str
    forms: dict[int, list[Interval]]
    text: dict[int, str] = field(default_factory=dict)
    lines: dict[int, Lines] = field(default_factory=dict)
    also: tuple[float, ...] = ()
    counts: dict[int, list[float]] = field(default_factory=dict)
    direct: bool = True
    free: bool = False
    slack: float = 0.15

    @property
    def quotient(self) -> bool:
        return self.rule == "ratio"

    def fits(self, r: int, q: Quantity, slack: float) -> bool:
        return any(f.hi > 0 and (q.value if self.quotient else q.plain).meets(f, slack) for f in self.forms[r])

    def excused(self, r: int, q: Quantity) -> bool:
        """Whether another convention gives the figure."""
        off = q.plain / self.forms[r][0]
        whole = (max(1.0, round(off.mid)), 1 / max(1.0, round(1 / off.mid))) if self.free else ()
        counted = (f for n in self.counts.get(r, ()) for f in (n, 1 / n))
        return any(off.meets(f, FIT) for f in (*self.also, *counted)) or any(off.meets(f, 0.04) for f in whole)

    def score(self, targets: Cells, telling: list[int]) -> int:
        """The rows that confirm it; 0 where more than one in three does not."""
        held = [r for r in telling if r in self.forms]
        fits = [self.fits(r, targets[r], FIT if self.quotient else 2 * FIT) for r in held]
        plain = any(targets[r].kind == "ratio" or targets[r].text[0] in "+-−" for r in held)
        one = not self.quotient or self.name.endswith("1x") or plain
        if fits.count(False) > max(one, 0.34 * len(held)):
            return 0
        # A wide one confirms nothing.
        return sum(
            f and targets[r].value.width < 0.3 and self.forms[r][0].width < 0.2 for r, f in zip(held, fits, strict=True)
        )


def printed_as(q: Quantity, x: Interval, change: str = "") -> list[Interval]:
    """What may be printed for the quotient `x`; a "change" or a "loss" only if that is said."""
    gain = Interval(max(x.lo - 1, 0), max(x.mid - 1, 0), max(x.hi - 1, 0))
    loss = Interval(max(1 - x.hi, 0), max(1 - x.mid, 0), max(1 - x.lo, 0))
    if q.text[:1] in ("-", "−", "+"):  # a change that is written as one
        return [gain if q.text[0] == "+" else loss]
    if q.kind in ("ratio", "number"):
        return [x, gain] if re.search(r"(?i)improve|gain", q.label) else [x]
    return {"": [x, gain, loss], "change": [gain, loss], "loss": [loss], "gain": [gain]}[change]


def sources_of(grid: Grid, target: int, targets: Cells, quotient: bool) -> list[Source]:
    found = []
    bare = quotient and re.search(r"(?i)speed|gain", grid.header[target])
    for c, header in enumerate(grid.header):
        held = {r: q for r, q in enumerate(grid.column(c)) if q is not None and q.value.mid > 0 and q.exact}
        kinds = Counter(q.kind for q in held.values())
        of_run = quotient or same_statistic(header, grid.header[target])
        if c == target or 2 * len(held) < len(grid.rows) or not of_run:
            continue
        kind, n = kinds.most_common(1)[0]
        mixed = quotient and len(kinds) > 1 and {*kinds} <= {*TYPED, "power", "energy", "money"}
        kind = "mixed" if mixed else kind if 2 * n >= len(grid.rows) else ""
        held = {r: q for r, q in held.items() if kind in (q.kind, "mixed")}
        kind = "bare" if kind == "number" and bare else kind
        values, text = {r: q.plain for r, q in held.items()}, {r: q.text for r, q in held.items()}
        lines: dict[int, Lines] = {r: (q.line,) for r, q in held.items()}
        found += [Source(header, kind, values, text, c, (1.0,), lines, {r: q.kind for r, q in held.items()})]
    for kind in ("bytes", "tokens"):
        parts = [s for s in found if s.kind == kind and s.values.keys() >= targets.keys()]
        if 1 < len(parts) < 4 and not quotient:  # read and written, prompt and answer
            sums = {r: sum((p.values[r] for p in parts[1:]), parts[0].values[r]) for r in targets}
            text = {r: " + ".join(p.text[r] for p in parts) for r in targets}
            found.append(Source(" + ".join(p.name for p in parts), kind, sums, text))
    work = {r: w for r in targets if not quotient and (w := work_of(grid.rows[r])) is not None}
    if work and len(work) == len(targets):
        plain = all(w.named and w.also == PLAIN for w in work.values())
        text, lines = {r: w.text for r, w in work.items()}, {r: w.lines for r, w in work.items()}
        values, also = {r: w.value for r, w in work.items()}, next(iter(work.values())).also
        found.append(Source("work", "flop", values, text, -1 - plain, also, lines))
    return found


def _quotient(target: Cells, x: Source, y: Source, name: str, direct: bool) -> Made:
    rows = [
        r for r in x.values.keys() & y.values.keys() if not x.kinds or x.kinds.get(r) == y.kinds.get(r, x.kinds.get(r))
    ]
    forms = {}
    for r in rows:
        of, q = x.values[r] / y.values[r], target.get(r)
        forms[r] = printed_as(q, of) if q else [of]
        # "1.1x slower" stands among those that are faster; of rates and times one is turned.
        if q and (x.kind == "mixed" or re.match(r"(?i)\W*(?:faster|slower|better|worse)", q.after)):
            forms[r] += printed_as(q, y.values[r] / x.values[r])
    text = {r: f"{x.text[r]} / {y.text[r]}" for r in rows}
    lines = {r: x.lines.get(r, ()) + y.lines.get(r, ()) for r in rows}
    return Made(name, "ratio", forms, text, lines, direct=direct)


def quotients(grid: Grid, target: int, targets: Cells, sources: list[Source], ones: list[int]) -> Iterator[Made]:
    """Two columns of a kind, or a column and one of its rows."""
    cells = {r: q for r, q in enumerate(grid.column(target)) if q is not None}
    typed = [s for s in sources if s.kind in (*TYPED, "bare", "mixed")]
    each = [*_each(grid, typed)]
    for some, of in ((typed, ""), (each, " of each GPU")) if len(typed) < 13 else ():
        for x, y in itertools.permutations(some, 2):
            if x.kind == y.kind:
                yield _quotient(cells, x, y, f"{x.name} / {y.name}{of}", True)
    for s in (*typed, *each):
        for base, direct in _bases(grid, target, s, ones):
            yield _quotient(cells, s, base, f"{s.name} of {base.name}", direct)
            if not direct:
                yield _quotient(cells, base, s, f"{s.name} over {base.name}", direct)


def _bases(grid: Grid, target: int, s: Source, ones: list[int]) -> Iterator[tuple[Source, bool]]:
    """A column's value in the row that others may be compared with, or all of it."""
    rows, body = grid.rows, [r for r, row in enumerate(grid.rows) if not row.summary]
    blank = [r for r in body if grid.column(target)[r] is None and rows[r].own]
    part = re.search(r"(?i)share|fraction|%|pct|percent|^\W*$", grid.header[target])
    if part and len(body) == len(rows) > 2 and all(r in s.values for r in body):
        total = sum((s.values[r] for r in body[1:]), s.values[body[0]])
        yield Source("the sum", s.kind, dict.fromkeys(body, total), dict.fromkeys(body, "the sum")), False
    for line in below(grid) if part else ():  # "Self CUDA time total: 12.5 ms"
        if q := line.only(s.kind):
            held = dict.fromkeys(body, q.plain), dict.fromkeys(body, q.text)
            yield Source("the total", s.kind, *held, lines=dict.fromkeys(body, (q.line,))), False
    bases = [
        ("the row of 1x", {r: max((o for o in ones if o < r), default=-1) for r in body}),
        ("the next row of 1x", {r: min((o for o in ones if o > r), default=-1) for r in body}),
        ("its like", {r: next((b for b in blank if rows[b].own == rows[r].own), -1) for r in body}),
        *((f"line {rows[b].line}", dict.fromkeys(body, b)) for b in (body if len(body) <= 24 else (body[0], body[-1]))),
        ("the row before", {r: r - 1 for r in body}),
        *((f"line {row.line}", dict.fromkeys(body, b)) for b, row in enumerate(rows) if row.summary),
    ]
    for name, base in bases:
        whole = any(b >= 0 and rows[b].summary for b in base.values())
        to = {r: b for r, b in base.items() if b in s.values and b != r and (whole or _same_work(rows[r], rows[b]))}
        values, text = {r: s.values[b] for r, b in to.items()}, {r: s.text[b] for r, b in to.items()}
        kinds, lines = {r: s.kinds[b] for r, b in to.items() if s.kinds}, {r: s.lines[b] for r, b in to.items()}
        yield Source(name, s.kind, values, text, lines=lines, kinds=kinds), whole


def below(grid: Grid) -> list[Row]:
    """The lines right below a table that have a total."""
    last, lines = grid.rows[-1].line, grid.rows[-1].report.lines_of_text
    return [row for row in lines if last < row.line <= last + 4 and re.search(r"(?i)\btotal\b", row.text)]


_SHAPES = re.compile(r"\b[A-Za-z]{1,3}=?\d+\b|\d+(?:[x×]\d+)+")


def _same_work(a: Row, b: Row) -> bool:
    """Whether two rows may be of one problem: "B4 N512" and "B1 N1024" are not."""
    shapes = [{re.sub(r"\d", "", s): s for s in _SHAPES.findall(row.label)} for row in (a, b)]
    shared = shapes[0].keys() & shapes[1].keys()
    return len(shared) < 2 or all(shapes[0][s] == shapes[1][s] for s in shared)


def _each(grid: Grid, sources: list[Source]) -> Iterator[Source]:
    """The columns for each GPU, which a scaling efficiency compares."""
    gpus = {r: row.own.get("gpus", 0.0) for r, row in enumerate(grid.rows)}
    for s in sources:  # "tokens/s (8 GPUs)"
        held = facts(s.name).of("gpus")
        counts = dict.fromkeys(gpus, held[0]) if len(held) == 1 else gpus if len({*gpus.values()}) > 1 else {}
        by = {r: n if s.kind == "time" else 1 / n for r, n in counts.items() if n and r in s.values}
        if by:
            yield replace(s, values={r: s.values[r] * x for r, x in by.items()})


def _counts(grid: Grid, targets: Cells, sources: list[Source]) -> Counts:
    """What rows may be multiplied or divided by: sizes by their names, whole numbers without a unit, two of them."""
    found: Counts = {}
    for name in ("batch", "seq", "gpus", "concurrency", *(n for r in targets for n in grid.rows[r].own)):
        sizes = {r: n.value for r in targets if (n := grid.rows[r].size(name)) and n.near}
        if len(sizes) == len(targets) and all(sizes.values()):
            found[name] = sizes
    for s in sources:
        if s.kind == "number" and all(r in s.values and s.values[r].mid % 1 == 0 for r in targets):
            found[s.name] = {r: s.values[r].mid for r in targets}
    some = {f" × {name}": held for name, held in list(found.items())[:5]}
    some |= {f" ÷ {name[3:]}": {r: 1 / v for r, v in held.items()} for name, held in some.items()}
    two = itertools.combinations(some.items(), 2)
    pairs = {a + b: {r: x[r] * y[r] for r in x} for (a, x), (b, y) in two if a[3:] != b[3:]}
    return {"": dict.fromkeys(targets, 1.0), **some, **pairs}


_SUM = re.compile(r"(?i)\btotal|\bsum\b|end[ _-]?to[ _-]?end|\be2e\b|overall")
_AVERAGE = re.compile(r"(?i)(?:\b|_)(?:mean|avg|average)(?:\b|_)")


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
                usual = x.also if x.name == "work" else law.also
                some = counts if law.several else {"": counts[""]}
                yield from _usual(law.rule, targets, _times(x, y, sign), some, usual, beside if law.several else {})
    for s in typed:
        header = f"{s.name} {grid.header[target]}"
        each = re.search(r"(?i)per|each|/ ?(?:gpu|device|node|user|req)", header)
        # The mean of so many calls is their total over the calls.
        calls = bool(kind == "time" and _AVERAGE.search(grid.header[target]) and _SUM.search(s.name))
        may = _loose(kind) and not re.search(NO_RUN, s.name) and (s.kind != kind or (kind in _RUN and each) or calls)
        for sign in (1, -1) if may and ("*" in kind or derived((kind, s.kind)) == kind) else ():
            # Tokens and requests are counts too: tokens/s are sequences at once over the time of a token.
            if _loose(kind) == _loose(product("ratio", s.kind, sign)):
                rule = "product" if calls else "throughput" if "item" in kind else "tokens/s"
                some = {n: c for n, c in counts.items() if n or (sign < 0 and kind != s.kind)}
                yield from _usual(rule, targets, _times(s, None, sign), some, (1.0,), beside)
        if s.column >= 0:
            yield from _constant(grid, target, kind, targets, s, counts)
    if kind in ("time", "bytes", "money", "energy", "items", "tokens") or _AVERAGE.search(grid.header[target]):
        named = _SUM.search(grid.header[target])
        like = [s for s in typed if s.kind == kind and 0 <= s.column < target and s.values.keys() >= targets.keys()]
        for some_of in (part for k in range(2, len(like) + 1) for part in (like[:k], like[-k:])):
            n = len(some_of) if _AVERAGE.search(grid.header[target]) else 1
            sums = {r: sum((s.values[r] for s in some_of[1:]), some_of[0].values[r]) * (1 / n) for r in targets}
            # A column that is not called a total is one where all rows but one say so.
            if named or sum(sums[r].meets(q.plain) for r, q in targets.items()) >= max(3, len(targets) - 1):
                name = f"the {'sum' if n == 1 else 'mean'} of the columns before"
                yield Made(name, "sum", {r: [v] for r, v in sums.items()})


def _loose(kind: str) -> str:
    """A kind without what can be counted."""
    powers = Counter({unit: p for unit, p in powers_of(kind).items() if unit not in ("token", "item", "gpu")})
    return kind_of(powers).replace("ratio", "")


def _times(x: Source, y: Source | None, sign: int) -> Source:
    """x × y, x ÷ y, x or 1 ÷ x."""
    rows, one = x.values.keys() & (y or x).values.keys(), exact(1.0)
    a, b = (x.values, y.values) if y else (x.values, {}) if sign > 0 else ({}, x.values)
    values = {
        r: a.get(r, one) * b.get(r, one) if sign > 0 else a.get(r, one) / b[r] for r in rows if sign > 0 or b[r].mid
    }
    mark = ("×" if sign > 0 else "in" if y.kind == "time" else "÷") if y else ""
    text = {r: f"{x.text[r]} {mark} {y.text[r]}" if y else f"1 ÷ {x.text[r]}" if sign < 0 else x.text[r] for r in rows}
    return Source(f"{x.name} {mark} {y.name if y else ''}".strip(), "", values, text, x.column, x.also, x.lines)


def _usual(
    rule: str, targets: Cells, e: Source, counts: Counts, usual: tuple[float, ...], beside: dict[int, list[float]]
) -> Iterator[Made]:
    """`e` times a count, where most of the rows agree on a factor of `usual`."""
    rows, work = [r for r in targets if r in e.values], e.name.startswith("work")
    for name, count in counts.items():
        off = [targets[r].value.mid / (e.values[r].mid * count[r] or 1e-300) for r in rows]
        if not rows or not any(sum(0.96 < n / u < 1.042 for n in off) * 2 >= len(off) for u in usual):
            continue
        expected = {r: e.values[r] * count[r] for r in rows}
        # A rate is often the mean of rates, beside a mean of times.
        found = odd_ones([targets[r].plain / expected[r] for r in rows], usual, 2 * FIT)
        if found and (found[0] in usual or work):
            also = () if e.column == -2 and found[0] == 1.0 else tuple(f / found[0] for f in usual)
            by = {r: f" × {n:.4g}" if n >= 1 else f" ÷ {1 / n:.4g}" for r, n in count.items() if n and name}
            text = {r: e.text[r] + by.get(r, "") for r in rows}
            forms = {r: [v * found[0]] for r, v in expected.items()}
            yield Made(e.name + name, rule, forms, text, e.lines, also, beside)


def _constant(grid: Grid, target: int, kind: str, targets: Cells, s: Source, counts: Counts) -> Iterator[Made]:
    """The target in proportion to a column or its inverse, to the last digit in all rows but one; for rates and times,
    which may be of one work, less exactly. It asks."""
    rows = [r for r in targets if r in s.values]
    work = bool({"time", "s_per_item"} & {kind, s.kind}) or {kind, s.kind} == {"rate", "bandwidth"}
    work = (
        work and {kind, s.kind} <= {*_RUN, "time", "s_per_item"} and derived((kind, s.kind)) == kind and kind != s.kind
    )
    named = grid.drawn or all(re.search("[a-z]{3}", n) for n in (s.name, grid.header[target]))
    exactly = named and s.column < target and (s.kind == kind or not {kind, s.kind} <= _APART)
    exactly = exactly and {kind, s.kind} not in ({"rate", "bandwidth"}, {"time"})
    sized = [n for n in counts if "÷" not in n] if work else [""]
    for sign, name in itertools.product((1, -1) if s.kind != kind else (1,), sized if len(rows) > 2 else ()):
        values = {r: v * counts[name][r] for r, v in _times(s, None, sign).values.items() if r in targets}
        factors = {r: targets[r].plain / values[r] for r in rows}
        middle = sorted(factors.values(), key=lambda f: f.mid)[len(rows) // 2].mid
        agree = [r for r in rows if factors[r].meets(middle, 0.002) and factors[r].width < 0.06]
        span = [values[r].mid for r in agree or rows]
        tight = len(agree) == len(rows) - 1 and max(span) > 1.2 * min(span)
        alike = len(agree) == len(rows) - 1 and work and sign < 0
        if len(rows) == 3 and not (alike and all(f.width < 0.05 for f in factors.values())):
            continue
        loose = work and (sign < 0) == (s.kind in ("time", "s_per_item"))
        if not loose and not (exactly and tight and not name):
            continue
        if not (tight or alike):
            found = odd_ones([factors[r] for r in rows])
            if found is None or len(found[1]) > 1:
                continue
            middle = found[0]
        slack = 0.04 if tight or alike else 0.15 if s.kind in ("time", "s_per_item") else 0.4
        rule = {"rate": "rate", "bandwidth": "bandwidth", "items_per_s": "throughput"}.get(kind, "tokens/s")
        rule = "proportion" if not loose else rule if s.kind in ("time", "s_per_item") else "intensity"
        title = f"{'proportion to' if sign > 0 else 'product with'} {s.name}{name}"
        yield Made(title, rule, {r: [v * middle] for r, v in values.items()}, free=True, slack=slack)


_OF_PEAK = re.compile(r"(?i)peak|theor|of (?:hbm|max|\d)|\bmfu\b|roof|\bsol\b")


def shares(grid: Grid, target: int, targets: Cells, sources: list[Source]) -> Iterator[Made]:
    """Shares of one peak: of a known one it accuses, of another it asks."""
    header, both = grid.header[target], {*grid.columns("rate")} and {*grid.columns("bandwidth")}
    for s in sources if _OF_PEAK.search(header) and not both else ():
        rows = [r for r in targets if r in s.values]
        if s.kind not in ("rate", "bandwidth") or not rows:
            continue
        devices = {d for r in rows for d in grid.rows[r].devices}
        stated = {q.value.mid for q in quantities(header, 0) if q.kind == s.kind}  # "% of 2039 GB/s"
        of, unit = re.search(r"of (\d[\d.,]*)$", header), unit_of_name(s.name)
        stated |= {printed(of[1]).mid * unit.low} if of and unit else set()  # "% of 362"
        known = (*stated, *(x for d in devices for x in (peaks_of(d) if s.kind == "rate" else (d.memory_bps,)) if x))
        found = odd_ones([s.values[r] / targets[r].plain for r in rows], known)
        if found and len(found[1]) < 2:
            forms = {r: [s.values[r] / found[0]] for r in rows}
            text = {r: f"{s.text[r]} of the others' peak" for r in rows}
            also = tuple(found[0] / x for x in known)
            free = found[0] not in known and len(rows) < 4
            yield Made(f"share of {s.name}", "share of peak", forms, text, also=also, free=free)
