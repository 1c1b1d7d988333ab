"""Rows, lines and sentences called average, total or percentile, over the rows or figures beside them; and so many of
so much each, which are so much together."""

import itertools
import math
import re
import statistics
from collections.abc import Iterator

from expertile.audit.facts import NUMBERS
from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, ODD, Interval
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.hardware import end_before, on_sheet
from expertile.audit.units import RATES, TYPED, unit_of_name

_TOTAL = regex(
    r"(?i)\btotal\b|^\W*(?:whole|full|entire) \w+\W*$|\bsum\b|\b(?:al)?together\b|\bin all\b|"
    r"adds? up to|end[- ]to[- ]end"
)
_IN_ALL = regex(r"(?i)\W{0,2}(?:in total|total|altogether|in all)\W*(?:$|[.,;)])")
ON_AVERAGE = regex(r"(?i)\W{0,2}(?:on average|in the mean|average\b)")
MEAN = regex(r"(?i)\bav(?:era)?g|mean\b|\bmedian\b|\boverall\b|typical")
# Rows may be left out, or be parts of one another.
_HIDDEN = regex(r"(?i)^\W*(?:\.\.\.|…|⋮)|selected|subset|first \d+ rows|top[- ]\d+|\ball \d+|omit|overlap|: p9\d")
_RATIOS = regex(
    r"(?i)ratio|speed|gain|rel|norm|eff|per(?![a-z])|/|\brate|%|(?<![a-z])x(?![a-z])|mean|avg|intens|\bbits\b"
)
_PART_OF = regex(
    r"\s*(?:\||<tr\b[^>]*>\s*<td\b[^>]*>)\s*(?:&nbsp;|&emsp;|\u00a0|[└├↳]|[-–·] |of which\b)"
)  # of the row above
_ADDS = ("time", "bytes", "percent", "gpu*s", "money", "energy")
_EXPECTED = regex(r"(?i)\b(?:expected|estimated|predicted) (?:peak|total|memory|footprint|time)")
_NO_PART = regex(
    r"(?i)\b(?:per|avg|average|mean|median|p\d\d|std|min|max|peak|used|free|alloc\w*|reserved|ttft|tpot|itl|latency|limit|"
    r"capacity|budget|baseline|before|after|old|new|ours|iter\w*|request|step|epoch)\b"
)
_RANK = (
    r"\b(?:(min(?:imum)?|fastest)|p(\d[05]|9\d(?:\.\d+)?)|(?<![\d.−+-])([5-9]\d(?:\.\d+)?|\d[05])(?:th|%)|"
    r"(med(?:ian)?)|(max(?:imum)?|slowest))(?![a-z])"
)
_RANKED = regex(rf"{_RANK}|\b(mean|avg|average)\b")
_RANK_NEAR = regex(_RANK)
# An interval around its middle: "[1.2 ms 1.3 ms 1.4 ms]".
_AROUND = regex(r"\[\d[\d.,]* ?[^\W\d]\S*(?: \d[\d.,]* ?[^\W\d]\S*){2}\]")
_WORDS = NUMBERS | {"one": "1"}
_N = rf"(?<![\w.,-])(?P<n>\d{{1,3}}(?:,\d{{3}})+|\d+|{'|'.join(_WORDS)})"
# "32 concurrent users", "the 32-GPU job", "the eight of them"
_COUNTED = regex(
    rf"(?i){_N}(?:-(?P<one>[a-z]{{3,}})| (?:(?:[a-z][\w-]* ){{0,2}}?(?P<noun>(?!hours|minutes|days)[a-z]{{3,}}s)|"
    r"of them))\b(?! ?/)"
)
_EACH = regex(
    r"(?i)(?:/ ?|\b(?:per[ -]|(?:for )?(?:each|every) |(?:each|every one) of (?:the|our|these) |and |an? |one ))"
    r"(?:\d+ )?([a-z]{3,}|[AHBLV]\d{2,3})|\beach\b"
)
_MEAN_OF = regex(r"(?i)\b(?:mean|avg|average)\W*(?:time|latency)?\W*(?:of|is|was)?\W*$")
_TAKEN_OFF = regex(r"(?i)→|->|\bminus\b[^;]*\b(?:leav(?:es?|ing)|remain\w*|left)\b")
_TOGETHER = regex(
    r"(?i)\b(?:total|together|altogether|in all|overall|combined|aggregate|sum|so|thus|hence|i\.e|that is|or|which|"
    r"across|evenly|mean\w*|giv\w+|delivers?|reach\w*|elapsed)\b|=|→|^\W*\(|\(\W*\|"
)
_SERVED = ("user", "stream", "request", "sequence", "client", "session", "slot")
_KINDS = ("time", "tokens_per_s", "items_per_s", "bandwidth", "rate", "bytes", "tokens", "power", "energy", "money")


