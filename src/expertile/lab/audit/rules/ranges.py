"""What a text says about a whole column: ranges ("2-5x slower"), best and worst, and trends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.columns import Column, TypedTable
from expertile.lab.audit.context import Context
from expertile.lab.audit.dims import dims_in, shapes_in
from expertile.lab.audit.document import Statement
from expertile.lab.audit.finding import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import Quantity

_UNIVERSAL = re.compile(
    r"\ball\b|\bevery\b|\balways\b|consisten|across|throughout|\bany\b|each|everywhere|uniform", re.I
)
_WHY_SLOWER = re.compile(r"slower|faster|speed-?\s?up|ratio|overhead", re.I)
_STATISTIC = re.compile(
    r"\b(?P<what>min|max|best|worst|peak)(?:imum)?\b[^\d,;]{0,24}?(?:[=:]|of|at|ratio|is)?\s*$", re.I
)
_UP = re.compile(r"(?:increas|improv|grow|ris|better|scale|higher)\w*", re.I)
_DOWN = re.compile(r"(?:decreas|drop|shrink|worse|lower|fall|degrad|diminish)\w*", re.I)
_WITH_SIZE = re.compile(
    r"\b(?:with|as|for|at)\b.{0,30}\b(?:larger|bigger|longer|size|dim\w*|length|batch|hidden|seq\w*|tokens"
    r"|matri\w+)|\b(?:larger|bigger|longer)\b",
    re.I,
)


@dataclass(frozen=True)
class _Row:
    table: TypedTable
    row: int
    line: int
    quantity: Quantity
    dims: dict[str, int]


def ranges(context: Context) -> list[Finding]:
    """Ranges of ratios in headings and text, against the ratio columns of the tables they speak of."""
    found = []
    for claim in context.claims:
        if (
            claim.kind != "ratio"
            or claim.quantity.high is None
            or claim.place.kind not in ("heading", "list", "paragraph")
        ):
            continue
        if not _WHY_SLOWER.search(claim.place.text) and not dims_in(claim.place.text):
            continue
        rows = _rows_for(context, claim)
        if rows:
            finding = _filtered(context, claim, rows) or _headline(context, claim, rows)
            if finding is not None:
                found.append(finding)
    return found


def _rows_for(context: Context, claim: Claim) -> list[_Row]:
    """Ratio cells of the nearest section that holds a ratio column; of the operation the claim names, if it does."""
    operation = context.report.operation(claim.place)
    for section in context.report.doc.ancestors(claim.place.section):
        tables = [
            (t, typed)
            for t, typed in enumerate(context.report.tables)
            if section.index in {a.index for a in context.report.doc.ancestors(typed.table.section)}
            and typed.of_kind("ratio")
        ]
        if operation is not None and len(tables) > 1:
            same = [
                (t, typed) for t, typed in tables if _family(_operation_of(context, t, typed)) == _family(operation)
            ]
            tables = same or tables
        if section.index != claim.place.section:  # further off, only tables that set rival systems side by side
            tables = [
                (t, typed)
                for t, typed in tables
                if len(typed.of_kind("time", "flop_rate", "byte_rate", "number", "token_rate")) >= 2
            ]
        if tables:
            rows = [r for t, typed in tables for r in _ratio_rows(context, t, typed)]
            named = [r for r in rows if _mentions(claim.place.text, r.table.label(r.row))]
            return named or [r for r in rows if not (r.quantity.value == 1.0 and r.row == 0)]
    return []


def _operation_of(context: Context, t: int, typed: TypedTable) -> str | None:
    return context.report.operation(context.report.cell(t, 0, typed.of_kind("ratio")[0].index))


def _family(operation: str | None) -> str | None:
    return "gemm" if operation in ("gemm", "grouped_gemm", "moe") else operation


def _mentions(text: str, label: str) -> bool:
    """Whether a sentence names the row it speaks of ("Triton Grouped GEMM")."""
    words = re.sub(r"\W+", " ", label.lower()).strip()
    return (
        len(words) > 3
        and not words.replace(" ", "").isdigit()
        and f" {words} " in f" {re.sub(r'[^a-z0-9]+', ' ', text.lower())} "
    )


def _ratio_rows(context: Context, t: int, typed: TypedTable) -> list[_Row]:
    columns = typed.of_kind("ratio")
    if len(columns) != 1:
        return []
    found = []
    for row in typed.body():
        quantity = typed.at(row, columns[0])
        if quantity is not None:
            scope = context.report.scopes(context.report.cell(t, row, columns[0].index))
            dims = scope[0].dims if scope and scope[0].name == "row" else {}
            found.append(_Row(typed, row, typed.table.lines[row], quantity, dims))
    return found


def _filtered(context: Context, claim: Claim, rows: list[_Row]) -> Finding | None:
    """ "m=64: 0.03x-0.13x": the rows with m = 64 must lie inside."""
    wanted = dims_in(claim.place.text[: claim.quantity.start])
    if len(wanted) != 1:
        return None
    name, value = next(iter(wanted.items()))
    chosen = [r for r in rows if r.dims.get(name) == value]
    if not chosen:
        return None
    span = claim.quantity.span
    outside = [r for r in chosen if not r.quantity.interval.meets(span)]
    listed = ", ".join(f"{r.quantity.text} (line {r.line})" for r in chosen[:8])
    if not outside:
        return context.finding(claim, POSSIBLE, "range_of_rows", f"{name} = {value}: {listed}")
    out = ", ".join(f"{r.quantity.text} (line {r.line})" for r in outside[:5])
    return context.finding(
        claim, INCONSISTENT, "range_of_rows", f"printed {claim.quantity.text}, but {name} = {value} has {out}"
    )


def _headline(context: Context, claim: Claim, rows: list[_Row]) -> Finding | None:
    """ "2-5x slower": the column's ratios, turned into slowdowns (or speed-ups), must lie in the range."""
    slower = bool(re.search(r"slow|overhead", claim.place.text, re.I))
    span = claim.quantity.span
    turned = [(r, _turned(r.quantity.interval, slower)) for r in rows]
    inside = [r for r, v in turned if v.meets(span)]
    outside = [(r, v) for r, v in turned if not v.meets(span)]
    word = "slowdown" if slower else "speed-up"
    if not inside:
        return None  # it speaks of something else than this column
    low, high = min(v.mid for _, v in turned), max(v.mid for _, v in turned)
    extremes = _stated_extremes(context, claim, slower)
    seen = f"the {len(rows)} rows give a {word} of {low:.3g}x to {high:.3g}x"
    if extremes:
        seen += f", and line {extremes[0]} states {extremes[1]}"
    if not outside:
        return context.finding(claim, POSSIBLE, "range_of_column", seen)
    top = claim.quantity.high or claim.quantity.interval
    if claim.quantity.interval.hi < 0.97 * low or top.lo > 1.03 * high:
        return None  # it speaks of more than these rows
    ends = (claim.quantity.interval, claim.quantity.high or claim.quantity.interval)
    quoted = all(any(v.meets(e) for _, v in turned) for e in ends)
    share = len(outside) / len(rows)
    listed = ", ".join(f"{r.quantity.text}{_as(v, r)} on line {r.line}" for r, v in outside[:6])
    text = f"printed {claim.quantity.text} {'slower' if slower else ''}".strip() + f", but {seen}; outside: {listed}"
    if _UNIVERSAL.search(claim.place.text) or (share >= 0.2 and not quoted):
        limit = high if high > span.hi else low
        return context.finding(claim, INCONSISTENT, "range_of_column", text, claim.quantity.value, limit, "x")
    return context.finding(
        claim, POSSIBLE, "range_of_column", f"holds for {len(inside)} of {len(rows)} rows; leaves out {listed}"
    )


