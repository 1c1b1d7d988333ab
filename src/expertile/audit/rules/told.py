"""What sentences say of figures: ratios and changes of two, averages and best cases of a table, sums, orders."""

import re
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FIT, ODD
from expertile.audit.quantity import Quantity, stem
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import NO_RUN_OF_ONE, on_sheet
from expertile.audit.rules.columns import TYPED, follows, wrong


def _two(q: Quantity, a: Quantity, b: Quantity, change: str = "") -> Iterator[Finding]:
    """Two figures and what is made of them, in either order."""
    sound = all(x.exact and x.value.mid > 0 for x in (q, a, b))
    if sound and not (follows(q, (a, b), ODD, change) or follows(q, (b, a), ODD, change)):
        yield wrong(q, (a, b) if a.value.mid >= b.value.mid else (b, a))


_FROM = re.compile(
    r"(?i)\bfrom\b.*\bto\b|→|->|\bvs\.?\b|\bversus\b|compared (?:to|with)|instead|\bagainst\b|(?:down|up) to|\bthan\b"
)
_GAINS = r"(?:faster|as fast|slower|speed|slow|improve|reduc|less|lower|higher|more|increas|gain|decreas|drop|sav|better|smaller)"
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
        parts = [q for q in row.of(*TYPED) if row.kind == "line" or not _PARTIAL.search(q.label)]
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


_RANK = re.compile(
    r"\b(?:(min(?:imum)?|fastest)|p(\d\d)(?:[._]?\d)?|(\d\d)(?:\.\d)?(?:th|%)|(median)|(max(?:imum)?|slowest))(?![a-z])"
)
_MEAN = re.compile(r"\b(?:avg|average|mean)\b")


def _rank(label: str) -> float | None:
    """The share of a distribution that lies below a figure, by its label: 0 of the least, 50 of the median."""
    found = _RANK.findall(re.sub(r"[_/]", " ", label.lower())[-40:])
    if len(found) != 1:
        return None
    least, p, th, median, most = found[0]
    return 0.0 if least else 100.0 if most else 50.0 if median else float(p or th)


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
        rank, plain = _rank(label), label.lower().replace("_", " ")
        if (
            q.exact
            and q.kind in ("time", "s_per_token", "s_per_item")
            and (rank is not None or _MEAN.search(plain[-24:]))
        ):
            name = stem(_RANK.sub(" ", re.sub(r"\b(?:of|and|the|at|is|was|a)\b", " ", plain)))
            groups.setdefault((q.kind, name if sure else ""), []).append((-1.0 if rank is None else rank, q))
    for held in groups.values():
        for (low, a), (high, b) in ((x, y) for x in held for y in held if x[0] < y[0]):
            # A mean may be above the 90th percentile, but neither above the maximum nor below the minimum.
            wrong_way = a.value.lo > 1.005 * b.value.hi and (low >= 0 or high == 100)
            wrong_way |= low == -1 and high == 0 and b.value.lo > 1.005 * a.value.hi
            if wrong_way and len({r for r, _ in held}) == len(held):
                message = f"{a.text} ({low:.0f} % of the runs are below) is more than {b.text} ({high:.0f} %)".replace(
                    "-1 %", "mean"
                )
                yield finding(INCONSISTENT if sure else QUESTION, "order", message, b, a)
                break


_TOTAL = re.compile(r"(?i)\b(?:in )?total|\bsum\b|altogether|in all\b|adds? up|overall|end[- ]to[- ]end")
_ADDED = ("time", "bytes", "money", "energy", "tokens", "percent")


def sums(report: Report) -> Iterator[Finding]:
    """A total in a sentence or record that its parts do not add up to: it asks."""
    for row in report.rows:
        for kind in _ADDED:
            held = row.of(kind)
            totals = [
                q for q in held if _TOTAL.search(q.label[-40:]) or re.match(r"(?i)\W*(?:in total|altogether)", q.after)
            ]
            parts = [q for q in held if q not in totals]
            if len(totals) != 1 or len(parts) < 3 or not all(q.exact for q in held) or len(parts) > 8:
                continue
            if row.kind == "record" and not all(stem(q.label) for q in parts):
                continue
            total = totals[0]
            if (
                not (all(q.start < total.start for q in parts) or all(q.start > total.start for q in parts))
                and row.kind == "line"
            ):
                continue
            most = sum((q.value for q in parts[1:]), parts[0].value)
            subsets = {sum(q.value.mid for q in parts if q is not x) for x in (None, *parts)}
            if (
                kind != "percent"
                and not most.meets(total.value, 0.03)
                and not any(total.value.meets(x, FIT) for x in subsets)
            ):
                if row.kind == "line" or total.value.hi < max(q.value.lo for q in parts):
                    message = (
                        f"the parts add up to {si(most.mid, UNIT_OF.get(kind, ''))}, not {total.text}: is one left out?"
                    )
                    yield finding(QUESTION, "sum", message, total, *parts)


