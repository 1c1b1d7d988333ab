"""Down a table: what a column is made of is found out from the rows that agree; the row that does not is accused."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median_high

from expertile.audit.facts import size_of_name
from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, ODD, Interval, exact
from expertile.audit.pattern import regex
from expertile.audit.quantity import RATIO, Quantity, same_statistic
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.made import Cells, Made, printed_as, products, quotients, shares, sources_of, summaries
from expertile.audit.rules.terms import drafts
from expertile.audit.units import RATES, TYPED

_PART = regex(
    r"(?i)^of\b|\bpeak|\beff|\bmfu\b|\bshare\b|scal|sav|reduc|overhead|%|percent|less|more|diff|delta|Δ|chang|incr|^\W*$"
)
# Counters of a profiler; bus bandwidth, which is no traffic.
_NO_QUOTIENT = regex(r"(?i)\bhit|\boccup|active|stall|utili[sz]|\bbus ?b(?:w|and)")
_COUNTED, _TIMED = ("tokens", "items", "params"), ("time", "s_per_item")
# What a column may be in proportion to: another, its inverse; and work to a size, in these ways.
_WAYS: dict[str, Callable[[Interval], Interval]] = {
    "": lambda x: x,
    "÷": lambda x: exact(1.0) / x,
    "²": lambda x: x * x,
    "³": lambda x: x * x * x,
    " log": lambda x: x * math.log(x.mid),
}
_FASTER = regex(r"(?i)speed-?[ _]?up|faster|slow-?[ _]?down")
_SCOPE = regex(r"(?i)e2e|end.to.end|overall|total|whole|train|step|model|app")  # of more than the column beside


def columns(report: Report) -> Iterator[Finding]:
    """Every column of every table that may be made of others."""
    for grid in report.tables:
        for index, name in enumerate(h.replace("_", " ") for h in grid.header):
            cells = [q for q in grid.column(index) if q is not None]
            kinds = {q.kind for q in cells}
            signed = all(q.text[0] in "+-−" for q in cells)
            ratio = kinds <= {"ratio", "percent"} and not (kinds == {"ratio"} or signed or RATIO.search(name))
            other = _NO_QUOTIENT.search(name) or (ratio and not _PART.search(name.strip()))
            other = other or ("tokens_per_s" in kinds and drafts(report))
            if len(kinds) == 1 and 2 * len(cells) >= len(grid.rows) and len(grid.header) < 40 and not other:
                yield from _column(grid, index, kinds.pop())


@dataclass(frozen=True)
class _Factor:
    """A column in one of the ways; `whole` are sizes, tokens and things counted."""

    name: str
    way: str
    cells: dict[int, Interval]
    column: int
    kind: str
    whole: bool


def _factors(grid: Grid) -> Iterator[_Factor]:
    """The columns of figures and those of whole numbers that differ down the table."""
    names, sizes = [*map(str.strip, grid.header)], 0
    for c, name in enumerate((*names, *(n for n in grid.body[0].bare if n not in map(str.lower, names)))):
        held = {r: q for r, row in enumerate(grid.body) if (q := row.figure(c))}
        bare = {r: exact(x) for r, row in enumerate(grid.body) if (x := row.bare.get(name.lower()))} if not held else {}
        kinds = {q.kind for q in held.values()} or {"number"}
        counts = kinds == {"number"} and all(re.fullmatch(r"[\d,]+", q.text) for q in held.values())
        cells = {r: exact(q.value.mid) if counts else q.plain for r, q in held.items()}
        cells = {r: x for r, x in cells.items() if x.width < 0.2} or bare
        if len(kinds) == 1 and len(cells) >= max(min(4, len(grid.body)), len(grid.body) - 1):
            (kind,) = kinds
            whole = kind in ("number", *_COUNTED) and all(x.mid % 1 == 0 for x in cells.values())
            if kind in (*RATES, *_TIMED) or _varies(cells.values()):
                sizes += (size := whole and kind == "number")
                for way in [*_WAYS][: 5 if size and sizes < 5 else 2]:
                    yield _Factor(name, way, {r: _WAYS[way](x) for r, x in cells.items()}, c, kind, whole)


def proportions(report: Report) -> Iterator[Finding]:
    """A column that another makes, or two, but for one constant: to the last digit in all rows but one; a rate and its
    time, which may be of one work, less exactly. It asks."""
    for grid in (g for g in report.tables if 2 < len(g.body) < 60 and len(g.header) < 16):
        of_all = [*_proportions(grid)]
        groups = [[*_proportions(g, False)] for g in _by_label(grid)] if not of_all else []
        yield from of_all or next((some for some in groups if sum(map(len, groups)) == len(some) == 1), [])


def _by_label(grid: Grid) -> list[Grid]:
    """The rows of each of a few names, where all have four rows and more: "full" and "causal" count unlike work."""
    names = dict.fromkeys(row.label.strip().lower() for row in grid.body)
    of = [[row for row in grid.body if row.label.strip().lower() == name] for name in names]
    return [Grid(grid.block, grid.header, rows) for rows in of] if 1 < len(of) < 5 and min(map(len, of)) > 3 else []


def _proportions(grid: Grid, passes: bool = True) -> Iterator[Finding]:
    """Of each column; what is off by a whole number may count other `passes`."""
    factors, found = [*_factors(grid)], set[int]()
    if {"m", "n", "k"} <= grid.rows[0].own.keys():  # their work is known
        factors = [f for f in factors if f.name.lower() not in ("m", "n", "k")]
    for n, target in itertools.product((1, 2, 3), [f for f in factors if not f.way][::-1]):
        others = [f for f in factors if f.column != target.column and same_statistic(f.name, target.name)]
        if n == 3:  # of two sizes and a time
            rated = [f for f in others if target.kind in RATES and f.kind in (*RATES, *_TIMED)]
            others = [f for f in others if f.whole and not f.way][:4] + rated[:6]
        for some in itertools.combinations(others, n):
            # Work is rate × time, so that a rate falls with the time and grows with the sizes.
            timed = target.kind in RATES and any(f.kind in _TIMED for f in some)
            if n == 3 and not (timed and sum(f.whole for f in some) == 2):
                continue
            ways = all((f.way == "÷") == (f.kind in _TIMED) if timed else f.way in ("", "÷") for f in some)
            chosen = all(f.whole for f in (target, *some)) and _round(target)  # nobody measured it
            chosen |= size_of_name(target.name) is not None and (target.whole or target.kind != "number")
            kinds = {f.kind for f in (target, *some)}
            chosen |= kinds == {"ratio"} or (n == 1 and kinds == {"time"})  # of different things
            chosen |= bool(re.search(r"(?i)\bp\d\d\b", target.name)) or not all(f.name.strip() for f in some)
            if ways and not chosen and len({f.column for f in some}) == n:
                rest = [f for f in others if f not in some]
                yield from _odd_row(grid, target, some, timed, passes, found, rest)


def _round(f: _Factor) -> bool:
    """Whether numbers are such as are chosen: few rows of powers of two, and of ten."""
    return len(f.cells) < 8 and all(x.mid < 1000 or x.mid % 8 == 0 or x.mid % 100 == 0 for x in f.cells.values())


def _works(rows: list[Row], used: set[str]) -> list[object]:
    """What tells the rows' work from each other, but for the columns that were `used`, and for those that have another
    number in every row, as counters have."""
    each = []
    for row in rows:
        counted = {f"{q.kind} {q.column}": q.value.mid for q in row.of("bytes", "flop", "tokens", "items")}
        sizes: dict[str, object] = {n: v for n, v in (row.own | row.bare | counted).items() if n not in used}
        each.append(sizes | {"tuples": row.facts.of("tuples")})
    names = {n for n in each[0] if len({e.get(n) for e in each}) < len(each)}
    return [{n: v for n, v in e.items() if n in names} for e in each]


def _varies(values: Iterable[Interval]) -> bool:
    mids = [x.mid for x in values]
    return max(mids, default=0) > 1.08 * min(mids, default=0)


def _odd_row(
    grid: Grid,
    target: _Factor,
    some: tuple[_Factor, ...],
    timed: bool,
    passes: bool,
    found: set[int],
    rest: list[_Factor],
) -> Iterator[Finding]:
    """`found` are rows that are asked about, and columns, below zero, of which all rows say what they are made of.
    What is off as a column of the `rest` is follows from that too."""
    made = {r: x for r, x in some[0].cells.items() if r in target.cells and all(r in f.cells for f in some)}
    for f in some[1:]:
        made = {r: x * f.cells[r] for r, x in made.items()}
    factors = {r: target.cells[r] / x for r, x in made.items()}
    middle = median_high(f.mid for f in factors.values()) if len(made) > 2 else 0.0
    if len(made) == 3 and not exact(middle).meets(1.0, 0.002):
        return  # of three rows only what is another over one
    odd = [r for r, f in factors.items() if not f.meets(middle, 0.002)]
    if timed and middle and not odd:
        found.add(-1 - target.column)
    exactly = len(odd) == 1 and sum(f.width < 0.05 for f in factors.values()) >= max(
        min(4, len(made)), 0.8 * len(factors)
    )
    odd = odd if exactly or not timed else [r for r, f in factors.items() if not f.meets(middle, FIT)]
    # Few rows confirm a plain quotient alone.
    pure = exact(middle).meets(1.0, 0.002) and (
        (target.kind == "number" and len({f.kind for f in some}) == 1) or all(f.width < 0.01 for f in factors.values())
    )
    few = (len(some) == 2 or len(grid.header) > 6) and not timed and len(grid.body) < 5 and not pure
    if few or not middle or len(odd) != 1 or not (timed or exactly) or odd[0] in found:
        return
    row, should = grid.body[odd[0]], middle * made[odd[0]].mid
    q, off = row.figure(target.column), (factors[odd[0]] / middle).mid
    known = timed and -1 - target.column in found
    if q is None or known or not off or not (timed or pure or _varies(made[r] for r in made if r not in odd)):
        return
    whole = round(max(off, 1 / off))  # of two passes, of four runs
    told = (x for line in row.report.lines_of_text for x in line.of("B/token", "B/param"))  # what each one takes
    sure = len(some) == 1 and any(x.value.meets(middle, 0.002) for x in told)
    whole = 0 if (whole == 10 or not passes or sure) and exactly else whole  # a digit
    other = any(f.cells[odd[0]].mid == 1 for f in (target, *some))  # a baseline
    whole = whole if "percent" not in {target.kind, some[0].kind} and whole < 64 else 0
    other |= any(x is not q and x.value.width < 0.2 and x.value.meets(should, FIT) for x in row.of(target.kind))
    if len(some) == 2 and any(len({f.cells[r].mid for r in made if r not in odd}) < 2 for f in some):
        return  # in which of the ways?
    for f in (f for f in rest if odd[0] in f.cells):
        like = {x.mid for r, x in f.cells.items() if r != odd[0]}
        other |= len(like) == 1 and (f.cells[odd[0]] / like.pop()).meets(off, 0.002)
        each = [target.cells[r] / x for r, x in f.cells.items() if r in target.cells]
        # Of two utilisations the one that makes it.
        other |= f.kind == some[0].kind == "percent" and all(x.meets(each[0]) for x in each)
    # Another shape alone may be another work.
    used = {f.name.lower() for f in some}
    works = _works(grid.body, used)
    other |= any(f.kind in (*RATES, *_TIMED) for f in (target, *some)) and works.count(works[odd[0]]) == 1
    least = 0.03 if exactly else 0.15
    if abs(off - 1) > least and abs(max(off, 1 / off) / (whole or 9) - 1) > (0.005 if exactly else 0.02) and not other:
        found.add(odd[0])
        names = " and ".join(f.name + f.way.strip("÷") for f in some)
        rule = "intensity" if {target.kind, some[0].kind} == {"rate", "bandwidth"} else "proportion"
        figure = f"{si(should, UNIT_OF.get(q.kind, ''))}, not {q.text}"
        message = f"{target.name} follows from {names} in all other rows; here it would be {figure}"
        beside = tuple(of.line for f in some if (of := row.figure(f.column)))
        yield finding(QUESTION, rule, f"{message}: is it of the same work?", q, lines=beside)


def _column(grid: Grid, index: int, kind: str) -> Iterator[Finding]:
    cells, quotient = grid.column(index), kind in ("ratio", "percent")
    body = [r for r, row in enumerate(grid.rows) if not row.summary]
    targets = {r: q for r in body if (q := cells[r]) is not None and q.exact and q.value.mid > 0}
    # A row whose ratio is 1 is a baseline: that it equals itself confirms nothing. So is the one row that has none.
    ones = [
        r
        for r, q in targets.items()
        if quotient and q.text[0] not in "+-−" and q.value.meets(1.0) and (q.value.width < 0.3 or q.value.mid == 1)
    ]
    told = {r: q for r, q in targets.items() if r not in ones}
    if kind == "other" or not told or (len(told) > 2 and len({q.text for q in told.values()}) == 1):
        return
    blank = [r for r in body if cells[r] is None and grid.rows[r].quantities]
    ones = ones or (blank if len(blank) == 1 and len(told) == len(body) - 1 else [])
    sources = sources_of(grid, index, targets, quotient)
    made = [*summaries(grid, targets, kind, index)]
    if kind != "number":
        made += quotients(grid, index, sources, ones) if quotient else products(grid, targets, kind, index, sources)
    made += shares(grid, index, targets, sources) if kind == "percent" else []
    # A log's changes may be from the best line so far; lines of parts have shares of all, or of one without.
    made = [m for m in made if grid.drawn or kind != "percent" or "row before" not in m.name]
    signed = all(q.text[0] in "+-−" for q in told.values())
    if kind == "percent" and not (grid.drawn or signed or grid.header[index].strip()):
        whole = tuple(f"of line {row.line}" for r, row in enumerate(grid.rows) if cells[r] is None)
        made = [m for m in made if m.name.endswith(("of the sum", "of the total", *whole))]
    scored = [(n, m) for m in made if (n := m.score(targets, [*told]))]

    def exactly(m: Made, held: Cells) -> int:
        return sum(r in m.cells and m.fits(r, q, 0.0) for r, q in held.items())

    ranked = ((s + 2 * exactly(m, told), m.direct, m.name[-2:] == "1x", -i) for i, (s, m) in enumerate(scored))
    *_, at = max(ranked, default=(0,))
    if not scored:
        yield from _pair(grid, index, told, ones)
        return
    score, best = scored[-at]
    if best.off != 1:
        q, lines = targets[min(targets)], (grid.rows[0].report.blocks[grid.block].first, *(r.line for r in grid.rows))
        off = f"{best.name} make {grid.header[index]} but for a factor of {best.off:g} in all rows: which unit?"
        many = rf"(?<![.\d]){max(best.off, 1 / best.off):.0f} (?:times(?! as)|runs|launch|pass|iter|rep|call)"
        if re.search(many, grid.rows[0].report.text.replace(",", "")):
            return  # a total of so many
        if score == len(told) and all(best.fits(r, q, 0.01) for r, q in told.items()):
            yield finding(QUESTION, "product", off, q, lines=lines)
        return
    one, whole_of = best.name.endswith("1x"), best.name.endswith(("of the sum", "of the total"))
    if score < 3 and not (best.direct or one or whole_of or kind == "ratio"):
        return
    # One row that agrees is enough beside one that does not, where nothing else can be meant.
    only = best.direct and (not quotient or any(len(grid.columns(k)) == 2 for k in TYPED))
    if score < 2 and not (len(told) == 2 and (only or (ones and one))):
        return
    good = exactly(best, told)
    if quotient and (2 * good < score or (not (best.direct or one or whole_of) and good < score)):
        return  # it suits the rows roughly; rates that are all alike suit any of them so
    # Where the rows agree to their last digit, so must every other.
    slack = 0.01 if score >= 3 and good >= score else ODD / 2 if good >= score > 1 else ODD
    digits = good > 3 and good >= score - 1  # all rows but one agree to the last
    least = 0.04 if score > 2 or slack < ODD else 0.1
    slack = slack if quotient else 0.015 if digits else max(slack, least)
    rivals = [m for s, m in scored if (score < 2 or m.direct or s > 1) and m is not best and m.direct == best.direct]
    # A rate named as its time is ("ours (us)", "ours (TFLOP/s)") is of no other time.
    own = set() if quotient else _named(grid.header[index]) & _named(best.name)
    rivals = [m for m in rivals if not own or own & _named(m.name)]
    odd = [r for r in told if r in best.cells and not best.fits(r, targets[r], slack)]
    for r in odd:
        # Another baseline of the same table may be meant in this row.
        other = any(r in m.cells and m.fits(r, targets[r], 0.0) for m in rivals)
        # Another column of the kind follows so: this one's may be of something else ("rate, uncompressed").
        beside = (q for q in grid.rows[r].of(kind) if q is not targets[r] and not quotient)
        beside = (q for q in beside if not all(_alike(best, grid, s, q, targets) for s in told if s != r))
        beside = (q for q in beside if len(told) < 4 or _meant(best, grid, q.column, told))
        other |= best.rule != "sum" and any(best.fits(r, q, FIT) for q in beside)
        # Where all others agree to the last digit, another convention in this row is asked about.
        excused = best.excused(r, targets[r])
        if not other and (not excused or (good >= score > 2 and len(odd) == 1)):
            yield _broken(best, targets[r], r, len(odd) > 1 or excused)  # of one error, one row
    mean = sum(t.value.mid for t in targets.values()) / len(targets)
    for r, row in enumerate(grid.rows) if quotient else ():
        s = cells[r] if row.summary and r in best.cells else None
        if s and s.exact and s.value.meets(mean, FIT) and not best.fits(r, s, FIT):
            x = f"{best.cells[r].text} of this row is {best.cells[r].value.mid:.3g}"
            message = f"{s.text} is the mean of the rows' ratios; {x}: which is meant?"
            yield finding(QUESTION, "mean of ratios", message, s)


def _alike(best: Made, grid: Grid, r: int, q: Quantity, targets: Cells) -> bool:
    """Whether a row has the same in another figure's column, in another unit."""
    x = grid.rows[r].figure(q.column, q.kind)
    return x is not None and x.text != targets[r].text and x.plain.meets(targets[r].plain, FIT) and best.fits(r, x, FIT)


