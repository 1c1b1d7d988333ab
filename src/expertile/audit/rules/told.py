"""What sentences, records and summary rows say of other figures: ratios, sums, means, best cases, percentiles.

Where nothing else can be meant it accuses: a speed-up of the sentence's only two times, a total that other columns
keep.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, NUMBER, ODD, Interval, printed
from expertile.audit.quantity import Quantity, stem
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.hardware import on_sheet
from expertile.audit.rules.tables import TYPED, printed_as, wrong
from expertile.audit.units import unit_of_name

_FROM = re.compile(
    r"(?i)\bfrom\b.*\bto\b|→|->|\bvs\.?\b|\bversus\b|compared (?:to|with)|instead|\bagainst\b|(?:down|up) to|\bthan\b"
)
_GAINS = (
    r"(?:faster|as fast|slower|speed|slow|improve|reduc|less|lower|higher|more|increas|gain|decreas|drop|"
    r"sav|better|smaller)"
)
_OUTCOME, _CHANGE = re.compile(rf"(?i){_GAINS}"), re.compile(rf"(?i)^\W*{_GAINS}")
_SPEED = re.compile(r"(?i)concurren|speed|faster|slower|latency|throughput|\btime")
_SIZE = re.compile(r"(?i)memory|vram|size|resource|gpus|power|energy|cost")
_APART = re.compile(r"(?i)peak|theor|limit|max|\bmin\b|\bp\d\d|std|total|best|worst")
_PARTIAL = re.compile(r"(?i)sav|differ|delta|reduc|overhead")
_THAN = re.compile(r"(?i)\b(?:than|over|vs)\b")
_SPEED_UP = re.compile(r"(?i)\W*(?:overall |total )?speed-?\s?up\W*")
_LESS = re.compile(r"(?i)drop|reduc|decreas|\bless|lower|sav|\bcut|fell")
_UNIT = re.compile(r"[\d., ]|[kKMGT](?=i?B)")
_BY = re.compile(r"(?i)\bby\W*$")
_NOT_OF = re.compile(
    r"(?i)peak|utili|efficien|accuracy|recall|confidence|error|sparsity|occupancy|of (?:the )?(?:total|time|runtime)"
)


def _either(q: Quantity, a: Quantity, b: Quantity, change: str = "") -> bool:
    """Whether `q` may be what is printed for the quotient of two figures."""
    alike = _UNIT.sub("", a.text) == _UNIT.sub("", b.text)
    x, y = (a.plain, b.plain) if alike else (a.value, b.value)
    return any(f.hi > 0 and q.value.meets(f, ODD) for z in (x / y, y / x) for f in printed_as(q, z, change))


def _wrong(q: Quantity, a: Quantity, b: Quantity) -> Finding:
    a, b = max((a, b), key=_mid), min((a, b), key=_mid)
    message = wrong(f"{a.text} / {b.text}", _mid(a) / _mid(b), q)
    return finding(INCONSISTENT, "ratio", message, q, lines=(a.line, b.line))


def ratios(report: Report) -> Iterator[Finding]:
    """Figures of one kind and what the sentence or record makes of them: "from 12.4 ms to 3.1 ms, 4.0x faster"."""
    mixed = [r for grid in report.grids for r in grid.body if any(_OUTCOME.search(q.after) for q in r.of("ratio"))]
    for whole in (*map(_one_kind, report.rows), *mixed):
        if whole.kind != "line":
            yield from _of_record(whole, _said(whole))
            continue
        found = [f for row in whole.parts() for f in _in_sentence(row, _said(row)) if f.verdict == INCONSISTENT]
        yield from [*found, *_scaling(whole)] or _in_sentence(whole, _said(whole))


def _one_kind(row: Row) -> Row:
    """A sentence in which "per step" or "per token" stands at one of its times only: "840 ms per step, now 610 ms"."""
    if row.kind != "line" or {q.kind for q in row.of(*TYPED)} not in ({"time", "s_per_item"}, {"time", "s_per_token"}):
        return row
    times = [replace(q, kind="time") if q.kind.startswith("s_per") else q for q in row.quantities]
    one = replace(row, quantities=times)
    one.report = row.report
    return one


_SCALED = re.compile(r"(?i)(\d+) (?:to|→|->|vs\.?) (\d+) (?:\w+ )?(?:gpus|nodes|cards|devices|ranks)")


def _scaling(row: Row) -> Iterator[Finding]:
    """ "From 1 to 4 GPUs … 96 min to 27 min … an efficiency of 89 %"; of one GPU and the report's only other number."""
    m, counts = _SCALED.search(row.text), row.report.everything.of("gpus")
    alone = len(counts) == 1
    times = int(m[2]) / int(m[1]) if m else counts[0] if alone else 0.0
    shares = [q for q in row.of("percent") if "efficien" in q.words and q.exact]
    near = [r for r in row.report.lines_of_text if r.block == row.block and 0 <= row.line - r.line < 3]
    for kind in TYPED if times > 1 and len(shares) == 1 and row.kind == "line" else ():
        held = [q for r in near for q in r.of(kind) if q.exact and _mid(q)]
        if m and not held:  # of a table's two rows
            rows = [r for g in row.report.grids for r in g.rows if r.own.get("gpus") in (float(m[1]), float(m[2]))]
            held = [q for r in rows for q in r.of(kind) if q.exact and _mid(q)]
        if len(held) == 2:
            gain = max(map(_mid, held)) / min(map(_mid, held))
            if not shares[0].value.meets(gain / times, 0.03):
                message = f"{gain:.3g}x on {times:.3g} times as many is an efficiency of {100 * gain / times:.3g} %"
                yield finding(
                    INCONSISTENT if m and held[0] in row.quantities else QUESTION,
                    "ratio",
                    f"{message}, not {shares[0].text}",
                    shares[0],
                    *held,
                )


