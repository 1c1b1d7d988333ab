"""What sentences say of the tables and records near by: figures that these have otherwise, gains that no two of their
figures make, best cases that no row reaches, means and totals; and which of two is faster."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from expertile.audit.facts import NUMBERS, facts
from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import exact
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.records import digits
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules import headlines
from expertile.audit.rules.hardware import EQUATION, end_before, gpu_counts, on_sheet
from expertile.audit.rules.limits import NO_RUN_OF_ONE
from expertile.audit.rules.terms import IF
from expertile.audit.rules.told import APART, OUTCOME, change_of, direction, may_be, mid, words_near, words_of
from expertile.audit.rules.totals import MEAN, ON_AVERAGE, may_come_to, weighted
from expertile.audit.units import RATES, TIMES, TYPED

_BEST = regex(
    r"(?i)\bup to|\bpeak|\bbest|\bmax|\bhighest|reach|\bhits?\b|sustain|achiev|\bat most|fastest|as high as|largest"
)
_UP_TO = regex(
    r"(?i)\b(?:(?:up to|as much as)(?: an?)?|max(?:imum|imal)? (?:speed-?up|gain|improvement) of|"
    r"between [\d.,]+ ?[x×%]* ?(?:and|to))\W*$"
)
_GAINED = regex(r"(?i)gain|improve|speed-?up|faster|sav|reduc")
_SUPERLATIVE = regex(r"peak|max(?:imum|imal)?(?= (?:speed-?up|gain|improvement))")
_TIMES_THE = regex(r"\W*times (?:the|as) ")
_SHARE = regex(r"(?i)utili[sz]ation|\bmfu\b")
_EARLIER = regex(
    r"(?i)\bwith (?:a )?(?:warm|cold)\b|\b(?:(?:on|in) (?:top|addition)\b|before (?:this|that|the)|used to|"
    r"was at|previously)\b"
)
_ANOTHER = regex(
    r"(?i)\balone\b|\b(?:on its own|by itself)\b|with(?:out)? (?:an? )?(?:l2 |cache )*flush|\bwith [A-Z_]{4,}=|"
    r"\bwithout -{1,2}[a-z]"
)
_PRICED = ("$/token", "$/item", "J/token", "J/item")
_PER_THING = regex(r"(?i)cheaper|costs?\b|\benergy\b|\bper (?:\w+ )?token")
_CALLS = regex(
    r"(?i)\b(\d{1,3})(?: times\b(?! (?:the|as|more|less|faster|slower))| (?:calls|launches|layers)|-layer)\b"
)
_OFF_TIME = regex(r"(?i)^\W*(?:off|less|shorter|reduction \w\w|lower)\b[^.;]*\b(?:time|latency|hours|duration)\b")
_LEFT_OUT = regex(r"(?i)\b(?:without|excluding|except|leav\w+ out|left out|omitting|ignoring)\b")
_WHOLE = regex(r"(?i)\b(?:whole|total|in all|(?:al)?together|end[- ]to[- ]end|adds? up|sum)\b")
_SLIPS = (1e3, 1e-3)
_AT = regex(r"(?i)\bat (?:(?:the|its|a|full|peak|all) )*$")  # "At 2039 GB/s it takes 44 us to read it"
_BOUND = regex(r"(?i)\b(?:floor|bound|least|roofline|ideal|limit|theor\w*|predict\w*|expected|estimate\w*)\b")
_DENIED = regex(
    r"(?i)(?:\bnot|n't|\bnever|rather than|instead of|\bfar from|short of) (?:(?:the|a|an|quite|full) )*\W*$"
)
_ROWS = rf"(?i)\b(?:the|all) (\d+|{'|'.join(NUMBERS)})\b"
_OVER = regex(r"(?i)\b(?:over|across|all|geo\w*|on average|of the (?:\w+ )?\w+s|un-?weighted|the \w+ \w+s above)\b")


def retold(report: Report) -> Iterator[Finding]:
    """Each sentence against the tables within forty lines of it, and the direction of its own ratios."""
    spans = [(g, {r.line for r in g.rows}) for g in report.tables if 1 < len(g.rows) < 60]
    in_tables = {row.line for grid in report.tables if not grid.drawn for row in grid.rows}
    for row in report.lines_of_text:
        yield from direction(row)
        earlier = any(r and _EARLIER.search(r.text) for r in (row, row.before))
        if row.line in in_tables or IF.match(row.text) or APART.search(row.text) or _ANOTHER.search(row.text):
            continue
        above = [g for g, lines in spans if min(abs(n - row.line) for n in lines) < 40]
        long = [g for g in above if len(g.body) > 2]
        bound = any(not q.exact for q in row.of("ratio"))
        near = [g for g in above if g.drawn] or [g for g in above if bound or _named(g, row, row.text)]
        below = [g for g in near if row.block in report.sections[g.block]]  # of a heading
        yield from _slips(row, near)
        if earlier:
            continue
        yield from headlines.won(row, long)
        for q in (q for q in row.quantities if q.value.mid and not _DENIED.search(row.text[: q.start])):
            if q.exact and q.text[0] not in "+-−":
                yield from _summary(row, q, above)
            if near and not NO_RUN_OF_ONE.search(_SUPERLATIVE.sub("", q.words)) and not on_sheet(row, q):
                cells = [c for grid in report.tables for r in grid.rows for c in r.of(q.kind) if c.value.mid]
                named = [(g, rows) for g in near if (rows := _named(g, row, row.clause(q)))]
                if _UP_TO.search(row.text[: q.start]):  # of all, unless one is named right behind
                    some = re.split(r"[,;:]| and ", row.text[q.end :])[0]
                    named = [(g, rows) for g, rows in named if len(rows) == len(_named(g, row, some)) == 1]
                if q.kind in ("ratio", "percent"):
                    yield from _of_tables(row, q, cells, named or [(g, g.rows) for g in below or near], bool(below))
                elif q.kind in TYPED and q.kind != "bytes" and near[0].drawn:
                    rows = [r for _, rows in named for r in rows if len(named) == 1]
                    yield from _other_figure(row, q, cells, rows, bool(below))


def _slips(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """ "338 ms" of a row that has 338.0 µs."""
    for q in (q for q in row.of(*TYPED) if q.exact and q.plain.width < 0.02 and not _CALLS.search(row.text)):
        cells = [c for g in grids for r in g.rows for c in r.of(q.kind) if mid(c) and c.column in g.columns(q.kind)]
        rest = [mid(x) for x in row.of(q.kind) if x is not q]
        if any(q.value.meets(x, 0.005) for a, b in itertools.combinations(rest, 2) for x in (abs(a - b), a + b)):
            continue  # its sentence makes it
        held = [c for g in grids for r in _named(g, row, row.clause(q)) for c in r.of(q.kind) if mid(c)]
        held = cells if len(cells) < 9 and not held else held
        slips = [c for c in held for k in _SLIPS if (c.plain * k).meets(q.plain) and c.plain.width < 0.02]
        slips = slips if not any(c.value.meets(q.value, 0.015) for c in cells) else []
        for slip in (slips or [c for c in cells if q.kind == "bandwidth" and _in_bits(c, q)])[:1]:
            message = f"line {slip.line} has {si(mid(slip), UNIT_OF.get(q.kind, ''))}, not {q.text}: in which unit?"
            yield finding(QUESTION, "unit", message, q, slip)


def _in_bits(a: Quantity, b: Quantity) -> bool:
    """Whether two figures have the same digits, the one in bits, the other in bytes."""
    off = mid(a) / mid(b)
    return abs(digits(a) / digits(b) - 1) < 0.003 and min(abs(off / 8 - 1), abs(off * 8 - 1)) < 0.01


def _other_figure(row: Row, q: Quantity, cells: list[Quantity], named: list[Row], heading: bool) -> Iterator[Finding]:
    """A figure that the named row has otherwise, or that is more than any row's."""
    worked_out = q.kind in TIMES and any(on_sheet(row, x) and _AT.search(row.text[: x.start]) for x in row.of(*RATES))
    named = named if q.exact and not worked_out else []
    held = [c for r in named for c in r.of(q.kind) if c.value.mid and not _BOUND.search(c.label)]
    sums = [x for a, b in itertools.combinations(map(mid, held), 2) for x in (abs(a - b), a + b)]
    adds = q.kind in ("time", "bytes") and len(cells) < 24
    sums += [mid(a) + mid(b) for a, b in itertools.combinations(cells, 2)] if adds else []
    close = min(held, key=lambda c: abs(math.log(mid(c) / mid(q))), default=q)
    same = any(c.value.meets(q.value, 0.015) for c in cells) or any(close.value.meets(x.value) for x in row.of(q.kind))
    same |= any(q.value.meets(x, 0.03) for x in sums)
    most = max(cells, key=lambda c: c.value.hi, default=q)
    top = most.value.hi * (max(gpu_counts(row)) if most.per_device and not q.per_device else 1.0)
    same |= bool(re.match(r"(?:, ?\d[\d.]*){2}", row.text[q.end :]))  # "ms: 9.1, 8.4, 8.4" are runs of their own
    # The parts of the row's figure; another run ("with a flush", "alone").
    same |= len(parts := row.of(q.kind)) > 2 and any(c.value.meets(sum(map(mid, parts)), 0.02) for c in held)
    if EQUATION.search(row.text[: q.start]):
        return
    if not same and close is not q and 0.4 < mid(close) / mid(q) < 2.5:
        message = f"line {close.line} has {close.text}, not {q.text}: is it of the same row?"
        yield finding(QUESTION, "retold", message, q, close)
    elif q.kind not in RATES or len(cells) < 3 or not (heading or _BEST.search(words_near(row, q, 48, 24))):
        return
    elif 1.04 * top < q.value.lo < 3 * top and not MEAN.search(row.text):
        message = f"{q.text} is more than {most.text}, the most of any row: which run is it?"
        yield finding(QUESTION, "headline", message, q, most)