def _meant(best: Made, grid: Grid, column: int, told: Cells) -> bool:
    """Whether `best` makes another column in all rows, which differs from this one in all: a draw, not its cap."""
    each = [(r, grid.rows[r].figure(column)) for r in told]
    return all(x and x.text != told[r].text and best.fits(r, x, 0.01) for r, x in each)


def _named(text: str) -> set[str]:
    return {*re.findall(r"[a-z]{3,}", text.lower())}


def _pair(grid: Grid, index: int, told: Cells, ones: list[int]) -> Iterator[Finding]:
    """The speed-up of one row over another, of the only figures that the two have. It asks."""
    columns = grid.columns(*TYPED[:-1])  # memory may be less by another factor
    name = grid.header[index]
    if len(told) != 1 or len(ones) != 1 or len(columns) != 1 or not _FASTER.search(name) or _SCOPE.search(name):
        return
    ((r, q),) = told.items()
    a, b = (grid.column(columns[0])[at] for at in (r, ones[0]))
    if a and b and a.kind == b.kind and a.exact and b.exact and a.value.mid and b.value.mid:
        y, x = sorted((a, b), key=lambda of: of.value.mid)
        forms = [*printed_as(q, x.plain / y.plain), *printed_as(q, y.plain / x.plain)]
        if not any(f.hi > 0 and q.value.meets(f, ODD) for f in forms):
            message = wrong(f"{x.text} / {y.text}", x.value.mid / y.value.mid, q)
            yield finding(QUESTION, "ratio", f"{message}: is it of these two?", q, lines=(a.line, b.line))


