"""Every law in a record, a sentence or a small table's row: a derived figure that no two others make."""

import itertools
import re
from collections.abc import Iterator
from math import prod

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import exact
from expertile.audit.quantity import is_tpot, same_statistic
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import on_sheet
from expertile.audit.rules.terms import GIB, NO_RUN, WRITTEN, Law, derived, law_of, multiples, terms, trained_work
from expertile.audit.rules.work import Term
from expertile.audit.units import UNTYPED, product

Held = tuple[list[Term], ...]
_ONE_WAY = re.compile(
    r"(?i)to (?:the )?(?:device|gpu|host|cpu)|h2d|d2h|\bmove[sd]\b|traffic|transferred|copied|"
    r"\b(?:read|load)(?:s|ing)?\b"
)
_BOTH_WAYS = re.compile(r"(?i)read ?(?:and|\+|&|/|plus) ?writ|\br\+w\b|\brw\b|\bcopy\b(?! to| from)")
_HENCEFORTH = re.compile(r"(?i)\W*(?:th(?:at|is|us)|which|hence|therefore|so)\b")
_HENCE = re.compile(r"(?i)\b(?:i\.e\.|that is|which is)|=|→|batch of [\d,]+ in ")


def _sure(row: Row, law: Law, by: dict[str, Term]) -> bool:
    """Whether the row alone is accused."""
    figures = [t.figure for t in by.values() if t.figure]
    first, second = (by[k].figure for k in law.kinds.split()[:2])
    if law.sure == "always":
        lone = row.kind != "table" or any(len(g.rows) == 1 for g in row.report.grids if g.block == row.block)
        return law.rule == "rate" or lone
    if row.kind != "line" or not law.sure:
        return False
    if law.sure == "close":
        return bool(first and second) and abs(first.start - second.start) < 40  # type: ignore[union-attr]
    if law.sure == "hence":
        return by["items"].figure is not None if "items" in by else bool(_HENCE.search(row.text))
    if len(figures) < 3 or not first or re.search(NO_RUN, first.words):
        return False
    written = max(f.start for f in figures) == first.start and WRITTEN.search(row.text[: first.start])
    return bool(_ONE_WAY.search(row.text) or written)


def rows(report: Report) -> Iterator[Finding]:
    """Where one of its figures stands in the sentences around it asks."""
    small = [row for grid in report.tables for row in grid.rows if len(grid.rows) < 3 or row.of("$/token", "$/item")]
    for whole in (*report.rows, *small):
        for row in whole.parts():
            alone = report.blocks[row.block].kind != "code" and not _HENCEFORTH.match(row.text)
            if (held := terms(row)) and (len(held) > 1 or not alone):
                yield from _solve(row, held)


def _by_kind(some: tuple[Term, ...] | list[Term]) -> dict[str, list[Term]]:
    kinds: dict[str, list[Term]] = {}
    for t in some:
        kinds.setdefault(t.kind, []).append(t)
    return kinds


def _solve(row: Row, held: tuple[Term, ...]) -> Iterator[Finding]:
    kinds, around = _by_kind(held), _by_kind(_around(row))
    if len(of := around.get("flop", [])) == 1 and kinds.get("flop") and not any(t.figure for t in kinds["flop"]):
        kinds["flop"] = of  # that the text states
    lent = {kind: some for kind, some in around.items() if kind not in kinds and len(some) == 1}
    # Of a log, two figures; of the sentence before, two that stand together.
    hence = row.report.blocks[row.block].kind != "prose" or _HENCEFORTH.match(row.text)
    most = 2 if hence or len({t.lines for (t,) in lent.values()}) == 1 else 1
    pool, seen = {**kinds, **lent}, set[frozenset[str]]()
    for x, y in itertools.permutations(pool, 2):
        for sign in (1, -1):
            c = product(x, y, sign)
            key = frozenset((x, y, c))
            of_c = [Term("ratio", exact(1.0), "1", ())] if c == "ratio" and sign > 0 else pool.get(c)
            borrowed = key & lent.keys()
            own = len(borrowed) < 2 or derived((x, y, c)) not in borrowed
            if of_c and key not in seen and len(borrowed) <= most and own:
                seen.add(key)
                yield from _check(
                    row, (pool[x], pool[y], of_c) if sign > 0 else (pool[y], of_c, pool[x]), bool(borrowed)
                )


