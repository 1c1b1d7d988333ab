"""Down a table: what a column is made of is found out from the rows that agree; the row that does not is accused."""

import re
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, ODD
from expertile.audit.quantity import Quantity
from expertile.audit.report import RATIO, Grid, Report
from expertile.audit.rules.products import products
from expertile.audit.rules.quotients import TYPED, Made, quotients, wrong

PART = re.compile(
    r"(?i)^of\b|\bpeak|efficien|\bmfu\b|\bshare\b|scal|sav|reduc|overhead|(?:%|percent) of|"
    r"less|more|diff|delta|Δ|chang|incr"
)
_NO_QUOTIENT = re.compile(r"(?i)\bhit|occupancy|active|stall|utili[sz]")  # counters of a profiler


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
                change = all(q.text[0] in "+-−" for q in cells)
                drawn = grid.drawn or ((kind == "ratio" or change) and len(grid.header) < 4)
                said = change or name.strip() == "%" or RATIO.search(name) or PART.search(name) or kind == "ratio"
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
    ones = [
        r for r, q in targets.items() if quotient and q.value.meets(1.0) and (q.value.width < 0.3 or q.value.mid == 1)
    ]
    telling = [r for r in targets if r not in ones]
    if not telling or (len(telling) > 2 and len({targets[r].text for r in telling}) == 1):
        return
    # So is the one row that has none.
    blank = [r for r in body if cells[r] is None and grid.rows[r].quantities]
    ones = ones or (blank if len(blank) == 1 and len(telling) == len(body) - 1 else [])
    made = [*products(grid, index, kind, targets), *(quotients(grid, index, body, ones) if quotient else ())]
    # A log's changes may be from the best line so far.
    made = [m for m in made if grid.drawn or kind != "percent" or "row before" not in m.name]
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
    slack = (
        slack
        if quotient
        else best.slack
        if best.free
        else max(slack, 0.04 if score > 2 or exactly >= score > 1 else 0.1)
    )
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