def totals(report: Report) -> Iterator[Finding]:
    """Each summary of a table, each sentence that lists figures and sums them up, and shares that exceed the whole."""
    for grid in (g for g in report.tables if not any(_HIDDEN.search(report.lines[r.line - 1]) for r in g.rows)):
        held, groups = list[Row](), list[list[Row]]()
        # "step | 18.4 ms | 100 %" below parts whose shares make it
        shares = [p.value.mid for row in grid.rows for p in row.of("percent")]
        all_of_it = 3 < len(shares) == len(grid.rows) and shares[-1] == 1 and abs(sum(shares) - 2) < 0.01
        for row in grid.rows:
            # "total" and "geomean" below the same rows
            of = groups[0] if not held and len(groups) == 1 and MEAN.search(row.label) else held
            summary = row.summary or (row is grid.rows[-1] and all_of_it)
            if summary and len(of) > 1 and unit_of_name(row.label) is None:
                yield from _summary(grid, row, of)
                groups += [held] if held else []
                held = []
            elif not (row.summary or _PART_OF.match(report.lines[row.line - 1])):
                held.append(row)
    for row in report.lines_of_text:
        yield from _listed(row)
    stages = [row for row in report.lines_of_text if report.blocks[row.block].kind != "prose"]
    for _, some in itertools.groupby(enumerate(stages), lambda at: (at[1].block, at[1].line - at[0])):
        parts = [[q for q in row.quantities if q.kind != "params"] for _, row in some]
        yield from _added([each[0] for each in parts if len(each) == 1])
    for rule, below in itertools.pairwise(stages):
        if below.block == rule.block and re.fullmatch(r"\s*[-=_─]{4,}\s*", rule.text) and len(below.quantities) == 1:
            yield from _under(below.quantities[0], [r for r in stages if r.block == rule.block and r.line < rule.line])
    small = [row for grid in report.grids for row in grid.rows if len(grid.rows) < 3]
    for row in (*(r for r in report.rows if r.kind == "record"), *small):
        yield from _added(row.quantities)


def _under(q: Quantity, above: list[Row]) -> Iterator[Finding]:
    """What stands under a drawn rule, as the sum of the lines of one figure right above it."""
    alike = itertools.takewhile(lambda r: [x.kind for x in r.quantities if x.exact] == [q.kind], above[::-1])
    parts = [r.quantities[0] for r in alike]
    if 3 <= len(parts) <= 12 and q.kind in ("time", "bytes", "money", "energy"):
        yield from _made_of(q, parts, True, False, whole=True)


def _added(figures: list[Quantity]) -> Iterator[Finding]:
    """The total of a record or of lines with one figure each: three or more others make it."""
    named = [(q, q.label.replace("_", " ")) for q in figures if q.kind in ("time", "bytes", "money", "energy")]
    totals = [q for q, label in named if _TOTAL.search(re.sub(r"\(.*?\)", "", label)) or _EXPECTED.search(label)]
    parts = [q for q, label in named if totals and q.kind == totals[0].kind and q is not totals[0]]
    parts = [q for q in parts if q.value.mid or not q.exact]
    other = any(_NO_PART.search(_EXPECTED.sub("", label)) for _, label in named) or not all(q.exact for q, _ in named)
    if len(totals) != 1 or not 3 <= len(parts) <= 12 or other:
        return
    yield from _made_of(totals[0], parts, True, False)


