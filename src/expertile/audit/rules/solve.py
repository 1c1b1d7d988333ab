"""Every law in a record, a sentence or a small table's row: a derived figure that no two others make."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from expertile.audit.facts import DIGITS
from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity, is_tpot, same_statistic
from expertile.audit.records import digits
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.hardware import EQUATION
from expertile.audit.rules.terms import COMMS, GIB, IF, SINGLE, WRITTEN, Law, combine, derived, drafts, law_of, terms
from expertile.audit.rules.work import ONE, Term, total_of
from expertile.audit.units import UNTYPED, product

Held = tuple[list[Term], ...]
_ONE_WAY = regex(
    r"(?i)to (?:the )?(?:device|gpu|host|cpu)|h2d|d2h|\bmove[sd]\b|traffic|transferred|copied|"
    r"\b(?:read|load)(?:s|ing)?\b"
)
_BOTH_WAYS = regex(r"(?i)read ?(?:and|\+|&|/|plus) ?writ|\br\+w\b|\brw\b|\bcopy\b(?! to| from)")
_HENCEFORTH = regex(r"(?i)\W*(?:th(?:at|is|us)|which|hence|therefore|so)\b")
_APART = regex(r"(?i)[;?!]|\. |\b(?:limit|bound|ceiling|at best|would|could)\b")
_BOTH = regex(r"(?i)\b(?:both|total|in all)\b")
WALL = regex(
    r"(?i)^(?!.*(?:mean|avg|average|p\d\d|median|(?<!total[_ ])latency|delta))"
    r".*(?:duration|elapsed|wall|time|step|iter|took|takes?\b|total|finish|done|job length|\bran\b|lasted|"
    r"train\w*[ _](?:hours|days))"
)
_FACTOR = regex(r" ?[x×*·] ?\d[^=;]*= ?[\d€]")
_SIDE = regex(r"(?i)(?P<input>input|prompt)|(?P<output>output|generated)|(?P<read>reads?\b|_read)|(?P<write>writ)")


def _sure(row: Row, law: Law, combo: tuple[Term, ...]) -> bool:
    """Whether the row alone is accused."""
    held = sorted((t.figure for t in combo if t.figure), key=lambda f: f.start)
    if row.kind == "table" and law.sure == "always":
        return law.rule == "rate" or any(len(g.rows) == 1 for g in row.report.grids if g.block == row.block)
    if law.sure in ("", "always") or row.kind != "line":
        told = row.text[held[0].start : held[-1].end] if row.kind == "line" else ""  # one clause, of what was measured
        return law.sure == "always" and not _APART.search(told)
    if law.sure == "near":
        close = all(b.start - a.end < 40 for a, b in itertools.pairwise(held))
        return close and all(t.figure or t is ONE for t in combo)
    written = held[-1].kind == "bandwidth" and WRITTEN.search(row.text[: held[-1].start])
    if re.search(COMMS, f"{row.lead} {row.headings}"):
        return False
    return len(held) == 3 and bool(_ONE_WAY.search(row.said or row.text) or written)


def rows(report: Report) -> Iterator[Finding]:
    """Where one of its figures stands in the sentences around it asks."""
    mixed = {g.block for g in report.grids if any({"rate", "bandwidth"} <= _kinds(g, c) for c in range(len(g.header)))}
    few = [g for g in report.tables if len(g.rows) < 3 or (g.block in mixed and g.drawn)]
    small = [row for g in report.tables for row in g.rows if g in few or row.of("$/token", "$/item")]
    for whole in (r for r in (*report.rows, *small) if r.quantities):
        for row in whole.parts():
            alone = report.blocks[row.block].kind != "code" and not _HENCEFORTH.match(row.text)
            if (held := terms(row)) and (len(held) > 1 or not alone):
                yield from _solve(row, held)


def _kinds(grid: Grid, column: int) -> set[str]:
    return {q.kind for q in grid.column(column) if q}


def _by_kind(some: Iterable[Term]) -> dict[str, list[Term]]:
    kinds: dict[str, list[Term]] = {}
    for t in some:
        kinds.setdefault(t.kind, []).append(t)
    return kinds


def _solve(row: Row, held: tuple[Term, ...]) -> Iterator[Finding]:
    kinds, around = _by_kind(held), _by_kind(_around(row))
    if len(of := around.get("flop", [])) == 1 and "flop" in kinds and not any(t.figure for t in kinds["flop"]):
        kinds["flop"] = of  # that the text states
    # Of inputs and outputs, reads and writes around it: those of the side that the row names.
    if side := _side(row.text) if row.kind == "line" else "":
        its = {kind: [t for t in some if t.figure and _side(t.figure.label) == side] for kind, some in around.items()}
        around = {kind: its[kind] if len(its[kind]) == 1 else some for kind, some in around.items()}
    # "The 70B has 70.6B parameters" lends one number; as many tokens read as made are two.
    alike = {k: some for k, some in around.items() if len({_side(t.figure.label) for t in some if t.figure}) < 2}
    one = {k for k, some in alike.items() if all(t.value.meets(some[0].value, 0.01) for t in some)}
    around = {k: some[-1:] if k in one else some for k, some in around.items()}
    lent = {kind: some for kind, some in around.items() if kind not in kinds and len(some) == 1}
    # Of a log, two figures; of the sentence before, two that stand together.
    hence = row.report.blocks[row.block].kind != "prose" or _HENCEFORTH.match(row.text)
    most = 2 if hence or len({t.lines for (t,) in lent.values()}) == 1 else 1
    pool, seen = {**kinds, **lent}, set[frozenset[str]]()
    for (x, y), sign in itertools.product(itertools.permutations(pool, 2), (1, -1)):
        c = product(x, y, sign)
        key, of_c = frozenset((x, y, c)), [ONE] if c == "ratio" and sign > 0 else pool.get(c)
        borrowed = key & lent.keys()
        own = len(borrowed) < 2 or (most == 2 >= len(borrowed) and derived((x, y, c)) not in borrowed)
        # Beside other times a rate of another line is of one of them.
        own &= derived((x, y, c)) not in borrowed or not any(len(around.get(k, ())) > 1 for k in key - borrowed)
        if of_c and own and key not in seen:
            seen.add(key)
            some = (pool[x], pool[y], of_c) if sign > 0 else (pool[y], of_c, pool[x])
            yield from _check(row, some, bool(borrowed))


def _around(row: Row) -> list[Term]:
    """Figures of the lines around a line, of the sentences around a sentence; and the report's only price."""
    report, kind = row.report, row.report.blocks[row.block].kind
    several = kind == "code" and len({q.kind for q in row.quantities} - {*UNTYPED}) > 1  # a log's line about itself
    block = [r for r in report.lines_of_text if r.block == row.block and r.text != row.text]
    lines = [r for r in block if abs(r.line - row.line) < (14 if kind == "code" else 4)]
    if several and row.kind == "line":  # but for the one amount that its block states
        amounts = [t for r in block for t in terms(r) if t.figure and t.kind in ("bytes", "flop", "tokens", "items")]
        close = [t for t in amounts if any(0 < row.line - n < 4 for n in t.lines)]
        return next((some for some in (amounts, close) if len({t.kind for t in some}) == len(some) > 0), [])
    lines = [] if row.kind != "line" else lines or block * (kind == "prose")
    # "… for the same array" lends what the sentence before says of it; else one of several kinds is about itself.
    same = re.search(r"(?i)\bsame\b|\bthis (?:is|costs?|makes)\b|\b(?:it|we|ours) (?:takes?|took|need\w*)\b", row.text)
    timed = {"time", "s_per_item", "s_per_token"}
    own = {q.kind for q in row.quantities}
    own = own if same else timed if own & timed else set()
    lines = [r for r in lines if not IF.match(r.text)]
    near: list[Term] = []
    for r in lines:
        some = [t for t in terms(r) if t.figure and (t.kind != "params" or kind == "list")]
        near += some if kind == "code" or len({t.kind for t in some}) == 1 else []
    spoken = row.kind == "line" and (kind == "prose" or (kind == "list" and re.search(r" (?:this|that|it) ", row.text)))
    last = [t for t in terms(row.before) if t.figure] if spoken and row.before else []
    last = [] if row.before and IF.match(row.before.text) else last
    goes_on = len(last) == 2 or (len(last) == 3 and (same or _HENCEFORTH.match(row.text)))
    of_it = [t.kind for t in last] == ["params"] and row.of("B/param")
    near += [t for t in last if (goes_on or of_it) and t.kind not in own]
    # Of a log's times and bytes the one that is of the whole.
    for whole, form in (("time", WALL), ("bytes", _BOTH)) if kind == "code" else ():
        wall = [t for t in near if t.kind == whole and t.figure and form.search(t.figure.label)]
        near = [t for t in near if t.kind != whole or len(wall) != 1 or t is wall[0]]
    priced = any(q.kind.startswith("$/") for q in row.quantities) and not any(t.kind == "$/s" for t in near)
    spent = not priced and {"money", "gpu*s"} <= {q.kind for q in row.quantities}
    rows = [r for r in report.all_rows if r is not row and r.of("$/s", "$/gpu*s")] if priced or spent else []
    prices = {t.value.mid: t for r in rows for t in terms(r) if t.kind == ("$/gpu*s" if spent else "$/s")}
    return near + [*prices.values()] * (len(prices) == 1)


