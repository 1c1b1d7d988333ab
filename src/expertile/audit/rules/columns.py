"""Columns whose rows share one constant that the report does not name: what fits into a capacity, what is left of so
many cards, times of day. The row with another one is asked about."""

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from statistics import median_high

from expertile.audit.finding import QUESTION, Finding
from expertile.audit.quantity import clean
from expertile.audit.records import Named, Sheet, records, sheets
from expertile.audit.report import Report
from expertile.audit.units import RATES, TIMES

_FITS = re.compile(
    r"(?i)\bfits?\b|sequences|\bseqs\b|\busers\b|slots|sessions|instances|replicas|how many|\bmax (?:batch|n)\b"
)
_LEFT = re.compile(r"(?i)\bleft\b|free|remain|spare|headroom|available|\brest\b")
_MEAN = re.compile(r"(?i)\b(?:mean|average|avg)\b.*\b(?:over|of|across) (?:the |all )?(\d{1,2}) ?[a-z]+\W*$")
_SPAN = re.compile(r"(?:(\d+)[-d] ?)?(\d+):(\d\d):(\d\d)(?:\.\d+)?")


def columns(report: Report) -> Iterator[Finding]:
    for s in (s for s in sheets(report) if 2 < len(s.rows) < 80 and len(s.header) < 24):
        yield from _fitting(s)
        yield from _left(s)
        yield from _unequal(s)
    for block in (b for b in report.blocks if b.table):
        yield from _spans(block.table.header, block.table.rows)  # type: ignore[union-attr]


def means(report: Report) -> Iterator[Finding]:
    """ "Mean over the 7 tasks: 0.6908", of one of several tables of seven rows, where another such line is right."""
    said = [(f, int(m[1])) for r in records(report) for f in r.figures if (m := _MEAN.search(f.name))]
    each: list[tuple[Named, float, bool]] = []
    for f, n in said if len(said) > 1 else ():
        of = [s.column(c) for s in sheets(report) if len(s.rows) == n > 2 for c in s.numeric]
        of = [held for held in of if min(x.value for x in held) < f.value < max(x.value for x in held)]
        made = [sum(x.value for x in held) / n for held in of if all(0.3 < x.value / f.value < 3 for x in held)]
        if made:
            near = min(made, key=lambda x: abs(x - f.value))
            each.append((f, near, f.meets(near, 0.002)))
    odd = [(f, near) for f, near, fits in each if not fits]
    if len(odd) == 1 and len(each) > 1:
        f, near = odd[0]
        yield Finding(
            QUESTION,
            "total",
            f.line,
            f.text,
            f"no column's mean is {f.text}, the nearest {near:.4g}: of which?",
            (f.line,),
        )


def _says(message: str, f: Named, *beside: Named, rule: str = "proportion") -> Finding:
    lines = tuple(x.line for x in (f, *beside))
    return Finding(QUESTION, rule, f.line, f.text, f"{message}: is it of the same?", lines)


def _sized(s: Sheet, c: int) -> bool:
    """Whether a column holds bytes, of things or of each."""
    return all(row[c].kind[:2] in ("by", "B/") for row in s.rows) or bool(re.search(r"\b[KMGT]i?B\b", s.header[c]))


def _fitting(s: Sheet) -> Iterator[Finding]:
    """Whole numbers of things that fit into one capacity, and the size of each: all rows but one have a capacity."""
    for c in (c for c in s.numeric if _FITS.search(s.header[c].replace("_", " "))):
        for size in (x for x in s.numeric if x != c and _sized(s, x)):
            rows = [(row[c], row[size]) for row in s.rows if row[c].whole and row[c].value >= 1 and row[size].value]
            if len(rows) < 4 or len(rows) < len(s.rows):
                continue
            spans = [(n.value * b.value * 0.995, (n.value + 1) * b.value * 1.005) for n, b in rows]
            odd = []
            for i, span in enumerate(spans):
                others = [x for j, x in enumerate(spans) if j != i]
                low, high = max(x[0] for x in others), min(x[1] for x in others)
                odd += [(i, low, high)] if low < high and not (span[0] < high and low < span[1]) else []
            if len(odd) == 1:
                (n, b), (_, low, high) = rows[odd[0][0]], odd[0]
                most = f"{math.floor(low / b.value):.0f} to {math.floor(high / b.value):.0f}"
                message = f"in the capacity of all other rows {most} of {b.text} fit, not {n.text}"
                yield _says(message, n, b, rule="memory")