def _of_tables(
    row: Row, q: Quantity, cells: list[Quantity], held: list[tuple[Grid, list[Row]]], heading: bool
) -> Iterator[Finding]:
    """A gain that no two figures of a table make, or that is more than all that they make."""
    kinds, words = [x.kind for x in row.of(*TYPED) if not on_sheet(row, x)], words_near(row, q, 24, 24)
    of_row = any(MEAN.search(r.label) for g, rows in held if rows is not g.rows for r in rows)  # a row of medians
    mean = MEAN.search(row.text.replace("_", " ")) and not of_row
    # "72 % of the hours" and a utilisation are no gains.
    share = re.match(r"\W*of\b", row.text[q.end :]) and not OUTCOME.search(row.text[: q.start][-24:])
    share = q.kind == "percent" and (share or any(r and _SHARE.search(r.text) for r in (row, row.before)))
    if mean or share or any(c.value.meets(q.value, 0.015) for c in cells) or any(kinds.count(k) > 1 for k in kinds):
        return
    told = [x for x in row.of(*TYPED) if x.exact and x.value.width < 0.02]
    same = [of for of in held if any(mid(c) == mid(x) for r in of[1] for x in told for c in r.of(x.kind))]
    held = same if len(same) == 1 else held  # the one table of which the sentence tells a figure
    named = held[0][1] is not held[0][0].rows
    two = named and sum(len(rows) for _, rows in held) > 1  # rows that it names
    beside = words_near(row, q, 400 if _UP_TO.search(row.text[: q.start]) else 48, 24)
    gain = OUTCOME.search(beside) or _TIMES_THE.match(row.text[q.end - 6 :])
    if len(row.of("ratio", "percent")) > 3 or not (two or gain):
        return
    speed, memory = re.search(r"(?i)fast|slower|speed|throughput|latency", words), re.search("(?i)memory|small", words)
    typed = [k for k in TYPED if (k != "bytes" or memory or not speed) and (k == "bytes" or not memory or speed)]
    off_time = _OFF_TIME.match(row.text[q.end :])  # of 1.6 times the rate 60 % are no saving of time
    typed = [*TIMES] if off_time else typed
    ranked = re.search(r"\bp\d\d\b", row.text[end_before(row, q) : q.start].lower())
    if ranked and named and not any(ranked[0] in r.label.lower() for _, rows in held for r in rows):
        return  # "p99 fell by 27 %, p50 by 8 %"
    text = f" {' '.join(words_of(row.clause(q)))} "
    typed_of = [*typed, *_PRICED] if _PER_THING.search(row.text) else typed
    made = [max(x, 1 / x) for g, rows in held for x in _made(g, rows, typed_of, text, heading)]
    # Its own figures, and others of the text, may be compared with the rows and with each other.
    of_table = {r.line for g, _ in held for r in g.rows}
    near = [r for r in row.report.lines_of_text if abs(r.line - row.line) < 30 and r.line not in of_table]
    for k in typed if q.exact else ():
        rest = {mid(c) for g, rows in held for r in g.rows if r not in rows for c in r.of(k)}  # retold of other rows
        told = [x for r in near for x in r.of(k) if mid(x) and mid(x) not in rest and not on_sheet(r, x)]
        cells = [c for _, rows in held for r in rows for c in r.of(k) if mid(c)]
        change = change_of(row, q, True, 40)
        if any(may_be(q, a.value / b.value, change, 0.01) for a in told for b in (*told, *cells) if a is not b):
            return
    bare = [float(n) for n in re.findall(r"(?<![\w.,])\d+\.\d+(?![\w.])", row.text)]
    if any(may_be(q, exact(a / b), slack=0.01) for a, b in itertools.permutations(filter(None, bare), 2)):
        return  # "2.481 and 2.484, a gap of 0.12 %"
    up_to = _UP_TO.search(row.text[: q.start])
    bound = not q.exact or up_to or _BEST.search(words_near(row, q, 48, 24))
    columns = [
        (c, rows) for g, rows in held for c in g.columns(q.kind) if q.kind == "ratio" or _GAINED.search(g.header[c])
    ]
    gains = [mid(x) for c, rows in columns if up_to for r in rows if (x := r.figure(c, q.kind))]
    made = gains if len(gains) > 2 and q.kind == "ratio" else made  # a column has them all
    more = (bound or heading) and q.kind == "ratio" and mid(q) <= 50 and made and q.value.lo > 1.04 * max(made)
    slower = re.match(r"\W*slower\b", row.text[q.end :])  # by more time, or by less in a time
    change = "loss" if off_time else "" if slower else change_of(row, q, True, 40)
    # Of rows that it does not name it speaks right beside them.
    close = any(-5 < row.line - r.line < 5 for r in held[0][0].rows)
    # "170 % faster" beside a cell of 1.70x, wherever it stands.
    close |= q.kind == "percent" and change == "change" and any(q.value.meets(x) for x in made)
    if more or (made and not bound and (named or close) and not any(may_be(q, exact(x), change, 0.04) for x in made)):
        rule = "headline" if more else "retold"
        gains = [mid(q)] if q.kind == "ratio" else [1 + mid(q), 1 / max(1 - mid(q), 0.01)]
        off, best = min((abs(math.log(x / g)), x) for x in made for g in gains if x > 0)
        if off > (1.1 if heading else 0.5):
            return  # it is of something else
        message = f"no two figures of the table make {q.text}, the nearest {best:.3g}x: which rows?"
        yield finding(QUESTION, rule, message, q, lines=tuple(r.line for r in held[0][0].rows[:4]))