def _multiples(row: Row, names: tuple[str, ...] = ("batch", "gpus", "accum", "concurrency")) -> tuple[float, ...]:
    """Counts by which a figure of the row may be multiplied or divided: GPUs, sequences, small numbers beside."""
    of = row.report.everything.of
    named = [n for name in names for n in {*of(name), row.own.get(name, 1)} if n > 1]
    several = {prod(some) for k in (1, 2, 3) for some in itertools.combinations(named, k) if len(named) < 9}
    beside = re.findall(r"(?<![\w.,:-])(\d{1,3})(?![\w.,%:-]|\s(?:ms|s|x|tok\w*)\b)", row.text)
    beside += [DIGITS[w] for w in re.findall(r"[a-z]+", row.text.lower()) if w in DIGITS]
    counts = {n for n in (*several, *map(float, beside), *named) if n > 0}
    return tuple(dict.fromkeys((1.0, *counts, *(1 / n for n in counts))))


def _check(row: Row, given: Held, lent: bool) -> Iterator[Finding]:
    """a × b = c, of every a, b and c in the row."""
    law, held = law_of(*(some[0].kind for some in given)), tuple([*some] for some in given)
    figures = [t.figure for some in held for t in some if t.figure]
    kinds = {some[0].kind for some in held}
    passes = lent and law.rule == "tokens/s" and drafts(row.report)  # which make several tokens each
    if passes or ("carbon" in kinds and "pue" in row.report.text):
        return  # with which `formulas` counts
    text = re.sub(r"requests? ?(?:/|per)", "", row.text) if row.kind == "line" else ""
    if any(f.noun == "request" and f.kind == "items" for f in figures):
        text = re.sub(r"(?i)requests?", "", text)  # they are what is counted
    if not re.search(r"(?i)decod|generat|output", text):
        prompts = "(?i)prefill|prompt|ttft|(?:time to )?first token" if "prefill" in text else "(?i)prefill"
        text = re.sub(prompts, "", text)
    lent_of = " ".join(f.words for f in figures if f not in row.quantities)
    if lent_of and re.search(law.unless, lent_of):
        return
    counted = law.rule == "tokens/s" and law.sure == "near" and row.report.everything.of("concurrency")
    algorithm = law.rule == "bandwidth" and any(re.search(r"(?i)\balg", f.label) for f in figures)  # bytes in a time
    rates = any(some[0].kind.endswith("_per_s") for some in held)
    batch = next((t for some in held for t in some if t.kind == "items" and not t.figure), None)
    if batch and ((not rates and batch.value.mid == 1) or any(f.after.startswith("each") for f in figures)):
        return  # a batch of one, of which the others are not; "151 s each" is of other things
    if prod(map(len, held)) > 12 or (re.search(law.unless, text) and not counted and not algorithm):
        return
    for some in held:
        # What is read and what is written, together.
        if some[0].kind in ("bytes", "tokens", "token/item") and 1 < len(some) < 4:
            some.append(total_of(some))
    made = derived(tuple(some[0].kind for some in held))
    at = next(i for i, some in enumerate(held) if some[0].kind == made)
    first = held[at][0].figure
    written = first and WRITTEN.search(row.text[: first.start])
    said = row.said or row.text
    around = " ".join([said, *(row.report.lines[f.line - 1] for f in figures if f not in row.quantities)])
    one_way = written or ((lent or _ONE_WAY.search(said)) and not _BOTH_WAYS.search(around))
    also = GIB if law.rule == "bandwidth" and one_way else law.also
    each = any(some[0].kind.startswith("B/") for some in held)  # GPUs do not multiply what is held
    counts = _multiples(row, ("batch", "concurrency")) if each else _multiples(row)
    factors = tuple(f * n for f in also for n in (counts if law.several else (1.0,)))
    if lent and each and row.facts.of("formats"):  # which may be another than the lent figure's
        factors += tuple(f * n for f in factors for n in (0.5, 2.0))
    if not row.facts.of("gpus"):  # any number of them that the report has
        gpus = [t.value.mid for some in held for t in some if t.kind == "gpu"]
        factors += tuple(f * n / g for f in factors for g in gpus for n in row.report.everything.of("gpus"))
    # Of one of so many GPUs that nobody says, it is any part.
    several = law.several and not row.report.everything.of("gpus")
    part = several and (lent or any(t.figure and not t.figure.per_device for t in held[at]))
    targets, broken = [t for t in held[at] if t.figure and not (part and t.figure.per_device)], []
    good = [c[at] for c in itertools.product(*held) if _fits(c, factors)]
    if good and row.kind == "line" and len(targets) > 1:
        return  # the others are of something else
    for target in targets:
        # Beside one that fits, what counts otherwise: reads and writes, all GPUs.
        if any(target.value.meets(t.value * f, 0.03) for t in good for f in law.also if t is not target):
            continue
        own = target.figure if target.figure in row.quantities else None
        if own and (EQUATION.search(row.text[: own.start]) or _FACTOR.match(row.text, own.end)):
            continue  # which `equations` works out, and what is multiplied there
        if target.figure and row.kind == "line" and _otherwise(row, target.figure):
            continue
        combos = [c for c in itertools.product(*held) if c[at] is target and _one_run(row, law, c)]
        off = [c[0].value * c[1].value / c[2].value for c in combos]
        mixed = any(t.kind == "gpu" for c in combos for t in c)
        if mixed and off and min(x.lo for x in off) <= 1 <= max(x.hi for x in off):
            continue  # of several numbers of GPUs, one after the other
        lengths = {n for c in combos for t in c if not t.figure and t.kind == "token/item" for n in t.lines}
        if at == 2 and off and off[0].lo > 1 and any("random" in row.report.lines[n - 1] for n in lengths):
            continue  # they are drawn up to this one
        whole = off and target.figure and "otal" in target.figure.label
        if whole and ((len(lengths) == 1 and off[0].hi < 1) or "s_per_token" in kinds):
            continue  # of inputs and outputs, of which one length is stated, or the time of an output
        # Far off, and not by its prefix, it is of something else.
        worked_out = lent or any(t.kind in ("items", "tokens") and not t.figure for c in combos for t in c)
        ways = ((1.0,) if worked_out else factors) if row.kind != "table" else ()
        far = ways and not any(
            f.meets(n, 30.0) or any(f.meets(n * s, 0.03) for s in (1e3, 1e-3)) for n in ways for f in off
        )
        others = (c for combo in combos for c in _beside(row, combo)) if lent else ()
        if any(_fits(c, factors) for c in (*combos, *others)):
            continue
        if combos and not (far or _steady(row, combos[0], factors)):
            nearest = min(zip(off, combos, strict=True), key=lambda of: abs(math.log(of[0].mid)))
            broken.append(nearest[1])  # a total is of inputs and outputs
    two = lent and len(targets) == 2 and targets[0].text != targets[1].text
    if broken and len(broken) in (1, len(targets)) and not two:
        # "14,042 questions; at 31 questions per second": all of them, or some?
        known = all(len(some) == 1 and (not (f := some[0].figure) or f.noun != "other") for some in held)
        sure = known and not lent and all(t.near and t.named for t in broken[0])
        yield _broken(law, sure and (made == "rate" or _sure(row, law, broken[0])), broken[0], at)


