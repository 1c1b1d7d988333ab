"""Speed-ups, percentages, averages and totals that do not follow from the figures of their own table or sentence."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, ODD, Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import RATIO, Grid, Report, Row

Pair = tuple[Quantity, Quantity]
_TYPED = ("time", "rate", "bandwidth", "tokens_per_s", "items_per_s", "s_per_token", "s_per_item", "bytes")
_PART = re.compile(
    r"(?i)^of\b|\bpeak|efficien|\bmfu\b|\bshare\b|scal|sav|reduc|overhead|(?:%|percent) of|"
    r"less|more|diff|delta|Δ|chang|incr"
)
_NO_QUOTIENT = re.compile(r"(?i)\bhit|occupancy|active|stall|utili[sz]")  # counters of a profiler


@dataclass(frozen=True)
class _Hypothesis:
    """How a column may follow from others: row -> the quotient's two figures. `direct`: two columns of one row."""

    name: str
    pairs: dict[int, Pair]
    direct: bool = False

    def fits(self, r: int, target: Quantity, slack: float) -> bool:
        a, b = self.pairs.get(r, (target, target))
        # "1.1x slower" stands among those that are faster.
        turned = re.match(r"(?i)\W*(?:faster|slower|better|worse)", target.after) and follows(target, (b, a), slack)
        return r in self.pairs and (bool(turned) or follows(target, (a, b), slack))

    def score(self, targets: dict[int, Quantity], telling: list[int]) -> int:
        """The rows that confirm it; 0 where more than one in three does not."""
        held = [r for r in telling if r in self.pairs]
        bad = good = 0
        for r in held:
            a, b = self.pairs[r]
            if not self.fits(r, targets[r], FIT):
                bad += 1
            elif targets[r].value.width < 0.3 and a.plain.width + b.plain.width < 0.2:
                good += 1  # a wide one confirms nothing
            if bad > max(targets[r].kind == "ratio" or self.name.endswith("1x"), 0.34 * len(held)):
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
    if q.kind == "ratio":
        forms = [x, gain] if re.search(r"(?i)improve|gain", q.label) else [x]
    return any(form.hi > 0 and q.value.meets(form, slack) for form in forms)


def grids(report: Report) -> Iterator[Finding]:
    """Every ratio column of every table."""
    for grid in report.tables:
        kinds = ("ratio", "percent") if grid.drawn else ("ratio",) * (len(grid.header) < 4)
        for index in grid.columns(*kinds):
            name, cells = grid.header[index], [q for q in grid.column(index) if q is not None]
            said = (
                name.strip() == "%" or RATIO.search(name) or _PART.search(name) or all(q.kind == "ratio" for q in cells)
            )
            if said and not _NO_QUOTIENT.search(name):
                yield from _column(grid, index)


