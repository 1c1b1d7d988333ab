"""Lists and columns of figures, and what is said of them: a mean, a total, a difference, so many in all."""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator

from expertile.audit.blocks import Table
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding
from expertile.audit.interval import printed
from expertile.audit.named import Named, Series, series, table_rows, words
from expertile.audit.quantity import clean
from expertile.audit.report import Report
from expertile.audit.rules.statistics import statistic

_OF_LIST: dict[str, tuple[Callable[[list[float]], float], ...]] = {
    "mean": (statistics.fmean,),
    "median": (statistics.median,),
    "min": (min,),
    "max": (max,),
    "best": (min, max),
    "worst": (max, min),
    "fastest": (min,),
    "slowest": (max,),
    "sum": (sum,),
    "total": (sum,),
    "std": (statistics.stdev, statistics.pstdev),
}
_ALIASES = {"avg": "mean", "average": "mean", "minimum": "min", "maximum": "max", "stdev": "std", "stddev": "std"}
# Of which runs a mean may not be.
_SOME = re.compile(r"(?i)exclud|warm|drop|discard|trim|without|first|skip|outlier|steady|last \d|top \d|selected|subset")
_HIDDEN = re.compile(r"(?i)\.\.\.|…|⋮|selected|subset|excerpt|top[- ]\d+ (?:rows|kernels|entries|bins|only)|first \d+|omit|cut\b|others? not shown")
_EXCLUSIVE = re.compile(r"(?i)exclusive|% of (?:all|the total|total)|share of the (?:summed|total)|of the summed")
_OVERLAP = re.compile(
    r"(?i)overlap|concurren|(?<!ex)(?<!non-)inclusive|cumulat|nested|children|of which|parallel|streams|not add|several|"
    r"more than one|multiple|independent|each out of"
)
_SHARE = re.compile(r"(?i)\bshare\b|^time ?\(%\)$|% of|fraction|breakdown|percent(?:age)? of")
_CHANGE = re.compile(r"(?i)\bdelta|diff|Δ|δ|chang|\bvs\b|\bgain\b|\bloss\b|saving|reduc|improve|drop")
_LOWER = re.compile(r"(?i)latenc|time|ttft|itl|tpot|duration|\bms\b|\bs\b|\bus\b|memory|loss|ppl|error|cost|power|energy")
_BETTER = re.compile(r"(?i)improve|better|gain|speed")
_STAT_COLUMN = re.compile(r"(?i)^\W*(?:(mean|avg\.?|average)|(median)|(max|maximum)|(min|minimum)|(total|sum))\b(?!.*\bof\b)")


def lists(report: Report) -> Iterator[Finding]:
    """Runs listed line by line or in one line, and the statistics below them."""
    every = [*series(report)]
    for index, block in enumerate(report.blocks):
        held = [s for s in every if s.block == index]
        if not block.table:
            for i, s in enumerate(held):
                alike = len({re.sub(r"\d+", "0", x) for x in s.labels}) <= 1
                if alike and len(s.figures) > 2 and not _SOME.search(block.text):
                    yield from _summed_up(s, [f for later in held[i + 1 :] for f in later.figures])
        for s in held:
            yield from _counted(report, s)
            yield from _shares(report, s)
    for block in report.blocks:
        if block.table and len(block.table.rows) > 2 and len(block.table.header) < 24:
            yield from _columns(block.table)


def _found(verdict: str, rule: str, message: str, f: Named, lines: list[int]) -> Finding:
    return Finding(verdict, rule, f.line, f.text, message, tuple(lines))


def _summed_up(s: Series, below: list[Named]) -> Iterator[Finding]:
    values, off = s.values, max(f.off for f in s.figures)
    digits = s.figures[0]
    fits, odd = 0, list[tuple[Named, float, str]]()
    for f in itertools.takewhile(lambda f: f.line - s.figures[-1].line < 14, below):
        own = [_ALIASES.get(w, w) for w in f.words]
        named = [w for w in own if w in _OF_LIST]
        if len(named) != 1 or len(own) > 2 or f.kind not in (digits.kind, "number"):
            continue
        scale = 1.0 if f.kind == digits.kind or digits.kind == "number" else values[0] / printed(digits.text.split()[0]).mid
        made = [of(values) for of in _OF_LIST[named[0]]]
        slack = 0.0 if named[0] in ("min", "max", "median") else 0.003
        if any(abs(f.value * scale - m) <= f.off * scale + off + slack * abs(m) for m in made):
            fits += named[0] not in ("sum", "total")
        else:
            odd.append((f, made[0] / scale, named[0]))
    for f, m, name in odd if len(odd) == 1 else ():
        shown = m / f.value * printed(re.sub(r"[^\d.]+", " ", f.text).split()[0]).mid if f.value else m
        message = f"the {name} of the {len(values)} figures above is {shown:.4g}, not {f.text}"
        lines = [x.line for x in s.figures]
        yield _found(INCONSISTENT if fits else QUESTION, "total", message, f, lines)


