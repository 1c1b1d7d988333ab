"""Down a table: what a column is made of is found out from the rows that agree; the row that does not is accused."""

import re
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, ODD
from expertile.audit.quantity import RATIO, Quantity
from expertile.audit.report import Grid, Report
from expertile.audit.rules.made import TYPED, Cells, Made, products, quotients, shares, sources_of

_PART = re.compile(
    r"(?i)^of\b|\bpeak|efficien|\bmfu\b|\bshare\b|scal|sav|reduc|overhead|(?:%|percent) of|less|more|diff|delta|Δ|"
    r"chang|incr"
)
_WORD = re.compile(r"[a-z]+")
_NO_QUOTIENT = re.compile(r"(?i)\bhit|occupancy|active|stall|utili[sz]")  # counters of a profiler


def columns(report: Report) -> Iterator[Finding]:
    """Every column of every table that may be made of others."""
    for grid in report.tables:
        for index, name in enumerate(h.replace("_", " ") for h in grid.header):
            cells = [q for q in grid.column(index) if q is not None]
            kinds = {q.kind for q in cells}
            if len(kinds) != 1 or len(grid.header) > 24 or 2 * len(cells) < len(grid.rows):
                continue
            kind, change = kinds.pop(), all(q.text[0] in "+-−" for q in cells)
            if kind in ("ratio", "percent"):
                whole = kind == "percent" and not (grid.drawn or name.strip())  # lines of parts and their shares
                drawn = grid.drawn or ((kind == "ratio" or change) and len(grid.header) < 4) or whole
                own = {*_WORD.findall(name.lower())}
                of = own and sum(own <= {*_WORD.findall(h.lower())} for h in grid.header) > 1  # "Self CUDA %"
                named = RATIO.search(name) or _PART.search(name) or name.strip() == "%" or whole
                if not drawn or not (named or change or of or kind == "ratio") or _NO_QUOTIENT.search(name):
                    continue
            if kind not in ("number", "other"):
                yield from _column(grid, index, kind)


def _column(grid: Grid, index: int, kind: str) -> Iterator[Finding]:
    cells, quotient = grid.column(index), kind in ("ratio", "percent")
    body = [r for r, row in enumerate(grid.rows) if not row.summary]
    targets = {r: q for r in body if (q := cells[r]) is not None and q.exact and q.value.mid > 0}
    # A row whose ratio is 1 is a baseline: that it equals itself confirms nothing. So is the one row that has none.
    near_one = [r for r, q in targets.items() if quotient and q.value.meets(1.0)]
    ones = [r for r in near_one if targets[r].value.width < 0.3 or targets[r].value.mid == 1]
    telling = [r for r in targets if r not in ones]
    if not telling or (len(telling) > 2 and len({targets[r].text for r in telling}) == 1):
        return
    blank = [r for r in body if cells[r] is None and grid.rows[r].quantities]
    ones = ones or (blank if len(blank) == 1 and len(telling) == len(body) - 1 else [])
    sources = sources_of(grid, index, targets, quotient)
    made = [*(() if quotient else products(grid, targets, kind, index, sources))]
    made += quotients(grid, index, targets, sources, ones) if quotient else []
    made += shares(grid, index, targets, sources) if kind == "percent" else []
    # A log's changes may be from the best line so far.
    made = [m for m in made if grid.drawn or kind != "percent" or "row before" not in m.name]
    if not (grid.drawn or grid.header[index].strip()):
        totals = (
            "of the sum",
            "of the total",
            *(f"of line {row.line}" for r, row in enumerate(grid.rows) if cells[r] is None),
        )
        made = [m for m in made if kind != "percent" or m.name.endswith(totals)]
    scored = [(n, m) for m in made if (n := m.score(targets, telling))]
    if any(s > 2 and not m.free for s, m in scored):
        scored = [(s, m) for s, m in scored if not m.free]

    def exactly(m: Made, held: Cells) -> int:
        return sum(r in m.forms and m.fits(r, q, 0.0) for r, q in held.items())

    told = {r: targets[r] for r in telling}
    score, best = max(
        scored, key=lambda x: (x[0] + 2 * exactly(x[1], told) - x[1].free, x[1].direct, x[1].name[-2:] == "1x"),
        default=(0, None),
    )  # fmt: skip
    if best is None:
        return
    one = best.name.endswith("1x")
    whole = best.name.endswith(("of the sum", "of the total"))
    if score < 3 and (best.free or not (best.direct or one or whole or kind == "ratio")):
        return
    # One row that agrees is enough beside one that does not, where nothing else can be meant.
    only = best.direct and not best.free and (not quotient or any(len(grid.columns(k)) == 2 for k in TYPED))
    if score < 2 and not (len(telling) == 2 and (only or (ones and one))):
        return
    # A pair that suits another column better is its own.
    good = exactly(best, told)
    for c in grid.columns("ratio", "percent") if quotient and best.direct else ():
        if c != index and exactly(best, {r: q for r, q in enumerate(grid.column(c)) if q}) > good:
            return
    # Where the rows agree to their last digit, so must every other.
    slack = 0.01 if score >= 3 and good >= score else ODD / 2 if good >= score > 1 else ODD
    slack = slack if quotient else best.slack if best.free else max(slack, 0.04 if score > 2 or slack < ODD else 0.1)
    rivals = [m for s, m in scored if (score < 2 or m.direct or s > 1) and m is not best and m.direct == best.direct]
    odd = [r for r in telling if r in best.forms and not best.fits(r, targets[r], slack)]
    ask = best.free or (not quotient and len(odd) > 1)  # of one error, one row
    for r in odd:
        # Another baseline of the same table may be meant in this row.
        other = any(r in m.forms and m.fits(r, targets[r], 0.0) for m in rivals)
        if not other and not best.excused(r, targets[r]):
            yield _broken(best, targets[r], r, ask)
    for r, row in enumerate(grid.rows) if quotient else ():
        if (s := cells[r]) is None or not row.summary or not s.exact or r not in best.forms or best.fits(r, s, FIT):
            continue
        if s.value.meets(sum(t.value.mid for t in targets.values()) / len(targets), FIT):
            x = f"{best.text[r]} of this row is {best.forms[r][0].mid:.3g}"
            yield finding(
                QUESTION, "mean of ratios", f"{s.text} is the mean of the rows' ratios; {x}: which is meant?", s
            )


def _broken(best: Made, q: Quantity, r: int, ask: bool) -> Finding:
    x = best.forms[r][0].mid
    if best.quotient:
        return finding(INCONSISTENT, "ratio", wrong(best.text[r], x, q, best.name), q, lines=best.lines[r])
    should = f"{100 * x:.3g} %" if q.kind == "percent" else si(x, UNIT_OF.get(q.kind, ""))
    like = f"the other rows' {best.name}" if best.free else best.text.get(r) or best.name
    message = f"{like} is {should}, not {q.text}{': is it of the same work?' * ask}"
    return finding(QUESTION if ask else INCONSISTENT, best.rule, message, q, lines=best.lines.get(r, ()))


def wrong(pair: str, x: float, q: Quantity, name: str = "") -> str:
    """Says that `q` is not the quotient `x` of a pair."""
    more = f"{100 * (x - 1):.3g} % more, " * (x > 1) + f"{100 * (1 - min(x, 1 / x)):.3g} % less"
    should = f"{x:.3g}x" if q.kind != "percent" else f"{100 * x:.3g} % ({more})"
    return f"{pair} is {should}, not {q.text}" + (f" ({name})" if name else "")