@lru_cache(maxsize=64)
def _names(grid: Grid) -> list[list[str]]:
    """By what each row may be named: its words, and its first cells."""
    found = []
    for r in grid.rows:
        cells = (r.label.lower(), *(c.partition(": ")[2].lower() for c in r.text.split("; ")[:2]))
        head = "" if grid.drawn else r.text[: r.quantities[0].start].lower()
        cells = cells if grid.drawn else (head, head.split()[0] if head.split() else "")
        names = [" ".join(words_of(re.sub(r"\(.*?\)|, [mµu]?s$", "", c) or c)) for c in cells]
        found.append([n for n in names if re.search(r"..|[a-z]", n)])
    return found


def _named(grid: Grid, row: Row, clause: str) -> list[Row]:
    """The rows that a sentence names by a cell of theirs, or else by a figure."""
    clause = re.sub(r"(?i)\btime to (?:the )?first token\b", "ttft", clause)
    clause = re.sub(r"(?i)\btime per (?:output )?token\b", "tpot", clause)
    text, found, both = f" {' '.join(words_of(clause))} ", [], []
    for r, names in zip(grid.rows, _names(grid), strict=True):
        # "p50 TTFT" of a row "TTFT p50"
        own = [n for n in names if f" {n} " in text or (n.count(" ") == 1 and f" {' '.join(n.split()[::-1])} " in text)]
        found.append(max(own, key=len, default=""))
        both += [r] if len({*own}) > 1 else []
    # "ours" within "ours fp8" names no row.
    sizes, longer = facts(clause).sizes.items(), {n for of in found for n in found if of != n and f" {of} " in f" {n} "}
    rows = [r for r in grid.rows if any(r.own.get(n) == v for n, v in sizes)]
    only = {of: bool(of) and not any(f" {of} " in f" {n} " for n in longer - {of}) for of in found}
    rows = rows or [r for r, of in zip(grid.rows, found, strict=True) if only[of]]
    told = [q for q in row.of(*TYPED) if q.value.width < 0.1 and q.text in clause]
    rows = rows or [
        r for r in grid.rows if any(q.kind == c.kind and c.value.meets(q.value) for c in r.quantities for q in told)
    ]
    # "With 6 sequences TP2 gives …" is not of the row that has 47.
    counts = [(m[2].lower(), float(m[1])) for m in re.finditer(r"(?<![\d.,])(\d+) ([a-z]{4,}s)\b", clause)]
    other = {id(r) for r in rows for noun, n in counts for name, v in r.bare.items() if name.endswith(noun) and v != n}
    rows = [r for r in rows if id(r) not in other]
    return rows if len(rows) < 4 else both if len(both) < 4 else []