def _column(grid: Grid, index: int) -> Iterator[Finding]:
    cells = grid.column(index)
    body = [r for r, row in enumerate(grid.rows) if not row.summary]
    targets = {r: q for r in body if (q := cells[r]) is not None and q.exact and q.value.mid > 0}
    # A row whose ratio is 1 is a baseline: that it equals itself confirms nothing.
    ones = [r for r, q in targets.items() if q.value.meets(1.0) and q.value.width < 0.3]
    telling = [r for r in targets if r not in ones and targets[r].value.mid != 1]
    if not telling or (len(telling) > 2 and len({targets[r].text for r in telling}) == 1):
        return
    # So is the one row that has none.
    blank = [r for r in body if cells[r] is None and grid.rows[r].quantities]
    ones = ones or (blank if len(blank) == 1 and len(telling) == len(body) - 1 else [])
    # Times in several units stand in a table without any.
    bare = ("number",) * bool(re.search(r"(?i)speed|gain", grid.header[index]))
    kinds = tuple(k for k in (*_TYPED, *bare) if any(c != index for c in grid.columns(k)))
    scored = [(h.score(targets, telling), h) for kind in kinds for h in _hypotheses(grid, kind, index, body, ones)]

    def rank(scored: tuple[int, _Hypothesis]) -> tuple[int, bool, bool]:
        score, h = scored
        return score + 2 * sum(h.fits(r, targets[r], 0.0) for r in telling), h.direct, h.name.endswith("1x")

    score, best = max(((s, h) for s, h in scored if s), key=rank, default=(0, None))
    told = best is not None and (best.direct or best.name.endswith("1x") or targets[telling[0]].kind == "ratio")
    if best is None or (score < 3 and not told):
        return
    # One row that agrees is enough beside one that does not, where nothing else can be meant.
    only = best.direct and any(len(grid.columns(kind)) == 2 for kind in kinds)
    if score < 2 and not (len(telling) == 2 and (only or (ones and best.name.endswith("1x")))):
        return
    # Where the rows agree to their last digit, so must every other. A pair that suits another better is its own.
    exactly = sum(best.fits(r, targets[r], 0.0) for r in telling)
    others = [enumerate(grid.column(c)) for c in grid.columns("ratio", "percent") if c != index]
    if best.direct and any(sum(bool(q and best.fits(r, q, 0.0)) for r, q in cells) > exactly for cells in others):
        return
    slack = 0.01 if score >= 3 and exactly >= score else ODD / 2 if exactly >= score > 1 else ODD
    rivals = [h for s, h in scored if (score < 2 or h.direct or s > 1) and h is not best and h.direct == best.direct]
    for r in telling:
        # Another baseline of the same table may be meant in this row.
        other = any(h.fits(r, targets[r], 0.0) for h in rivals)
        if r in best.pairs and not best.fits(r, targets[r], slack) and not other:
            yield _wrong(targets[r], best.pairs[r], best.name)
    for r in range(len(grid.rows)):
        q = cells[r]
        if q is None or r in body or not q.exact or r not in best.pairs or best.fits(r, q, FIT):
            continue
        if q.value.meets(sum(t.value.mid for t in targets.values()) / len(targets), FIT):
            a, b = best.pairs[r]
            x = f"{a.text} / {b.text} of this row is {a.value.mid / b.value.mid:.3g}"
            message = f"{q.text} is the mean of the rows' ratios; {x}: which of the two is meant?"
            yield finding(QUESTION, "mean of ratios", message, q)


def _hypotheses(grid: Grid, kind: str, target: int, body: list[int], ones: list[int]) -> Iterator[_Hypothesis]:
    blank = [r for r in body if grid.column(target)[r] is None and grid.rows[r].own]
    columns = {
        c: {r: q for r, q in enumerate(grid.column(c)) if q is not None and q.kind == kind and q.value.mid > 0}
        for c in grid.columns(kind)
        if c != target
    }
    for a, b in permutations(columns, 2) if len(columns) < 13 else ():
        both = {r: (columns[a][r], columns[b][r]) for r in columns[a].keys() & columns[b].keys()}
        yield _Hypothesis(f"{grid.header[a]} / {grid.header[b]}", both, True)
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
                yield _Hypothesis(f"{grid.header[c]} of line {row.line}", shares, True)
        for name, base in bases:
            pairs = [(r, s) for r, s in base.items() if r in held and s in held and s != r]
            there = {r: (held[s], held[r]) for r, s in pairs if _same_work(grid.rows[r], grid.rows[s])}
            yield _Hypothesis(f"{grid.header[c]} of {name}", there)
            yield _Hypothesis(f"{grid.header[c]} over {name}", {r: (b, a) for r, (a, b) in there.items()})


_SHAPES = re.compile(r"\b[A-Za-z]{1,3}=?\d+\b|\d+(?:[x×]\d+)+")


