"""Lists and columns of figures, and what is said of them: a mean, a total, a difference, so many in all."""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding
from expertile.audit.quantity import clean
from expertile.audit.records import Named, Series, Sheet, digits, in_line, series, sheets, words
from expertile.audit.report import Report

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
_HIDDEN = re.compile(
    r"(?i)\.\.\.|…|⋮|selected|subset|excerpt|top[- ]\d+ (?:rows|kernels|entries|bins|only)|first \d+|omit|"
    r"cut\b|others? not shown"
)
_DROPPED = re.compile(
    r"(?i)(?<!none )(?<!no )(?<!without )\b(?:dropped|discarded|outliers?|failed|rejected|excluding|except)\b"
)
_EXCLUSIVE = re.compile(r"(?i)exclusive|% of (?:all|the total|total)|share of the (?:summed|total)|of the summed")
_OVERLAP = re.compile(
    r"(?i)overlap|concurren|(?<!ex)(?<!non-)inclusive|cumulat|nested|children|of which|parallel|streams|"
    r"not add|several|"
    r"more than one|multiple|independent|each out of"
)
_SHARE = re.compile(
    r"(?i)\bshare\b(?! of (?:the )?(?:\w+ )?(?:peak|roof|limit|bound))|^time ?\(%\)$|breakdown|"
    r"(?:%|\bpct|percent(?:age)?|fraction) of (?:the )?(?:total|all|time|runtime|step|calls|samples|requests|summed)\b"
)
_EXPECTED = re.compile(r"(?i)\b(?:expected|estimated|predicted) (?:peak|total|memory|footprint|time)")
_CHANGE = re.compile(
    r"(?i)^(?!.*speed).*(?:\bdelta|\bdiff|Δ|δ|\bchang|\bvs\b|\bgain\b|\bsaving|\breduc|improve|\bdrop\b)"
)
_LOWER = re.compile(
    r"(?i)latenc|time|ttft|itl|tpot|duration|\bms\b|\bs\b|\bus\b|memory|loss|ppl|error|cost|power|energy"
)
_BETTER = re.compile(r"(?i)improve|better|gain|speed")
_RANKED = re.compile(r"(?i)\b(?:p\d\d|\d\dth|min|max|median|mean|avg|average|std|stddev|total|best|worst)\b|±|\d\d ?%")
_PHASES = re.compile(r"(?i)\bbreak-?down|\bphases|\bstages")
_WHOLE = {"layer", "step", "iteration", "pass", "run", "pipeline", "forward", "e2e", "whole", "full", "time", "latency"}
_STAT_COLUMN = re.compile(
    r"(?i)^\W*(?:(mean|avg\.?|average)|(median)|(max|maximum)|(min|minimum)|(total|sum))\b(?!.*\bof\b)"
)


def lists(report: Report) -> Iterator[Finding]:
    """Runs listed line by line or in one line, and the statistics below them."""
    every = series(report)
    for index, block in enumerate(report.blocks):
        held = [s for s in every if s.block == index]
        if not block.table:
            for s in held:
                last = s.figures[-1].line
                near = (line for line in block.lines if last < line.number < last + 30)
                below = [f for line in near if len(found := in_line(line)) == 1 for f in found]
                if _PHASES.search(s.name):
                    yield from _phases(s, below)
        for s in held:
            yield from _counted(report, s)
            yield from _expected(s)
            yield from _shares(report, s)
    for sheet in sheets(report):
        if len(sheet.rows) > 2 and len(sheet.header) < 24:
            yield from _columns(sheet)


def _found(verdict: str, rule: str, message: str, f: Named, lines: list[int]) -> Finding:
    return Finding(verdict, rule, f.line, f.text, message, tuple(lines))