def _otherwise(row: Row, q: Quantity) -> bool:
    """Whether two others of a sentence's figures make one: "76k reads/s of 4 KiB each, 311 MB/s" beside a latency."""
    pairs = itertools.permutations([x.plain for x in row.quantities if x is not q and x.value.mid], 2)
    return any(q.value.meets(made, 0.005) for x, y in pairs for made in (x * y, x / y))


def _beside(row: Row, combo: tuple[Term, ...]) -> Iterator[tuple[Term, ...]]:
    """The terms with another figure, of a table right above, in the place of a lent one."""
    rows = [r for g in row.report.grids if g.block == row.block - 1 for r in g.rows]
    for i, t in enumerate(combo):
        others = (q for r in rows for q in r.of(t.kind) if q.value.mid) if t.figure not in row.quantities else ()
        yield from ((*combo[:i], replace(t, value=q.value), *combo[i + 1 :]) for q in others)


def _side(label: str) -> str:
    """The one of input and output, of read and write, that a label names."""
    sides = {m.lastgroup or "" for m in _SIDE.finditer(label)}
    return sides.pop() if len(sides) == 1 else ""


def _one_run(row: Row, law: Law, combo: tuple[Term, ...]) -> bool:
    times = [t.figure.label for t in combo if t.figure and t.kind == "time"] if row.kind != "line" else []
    one_way = {t.kind for t in combo} == {"bandwidth", "bytes", "time"}
    if one_way and any(t.kind == "time" and t.figure and "latency" in t.figure.label.lower() for t in combo):
        return False  # of one message
    batch = any(t.kind == "items" and not t.figure for t in combo)  # its latency is that of the whole
    if any(re.search(law.unless, label) or (law.several and not batch and not WALL.search(label)) for label in times):
        return False
    labels = [t.figure.label for t in combo if t.figure]
    if len({_side(x) for x in labels} - {""}) > 1:
        return False
    nouns = {t.figure.noun for t in combo if t.figure and t.figure.noun}
    if any(t.figure and t.figure.noun == "other" and t.kind == "s_per_item" for t in combo):
        return False  # of other things
    steps = any(t.figure and t.figure.noun == "step" and t.kind.startswith("items") for t in combo)
    each = [t.figure for t in combo if t.figure and t.kind in ("s_per_item", "token/item")]
    if batch and any(f.noun in ("step", "it", "iteration") or re.search("(?i)step", f.label) for f in each):
        return False  # which is no sample
    batched = nouns == {"step", "sample"} and row.size("batch") and not steps
    return (len(nouns) < 2 or bool(batched)) and all(same_statistic(x, y) for x, y in itertools.combinations(labels, 2))