def _broken(best: Made, q: Quantity, r: int, ask: bool) -> Finding:
    t, x = best.cells[r], best.cells[r].value.mid
    if best.quotient:
        bare = t.kind == "number" and re.fullmatch(r"[\d,]+ / [\d,]+", t.text)  # of sizes that nobody measured
        return finding(QUESTION if bare else INCONSISTENT, "ratio", wrong(t.text, x, q, best.name), q, lines=t.lines)
    should = f"{100 * x:.3g} %" if q.kind == "percent" else si(x, UNIT_OF.get(q.kind, ""))
    message = f"{t.text} is {should}, not {q.text}"
    verdict = QUESTION if ask else INCONSISTENT
    return finding(verdict, best.rule, message + ": is it of the same work?" * ask, q, lines=t.lines)


def wrong(pair: str, x: float, q: Quantity, name: str = "") -> str:
    """Says that `q` is not the quotient `x` of a pair."""
    more = f"{100 * (x - 1):.3g} % more, " * (x > 1) + f"{100 * (1 - min(x, 1 / max(x, 1))):.3g} % less"
    should = f"{x:.3g}x" if q.kind != "percent" else f"{100 * x:.3g} % ({more})"
    return f"{pair} is {should}, not {q.text}" + (f" ({name})" if name else "")