def _around(row: Row) -> list[Term]:
    """Figures of the sentences around a sentence, of a log's lines around one, and the report's only price."""
    report, kind = row.report, row.report.blocks[row.block].kind
    reach = 14 if kind == "code" else 4
    block = [r for r in report.lines_of_text if r.block == row.block]
    lines = [r for r in block if 0 < abs(r.line - row.line) < reach]
    if kind == "prose" and not lines:
        lines = [r for r in block if r.text != row.text]
    if row.kind != "line" or (kind == "code" and len({q.kind for q in row.quantities} - {*UNTYPED}) > 1):
        lines = []  # a log's line of several kinds is about itself
    held = [[t for t in terms(r) if t.figure] for r in lines]
    # A sentence of several kinds is about itself, the one right before goes on.
    timed = {"time", "s_per_item", "s_per_token"}
    timed = timed if any(q.kind in timed for q in row.quantities) else set()
    last = [t for t in terms(row.before) if t.figure] if kind == "prose" and row.kind == "line" and row.before else []
    # "… for the same array" lends what the sentence before says of it.
    same = re.search(r"\bsame\b|\b(?:[Ii]t|[Ww]e|[Oo]urs) (?:takes?|took|needs?|needed)\b", row.text)
    own = {q.kind for q in row.quantities} if same else timed
    goes_on = len(last) == 2 or (len(last) == 3 and (same or _HENCEFORTH.match(row.text)))
    before = [t for t in last if goes_on and t.kind not in own]
    near = [t for some in held if kind == "code" or len({t.kind for t in some}) == 1 for t in some] + before
    # Of a log's times the one that is of the whole.
    times = [t for t in near if t.kind == "time"]
    wall = [t for t in times if t.figure and kind == "code" and WALL.search(t.figure.label)]
    near = [t for t in near if t.kind != "time" or len(wall) != 1 or t is wall[0]]
    return near + [t for t in _price(row) if not any(x.kind == t.kind for x in near)]


def _price(row: Row) -> list[Term]:
    """The report's only price of an hour, for a row with costs."""
    if not any(q.kind.startswith("$/") for q in row.quantities):
        return []
    rows = [r for r in row.report.all_rows if r.of("$/s", "$/gpu*s") and r is not row]
    prices = [t for r in rows for t in terms(r) if t.kind == "$/s"]
    return prices[:1] if len({t.value.mid for t in prices}) == 1 else []


def _check(row: Row, held: Held, lent: bool) -> Iterator[Finding]:
    """a × b = c, of every a, b and c in the row."""
    law = law_of(*(some[0].kind for some in held))
    text = re.sub(r"requests? ?(?:/|per)", "", row.text) if row.kind == "line" else ""
    if any(t.figure and t.figure.noun == "request" for some in held for t in some if t.kind == "items"):
        text = re.sub(r"(?i)requests?", "", text)  # they are what is counted
    if not re.search(r"(?i)decod|generat|output", text):
        prompt = "(?i)prefill|prompt|ttft|(?:time to )?first token" if "prefill" in text else "(?i)prefill"
        text = re.sub(prompt, "", text)
    counted = law.sure == "close" and row.report.everything.of("concurrency")
    if law.rule == "bandwidth" and any(
        t.figure and re.search(r"(?i)\balg", t.figure.label) for some in held for t in some
    ):
        text = ""  # an algorithm's bandwidth is bytes in a time
    if prod(map(len, held)) > 12 or (re.search(law.unless, text) and not counted):
        return
    held = tuple([*some] for some in held)
    for some in held:
        if some[0].kind in ("bytes", "tokens") and 1 < len(some) < 4:  # what is read and what is written, together
            total, lines = sum((t.value for t in some[1:]), some[0].value), tuple(n for t in some for n in t.lines)
            some.append(Term(some[0].kind, total, " + ".join(t.text for t in some), lines))
    made = derived(tuple(some[0].kind for some in held))
    at = next(i for i, some in enumerate(held) if some[0].kind == made)
    written = any(t.figure and WRITTEN.search(row.text[: t.figure.start]) for t in held[at][:1])
    one_way = _ONE_WAY.search(row.text) and not _BOTH_WAYS.search(row.text)
    also = GIB if law.rule == "bandwidth" and (one_way or written) else law.also
    factors = tuple(f * n for f in also for n in (multiples(row) if law.several else (1.0,)))
    if lent and made == "rate" and law.rule == "product" and held[at][0].text.endswith("FLOPs"):
        return  # of one item
    broken = []
    for target in (t for t in held[at] if t.figure):
        combos = [c for c in itertools.product(*held) if c[at] is target and _one_run(row, law, c)]
        if combos and not any(_fits(c, factors) for c in combos) and not _steady(combos[0], factors):
            broken.append((target, combos[0]))
    if len(broken) != 1 and not (broken and len(broken) == sum(bool(t.figure) for t in held[at])):
        return
    combo = broken[0][1]
    near = all(len(some) == 1 for some in held) and all(t.near and t.named for t in combo) and not lent
    yield _broken(law, near and (made == "rate" or _sure(row, law, {t.kind: t for t in combo})), combo, at)