def _counted(report: Report, s: Series) -> Iterator[Finding]:
    """Counts by bin or class, and how many there are in all."""
    name = [w for w in words(re.split(r"\s{2,}", s.name.strip())[-1])]
    whole = all(f.kind in ("number", "items", "tokens") and "." not in f.text and f.value >= 0 for f in s.figures)
    block, first = report.blocks[s.block], s.figures[0].line
    lead = "\n".join(report.lines[max(0, first - 6) : first - 1])
    if not (whole and name and len(s.figures) > 3) or _HIDDEN.search(lead + block.text):
        return
    noun, spread = name[-1], len(name) > 2 and name[1] == "per"
    noun = name[0] if spread else noun
    if not noun.endswith("s") or not (spread or re.search(r"(?i)\bhist|bin|bucket|distribut|by \w+", f"{lead} {s.name} {block.text[:200]}")):
        return
    said = [m for m in re.finditer(rf"(?<![\d.,])(\d[\d,]*) {noun}\b|\b{noun}\b[^\d:\n]{{0,24}}: *(\d[\d,]*)", lead.lower())]
    stated = {float((m[1] or m[2]).replace(",", "")) for m in said}
    if len(stated) != 1:
        return
    (n,), total = stated, sum(s.values)
    times = {float(x) for x in re.findall(r"(?i)top[- _]?k? ?[=:]? ?(\d+)", lead)}
    if not any(n * k == total for k in (1.0, *times)) and 0.5 < total / n < max((1.0, *times)) * 2:
        message = f"the {len(s.figures)} counts make {total:,.0f}; {n * max((1.0, *times)):,.0f} {noun} are stated"
        yield _found(QUESTION, "total", message, s.figures[0], [f.line for f in s.figures])


def _shares(report: Report, s: Series) -> Iterator[Finding]:
    """Shares of one whole that are more than it."""
    first = s.figures[0].line
    lead = " ".join(report.lines[max(0, first - 7) : first - 1])
    percent = all(f.kind == "percent" for f in s.figures)
    values = [v * 100 for v in s.values] if percent else s.values
    said = _SHARE.search(clean(s.name)) or (s.table < 0 and re.search(r"in % of", lead))
    if len(values) < 3 or not said or not (percent or "%" in s.name + lead) or max(values) > 100 or min(values) < 0:
        return
    last = s.figures[-1].line
    around = "\n".join((*report.lines[max(0, first - 10) : first - 1], *report.lines[last : last + 8]))
    other = _OVERLAP.search(around + s.name) or any(re.search(r"(?i)of which|overlap|incl", x) for x in s.labels)
    indented = {len(line) - len(line.lstrip()) for line in (report.lines[f.line - 1] for f in s.figures)}
    if other or (s.table < 0 and len(indented) > 1) or any(re.match(r"(?i)\W*(?:total|all\b(?! others?)|sum)", x) for x in s.labels):
        return
    total, open_ = sum(values), sum(f.off for f in s.figures) * (100 if percent else 1)
    if total > 100 + open_ + 0.5 and total < 200:
        message = f"the {len(values)} shares make {total:.4g} %"
        sure = _EXCLUSIVE.search(f"{s.name} {lead}")
        yield _found(INCONSISTENT if sure else QUESTION, "total", message, s.figures[0], [f.line for f in s.figures])


def _columns(table: Table) -> Iterator[Finding]:
    """Columns that are the difference or the change of two others, or the mean or the sum of those before."""
    rows = [{f.column: f for f in figures} for figures, _ in table_rows(table)]
    labels = [label for _, label in table_rows(table)]
    header = [clean(h) for h in table.header]
    numeric = [c for c in range(len(header)) if sum(c in row for row in rows) >= max(3, 0.6 * len(rows))]
    for c in numeric:
        column = [(r, row[c]) for r, row in enumerate(rows) if c in row]
        signed = all(f.text[0] in "+-−" or f.value == 0 for _, f in column)
        if _CHANGE.search(header[c]) or signed:
            yield from _difference(rows, labels, header, numeric, c)
        elif m := _STAT_COLUMN.match(header[c].replace("_", " ")):
            which = ("mean", "median", "max", "min", "sum")[next(i for i, g in enumerate(m.groups()) if g)]
            yield from _statistic(rows, header, numeric, c, which)