def _made(grid: Grid, rows: Iterable[Row], kinds: list[str], text: str, alone: bool = False) -> list[float]:
    """The quotients of two figures of a row, and, where the text names no column and rows do not stand `alone`, of a
    row's and another's in its column."""
    found = [mid(c) for r in rows for c in r.of("ratio") if mid(c)]
    names = [" ".join(words_of(re.sub(r"\(.*?\)| v?\d[\d.]*", "", h))) for h in grid.header[1:]]  # "GCC 13.2 (ms)"
    named = any(len(n) > 2 and f" {n} " in text for n in names)
    for r, kind in itertools.product(rows, kinds):
        held = [c for c in r.of(kind) if mid(c)]
        # Another size is another problem, another percentile another measure.
        ranked = re.search(r"(?i)\b(?:p\d\d|mean|median|avg)\b", r.label) and rows is not grid.rows
        other = r.own and not any(f" {n} " in text for n in (*r.own, "from"))
        apart = len(held) > 1 and (alone or named or ranked or other)
        told = [*rows] if rows is not grid.rows else []
        below = [c for s in grid.rows if s is not r and (not apart or s in told) for c in s.of(kind) if mid(c)]
        beside = ((a, b) for a in held for b in (*held, *(c for c in below if c.column == a.column)) if a is not b)
        found += [mid(a) / mid(b) for a, b in beside]
    return found