def _fits(combo: tuple[Term, ...], factors: tuple[float, ...]) -> bool:
    f = combo[0].value * combo[1].value / combo[2].value
    return not f.beyond(1.1) or any(f.meets(n * x, 0.08 if n == 1 else 0.03) for n in factors for x in combo[2].also)


def _steady(row: Row, combo: tuple[Term, ...], factors: tuple[float, ...]) -> bool:
    """Whether sequences at once make no more tokens than their time per output token allows; the prompts cost more."""
    of = [t.figure for t in combo if t.figure and t.kind == "s_per_token"]
    unknown = max(factors) == 1 and not SINGLE.search(f"{row.words} {row.lead}")
    few = unknown or (combo[0].value * combo[1].value).lo < 1.05 * max(factors)
    lost = (combo[0].value * combo[1].value).hi < 0.1  # no prompt costs so much
    once = combo[0].value.mid * combo[1].value.mid / combo[2].value.mid  # sequences, less what the prompts took
    near = any(0.8 < once / n < 1.03 for n in factors if n > 1)
    known = (c := row.size("concurrency")) and c.near
    if any(map(is_tpot, of)) and (near or (once > 2 and not known and len(row.quantities) > 5)):
        return True
    return combo[2].kind == "ratio" and any(map(is_tpot, of)) and few and not lost


def shown_as(value: float, q: Quantity) -> str:
    """A value as that of `q` is printed: with its kind's unit, else in the figure's own."""
    return si(value, UNIT_OF[q.kind]) if q.kind in UNIT_OF else f"{value / q.value.mid * digits(q):.4g}"


def _broken(law: Law, sure: bool, combo: tuple[Term, ...], at: int) -> Finding:
    off, figure = (combo[0].value * combo[1].value / combo[2].value).mid, combo[at].figure
    assert figure is not None
    would = figure.value.mid * off if at == 2 else figure.value.mid / off
    others = [t for i, t in enumerate(combo) if i != at]
    made = combine(others[0], others[1], 1) if at == 2 else combine(others[1], others[0], -1)
    ask = "" if sure else ": is this the same run?"
    message = f"{made.text} is {shown_as(would, figure)}, not {figure.text}{ask}"
    beside, lines = [t.figure for t in others if t.figure], tuple(n for t in combo for n in t.lines)
    return finding(INCONSISTENT if sure else QUESTION, law.rule, message, figure, *beside, lines=lines)