def _as(value: Interval, row: _Row) -> str:
    return "" if value.mid == row.quantity.interval.mid else f" = {value.mid:.3g}x slower"


def _turned(interval: Interval, slower: bool) -> Interval:
    if slower and interval.mid < 1 and interval.lo > 0:
        return Interval.of(1.0) / interval
    return interval


def _stated_extremes(context: Context, claim: Claim, slower: bool) -> tuple[int, str] | None:
    for c in context.claims:
        if (
            c.kind == "ratio"
            and c.place.table is None
            and re.search(r"\bmin\s*[=:]\s*$", c.place.text[: c.quantity.start], re.I)
        ):
            value = 1 / c.quantity.value if slower and 0 < c.quantity.value < 1 else c.quantity.value
            if value > claim.quantity.span.hi:
                return c.place.line, f"{c.quantity.text} = {value:.3g}x slower"
    return None


def extremes(context: Context) -> list[Finding]:
    """ "min=0.03x max=0.49x", "best speedup at 2048×2048 (1.25x)", "up to 2.6x": against the columns they sum up."""
    found = []
    for claim in context.claims:
        if (
            claim.kind not in ("ratio", "flop_rate", "byte_rate")
            or claim.place.table is not None
            or claim.quantity.high is not None
        ):
            continue
        if claim.is_limit:
            continue
        before = claim.place.text[: claim.quantity.start]
        match = _STATISTIC.search(before)
        what = match["what"].lower() if match else ""
        if claim.quantity.bound == "up to" or (not what and re.search(r"\bbest\b", claim.place.text, re.I)):
            what = "max"
        what = {"best": "max", "peak": "max", "worst": "min"}.get(what, what)
        if what:
            finding = _extreme(context, claim, what)
            if finding is not None:
                found.append(finding)
    return found