def _said(row: Row) -> list[Quantity]:
    return [q for q in row.of("ratio", "percent") if q.exact and q.value.mid and not _NOT_OF.search(q.words)]


def _of_record(row: Row, said: list[Quantity]) -> Iterator[Finding]:
    """The ratio that a record, or a row of a table, gives of its only two figures."""
    parts = [q for q in row.of(*TYPED) if not _PARTIAL.search(q.label) and q.exact and q.value.mid]
    pairs = [held for kind in TYPED if len(held := [q for q in parts if q.kind == kind]) == 2]
    # A ratio of memory is not of the times beside it, nor one of speed of the bytes.
    other = _SPEED if pairs and pairs[0][0].kind == "bytes" else _SIZE
    said = [
        q for q in said if _OUTCOME.search(q.label + row.text * (row.kind == "table")) and not other.search(q.words)
    ]
    # Of two variants with several figures each, the speed-up is of one of these; two ratios in a line are of parts.
    whole = len(pairs) > 1 and all(_SPEED_UP.fullmatch(q.label) for q in said)
    if len(said) != 1 or not pairs or not (whole or len(parts) == 2) or any(_APART.search(x.label) for x in pairs[0]):
        return
    alone = not any(p.line == said[0].line and p is not said[0] for p in row.of("ratio", "percent"))
    if alone and not _THAN.search(said[0].after) and not any(_either(said[0], x, y) for x, y in pairs):
        yield _wrong(said[0], *pairs[0])


def _mid(q: Quantity) -> float:
    return q.value.mid


_COMPARED = (*TYPED, "params", "tokens", "items", "money", "energy", "power", "flop")
_AS_MANY = re.compile(r" ?(?:times )?as (?:many|much|large|high)")
_OF_WHICH = re.compile(r"(?i)of which [^.;]*$")
_BARE = re.compile(
    rf"(?i)(?<![\w.])({NUMBER}) (?:instead of|rather than|vs\.?|against|up from|down from|compared (?:to|with)) "
    rf"({NUMBER})(?! ?[\w%]*/)|\bfrom ({NUMBER}) to ({NUMBER})(?! ?(?:%|[xX]\b))"
)


def _bare(row: Row) -> list[Quantity]:
    """Two numbers without a unit that a sentence compares: "61 instead of 34 users"."""
    m = _BARE.search(row.text)
    spans = [m.span(g) for g in (1, 2, 3, 4) if m[g]] if m else []
    if any(q.start <= a < q.end or a == q.start for a, _ in spans for q in row.quantities):
        return []
    held = [(row.text[a:b], a, b) for a, b in spans]
    return [Quantity("number", printed(t), t, "", row.line, start=a, end=b) for t, a, b in held]


