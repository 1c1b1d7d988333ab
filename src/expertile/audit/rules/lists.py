"""Lists and columns of figures, and what is said of them: a mean, a total, a difference, so many in all."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding
from expertile.audit.quantity import clean
from expertile.audit.records import Named, Series, Sheet, digits, in_line, series, sheets
from expertile.audit.report import Report

_EXCLUSIVE = re.compile(r"(?i)exclusive|% of (?:all|the total|total)|share of the (?:summed|total)|of the summed")
_OVERLAP = re.compile(
    r"(?i)overlap|concurren|(?<!ex)(?<!non-)inclusive|cumulat|nested|children|of which|parallel|streams|"
    r"not add|several|"
    r"more than one|multiple|independent|each out of"
)
_NO_SHARE = re.compile(r"(?i)of which|overlap|incl|^\W*(?:total|all\b(?! others?)|sum)")
_SHARE = re.compile(
    r"(?i)\bshare\b(?! of (?:the )?(?:\w+ )?(?:peak|roof|limit|bound))|^time ?\(%\)$|breakdown|"
    r"(?:%|\bpct|percent(?:age)?|fraction) of (?:the )?(?:total|all|time|runtime|step|calls|samples|requests|summed)\b"
)
_CHANGE = re.compile(r"(?i)^(?!.*speed).*(?:\b(?:delta|diff|chang|vs\b|gain\b|saving|reduc|drop\b)|Δ|improve)")
_PHASES = re.compile(r"(?i)\bbreak-?down|\bphases|\bstages")
_LIST = re.compile(r"\[((?:\d+, ?){3,}\d+)\]")
_WHOLE = {"layer", "step", "iteration", "pass", "run", "pipeline", "forward", "e2e", "whole", "full", "time", "latency"}


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
            yield from _shares(report, s)
    yield from _of_one_sum(report)
    for sheet in sheets(report):
        if len(sheet.rows) > 2 and len(sheet.header) < 24:
            yield from _columns(sheet)


def _of_one_sum(report: Report) -> Iterator[Finding]:
    """Lists of as many counts each, of which all but one come to the same."""
    found = [(i, [int(x) for x in m[1].split(",")]) for i, t in enumerate(report.lines, 1) for m in _LIST.finditer(t)]
    for some in ([x for x in found if len(x[1]) == n] for n in {len(counts) for _, counts in found}):
        sums = [sum(counts) for _, counts in some]
        usual = max(sums, key=sums.count)
        odd = [(line, total) for (line, _), total in zip(some, sums, strict=True) if total != usual]
        if len(odd) == 1 and len(sums) > 3 and 0 < abs(odd[0][1] - usual) < usual / 2:
            message = f"this list comes to {odd[0][1]:,}, the {len(sums) - 1} others to {usual:,}: is it of the same?"
            yield Finding(QUESTION, "total", odd[0][0], f"{odd[0][1]:,}", message, tuple(line for line, _ in some))


def _phases(s: Series, below: list[Named]) -> Iterator[Finding]:
    """Times below the word breakdown, and the one of the whole that stands behind them in their block: it asks."""
    whole = [f for f in below if f.kind == "time" and {*f.words} <= _WHOLE and f.line - s.figures[-1].line < 30]
    if len(s.figures) > 2 and len(whole) == 1 and s.figures[0].kind == "time":
        q, values = whole[0], s.values
        made = [sum(values), *(sum(values) - v for v in values)]  # one may be left out
        if not any(abs(q.value - m) <= q.off + sum(f.off for f in s.figures) + 0.03 * m for m in made):
            text = f"the sum of {len(values)} is {made[0] / (q.value or 1.0) * digits(q):.4g}"
            yield finding(QUESTION, "total", f"{text}, not {q.text}: which of them does it count?", q, lines=s.lines)


def _shares(report: Report, s: Series) -> Iterator[Finding]:
    """Shares of one whole that are more than it."""
    first, last = s.figures[0].line, s.figures[-1].line
    lead = " ".join(report.lines[max(0, first - 7) : first - 1])
    percent = all(f.kind == "percent" for f in s.figures)
    values = [v * 100 for v in s.values] if percent else s.values
    said = _SHARE.search(clean(s.name)) or (s.table < 0 and re.search(r"in % of", lead))
    told = percent or re.search("%|pct|percent", s.name + lead)
    if len(values) < 3 or not (said and told) or max(values) > 100 or min(values) < 0:
        return
    around = "\n".join((*report.lines[max(0, first - 10) : first - 1], *report.lines[last : last + 8]))
    lines = [report.lines[f.line - 1] for f in s.figures]
    nested = s.table < 0 and len({len(line) - len(line.lstrip()) for line in lines}) > 1
    if _OVERLAP.search(around + s.name) or nested or any(map(_NO_SHARE.search, s.labels)):
        return
    total, open_ = sum(values), sum(f.off for f in s.figures) * (100 if percent else 1)
    if total > 100 + open_ + 0.5 and total < 200:
        message = f"the {len(values)} shares make {total:.4g} %"
        sure = _EXCLUSIVE.search(f"{s.name} {lead}")
        yield finding(INCONSISTENT if sure else QUESTION, "total", message, s.figures[0], lines=s.lines)


def _columns(sheet: Sheet) -> Iterator[Finding]:
    """Columns that are the difference of two others."""
    numeric = [c for c in range(len(sheet.header)) if len(sheet.column(c)) >= 3]
    for c in numeric:
        texts = [f.text for f in sheet.column(c) if f.value]
        signed = all(t[0] in "+-−" for t in texts) and any(t[0] == "+" for t in texts)
        if _CHANGE.search(sheet.header[c]) or signed:
            yield from _difference(sheet, numeric, c)


def _difference(sheet: Sheet, numeric: list[int], c: int) -> Iterator[Finding]:
    """The difference of the two columns that most rows say it is of."""
    rows, ranked = sheet.rows, []
    for a, b in itertools.permutations([x for x in numeric if x != c], 2):
        fits, made = dict[int, bool](), dict[int, float]()
        for r, row in enumerate(rows):
            x, y, t = row.get(a), row.get(b), row.get(c)
            if x and y and t and x.kind == y.kind and t.kind in (x.kind, "number", "percent"):
                scale = 0.01 if t.kind == "percent" and x.kind == "number" else 1.0
                made[r] = scale * (y.value - x.value)
                fits[r] = abs(t.value - made[r]) <= 1.01 * (t.off + scale * (x.off + y.off))
        ranked.append((len({made[r] for r, fit in fits.items() if fit and made[r]}), fits, made, a, b))
    good, fits, made, a, b = max(ranked, key=lambda of: of[0], default=(0, {}, {}, 0, 0))
    odd = [r for r, fit in fits.items() if not fit]
    for r in odd if len(odd) == 1 and good > 1 and len(fits) > 2 else ():
        x, y, t = rows[r][a], rows[r][b], rows[r][c]
        turned = abs(t.value + made[r]) <= abs(made[r]) * 0.03 + t.off  # less may be better in this row
        if made[r] and abs(t.value - made[r]) >= 0.02 * abs(made[r]):
            shown = made[r] * (100.0 if t.kind == "percent" else 1.0)
            message = f"{sheet.header[b]} {y.text} is {shown:+.3g} from {sheet.header[a]} {x.text}, not {t.text}"
            sure = good > 2 and not turned
            yield finding(INCONSISTENT if sure else QUESTION, "ratio", message, t, lines=(x.line, y.line))