def _made_of(q: Quantity, parts: list[Quantity], total: bool, mean: bool, whole: bool = False) -> Iterator[Finding]:
    """A sum, of which one part may be left out but for a `whole`, or a mean that the parts do not make."""
    means = may_come_to([x.value for x in parts], total and not mean)
    means += [
        m for x in parts if total and not whole for m in may_come_to([y.value for y in parts if y is not x], True)
    ]
    slacks = [0.03 if total else 0.012, *(0.005 for _ in means)]
    far = not 0.1 < means[0].mid / q.value.mid < 10  # it is of something else
    if not far and not any(q.value.meets(m, slack) for m, slack in zip(means, slacks, strict=False)):
        made = f"the {'sum' if total else 'mean'} of {len(parts)} is {si(means[0].mid, UNIT_OF.get(q.kind, ''))}"
        yield finding(QUESTION, "total", f"{made}, not {q.text}: which of them does it count?", q, *parts)


def _listed(row: Row) -> Iterator[Finding]:
    """ "1.2x, 1.4x and 1.3x, a mean of 1.3x", "14 ms, 212 ms and 9 ms, in total 235 ms"; the parts may stand in the
    sentences before."""
    for q in (q for q in row.of(*TYPED, "ratio", "money", "energy", "percent") if q.exact):
        words = q.label[-30:]
        if re.match(r", ?(?:and )?\d| ?\+", row.text[q.end :]):
            continue  # one of a list
        # "Average of the three runs (412, 408 and 419 TFLOPS) is 441 TFLOPS."
        if re.search(r"\) ?(?:is|was|=|:|gives|comes to|we are|it is)\W*$", row.text[: q.start]):
            words = re.sub(r"\([^()]*\)", "", row.text[: q.start])[-40:]
        total, mean = _TOTAL.search(words) or _IN_ALL.match(row.text, q.end), MEAN.search(words)
        mean = mean or ON_AVERAGE.match(row.text, q.end)
        if not (total or mean) or (q.kind in ("percent", "ratio") and total) or _TAKEN_OFF.search(row.text):
            continue
        lines = [r for r in row.report.lines_of_text if r.block == row.block and row.line - 12 < r.line <= row.line]
        lines = lines if row.report.blocks[row.block].kind == "prose" else []
        own = ([x for x in row.of(q.kind) if x.end <= q.start], [x for x in row.of(q.kind) if x.start > q.end])
        earlier = [x for r in lines if r.text != row.text for x in r.of(q.kind)]
        if own[1] and ";" in row.text[q.end : own[1][0].start]:
            own = own[0], []  # another thought
        parts = next((some for some in (*own, earlier) if len(some) > 2), [])
        ranked = any(_RANK_NEAR.search(x.label.lower()[-12:]) for x in parts)
        if 3 <= len(parts) <= 12 and all(x.exact and x.value.mid for x in parts) and not ranked:
            yield from _made_of(q, parts, bool(total), bool(mean))


def may_come_to(values: list[Interval], total: bool, geo: bool = False) -> list[Interval]:
    """What may be called the total of figures, or their mean; what their geometric mean alone."""
    mids, n = [v.mid for v in values], len(values)
    half = sum(v.hi - v.lo for v in values) / max(sum(mids), 1e-30) / 2
    found = [sum(mids)] if total else [sum(mids) / n, statistics.median(mids), sum(mids)]
    if all(mids) and not total:
        found += [math.prod(m ** (1 / n) for m in mids), n / sum(1 / m for m in mids)]
        found = found[-2:-1] if geo else found
    return [Interval(m * (1 - min(half, 1)), m, m * (1 + half)) for m in found]