def _in_sentence(row: Row, said: list[Quantity]) -> Iterator[Finding]:
    """A ratio that no two figures of its sentence, or of the one before, make. It asks, unless the sentence's only two
    figures can only be what it compares."""
    lines, parts = row.report.lines_of_text, row.of(*TYPED)
    at = next((i for i, r in enumerate(lines) if r.block == row.block and r.text == row.text), 0)
    before = lines[at - 1] if at and lines[at - 1].block == row.block else None
    two = parts if len(parts) == 2 and parts[0].kind == parts[1].kind and len(said) < 3 else []
    for q in said:
        head, tail = row.text[: q.start], row.text[q.end :]
        own = [x for x in (*row.of(*_COMPARED), *_bare(row)) if x.end <= q.start and not on_sheet(row, x)]
        if len(own) < 2 and before and len(said) == 1 and not before.of("ratio", "percent"):
            lent = [x for x in (*before.of(*_COMPARED), *_bare(before)) if not own or x.kind == own[0].kind]
            own += lent if len(lent) + len(own) == 2 and not _PARTIAL.search(row.text) else []
        sure = bool(two) and _only(row, q, two[0], two[1])
        own = [x for x in (two if sure else own) if x.exact and x.value.mid]
        kinds = [[x for x in own if x.kind == kind] for kind in dict.fromkeys(x.kind for x in own)]
        several = [of for of in kinds if 2 <= len(of) <= 4]
        # "dropped by 60 %" is a change; "to 60 % of it" is a share.
        by, less = (
            _BY.search(head) or _CHANGE.search(tail),
            _LESS.search(head[-24 if len(said) > 1 else 0 :] + tail[:12]),
        )
        change = "loss" if less and (by or (not sure and q.kind == "percent")) else "change" if by and sure else ""
        gain: object = sure or _OUTCOME.search(f"{head[-32:]}|{tail[:16]}") or _AS_MANY.match(tail)
        gain = gain or (q.kind == "percent" and _OF_WHICH.search(head))
        gain = gain or (head.endswith("(") and len(row.quantities) == 3 and q.kind == "ratio")
        size = (_SPEED if all(of[0].kind == "bytes" for of in several) else _SIZE).search(q.after[:24])
        made = any(_either(q, a, b, change) for of in several for a, b in itertools.combinations(of, 2))
        if several and gain and not size and not made and (sure or not _THAN.search(q.after[:24])):
            f = _wrong(q, *several[-1][-2:])
            # Where the sentence has two ratios, the other must follow.
            sure = sure and all(o is q or _either(o, two[0], two[1]) for o in said)
            yield f if sure else replace(f, verdict=QUESTION, message=f.message + ": is it of these two?")


def _only(row: Row, q: Quantity, a: Quantity, b: Quantity) -> bool:
    """Whether a sentence's two figures can only be what its ratio compares."""
    before, between, behind = row.text[: a.start], row.text[a.end : b.start], row.text[b.end : q.start]
    near = row.text[max(0, q.start - 24) : q.start] + row.text[q.end : q.end + 16]
    close = re.fullmatch(r"\W{1,3}", behind) and _OUTCOME.search(q.after) and not _THAN.search(q.after)
    # "1.9 ms, the unfused one 5.1 ms, which makes it 3.7x faster"
    last = q is row.quantities[-1] and len(row.quantities) == 3 and re.match(r"\W*(?:faster|slower|speed)", q.after)
    # "as the length grew 4x" is not of the times: a word of gain stands beside the ratio, or the times do.
    told: object = _OUTCOME.search(near) or _BY.search(row.text[: q.start]) or re.fullmatch(r"\W+", behind)
    told = told or "→" in between or "->" in between
    # "42.8 -> 40.2 s, a 2.6 s reduction (-6 %)"
    other = re.search(r"\d", between) or re.search(r"\d ?(?:→|->) ?$", before)
    return bool(told and not other and (_FROM.search(f"{before[-8:]} {between}") or close or last))


_TOTAL = re.compile(r"(?i)\btotal\b|\bsum\b|altogether|\bin all\b|adds? up to")
_IN_ALL = re.compile(r"(?i)\W{0,2}(?:in total|total|altogether|in all)\W*(?:$|[.,;)])")
_MEAN = re.compile(r"(?i)\bav(?:era)?g|mean\b|\bmedian\b|\boverall\b")
# Rows may be left out, or be parts of one another.
_HIDDEN = re.compile(r"(?i)^\W*(?:\.\.\.|…|⋮)|selected|subset|first \d+ rows|top[- ]\d+|\ball \d+|omit|overlap|: p9\d")
_REST = re.compile(r"(?i)\bthe rest\b|\bremain(?:s|ing|der)|\bothers?\b|everything else")
_OF_ALL = re.compile(r"(?i)^\W*share\W*$|(?:%|share|percent|fraction) of (?:the )?(?:total|time|runtime|step|all)")
_ADDS = ("time", "bytes", "percent")
_AVERAGES = ("time", "rate", "tokens_per_s", "items_per_s", "bytes", "bandwidth", "ratio", "s_per_token", "s_per_item")