_HEAD = re.compile(
    r"(?i)\bup to|\bpeak(?:s|ed)?\b|\bbest|\bmax|\bhighest|\breach|\bhits?\b|\bsustain|\bachiev|\bat most|fastest|as high as"
)
_GENERAL = re.compile(
    r"(?i)\bcould|\bwould|theor|expect|claim|paper|report(?:ed|s) |vendor|spec|ideal|earlier|previous|other"
)


def headlines(report: Report) -> Iterator[Finding]:
    """A figure in a sentence that is better than every one of the tables that it sums up: it asks."""
    cells: dict[str, list[Quantity]] = {}
    for grid in report.tables:
        for row in grid.rows:
            for q in row.quantities:
                cells.setdefault(q.kind, []).append(q)
    ratios = [q.value.mid for q in cells.get("ratio", ())]
    quotients = _quotients(report)
    lines = {row.line for grid in report.tables for row in grid.rows}
    for row in (r for r in report.lines_of_text if r.line not in lines):
        for q in row.quantities:
            near = row.text[max(0, q.start - 48) : q.end + 40]
            if (
                not q.value.mid
                or _GENERAL.search(row.text)
                or _MEAN.search(row.text.lower())
                or NO_RUN_OF_ONE.search(q.words.replace("peak", ""))
            ):
                continue
            if (
                q.kind == "ratio"
                and _OUTCOME.search(near)
                and (len(ratios) > 2 or len(quotients) > 2)
                and not row.of(*TYPED)
            ):
                best = max((*ratios, *quotients, *(1 / x for x in (*ratios, *quotients) if x)))
                if q.value.lo > 1.04 * best and q.value.mid < 50:
                    message = f"{q.text} is more than the {best:.3g}x of any row: which rows make it?"
                    yield finding(QUESTION, "headline", message, q)
            held = [] if on_sheet(row, q) else [x for x in cells.get(q.kind, ()) if x.value.mid]
            if q.kind in ("rate", "bandwidth", "tokens_per_s", "items_per_s") and _HEAD.search(near) and len(held) > 2:
                best_q = max(held, key=lambda x: x.value.hi)
                if q.value.lo > 1.04 * best_q.value.hi and q.value.lo < 3 * best_q.value.hi:
                    message = f"{q.text} is more than {best_q.text}, the most of any row: which run is it?"
                    yield finding(QUESTION, "headline", message, q, lines=(best_q.line,))


def _quotients(report: Report) -> list[float]:
    """Of two figures of one kind in a row, and of two rows in a column."""
    found: list[float] = []
    for grid in report.tables if sum(len(g.rows) for g in report.tables) < 200 else ():
        for row in grid.rows:
            for kind in TYPED:
                of = [q.value.mid for q in row.of(kind) if q.value.mid]
                found += [max(of) / min(of)] if len(of) > 1 else []
        for c in range(len(grid.header)):
            of = [q.value.mid for q in grid.column(c) if q and q.kind in TYPED and q.value.mid]
            found += [max(of) / min(of)] if len(of) > 1 else []
    return found


def pairs(report: Report) -> Iterator[Finding]:
    """ "… at 31.5 tokens/s. With a draft it makes 84.7 tokens/s, a 2.7x speedup": two sentences and their ratio."""
    lines = report.lines_of_text
    for before, row in zip(lines, lines[1:], strict=False):
        ratios = [
            q for q in row.of("ratio", "percent") if q.exact and _OUTCOME.search(row.text[q.start - 24 : q.end + 24])
        ]
        for kind in TYPED if len(ratios) == 1 and before.block == row.block else ():
            a, b = before.of(kind), row.of(kind)
            if (
                len(a) == len(b) == 1
                and not _PARTIAL.search(row.text)
                and a[0].exact
                and b[0].exact
                and a[0].value.mid
                and b[0].value.mid
            ):
                q = ratios[0]
                if len(row.of(*TYPED)) == len(before.of(*TYPED)) == 1 and not before.of("ratio", "percent"):
                    if not any(follows(q, p, ODD) for p in ((a[0], b[0]), (b[0], a[0]))):
                        found = wrong(
                            q, (max(a[0], b[0], key=lambda x: x.value.mid), min(a[0], b[0], key=lambda x: x.value.mid))
                        )
                        yield replace(found, verdict=QUESTION, message=found.message + ": is it of these two?")