def _odd(fits: dict[int, bool]) -> list[int]:
    """The rows that do not fit, where nearly all others do."""
    odd = [r for r, fit in fits.items() if not fit]
    return odd if len(odd) == 1 and len(fits) - 1 >= 2 else []


def _difference(rows: list[dict[int, Named]], labels: list[str], header: list[str], numeric: list[int], c: int) -> Iterator[Finding]:
    best: tuple[int, dict[int, bool], dict[int, float], tuple[int, int], str] | None = None
    for a, b in itertools.permutations([x for x in numeric if x != c], 2):
        for form in ("difference", "change"):
            fits, made = dict[int, bool](), dict[int, float]()
            for r, row in enumerate(rows):
                if not {a, b, c} <= row.keys() or row[a].kind != row[b].kind:
                    continue
                x, y, t = row[a], row[b], row[c]
                if form == "change" and (t.kind not in ("percent", "number") or not x.value):
                    continue
                if form == "difference" and t.kind not in (x.kind, "number", "percent"):
                    continue
                scale = 100.0 if t.kind == "number" else 1.0
                value = y.value - x.value if form == "difference" else scale * (y.value - x.value) / x.value
                scale = 1.0 if form == "difference" else scale / abs(x.value)
                if form == "difference" and t.kind == "percent" and x.kind == "number":
                    value, scale = value / 100, 0.01
                off = t.off + scale * (x.off + y.off) * (1.0 if form == "difference" else max(1.0, abs(y.value / x.value)))
                made[r], fits[r] = value, abs(t.value - value) <= off * 1.01
            good = sum(fits.values())
            if good > (best[0] if best else 1):
                best = good, fits, made, (a, b), form
    if best is None:
        return
    good, fits, made, (a, b), form = best
    for r in _odd(fits):
        t, scale = rows[r][c], 100.0 if rows[r][c].kind == "percent" else 1.0
        turned = abs(t.value + made[r]) <= abs(made[r]) * 0.03 + t.off
        like = [q for q, fit in fits.items() if fit and rows[q][c].value < 0 and _LOWER.search(labels[q])]
        lower = _LOWER.search(labels[r]) and like and not _BETTER.search(header[c])
        if rows[r][a].value == rows[r][b].value or (not turned and abs(t.value - made[r]) < 0.02 * abs(made[r])):
            continue
        message = f"{header[b]} {rows[r][b].text} is {made[r] * scale:+.3g} from {header[a]} {rows[r][a].text}, not {t.text}"
        sure = good > 2 and (lower if turned else True)
        yield _found(INCONSISTENT if sure else QUESTION, "ratio", message, t, [rows[r][a].line, rows[r][b].line])


def _statistic(rows: list[dict[int, Named]], header: list[str], numeric: list[int], c: int, which: str) -> Iterator[Finding]:
    """Of the columns that stand right before it, or right behind."""
    before = [*itertools.takewhile(lambda x: x in numeric, range(c - 1, -1, -1))]
    behind = [*itertools.takewhile(lambda x: x in numeric, range(c + 1, len(header)))]
    for side in (before, behind):
        for k in range(len(side), 1, -1):
            some, fits, made = side[:k], dict[int, bool](), dict[int, float]()
            for r, row in enumerate(rows):
                if c in row and all(x in row for x in some) and len({row[x].kind for x in some} | {row[c].kind}) == 1:
                    values = [row[x].value for x in some]
                    made[r] = _OF_LIST[which][0](values)
                    off = sum(row[x].off for x in some) / (1 if which == "sum" else k)
                    fits[r] = abs(row[c].value - made[r]) <= (row[c].off + off) * 1.01
            if sum(fits.values()) < max(2, len(fits) - 1) or len(fits) < 3 or len({*made.values()}) < 2:
                continue
            for r in _odd(fits):
                t = rows[r][c]
                if math.isclose(t.value, made[r], rel_tol=0.003):
                    continue
                shown = made[r] / t.value * printed(re.sub(r"[^\d.]", "", t.text)).mid if t.value else made[r]
                message = f"the {which} of the {k} columns beside is {shown:.4g}, not {t.text}"
                yield _found(INCONSISTENT if len(fits) > 3 else QUESTION, "total", message, t, [t.line])
            return