def _same_work(a: Row, b: Row) -> bool:
    """Whether two rows may be of one problem: "B4 N512" and "B1 N1024" are not."""
    shapes = [{re.sub(r"\d", "", s): s for s in _SHAPES.findall(row.label)} for row in (a, b)]
    shared = shapes[0].keys() & shapes[1].keys()
    return len(shared) < 2 or all(shapes[0][s] == shapes[1][s] for s in shared)


def _each(grid: Grid, columns: dict[int, dict[int, Quantity]]) -> Iterator[tuple[int, dict[int, Quantity]]]:
    """The columns for each GPU, which a scaling efficiency compares."""
    gpus = {r: row.own.get("gpus", 0.0) for r, row in enumerate(grid.rows)}
    for c, held in columns.items() if len({*gpus.values()}) > 1 else ():
        by = {r: gpus[r] if q.kind == "time" else 1 / gpus[r] for r, q in held.items() if gpus[r]}
        yield c, {r: replace(held[r], value=held[r].value * x) for r, x in by.items()}


def _two(q: Quantity, a: Quantity, b: Quantity, change: str = "") -> Iterator[Finding]:
    """Two figures and what is made of them, in either order."""
    sound = all(x.exact and x.value.mid > 0 for x in (q, a, b))
    if sound and not (follows(q, (a, b), ODD, change) or follows(q, (b, a), ODD, change)):
        yield _wrong(q, (a, b) if a.value.mid >= b.value.mid else (b, a))


def _wrong(q: Quantity, pair: Pair, name: str = "") -> Finding:
    x, unit = pair[0].value.mid / pair[1].value.mid, UNIT_OF.get(pair[0].kind, "")
    more = f"{100 * (x - 1):.3g} % more, " * (x > 1) + f"{100 * (1 - min(x, 1 / x)):.3g} % less"
    should, meant = f"{x:.3g}x" if q.kind == "ratio" else f"{100 * x:.3g} % ({more})", f" ({name})" if name else ""
    message = f"{si(pair[0].value.mid, unit)} / {si(pair[1].value.mid, unit)} is {should}, not {q.text}{meant}"
    return finding(INCONSISTENT, "ratio", message, q, lines=(pair[0].line, pair[1].line))


_FROM = re.compile(
    r"(?i)\bfrom\b.*\bto\b|→|->|\bvs\.?\b|\bversus\b|compared (?:to|with)|instead|\bagainst\b|(?:down|up) to|\bthan\b"
)
_GAINS = (
    r"(?:faster|slower|speed|slow|improve|reduc|less|lower|higher|more|increas|gain|decreas|drop|sav|better|smaller)"
)
_OUTCOME, _CHANGE = re.compile(rf"(?i){_GAINS}"), re.compile(rf"(?i)^\W*{_GAINS}")
_SPEED, _SIZE = (
    re.compile(r"(?i)concurren|speed|faster|slower|latency|throughput|\btime"),
    re.compile(r"(?i)memory|vram|size"),
)
_APART = re.compile(r"(?i)peak|theor|limit|max|\bmin\b|\bp\d\d|std|total|best|worst")
_PARTIAL = re.compile(r"(?i)sav|differ|delta|reduc|overhead")
_THAN = re.compile(r"(?i)\b(?:than|over|vs)\b")
_SPEED_UP = re.compile(r"(?i)\W*(?:overall |total )?speed-?\s?up\W*")
_LESS = re.compile(r"(?i)drop|reduc|decreas|\bless|lower|sav|\bcut")
_BY = re.compile(r"(?i)\bby\W*$")
_NOT_OF = re.compile(
    r"(?i)peak|utili|efficien|accuracy|recall|confidence|error|sparsity|occupancy|of (?:the )?(?:total|time|runtime)"
)