def weighted(body: list[Row], held: list[Quantity]) -> Iterator[Interval]:
    """Means of a column's figures, arithmetic and harmonic, with the rows' counts or shares as weights."""
    shares = [{f"share {q.column}": q.value.mid for q in r.of("percent")} for r in body]
    each = [r.bare | share for r, share in zip(body, shares, strict=True)]
    for name in each[0] if len(held) == len(body) else ():
        weights = [e.get(name, 0.0) for e in each]
        if all(weights):
            of = [(x.plain, w / sum(weights)) for x, w in zip(held, weights, strict=True)]
            yield sum((x * w for x, w in of), Interval(0.0, 0.0, 0.0))
            yield Interval(1.0, 1.0, 1.0) / sum((Interval(w, w, w) / x for x, w in of), Interval(0.0, 0.0, 0.0))


def _summary(grid: Grid, row: Row, body: list[Row]) -> Iterator[Finding]:
    label = row.label if grid.drawn else row.text
    whole = any(p.value.mid == 1 for p in row.of("percent"))  # of the shares above it
    total = bool(_TOTAL.search(label) or whole) and not MEAN.search(label)
    rates = ("rate", "bandwidth", "power") if not grid.drawn else ()
    good, exactly, held = 0, 0, list[tuple[Quantity, list[Interval], Interval]]()
    # Without a unit a column may be of ratios, or of whole numbers that count other things, unless one's are added up.
    bare = [q for q in row.of("number") if not _RATIOS.search(q.label)]
    sums = [sum(v.plain.mid for b in body if (v := b.figure(q.column, q.kind))) for q in bare]
    added = len(body) > 2 and any(q.plain.mid > 9 and q.plain.meets(x, 0.001) for q, x in zip(bare, sums, strict=True))
    bare = [q for q in bare if added or "." in q.text]
    for q in (*row.of(*((*_ADDS, *rates) if total else (*TYPED, "ratio", "percent"))), *bare):
        values = [v.plain for b in body if (v := b.figure(q.column, q.kind))]
        if len(values) != len(body) or not q.exact or not q.value.mid or q.text[0] in "+-−":
            continue
        if all(v.meets(q.plain) for v in values):
            continue  # what all rows share: the time in which they ran side by side
        means = may_come_to(values, total, "geo" in label.lower())
        usual = means[0]
        means += [] if total else weighted(body, [v for b in body if (v := b.figure(q.column, q.kind))])
        good += any(q.plain.meets(m, FIT) for m in means)
        exactly += any(q.plain.meets(m, 0.002) for m in means)
        # No mean lies outside of its rows.
        outside = not min(v.lo for v in values) <= q.plain.mid <= max(v.hi for v in values)
        exactly += outside and not total and len(values) > 2 and q.kind != "ratio"
        held.append((q, means, usual))
    odd = []
    for q, means, usual in held:  # to the last digit, where two columns more are so
        near = 0.003 if exactly > 1 and not total and not _follows(q, row) else 0.012
        odd += [(q, usual)] if not any(q.plain.meets(m, near) for m in means) else []
    # Where another column's is exact, so must be each.
    odd = odd if exactly else [(q, m) for q, m in odd if not q.plain.meets(m, ODD) and (total or q.kind != "number")]
    for q, m in odd if len(odd) <= max(good, 2) and len(body) > 2 else ():
        span_of = f"the {'sum' if total else 'mean'} of lines {body[0].line}–{body[-1].line}"
        ask = "" if good else ": which rows does it count?"
        message = f"{span_of} is {si(m.mid, UNIT_OF.get(q.kind, ''))}, not {q.text}{ask}"
        sure = good and q.kind != "number"
        yield finding(INCONSISTENT if sure else QUESTION, "total", message, q, lines=tuple(b.line for b in body))


def _follows(q: Quantity, row: Row) -> bool:
    """Whether a figure is, or may be, what two others of its row make: a mean rate is total work in total time."""
    others = [x.plain for x in row.quantities if x is not q and x.value.mid]
    made = (x / y for x, y in itertools.permutations(others, 2))
    return q.kind in ("ratio", "percent", "number") or any(q.plain.meets(m, 0.003) for m in made)