WALL = re.compile(
    r"(?i)^(?!.*(?:mean|avg|average|p\d\d|median|latency|delta)).*(?:duration|elapsed|wall|time|step|iter|took|total|finish|done)"
)


def _one_run(row: Row, law: Law, combo: tuple[Term, ...]) -> bool:
    times = [t.figure.label for t in combo if t.figure and t.kind == "time"] if row.kind != "line" else []
    batch = any(t.kind == "items" and not t.figure for t in combo)  # its latency is that of the whole
    if any(re.search(law.unless, label) or (law.several and not batch and not WALL.search(label)) for label in times):
        return False
    labels = [t.figure.label for t in combo if t.figure]
    sides = {m[0].lower() for x in labels if (m := re.search(r"(?i)input|output|prompt|generated", x))}
    if len({s.replace("prompt", "input").replace("generated", "output") for s in sides}) > 1:
        return False
    nouns = {t.figure.noun for t in combo if t.figure and t.figure.noun}
    batched = nouns == {"step", "sample"} and row.size("batch")
    return (len(nouns) < 2 or bool(batched)) and all(same_statistic(x, y) for x, y in itertools.combinations(labels, 2))


def _fits(combo: tuple[Term, ...], factors: tuple[float, ...]) -> bool:
    f = combo[0].value * combo[1].value / combo[2].value
    return not f.beyond(1.1) or any(f.meets(n * x, 0.08 if n == 1 else 0.03) for n in factors for x in combo[2].also)


def _steady(combo: tuple[Term, ...], factors: tuple[float, ...]) -> bool:
    """Whether sequences at once make no more tokens than their time per output token allows; the prompts cost more."""
    of = [t.figure for t in combo if t.figure and t.kind == "s_per_token"]
    few = max(factors) == 1 or (combo[0].value * combo[1].value).lo < 1.05 * max(factors)
    return combo[2].kind == "ratio" and any(map(is_tpot, of)) and few


def _broken(law: Law, sure: bool, combo: tuple[Term, ...], at: int) -> Finding:
    off, figure = (combo[0].value * combo[1].value / combo[2].value).mid, combo[at].figure
    assert figure is not None
    would = figure.value.mid * off if at == 2 else figure.value.mid / off
    others = [t for i, t in enumerate(combo) if i != at]
    left, right = (others[1], others[0]) if at < 2 else others
    mark = "×" if at == 2 else "in" if right.kind == "time" else "÷"
    ask = "" if sure else ": is this the same run?"
    message = f"{left.text} {mark} {right.text} is {si(would, UNIT_OF.get(figure.kind, ''))}, not {figure.text}{ask}"
    beside, lines = [t.figure for t in others if t.figure], tuple(n for t in combo for n in t.lines)
    return finding(INCONSISTENT if sure else QUESTION, law.rule, message, figure, *beside, lines=lines)


_ONE = re.compile(
    r"(?i)(?:per|each|every|a)[ -](?:gpu|[AHBL]\d{2,3}S?|user|request|stream|sequence|client|session|slot)\b|"
    r"/(?:gpu|user|req)|\beach \w+ing\b"
)
_EQUALS = re.compile(
    r"(?i)(?:^|\W)(?:i\.e\.|that is|that means|which is|equals|or|=|amounts? to|comes? to|makes)[\W]*$"
)
_SO = re.compile(r"(?i)i\.e|\bmean|that is|hence|giv|deliver|reach|aggregate|\bso\b|=|\btotal\b|\(|which|thus|\bor\b|→")