def _counted(report: Report, s: Series) -> Iterator[Finding]:
    """Counts by bin or class, and how many there are in all."""
    name = words(re.split(r"\s{2,}", s.name.strip())[-1])
    whole = all(f.kind in ("number", "items", "tokens") and "." not in f.text and f.value >= 0 for f in s.figures)
    block, first = report.blocks[s.block], s.figures[0].line
    lead = "\n".join(report.lines[max(0, first - 6) : first - 1])
    if not (whole and name and len(s.figures) > 3) or _HIDDEN.search(lead + block.text) or _DROPPED.search(lead):
        return
    noun, spread = name[-1], len(name) > 2 and name[1] == "per"
    noun = name[0] if spread else noun
    if not (noun.endswith("s") and len(noun) > 3) or not (
        spread or re.search(r"(?i)\bhist|bin|bucket|distribut|by \w+", f"{lead} {s.name} {block.text[:200]}")
    ):
        return
    said = rf"(?<![\d.,])(\d[\d,]*) {noun}\b|\b{noun}\b[^\d:\n]{{0,24}}: *(\d[\d,]*)"
    stated = {float((m[1] or m[2]).replace(",", "")) for m in re.finditer(said, lead.lower())}
    if len(stated) != 1:
        return
    (n,), total = stated, sum(s.values)
    times = {float(x) for x in re.findall(r"(?i)top[- _]?k? ?[=:]? ?(\d+)", lead)}
    if not any(n * k == total for k in (1.0, *times)) and 0.5 < total / n < max((1.0, *times)) * 2:
        message = f"the {len(s.figures)} counts make {total:,.0f}; {n * max((1.0, *times)):,.0f} {noun} are stated"
        yield _found(QUESTION, "total", message, s.figures[0], [f.line for f in s.figures])


def _phases(s: Series, below: list[Named]) -> Iterator[Finding]:
    """Times below the word breakdown, and the one of the whole that stands behind them in their block: it asks."""
    whole = [f for f in below if f.kind == "time" and {*f.words} <= _WHOLE and f.line - s.figures[-1].line < 30]
    if len(s.figures) > 2 and len(whole) == 1 and s.figures[0].kind == "time":
        q, values = whole[0], s.values
        made = [sum(values), *(sum(values) - v for v in values)]  # one may be left out
        if not any(abs(q.value - m) <= q.off + sum(f.off for f in s.figures) + 0.03 * m for m in made):
            text = f"the sum of {len(values)} is {made[0] / (q.value or 1.0) * digits(q):.4g}"
            yield _found(
                QUESTION, "total", f"{text}, not {q.text}: which of them does it count?", q, [f.line for f in s.figures]
            )


def _expected(s: Series) -> Iterator[Finding]:
    """ "Expected peak" below the parts that it is made of: it asks."""
    *parts, q = s.figures
    made, off = sum(f.value for f in parts), sum(f.off for f in s.figures)
    said = len(parts) > 2 and _EXPECTED.search(q.name) and q.kind in ("bytes", "time")
    far = abs(q.value - made) > off + 0.02 * made and 0.5 < q.value / (made or 1.0) < 2
    if said and far and q.value > max(f.value for f in parts):
        made_of = f"the {len(parts)} figures above make {made / q.value * digits(q):.4g}"
        yield _found(QUESTION, "total", f"{made_of}, not {q.text}: what does it count?", q, [f.line for f in s.figures])