def totals(report: Report) -> Iterator[Finding]:
    """Rows, lines and sentences called average or total, over the rows or figures before them."""
    for grid in report.tables:
        held: list[Row] = []
        below = report.after(grid) if not grid.drawn else ()
        for row in (*grid.rows, *below) if not any(_HIDDEN.search(row.text) for row in grid.rows) else ():
            if row.summary and len(held) > 1 and unit_of_name(row.label) is None:
                yield from _summary(grid, row, held)
                held = []
            elif not row.summary:
                held.append(row)
    for row in report.lines_of_text:
        yield from _listed(_one_kind(row))
    for grid in (g for g in report.grids if not any(_HIDDEN.search(row.text) for row in g.rows)):
        for c in (c for c in grid.columns("percent") if _OF_ALL.search(grid.header[c])):
            of = [q for row in grid.body if (q := row.figure(c))]
            whole = sum(map(_mid, of))
            if len(of) == len(grid.body) > 1 and 1.02 + 0.005 * len(of) < whole < 1.5:
                yield finding(QUESTION, "total", f"the shares add up to {100 * whole:.3g} %", of[-1], *of[:-1])


def _listed(row: Row) -> Iterator[Finding]:
    """ "1.2x, 1.4x and 1.3x, a mean of 1.3x", "14 ms, 212 ms and 9 ms, in total 235 ms"; the parts may stand in the
    sentences before."""
    shares = row.of("percent")
    whole = sum(q.value.mid for q in shares)
    if (
        len(shares) > 2
        and _REST.search(row.text)
        and all(q.exact for q in shares)
        and 0.6 < whole < 1.5
        and abs(whole - 1) > 0.025
    ):
        yield finding(QUESTION, "total", f"the shares add up to {100 * whole:.3g} %", shares[-1], *shares[:-1])
    for q in (q for q in row.quantities if q.kind in (*_AVERAGES, "money", "energy") and q.exact):
        words = q.label[-30:]
        total, mean = _TOTAL.search(words) or _IN_ALL.match(row.text, q.end), _MEAN.search(words)
        if not (total or mean):
            continue
        rows = [r for r in row.report.lines_of_text if r.block == row.block and row.line - 12 < r.line <= row.line]
        prose = row.report.blocks[row.block].kind == "prose"
        earlier = [x for r in rows if prose and r.text != row.text for x in r.of(q.kind)]
        own = [[x for x in row.of(q.kind) if x.end <= q.start], [x for x in row.of(q.kind) if x.start > q.end], earlier]
        parts = next((some for some in own if len(some) > 2), [])
        if len(parts) < 3 or len(parts) > 12 or not all(x.exact and x.value.mid for x in parts):
            continue
        means = _may_be([x.value for x in parts], bool(total) and not mean)
        means += [m for x in parts if total for m in _may_be([y.value for y in parts if y is not x], True)]
        if not any(q.value.meets(m, 0.03) for m in means):
            made = f"the {'sum' if total else 'mean'} of {len(parts)} is {si(means[0].mid, UNIT_OF.get(q.kind, ''))}"
            yield finding(QUESTION, "total", f"{made}, not {q.text}: which of them does it count?", q, *parts)


def _may_be(values: list[Interval], total: bool) -> list[Interval]:
    mids, n = [v.mid for v in values], len(values)
    half = sum(v.hi - v.lo for v in values) / max(sum(mids), 1e-30) / 2
    found = [sum(mids)] if total else [sum(mids) / n, statistics.median(mids), sum(mids)]
    if all(mids) and not total:
        found += [math.prod(m ** (1 / n) for m in mids), n / sum(1 / m for m in mids)]
    return [Interval(m * (1 - min(half, 1)), m, m * (1 + half)) for m in found]


def _of_sums(grid: Grid, body: list[Row]) -> Iterator[Interval]:
    """The quotients of two columns' sums."""
    for kind in ("time", "rate", "bandwidth", "tokens_per_s", "items_per_s", "bytes"):
        columns = ([v.value for row in body if (v := row.figure(c, kind))] for c in grid.columns(kind))
        sums = [sum(of[1:], of[0]) for of in columns if len(of) == len(body)]
        yield from (a / b for a, b in itertools.permutations(sums, 2))