def _left(s: Sheet) -> Iterator[Finding]:
    """What is left is a count times one size, less what is used."""
    counts = [c for c in s.numeric if all(row[c].whole and row[c].kind in ("number", "items") for row in s.rows)]
    sizes = [c for c in s.numeric if all(row[c].kind == "bytes" for row in s.rows)]
    left = [c for c in sizes if _LEFT.search(s.header[c].replace("_", " "))]
    for c, used, n in ((c, u, n) for c in left for u in sizes for n in counts if u != c):
        held = [(row[n], row[used], row[c]) for row in s.rows if row[n].value]
        each = [((a.value + b.value) / f.value, (a.off + b.off) / f.value) for f, a, b in held]
        middle = median_high(x for x, _ in each)
        odd = [i for i, (x, off) in enumerate(each) if abs(x - middle) > off + 0.01 * middle]
        if len(odd) == 1 and len(held) > 3:
            f, a, b = held[odd[0]]
            made = f"{a.text} and {b.text} are {each[odd[0]][0] / middle:.3g} times as much for each"
            yield _says(f"{made} of {f.text} as in all other rows", f, a, b, rule="memory")
            return


def _unequal(s: Sheet) -> Iterator[Finding]:
    """A size that two runs compared have in columns of their own ("old k", "new k"): equal in all rows but one."""
    heads = [(h.split(" ", 1) * 2)[:2] for h in s.header]
    sizes = [c for c in s.numeric if all(row[c].whole for row in s.rows) and s.rows[0][c].kind == "number"]
    for a, b in itertools.combinations(sizes, 2):
        timed = {heads[c][0] for c in s.numeric if s.rows[0][c].kind in (*TIMES, *RATES)}
        odd = [row for row in s.rows if row[a].value != row[b].value]
        pair = heads[a][1] == heads[b][1] and heads[a][0] != heads[b][0] and {heads[a][0], heads[b][0]} <= timed
        if pair and len(odd) == 1 and len(s.rows) > 3:
            x, y = odd[0][a], odd[0][b]
            message = f"{s.header[a]} is {x.text}, {s.header[b]} {y.text}; in all other rows they are equal"
            yield _says(message, y, x, rule="equal work")


def _stamp(cell: str) -> float | None:
    with suppress(ValueError):
        if re.match(r"\d{4}\D", cell):
            return datetime.fromisoformat(cell.strip().replace("/", "-")).timestamp()
    return None


def _spans(header: tuple[str, ...], rows: tuple[tuple[int, tuple[str, ...]], ...]) -> Iterator[Finding]:
    """Two times of day of a row and what lies between them: "3-00:50:36", as Slurm prints it."""
    cells = [(n, [clean(c) for c in raw]) for n, raw in rows]
    for c, name in enumerate(header):
        if not re.search(r"(?i)elapsed|duration|time|took|length", name):
            continue
        held = []
        for number, row in cells:
            at = [x for i, cell in enumerate(row) if i != c and (x := _stamp(cell)) is not None]
            m = _SPAN.fullmatch(row[c].strip())
            if len(at) == 2 and m:
                said = 86400.0 * int(m[1] or 0) + 3600 * int(m[2]) + 60 * int(m[3]) + int(m[4])
                held.append((number, row[c].strip(), said, abs(at[1] - at[0])))
        odd = [h for h in held if abs(h[2] - h[3]) > 2 and abs(h[2] - h[3]) != 3600]  # summer time
        if len(odd) == 1 and len(held) > 1:
            number, text, _, made = odd[0]
            days = f"{made // 86400:.0f} days and {made % 86400 / 3600:.2f} hours"
            message = f"the two times lie {days} apart, not {text}: was it paused?"
            yield Finding(QUESTION, "time", number, text, message, (number,))