def _columns(q: Quantity, grids: list[Grid]) -> list[tuple[Grid, list[Quantity]]]:
    columns = [(g, [x for r in g.body if (x := r.figure(c, q.kind))]) for g in grids for c in g.columns(q.kind)]
    return [(g, held) for g, held in columns if len(held) > 2 or _whole(g)]


def _summary(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    """What is called the mean of a column, or the total of the one column of a table right above."""
    past = end_before(row, q)
    if _LEFT_OUT.search(row.text) or re.match(r", ?(?:and )?\d", row.text[q.end :]):
        return  # of some rows; one of a list
    mean = MEAN.search(row.text[past : q.start][-60:].replace("_", " ")) and _OVER.search(row.text)
    mean = mean or ON_AVERAGE.match(row.text, q.end)
    total = not mean and q.kind in ("time", "bytes", "money", "energy")
    if total:
        total = bool(_WHOLE.search(f"{q.label[-40:]}|{row.text[q.end : q.end + 16]}"))
        above = (g for g in grids if (g.drawn and 0 < row.line - g.rows[-1].line < 5) or g.block == row.block - 1)
        grids = [g for g in above if not any(r.summary for r in g.rows)]
    columns = _columns(q, grids) if mean or total else []
    if total and len(columns) > 1:  # of the column that it names, in a table whose shares say that no row is left out
        text, heads = row.text.lower(), [re.sub(r" *\(.*?\)", "", g.header[of[0].column]).lower() for g, of in columns]
        named = [(c, h) for c, h in zip(columns, heads, strict=True) if {*words_of(h)} <= {*words_of(text)}]
        first = [(c, h) for c, h in named if text.startswith(h)]
        columns = [c for c, h in first or named if _whole(c[0], h)]
    if not 0 < len(columns) < 3 - total or (total and any(map(_unfilled, columns))):
        return
    geo = bool(mean) and "geo" in row.text[past : q.start].lower()
    made = [(m, held) for _, held in columns for m in may_come_to([x.plain for x in held], total, geo)]
    for g, held in columns if mean else ():
        by_shares = [(m, held) for m in weighted(g.body, held)]
        plain = re.search(r"(?i)\b(?:plain|simple|arithmetic|un-?weighted)\b", row.text)
        made = made if plain else by_shares if by_shares and _whole(g) else [*made, *by_shares]
    m, held = min(made, key=lambda each: abs(each[0].mid / q.value.mid - 1))
    least = max(x.value.mid for x in held) if total else 0.0
    if 0.6 < m.mid / q.value.mid < 1.8 and q.value.mid > least and not any(q.value.meets(x, 0.013) for x, _ in made):
        name = f"the {'sum' if total else 'mean'} of lines {held[0].line}–{held[-1].line}"
        message = f"{name} is {si(m.mid, UNIT_OF.get(q.kind, ''))}, not {q.text}"
        # A geometric mean of so many rows as there are can be nothing else.
        counts = {float(NUMBERS.get(w.lower(), w)) for w in re.findall(_ROWS, row.text)} if geo else set()
        other = q.value.lo > max(map(mid, held)) or q.value.meets(sum(map(mid, held)) / len(held))
        sure = len(held) in counts and other
        ask = "" if sure else ": which rows does it count?"
        yield finding(INCONSISTENT if sure else QUESTION, "total", message + ask, q, lines=tuple(x.line for x in held))


def _unfilled(of: tuple[Grid, list[Quantity]]) -> bool:
    """Whether a row of the column has no figure that adds to the total."""
    grid, held = of
    return sum(x is not None and x.exact for x in grid.column(held[0].column)) < len(grid.rows)


def _whole(grid: Grid, name: str = "%") -> bool:
    """Whether shares, those of the column `name` where the table has such, make a whole."""
    columns = grid.columns("percent")
    own = [c for c in columns if grid.header[c].lower().startswith(name)]
    shares = [[q for r in grid.body for q in r.of("percent") if q.column == c] for c in own or columns]
    return any(0.99 < sum(q.value.mid for q in of) < 1.01 for of in shares if len(of) == len(grid.body))
