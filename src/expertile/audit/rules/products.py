"""A column as a product of others whose units make its own, with every count that its rows state between.

The work, the tokens or the batch that sizes mean, in a time; a sum; a share of a peak; a constant times another column.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from expertile.audit.interval import FIT, Interval, exact, odd_ones, printed
from expertile.audit.quantity import quantities, same_statistic
from expertile.audit.report import Grid
from expertile.audit.rules.laws import NO_RUN, derived, law_of
from expertile.audit.rules.peaks import peaks_of
from expertile.audit.rules.quotients import Cells, Made
from expertile.audit.rules.work import conventions, readings
from expertile.audit.units import UNTYPED, kind_of, powers_of, product, unit_of_name

_OF_PEAK = re.compile(r"(?i)peak|theor|of (?:hbm|max|\d)|\bmfu\b|roof|\bsol\b")
_SUM = re.compile(r"(?i)\btotal|\bsum\b|end[ _-]?to[ _-]?end|\be2e\b|overall")


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
        sizes = {r: n.value for r in targets if (n := grid.rows[r].size(name)) and n.near}
        if len(sizes) == len(targets) and all(sizes.values()):
            found[name] = sizes
    for s in sources:
        whole = s.kind == "number" and all(v.mid == int(v.mid) for v in s.values.values())
        if whole and len(s.values) == len(targets) and all(v.mid for v in s.values.values()):
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


def products(grid: Grid, target: int, kind: str, targets: Cells) -> Iterator[Made]:
    """Columns whose units make the target's, with every count of a row between; one column times a constant."""
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
    work = "time" in (kind, s.kind) or {kind, s.kind} == {"rate", "bandwidth"}
    work = work and {kind, s.kind} <= {*_RUN, "time"} and derived((kind, s.kind)) == kind and kind != s.kind
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
    stated = {q.value.mid for q in quantities(grid.header[target], 0) if q.kind == s.kind}  # "% of 2039 GB/s"
    of, unit = re.search(r"of (\d[\d.,]*)$", grid.header[target]), unit_of_name(s.name)
    stated |= {printed(of[1]).mid * unit.low} if of and unit else set()  # "% of 362"
    known = tuple(
        stated | {x for d in peaks for x in (peaks_of(d) if s.kind == "rate" else (d.memory_bps or 0.0,)) if x}
    )
    if not _OF_PEAK.search(grid.header[target]) or ({*grid.columns("rate")} and {*grid.columns("bandwidth")}):
        return
    found = odd_ones([s.values[r] / targets[r].plain for r in rows], known)
    if found and len(found[1]) < 2:
        expected = {r: s.values[r] / found[0] for r in rows}
        text = {r: f"{s.text[r]} of the others' peak" for r in rows}
        also = dict.fromkeys(rows, tuple(found[0] / x for x in known))
        free = found[0] not in known and len(rows) < 4
        yield Made(f"share of {s.name}", "share of peak", expected, text, also=also, free=free)