def orders(report: Report) -> Iterator[Finding]:
    """Sentences whose figures are in the wrong order: "median 4.1 ms, max 4.0 ms", "[1.4 ms 1.3 ms 1.2 ms]",
    "p50 / p99 were 320 and 260 ms"; of two alone it asks."""
    for row in report.lines_of_text:
        text, wrong, sure = row.text.lower(), list[tuple[Quantity, Quantity]](), True
        for m in _AROUND.finditer(row.text):
            held = [q for q in row.of(*TYPED) if m.start() < q.start < m.end()]
            if len(held) == 3 and {q.kind for q in held} == {held[0].kind}:
                wrong += [(a, b) for a, b in itertools.pairwise(held) if a.value.lo > b.value.hi]
        ranks = [(m.end(), _rank(m)) for m in _RANKED.finditer(text)]
        times = [q for q in row.of("time", "s_per_item") if q.value.mid]
        beside = [(r, q) for end, r in ranks for q in times if 0 <= q.start - end < 12]
        if len(times) == len(ranks) > 1 and ranks[-1][0] < times[0].start:
            beside = [(r, q) for (_, r), q in zip(ranks, times, strict=True)]
        if len(beside) == len({r for r, _ in beside}) == len(times) and len({q.kind for q in times}) == 1 and not wrong:
            pairs = itertools.permutations(beside, 2)
            wrong = [(a, b) for (r, a), (s, b) in pairs if _below(r, s) and a.value.lo > 1.005 * b.value.hi]
            sure = len(beside) > 2 and not re.search(r"limit|cap\b|timeout|target|slo\b", text)
        for a, b in wrong[:1]:
            message = f"{a.text} and {b.text} are in the wrong order"
            yield finding(INCONSISTENT if sure else QUESTION, "order", message, b, a)


def _rank(m: re.Match[str]) -> float:
    least, p, th, median, most, _ = m.groups()
    return 0.0 if least else 100.0 if most else 50.0 if median else float(p or th) if p or th else -1.0


def _below(r: float, s: float) -> bool:
    """Whether a figure of the rank `r`, -1 for a mean, is never above one of `s`."""
    return (0 <= r < s) or (r == -1 and s == 100) or (r == 0 and s == -1)


def shared(report: Report) -> Iterator[Finding]:
    """ "With eight workers the loader delivers 5,200 samples/s, or 650 samples/s per worker"."""
    for row in report.lines_of_text:
        for kind in _KINDS if any(c.isdigit() for c in row.text) else ():
            of = (kind, "s_per_item") if kind == "time" else (kind,)
            held = [q for q in row.of(*of) if q.exact and q.value.mid and not on_sheet(row, q)]
            held = [q for q in held if not re.match(r"(?i)(?:gpu|card|board|device)\b", q.after)]  # "one 80 GB card"
            for a, b in itertools.pairwise(sorted(held, key=lambda q: q.start)) if len(held) < 4 else ():
                yield from _pair(row, a, b)
    small = [r for g in report.grids for r in g.rows if len(g.rows) < 3]
    for row in (*(r for r in report.rows if r.kind == "record"), *small):
        for kind in RATES:  # "tokens/s" and "tokens/s/GPU"
            held = [q for q in row.of(kind) if q.exact and q.value.mid and not on_sheet(row, q)]
            each, whole = ([q for q in held if q.per_device == own] for own in (True, False))
            ns = {*report.everything.of("gpus"), *([row.own["gpus"]] if "gpus" in row.own else [])} - {1.0}
            if (
                len(each) == len(whole) == 1
                and ns
                and not any((whole[0].plain / each[0].plain).meets(n, 0.02) for n in (*ns, 1.0))
            ):
                yield from _not_shared(each[0], whole[0], ns, 20.0)