def sentences(report: Report) -> Iterator[Finding]:
    """Two figures of one kind and what the sentence or record makes of them: "from 12.4 ms to 3.1 ms, 4.0x faster"."""
    mixed = [r for grid in report.grids for r in grid.body if any(_OUTCOME.search(q.after) for q in r.of("ratio"))]
    for row in (*(part for whole in report.rows for part in whole.parts()), *mixed):
        ratios = [q for q in row.of("ratio", "percent") if not _NOT_OF.search(q.words)]
        parts = [q for q in row.of(*_TYPED) if row.kind == "line" or not _PARTIAL.search(q.label)]
        by_kind = ([q for q in parts if q.kind == kind] for kind in dict.fromkeys(q.kind for q in parts))
        pairs = [held for held in by_kind if len(held) == 2]
        # A record of two variants: its speed-up is of one of their figures.
        said = [q for q in ratios if row.kind == "record" and len(pairs) > 1 and _SPEED_UP.fullmatch(q.label)]
        if not said and (len(parts) != 2 or len(pairs) != 1):
            continue
        # "Memory ratio: 1.71x more per token, 2.05x less in total", "42.8 -> 40.2 s, a 2.6 s reduction (-6 %)"
        several = row.kind == "record" and any(p.line == q.line and p is not q for p in ratios for q in ratios)
        if several or (row.kind == "line" and re.search(r"\d ?(?:→|->) ?$", row.text[: parts[0].start])):
            continue
        if said and any(follows(said[0], pair, ODD) for x, y in pairs for pair in ((x, y), (y, x))):
            continue
        a, b = pairs[0]
        # A ratio of memory is not of the times beside it, nor one of speed of the bytes.
        other = _SPEED if a.kind == "bytes" else _SIZE
        ratios = [q for q in ratios if not other.search(q.after[:16] if row.kind == "line" else q.words)]
        if row.kind != "line":
            ratios = [q for q in ratios if _OUTCOME.search(q.label + row.text * (row.kind == "table"))]
            if len(ratios) == 1 and not _THAN.search(ratios[0].after) and not _APART.search(a.label + b.label):
                yield from _two(ratios[0], a, b)
            continue
        before, between = row.text[max(0, a.start - 8) : a.start], row.text[a.end : b.start]
        # Another figure between the two: the ratio is of something else.
        # "12.6 ms, ours 4.2 ms: 3.0x faster"
        close = [q for q in ratios if re.fullmatch(r"\W{1,3}", row.text[b.end : q.start]) and not _THAN.search(q.after)]
        # "1.9 ms, the unfused one 5.1 ms, which makes it 3.7x faster"
        last = [q for q in ratios if q is row.quantities[-1] and len(row.quantities) == 3]
        told = _FROM.search(f"{before} {between}") or (close and _OUTCOME.search(close[0].after))
        told = told or (last and re.match(r"\W*(?:faster|slower|speed)", last[0].after))
        if len(ratios) > 2 or re.search(r"\d", between) or not told:
            continue
        # "as the length grew 4x" is not of the times: a word of gain stands beside the ratio, or the times do.
        near = {q: row.text[max(0, q.start - 24) : q.start] + row.text[q.end : q.end + 16] for q in ratios}
        ratios = [
            q
            for q in ratios
            if _OUTCOME.search(near[q])
            or _BY.search(row.text[: q.start])
            or re.fullmatch(r"\W+", row.text[b.end : q.start])
            or (q.kind == "ratio" and len(row.quantities) == 3 and re.search("→|->", between))
        ]
        for q in ratios:
            # "dropped by 60 %" is a change; "to 60 % of it" is a share.
            by = _BY.search(row.text[: q.start]) or _CHANGE.search(row.text[q.end :])
            reach = 24 if len(ratios) > 1 else len(row.text)
            down = by and _LESS.search(row.text[max(0, q.start - reach) : q.end + 12])
            # Where the sentence has two ratios, the other must follow.
            if all(o is q or follows(o, (a, b), ODD) or follows(o, (b, a), ODD) for o in ratios):
                yield from _two(q, a, b, "loss" if down else "change" if by else "")