def each(report: Report) -> Iterator[Finding]:
    """A figure of one GPU or user beside that of all, and one in two units: it asks where no count lies between."""
    for row in (r for r in report.rows if r.kind == "line"):
        works = ("flop", "flop/item", "rate") if "MAC" in row.text else ("flop",)
        for kinds in (("rate",), ("bandwidth",), ("tokens_per_s",), ("items_per_s",), works):
            held = [q for q in row.of(*kinds) if q.exact and q.value.mid and not on_sheet(row, q)]
            held = held[:2] if len(kinds) > 1 else held
            if len(held) != 2 or abs(held[1].start - held[0].end) > 60:
                continue
            said = [q.per_device or bool(_ONE.search(f"{q.label[-24:]}|{q.after[:16]}")) for q in held]
            one, whole = (held[0], held[1]) if said[0] else (held[1], held[0])
            between, n = row.text[held[0].end : held[1].start], whole.plain / one.plain
            twice = len({re.sub(r"[\d., ]", "", q.text) for q in held}) > 1 and not any(said)
            twice = twice and bool(_EQUALS.search(between.split(",")[-1] if kinds == works else between))
            counts = (1.0, 1.0737, 1 / 1.0737) if twice else multiples(row)
            hence = _SO.search(between) and sum(said) == 1 and len(counts) > 1 and kinds != works
            if (twice or hence) and not any(n.meets(m, 0.03) for m in counts):
                macs = "MAC" in held[0].text  # two FLOPs each
                message = f"{whole.text} is {n.mid:.4g} times {one.text}{'' if macs else ': of how many is it?'}"
                yield finding(INCONSISTENT if macs else QUESTION, "work" if macs else "product", message, one, whole)


_STEP = re.compile(
    r"(?i)(?:per|each|every|a) (?:optimizer |training |global |gradient )?(?:step|batch|update|iteration)|/step"
)


def counted(report: Report) -> Iterator[Finding]:
    """FLOPs, and tokens of a step, that the stated sizes do not make: it asks."""
    of = report.everything.of
    sizes = [of(n)[0] for n in ("batch", "seq", "accum", "gpus") if len(of(n)) == 1]
    made = [prod(some) for k in range(1, 5) for some in itertools.combinations(sizes, k)]
    # A global batch of micro-batches.
    batches, others = sorted(of("batch")), [n for name in ("accum", "gpus") for n in of(name)]
    ways = [prod(some) for k in range(1, 3) for some in itertools.combinations(others, k)]
    if len(batches) == 2 and len(others) == 2 and not any(batches[0] * w == batches[1] for w in ways):
        row = next((r for r in report.rows if batches[1] in r.facts.of("batch")), None)
        whole = row and re.search(r"(?i)global|effective|total", row.text)
        if row and whole and re.search(r"(?i)micro|per[- ](?:gpu|device)", report.text):
            text = " × ".join(f"{n:.0f}" for n in (batches[0], *others))
            message = f"{text} is {batches[0] * prod(others):.0f}, not {batches[1]:.0f}: which sizes make the batch?"
            yield Finding(QUESTION, "product", row.line, f"{batches[1]:.0f}", message)
    for row in report.all_rows:
        q = row.only("flop")
        for t in (*terms(row), trained_work(row)) if q else ():
            if not q or not t or t.kind != "flop" or t.figure or not t.near or not t.named:
                continue
            if not any(q.value.meets(t.value * f, 0.12 if t.text[0] == "6" else 0.05) for f in t.also):
                message = f"{t.text} is {si(t.value.mid, 'FLOP')}, not {q.text}: of which sizes is it?"
                yield finding(QUESTION, "work", message, q, lines=t.lines)
        stepped = row.kind != "table" and len(sizes) > 2 and of("seq") and of("batch") and _STEP.search(row.text)
        for q in row.of("tokens", "token/item") if stepped else ():
            if q.exact and q.value.mid > 1 and not any(q.value.meets(m, 0.03) for m in made):
                text = f"{' × '.join(f'{s:.0f}' for s in sizes)} is {made[-1]:.0f} tokens"
                yield finding(QUESTION, "product", f"{text}, not {q.text}: which sizes make it?", q)