def _name(noun: str | None) -> str:
    """A counted thing in the singular; every GPU by that name."""
    gpu = re.fullmatch(r"(?i)gpus?|cards?|devices?|[ahblv]\d{2,3}", noun or "")
    return "gpu" if gpu else (noun or "").lower().rstrip("s")


def _counts(row: Row) -> dict[str, set[float]]:
    """How many of what a sentence and the one before count."""
    found: dict[str, set[float]] = {}
    for r in filter(None, (row.before, row)):
        for m in _COUNTED.finditer(r.text):
            n = float(_WORDS.get(m["n"].lower(), m["n"]).replace(",", ""))
            found.setdefault(_name(m["noun"] or m["one"]), set()).add(n)
        found.setdefault("gpu", set()).update(r.facts.of("gpus"))
        for noun in _SERVED:
            found.setdefault(noun, set()).update((*r.facts.of("batch"), *r.facts.of("concurrency")))
    return {noun: ns - {1.0} for noun, ns in found.items() if ns - {1.0}}


def _noun(row: Row, q: Quantity, past: int, counts: dict[str, set[float]]) -> str:
    """Of which counted thing a figure is said to be one's; "" where it is not."""
    before, behind = row.text[past : q.start], row.text[q.end : q.end + 20]
    before = re.split(r"[,;:(=]|\b(?:so|or|hence|and)\b", before, maxsplit=1)[-1] if past else before
    for m in (*_EACH.finditer(f"{q.text[-24:]}{re.split(r'[;,(]', behind)[0]}"), *_EACH.finditer(before)):
        if _name(m[1]) in counts or (m[1] and "" in counts):
            return _name(m[1])
        # "24 workers each doing 85 images/s", "8 GPUs with 80 GB each"
        told = [*_COUNTED.finditer(row.text[: q.start])] if not m[1] or m[1].endswith("ing") else []
        if told:
            return _name(told[-1]["noun"] or told[-1]["one"])
    runs = {"iter", "run", "call", "launche", "iteration", "repeat"} & counts.keys()
    return min(runs) if runs and (_MEAN_OF.search(q.label) or q.kind == "s_per_item") else "gpu" * q.per_device


def _pair(row: Row, a: Quantity, b: Quantity) -> Iterator[Finding]:
    counts, earlier = _counts(row), end_before(row, a)
    said = (_noun(row, a, earlier, counts), _noun(row, b, a.end, counts))
    if bool(said[0]) == bool(said[1]):
        return
    one, whole, noun = (a, b, said[0]) if said[0] else (b, a, said[1])
    between = row.text[a.end : b.start]
    what = [re.match(r"(?: in all| in total)? (?:of|for) (?:the )?([a-z]+)", row.text[q.end :]) for q in (a, b)]
    if all(what) and len({m[1] for m in what if m}) == 2:
        return  # of other things
    them = _COUNTED.search(between) if whole is b else None  # "90 epochs 9.2 hours", "the eight of them draw 6.4 kW"
    direct = them is not None and _name(them["noun"] or them["one"]) in (noun, "")
    if not direct and not _TOGETHER.search(f"{between}|" + row.text[b.end : b.end + 20]):
        return
    times = whole.plain / one.plain
    ns = counts.get("" if direct and "" in counts else noun) or {*row.report.everything.of("gpus")} - {1.0}
    if ns and times.lo > 1 and not any(times.meets(n, 0.05) for n in ns):
        yield from _not_shared(one, whole, ns)


def _not_shared(one: Quantity, whole: Quantity, ns: set[float], most: float = 3.0) -> Iterator[Finding]:
    """What one of `ns` has is not what all have."""
    times = whole.plain / one.plain
    n = min(ns, key=lambda n: abs(math.log(times.mid / n)))
    made = si((one.value * n).mid, UNIT_OF.get(one.kind, ""))
    if (times / n).meets(1.0, most):
        message = f"{n:.0f} × {one.text} is {made}, not {whole.text}: of how many is it?"
        yield finding(QUESTION, "product", message, one, whole)
