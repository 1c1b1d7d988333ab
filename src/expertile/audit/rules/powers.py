"""Down a table: rate times time grows as a power of the rows' sizes; no column is a thousand times off. It asks."""

import itertools
import math
import statistics
from collections.abc import Iterator

from expertile.audit.finding import QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import same_statistic
from expertile.audit.report import Grid, Report
from expertile.audit.rules.terms import derived, law_of
from expertile.audit.units import UNTYPED, product

_RATES, _TIMES = ("rate", "bandwidth", "tokens_per_s", "items_per_s"), ("time", "s_per_item", "s_per_token")
_UNITS = (1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9)
Column = dict[int, Interval]


def powers(report: Report) -> Iterator[Finding]:
    """Every table of four rows and more."""
    for grid in (g for g in report.tables if 2 < len(g.rows) < 60 and len(g.header) < 20):
        columns = {c: _column(grid, c) for c in range(len(grid.header))}
        kinds = {c: k for c, (k, held) in columns.items() if k not in ("", *UNTYPED) and len(held) == len(grid.body)}
        typed = {c: columns[c][1] for c in [*kinds][:8]}
        yield from _scaled(grid, typed, kinds)
        if len(grid.body) > 3:
            yield from _grown(grid, typed, kinds)


def _column(grid: Grid, c: int) -> tuple[str, Column]:
    held = {r: q for r, row in enumerate(grid.body) if (q := row.figure(c))}
    kinds = {q.kind for q in held.values()}
    return (kinds.pop() if len(kinds) == 1 else ""), {r: q.plain for r, q in held.items()}


def _scaled(grid: Grid, typed: dict[int, Column], kinds: dict[int, str]) -> Iterator[Finding]:
    """A column that two others make but for a factor of a thousand, in every row."""
    for target, of in typed.items():
        if derived_kinds := [k for k in kinds.values() if k != kinds[target]]:
            factors: list[tuple[float, int, int]] = []
            for (x, y), sign in itertools.product(itertools.permutations(typed, 2), (1, -1)):
                law = (kinds[x], kinds[y], kinds[target])
                if (
                    target in (x, y)
                    or product(kinds[x], kinds[y], sign) != kinds[target]
                    or derived(law) != kinds[target]
                ):
                    continue
                if sign < 0 or x < y:
                    off = [of[r].mid / (typed[x][r].mid * typed[y][r].mid ** sign) for r in of]
                    if max(off) < 1.15 * min(off):
                        factors.append((statistics.median(off), x, y))
            also = (f for _, x, y in factors for f in law_of(kinds[x], kinds[y], kinds[target]).also)
            if derived_kinds and factors and not any(abs(f / g - 1) < 0.1 for f, _, _ in factors for g in {1.0, *also}):
                for f, x, y in factors:
                    unit = next((u for u in _UNITS if abs(f / u - 1) < 0.12), 0.0)
                    if unit:
                        names = f"{grid.header[x]} and {grid.header[y]}"
                        q = grid.body[0].figure(target)
                        message = (
                            f"{names} make {grid.header[target]} but for a factor of {unit:g} in all rows: which unit?"
                        )
                        assert q is not None
                        lines = (grid.rows[0].report.blocks[grid.block].first, *(r.line for r in grid.body))
                        yield finding(QUESTION, "product", message, q, lines=lines)
                        break


def _sizes(grid: Grid) -> dict[str, list[float]]:
    """What the work of the rows may grow with: sizes, their squares and cubes, n log n, products of them."""
    names = [n for n in grid.body[0].bare if all(r.bare.get(n, 0) > 0 for r in grid.body)]
    held = {n: [r.bare[n] for r in grid.body] for n in names if len({r.bare[n] for r in grid.body}) > 1}
    found = {"1": [1.0] * len(grid.body)}
    for n, v in list(held.items())[:4]:
        found |= {n: v, f"{n}²": [x**2 for x in v], f"{n}³": [x**3 for x in v]}
        found[f"{n} log {n}"] = [x * math.log2(x + 1e-9) for x in v]
    for k in (2, 3):
        for some in itertools.combinations(list(held)[:4], k):
            found[" × ".join(some)] = [math.prod(held[n][r] for n in some) for r in range(len(grid.body))]
    return {n: v for n, v in found.items() if all(x > 0 for x in v)}


def _grown(grid: Grid, typed: dict[int, Column], kinds: dict[int, str]) -> Iterator[Finding]:
    """A rate that times its time is in no proportion to the work of all other rows."""
    times = [c for c in typed if kinds[c] in _TIMES]
    for c in (c for c in typed if kinds[c] in _RATES and times):
        fits: list[tuple[int, str, int, float, int]] = []
        for t, (name, sizes) in itertools.product(times, _sizes(grid).items()):
            if not same_statistic(grid.header[c], grid.header[t]):
                continue
            work = [typed[c][r] * typed[t][r] / sizes[r] for r in range(len(grid.body))]
            middle = statistics.median(w.mid for w in work)
            odd = [r for r, w in enumerate(work) if not w.meets(middle, 0.01)]
            tight = sum(w.width < 0.06 for w in work)
            if len(odd) <= 1 and tight >= len(work) - 1:
                fits.append((len(odd), name, t, middle, odd[0] if odd else -1))
        if fits and min(fits)[0] == 1 and len({f[4] for f in fits}) == 1:
            _, name, t, middle, r = min(fits, key=lambda f: len(f[1]))
            made = middle * _sizes(grid)[name][r] / typed[t][r].mid
            q = grid.body[r].figure(c)
            if q and not q.value.meets(made, 0.03):
                both = f"{grid.header[c]} × {grid.header[t]}"
                message = f"{both} is in proportion to {name} in all other rows: this one's would be"
                message += f" {si(made, UNIT_OF.get(q.kind, ''))}, not {q.text}; is it of the same work?"
                yield finding(QUESTION, "proportion", message, q)