def _extreme(context: Context, claim: Claim, what: str) -> Finding | None:
    cells = [
        c
        for c in context.claims
        if c.column is not None
        and c.place.row is not None
        and c.place.table is not None
        and c.column.kind in (claim.kind, "number")
        and c.kind == claim.kind
        and not context.report.tables[c.place.table].summary(c.place.row)
    ]
    numbers = _number_cells(context, claim) if claim.kind in ("flop_rate", "byte_rate") else []
    shapes = {s.sizes for s in shapes_in(claim.place.text)}
    values = [(c.quantity.interval, c.quantity.text, c.place.line) for c in cells] + numbers
    hits = [(text, line) for interval, text, line in values if interval.meets(claim.quantity.interval)]
    if hits:
        row_shapes = [
            c
            for c in cells
            if shapes
            and shapes & {s.sizes for s in shapes_in(c.place.text)}
            and c.quantity.interval.meets(claim.quantity.interval)
        ]
        where = row_shapes[0].place.line if row_shapes else hits[0][1]
        return context.finding(claim, POSSIBLE, "extreme", f"line {where} prints {hits[0][0]}")
    if claim.kind != "ratio" or not cells or not re.search(r"\bmin\s*=|\bmax\s*=", claim.place.text):
        return None
    nearby = [c for c in cells if c.column is not None and c.column.kind == "ratio"]
    if not nearby:
        return None
    beyond = [
        c
        for c in nearby
        if (
            c.quantity.interval.lo > claim.quantity.interval.hi
            if what == "max"
            else c.quantity.interval.hi < claim.quantity.interval.lo
        )
    ]
    if beyond and len({c.column.header for c in nearby if c.column}) == 1:
        text = f"printed {what} {claim.quantity.text}, but line {beyond[0].place.line} has {beyond[0].quantity.text}"
        return context.finding(
            claim, INCONSISTENT, "extreme", text, claim.quantity.value, beyond[0].quantity.value, "x"
        )
    text = (
        f"{what} {claim.quantity.text} is of rows that are not all shown; those shown reach "
        f"{min(c.quantity.value for c in nearby):.3g}x to {max(c.quantity.value for c in nearby):.3g}x"
    )
    return context.finding(claim, POSSIBLE, "extreme", text)


def _number_cells(context: Context, claim: Claim) -> list[tuple[Interval, str, int]]:
    """Cells of columns without a unit that the claim names: their unit may be the claim's."""
    found = []
    for typed in context.report.tables:
        for column in typed.of_kind("number"):
            if column.system and any(re.search(rf"\b{re.escape(w)}\b", claim.words, re.I) for w in column.system):
                for row in typed.body():
                    q = typed.at(row, column)
                    if q is not None:
                        scale = 1e12 if claim.kind == "flop_rate" else 1e9
                        found.append((q.interval * scale, q.text, typed.table.lines[row]))
    return found


def trends(context: Context) -> list[Finding]:
    """ "Speedup increases with hidden dimension": held against the one ratio column of its section, row by row."""
    found = []
    for s in context.report.doc.statements:
        if (
            s.kind not in ("list", "paragraph")
            or not re.search(r"speed-?up|\bratio\b", s.text, re.I)
            or not _WITH_SIZE.search(s.text)
        ):
            continue
        rising, falling = bool(_UP.search(s.text)), bool(_DOWN.search(s.text))
        if rising == falling or s.line in context.by_line:
            continue
        finding = _trend(context, s, rising)
        if finding is not None:
            found.append(finding)
    return found


def _trend(context: Context, s: Statement, rising: bool) -> Finding | None:
    tables = [t for t in context.report.tables if t.table.section == s.section and len(t.of_kind("ratio")) == 1]
    if len(tables) != 1:
        return None
    typed = tables[0]
    ratio = typed.of_kind("ratio")[0]
    points = [(size, q) for r in typed.body() if (size := _size(typed, r)) and (q := typed.at(r, ratio))]
    if len(points) < 3 or len({p[0] for p in points}) != len(points):
        return None
    points.sort(key=lambda p: p[0])
    steps = [(a[1], b[1]) for a, b in pairwise(points)]
    against = [
        (a, b) for a, b in steps if (b.interval.hi < a.interval.lo) == rising and not a.interval.meets(b.interval)
    ]
    pairs = [
        (a[1], b[1]) for i, a in enumerate(points) for b in points[i + 1 :] if not a[1].interval.meets(b[1].interval)
    ]
    agree = sum((b.value > a.value) == rising for a, b in pairs)
    listed = ", ".join(q.text for _, q in points)
    if not against:
        return Finding(s.line, s.text.strip(), POSSIBLE, "trend", f"by size: {listed}", anchor=(s.line, 0))
    if pairs and agree <= len(pairs) - agree:
        text = f"by size: {listed}; {len(pairs) - agree} of {len(pairs)} pairs go the other way"
        return Finding(s.line, s.text.strip(), INCONSISTENT, "trend", text, anchor=(s.line, 0))
    text = (
        f"by size: {listed}; {agree} of {len(pairs)} pairs agree, but {against[0][0].text} is followed by "
        f"{against[0][1].text}"
    )
    return Finding(s.line, s.text.strip(), NOT_CHECKABLE, "trend", text, anchor=(s.line, 0))


def _size(typed: TypedTable, row: int) -> int:
    dims: list[Column] = typed.of_kind("dim")
    if len(dims) == 1:
        digits = re.sub(r"\D", "", typed.table.rows[row][dims[0].index])
        return int(digits) if digits else 0
    if dims:
        return 0
    shapes = shapes_in(typed.label(row))
    return shapes[0].elements * shapes[0].count if shapes else 0