def _shares(report: Report, s: Series) -> Iterator[Finding]:
    """Shares of one whole that are more than it."""
    first = s.figures[0].line
    lead = " ".join(report.lines[max(0, first - 7) : first - 1])
    percent = all(f.kind == "percent" for f in s.figures)
    values = [v * 100 for v in s.values] if percent else s.values
    said = _SHARE.search(clean(s.name)) or (s.table < 0 and re.search(r"in % of", lead))
    if (
        len(values) < 3
        or not said
        or not (percent or re.search("%|pct|percent", s.name + lead))
        or max(values) > 100
        or min(values) < 0
    ):
        return
    last = s.figures[-1].line
    around = "\n".join((*report.lines[max(0, first - 10) : first - 1], *report.lines[last : last + 8]))
    other = _OVERLAP.search(around + s.name) or any(re.search(r"(?i)of which|overlap|incl", x) for x in s.labels)
    indented = {len(line) - len(line.lstrip()) for line in (report.lines[f.line - 1] for f in s.figures)}
    if (
        other
        or (s.table < 0 and len(indented) > 1)
        or any(re.match(r"(?i)\W*(?:total|all\b(?! others?)|sum)", x) for x in s.labels)
    ):
        return
    total, open_ = sum(values), sum(f.off for f in s.figures) * (100 if percent else 1)
    if total > 100 + open_ + 0.5 and total < 200:
        message = f"the {len(values)} shares make {total:.4g} %"
        sure = _EXCLUSIVE.search(f"{s.name} {lead}")
        yield _found(INCONSISTENT if sure else QUESTION, "total", message, s.figures[0], [f.line for f in s.figures])


def _columns(sheet: Sheet) -> Iterator[Finding]:
    """Columns that are the difference or the change of two others, or the mean or the sum of those before."""
    rows, labels, header = [*sheet.rows], [*sheet.labels], [*sheet.header]
    numeric = [c for c in range(len(header)) if sum(c in row for row in rows) >= 3]
    for c in numeric:
        column = [(r, row[c]) for r, row in enumerate(rows) if c in row]
        signed = all(f.text[0] in "+-−" or f.value == 0 for _, f in column) and any(f.text[0] == "+" for _, f in column)
        if _CHANGE.search(header[c]) or signed:
            yield from _difference(rows, labels, header, numeric, c)
        elif m := _STAT_COLUMN.match(header[c].replace("_", " ")):
            which = ("mean", "median", "max", "min", "sum")[next(i for i, g in enumerate(m.groups()) if g)]
            yield from _statistic(rows, header, numeric, c, which)


def _odd(fits: dict[int, bool]) -> list[int]:
    """The rows that do not fit, where nearly all others do."""
    odd = [r for r, fit in fits.items() if not fit]
    return odd if len(odd) == 1 and len(fits) - 1 >= 2 else []


def _difference(
    rows: list[dict[int, Named]], labels: list[str], header: list[str], numeric: list[int], c: int
) -> Iterator[Finding]:
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
                off = t.off + scale * (x.off + y.off) * (
                    1.0 if form == "difference" else max(1.0, abs(y.value / x.value))
                )
                made[r], fits[r] = value, abs(t.value - value) <= off * 1.01
            good = len({made[r] for r, fit in fits.items() if fit and made[r]})
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
        message = (
            f"{header[b]} {rows[r][b].text} is {made[r] * scale:+.3g} from {header[a]} {rows[r][a].text}, not {t.text}"
        )
        sure = good > 2 and (lower if turned else True)
        yield _found(INCONSISTENT if sure else QUESTION, "ratio", message, t, [rows[r][a].line, rows[r][b].line])


def _statistic(
    rows: list[dict[int, Named]], header: list[str], numeric: list[int], c: int, which: str
) -> Iterator[Finding]:
    """Of the columns that stand right before it, or right behind."""
    plain = [x for x in numeric if x == c or not _RANKED.search(header[x].replace("_", " "))]
    before = [*itertools.takewhile(lambda x: x in plain, range(c - 1, -1, -1))]
    behind = [*itertools.takewhile(lambda x: x in plain, range(c + 1, len(header)))]
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
                shown = made[r] / t.value * digits(t) if t.value else made[r]
                message = f"the {which} of the {k} columns beside is {shown:.4g}, not {t.text}"
                values = [rows[r][x].value for x in some]
                outside = which in ("mean", "median") and not min(values) <= t.value <= max(values)
                sure = INCONSISTENT if len(fits) > 3 or outside else QUESTION
                yield _found(sure, "total", message, t, [t.line])
            return