def _summary(grid: Grid, row: Row, body: list[Row]) -> Iterator[Finding]:
    label = row.label if grid.drawn else row.text
    total = bool(_TOTAL.search(label)) and not _MEAN.search(label)
    good, odd, exactly = 0, [], 0
    for q in row.of(
        *((*_ADDS, "rate", "bandwidth", "power") if total and not grid.drawn else _ADDS if total else _AVERAGES)
    ):
        values = [v.plain for b in body if (v := b.figure(q.column, q.kind))]
        if len(values) != len(body) or not q.exact or not q.value.mid or q.text[0] in "+-−":
            continue
        means = _may_be(values, total)
        means[:0] = [*_of_sums(grid, body)] if q.kind == "ratio" and "geo" not in label.lower() else []
        good += any(q.plain.meets(m, FIT) for m in means)
        exactly += any(q.plain.meets(m, 0.002) for m in means)
        low, high = min(v.lo for v in values), max(v.hi for v in values)
        summed = any(q.plain.meets(m, 0.012) for m in means)
        if not total and not low <= q.plain.mid <= high and len(values) > 2 and not summed and q.kind != "ratio":
            odd.append((q, means[0]))
            exactly += 1
            continue
        if not any(q.plain.meets(m, 0.012) for m in means):
            odd.append((q, means[-2 if "geo" in label.lower() else -5 if q.kind == "ratio" else 0]))
    # Where another column's is exact, so must be each.
    if not exactly:
        odd = [(q, m) for q, m in odd if not q.plain.meets(m, ODD)]
    for q, m in odd if len(odd) <= max(good, 2) and len(body) > 2 else ():
        span_of = f"the {'sum' if total else 'mean'} of lines {body[0].line}–{body[-1].line}"
        ask = "" if good else ": which rows does it count?"
        message = f"{span_of} is {si(m.mid, UNIT_OF.get(q.kind, ''))}, not {q.text}{ask}"
        yield finding(INCONSISTENT if good else QUESTION, "total", message, q, lines=tuple(b.line for b in body))


_RANK = re.compile(
    r"\b(?:(min(?:imum)?|fastest)|p(\d[05]|9\d)(?:[._]?\d)?|(?<![\d.−+-])([5-9]\d|\d[05])(?:\.\d)?(?:th|%)|"
    r"(median)|(max(?:imum)?|slowest))(?![a-z])"
)
_AVERAGE = re.compile(r"\b(?:avg|average|mean)\b")


def orders(report: Report) -> Iterator[Finding]:
    """A percentile below a lower one, a maximum below the median, a mean outside of both; of one row or one column."""
    for row in report.all_rows:
        yield from _ordered([(q.label, q) for q in row.quantities], row.kind != "line")
    for grid in report.grids:
        for c in range(len(grid.header)):
            yield from _ordered([(row.label, q) for row in grid.rows if (q := row.figure(c))], True)


def _ordered(figures: list[tuple[str, Quantity]], sure: bool) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[tuple[float, Quantity]]] = {}
    for label, q in figures:
        plain = re.sub(r"[_/]", " ", label.lower())
        ranks, mean = _RANK.findall(plain[-40:]), _AVERAGE.search(plain[-24:])
        if q.exact and q.kind in ("time", "s_per_token", "s_per_item") and len(ranks) + bool(mean) == 1:
            least, p, th, median, most = (*ranks, ("",) * 5)[0]
            rank = -1.0 if mean else 0.0 if least else 100.0 if most else 50.0 if median else float(p or th)
            name = stem(_RANK.sub(" ", re.sub(r"\b(?:of|and|the|at|is|was|a)\b", " ", plain)))
            groups.setdefault((q.kind, name if sure else ""), []).append((rank, q))
    for held in (h for h in groups.values() if len({r for r, _ in h}) == len(h)):
        for (low, a), (high, b) in ((x, y) for x in held for y in held if x[0] < y[0]):
            # A mean may be above the 90th percentile, but neither above the maximum nor below the minimum.
            above = a.value.lo > 1.005 * b.value.hi and (low >= 0 or high == 100)
            if above or (low == -1 and high == 0 and b.value.lo > 1.005 * a.value.hi):
                names = [
                    f"{'the mean' if r < 0 else f'percentile {r:.0f}'}, {q.text}" for r, q in ((low, a), (high, b))
                ]
                message = f"{names[0]}, and {names[1]}, are in the wrong order"
                yield finding(INCONSISTENT if sure else QUESTION, "order", message, b, a)
                break
