"""The laws: which product of two figures is a third, and by which counts a report may multiply one of them.

Any three kinds whose units balance make a law (tokens/s × s = tokens, J/token × tokens/s = W, $/GPU-h × GPU-h = $).
LAWS says more of some of them. `rows` solves them in one record, sentence or small table; `columns` down a table.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import Interval, exact
from expertile.audit.quantity import Quantity, same_statistic
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import on_sheet
from expertile.audit.rules.work import conventions, readings
from expertile.audit.units import UNTYPED, product


@dataclass(frozen=True)
class Term:
    """A factor of a law: a figure, or what the row's sizes mean. `also`: factors by which others count it; `near`: it
    stands in the row."""

    kind: str
    value: Interval
    text: str
    lines: tuple[int, ...]
    figure: Quantity | None = None
    also: tuple[float, ...] = (1.0,)
    near: bool = True


@dataclass(frozen=True)
class Law:
    """Says of `a` × `b` = `c` more than their units do. `sure`: whether a row alone is accused; `also`: factors that
    conventions bring; `several`: counts of GPUs, sequences and batches may stand between; `unless`: words that make it
    silent; `slack`: by how much a figure may be off that is often of another run."""

    rule: str
    kinds: str
    also: tuple[float, ...] = (1.0,)
    several: bool = False
    unless: str = "(?!)"
    sure: Callable[[Row, Term, Term, Term], bool] | None = None
    slack: float = 0.08


NO_RUN = (
    r"(?i)peak|theoretical|roofline|limit|bound|expected|model\b|estimate|predict|ideal|\bmax\b|ridge|balance|\bcap\b"
)
# Times of a part of the run, and figures of several requests.
_NOT_ALL = (
    r"(?i)ttft|first token|prefill|load|warm-?up|compile|p9\d|std|queue|tpot|itl|inter-?token|(?:per|next) token|"
    r"concurren|requests|users?\b|clients|parallel|steady|decode only|chunk|per device|excluding|worker|stream|"
    r"pipeline"
)
_SHARED = r"(?i)(?<!single )(?<!one )users?\b|concurren|total|clients|parallel|each"
_HELD = r"usage|alloc|vram|footprint|peak|model|param|\bweights\b|cache|reserved|chunk|batch|buffer"
_MOVED = re.compile(
    r"(?i)transfer|data|\bmove|copied|cop(?:y|ies)|traffic|\bread|writ|message|payload|memcpy|h2d|d2h|shard|load"
)
ONE_WAY = re.compile(
    r"(?i)to (?:the )?(?:device|gpu|host|cpu)|h2d|d2h|\bmove[sd]\b|traffic|transferred|copied|^reading"
)
# "14 GB in 2 s = 7 GB/s", "9.8 ms for 4 GB, that is 400 GB/s"
_WRITTEN = re.compile(
    r"(?i)\b(?:[KMGT]i?B|[munµ]?s)\b[^;]{0,30} (?:in|per|over|takes|took|needs|for)\b[^;]{2,30}"
    r"(?:[=→:,(~≈]|->|that is|i\.e\.|or|which is)\W*$"
)
_HENCE = re.compile(r"(?i)\b(?:i\.e\.|that is|which is)|=|→|batch of [\d,]+ in ")


def _moved(row: Row, rate: Term, time: Term, of: Term) -> bool:
    a, b, c = rate.figure, time.figure, of.figure
    if row.kind != "line" or not (a and b and c) or re.search(NO_RUN, a.words):
        return False
    written = max(b.start, c.start) < a.start and _WRITTEN.search(row.text[: a.start])
    return bool(ONE_WAY.search(row.text) or _MOVED.search(row.text) or written)


def _close(row: Row, a: Term, b: Term, _: Term) -> bool:
    return row.kind == "line" and bool(a.figure and b.figure) and abs(a.figure.start - b.figure.start) < 40  # type: ignore[union-attr]


def _hence(row: Row, _a: Term, _b: Term, c: Term) -> bool:
    return row.kind == "line" and (c.figure is not None or bool(_HENCE.search(row.text)))


def _always(row: Row, *_: Term) -> bool:
    return row.kind != "table"


_COLLECTIVE = r"(?i)nccl|all-?(?:reduce|gather)|\bgpus|bus ?b"
GIB = (1.0, 1.0737, 1 / 1.0737, 1.0486, 1 / 1.0486)
COPIES = (2.0, 0.5, 3.0, 1 / 3, 4.0, 1.5, 2 / 3)
_ONE_PASS = r"(?i)ttft|first token|prefill|prompt|concurren|users?\b|p9\d|std"
LAWS = (
    Law("rate", "rate time flop", unless=NO_RUN + r"|sparse|winograd|strassen|effective"),
    Law("bandwidth", "bandwidth time bytes", (*GIB, *COPIES), unless=_COLLECTIVE, sure=_moved),
    Law("tokens/s", "tokens_per_s s_per_token ratio", several=True, unless=_SHARED, sure=_close),
    Law("tokens/s", "tokens_per_s time tokens", several=True, unless=_NOT_ALL, sure=_always),
    Law("tokens/s", "tokens_per_s s_per_item tokens", several=True, unless=_NOT_ALL, sure=_always),
    Law("tokens/s", "s_per_token tokens time", several=True, unless=_ONE_PASS, sure=_close),
    Law("throughput", "items_per_s time items", several=True, unless=_NOT_ALL, sure=_hence),
    Law("throughput", "items_per_s s_per_item ratio", several=True, unless=_NOT_ALL, sure=_hence),
    Law("tokens/s", "tokens_per_s items_per_s token/item", (1.0, 2.0, 0.5), several=True),
    Law("intensity", "intensity bandwidth rate", (1.0, 2.0, 0.5)),
    Law("intensity", "intensity bytes flop", unless="ridge|balance|machine", sure=_always),
    Law("energy", "energy power time", several=True),
    Law("cost", "money $/gpu*s gpu*s", sure=_always),
    Law("cost", "money $/s time", several=True),
    Law("cost", "$/s tokens_per_s $/token", unless="(?i)input|blend"),
    Law("memory", "bytes B/param params", several=True, sure=_always),
)
_BY_KINDS = {frozenset(law.kinds.split()): law for law in LAWS}
# The figure that follows from the others, where several may.
_DERIVED = (
    *("rate", "bandwidth", "tokens_per_s", "items_per_s", "intensity", "$/token", "token/J", "flop/J", "J/token"),
    *("money", "energy", "power", "s_per_token", "s_per_item", "gpu*s", "bytes", "tokens", "flop", "time"),
)


def law_of(a: str, b: str, c: str) -> Law:
    return _BY_KINDS.get(frozenset((a, b, c))) or Law("product", f"{a} {b} {c}", several=True)


@lru_cache(maxsize=4096)
def derived(kinds: tuple[str, ...]) -> str:
    """The kind of the figure that a law makes of the others."""
    return min(kinds, key=lambda k: _DERIVED.index(k) if k in _DERIVED else 50 if "/" in k else 99)


def multiples(row: Row) -> tuple[float, ...]:
    """Counts by which a figure of the row may be multiplied or divided: GPUs, sequences, small numbers beside."""
    everything = row.report.everything
    named = [
        n for name in ("batch", "gpus", "accum", "concurrency") for n in (*everything.of(name), row.own.get(name, 1))
    ]
    several = {
        prod(some) for k in (1, 2, 3) for some in itertools.combinations(dict.fromkeys(named), k) if len(named) < 9
    }
    beside = re.findall(r"(?<![\w.,:-])(\d{1,3})(?![\w.,%:-]|\s(?:ms|s|x|tok\w*)\b)", row.text)
    counts = {n for n in (*several, *map(float, beside), *named) if n > 0}
    return tuple(dict.fromkeys((1.0, *counts, *(1 / n for n in counts))))


def terms(row: Row) -> list[Term]:
    """The row's figures and what its sizes mean: FLOPs, tokens of a step, a batch, GPUs."""
    found = [
        Term(q.kind, q.plain, q.text, (q.line,), q)
        for q in row.quantities
        if q.kind not in UNTYPED and q.exact and q.value.mid > 0
        if not (q.kind == "bytes" and _is_held(row, q)) and not on_sheet(row, q)
    ]
    if row.kind == "record":  # a line of several figures is about itself
        at = [t.lines for t in found]
        found = [t for t in found if at.count(t.lines) == 1]
    if (w := readings(row)) and any(t.kind == "rate" for t in found):
        also = conventions(w, f"{row.words} {row.lead.lower()}")
        found.append(Term("flop", exact(w.work.flops), f"{w.formula} FLOP", w.lines, None, also, w.named and w.near))
    batch, seq, gpus = (row.size(name) for name in ("batch", "seq", "gpus"))
    if batch and not any(t.kind == "items" for t in found):
        text = f"a batch of {batch.value:.0f}"
        found.append(Term("items", exact(batch.value), text, (batch.line,), None, (1.0, 1 / batch.value), batch.near))
    if batch and seq and not any(t.kind == "tokens" for t in found):
        text = f"{batch.value:.0f} × {seq.value:.0f} tokens"
        found.append(Term("tokens", exact(batch.value * seq.value), text, (batch.line, seq.line), near=False))
        found += [replace(found[-1], kind="token/item")] * any(t.kind == "s_per_item" for t in found)
    if gpus and any("$" in t.kind for t in found):
        found.append(Term("gpu", exact(gpus.value), f"{gpus.value:.0f} GPUs", (gpus.line,), None, near=gpus.near))
    if not any(t.kind == "$/s" or (t.figure and t.figure.per_device) for t in found):
        n, of = (gpus.value, f" × {gpus.value:.0f}") if gpus else (1.0, "")
        found += [replace(t, kind="$/s", value=t.value * n, text=t.text + of) for t in found if t.kind == "$/gpu*s"]
    times = [t for t in found if t.kind == "time"]
    if gpus and len(times) == 1 and not any(t.kind == "gpu*s" for t in found):
        text = f"{gpus.value:.0f} × {times[0].text}"
        found.append(Term("gpu*s", times[0].value * gpus.value, text, times[0].lines, None, near=gpus.near))
    return found


def _is_held(row: Row, q: Quantity) -> bool:
    """Whether bytes are held in memory, not moved."""
    return bool(re.search(_HELD, q.label.lower())) and not _WRITTEN.search(row.text[: q.start] + "GB in 1 s:")


def rows(report: Report) -> Iterator[Finding]:
    """Every law in every record and sentence; where one of its figures stands in the sentences around it asks."""
    small = [row for grid in report.tables for row in grid.rows if len(grid.rows) < 3 or row.of("$/token", "$/item")]
    for whole in (*report.rows, *small):
        for row in whole.parts():
            if (held := terms(row)) and (len(held) > 1 or report.blocks[row.block].kind == "code"):
                yield from _solve(row, held)


def _solve(row: Row, held: list[Term]) -> Iterator[Finding]:
    kinds: dict[str, list[Term]] = {}
    for t in held:
        kinds.setdefault(t.kind, []).append(t)
    around: dict[str, list[Term]] = {}
    for t in _around(row):
        around.setdefault(t.kind, []).append(t)
    if len(of := around.get("flop", [])) == 1 and kinds.get("flop") and not any(t.figure for t in kinds["flop"]):
        kinds["flop"] = of  # that the text states
    lent = {kind: some for kind, some in around.items() if kind not in kinds and len(some) == 1}
    # Of a log, two figures; of the sentence before, two that stand together.
    most = 2 if row.report.blocks[row.block].kind != "prose" or len({t.lines for (t,) in lent.values()}) == 1 else 1
    seen = set[frozenset[str]]()
    for (a, of_a), (b, of_b) in itertools.combinations({**kinds, **lent}.items(), 2):
        for x, of_x, y, of_y, sign in ((a, of_a, b, of_b, 1), (a, of_a, b, of_b, -1), (b, of_b, a, of_a, -1)):
            c = product(x, y, sign)
            key = frozenset((a, b, c))
            of_c = [Term("ratio", exact(1.0), "1", ())] if c == "ratio" and sign > 0 else {**kinds, **lent}.get(c)
            borrowed = key & lent.keys()
            own = len(borrowed) < 2 or derived((a, b, c)) not in borrowed
            if of_c and key not in seen and len(borrowed) <= most and own:
                seen.add(key)
                yield from _check(row, (of_x, of_y, of_c) if sign > 0 else (of_y, of_c, of_x), bool(borrowed))


def _around(row: Row) -> list[Term]:
    """Figures of the sentences around a sentence, of a log's lines around one, and the report's only price."""
    report, kind = row.report, row.report.blocks[row.block].kind
    reach = 14 if kind == "code" else 4
    lines = [r for r in report.lines_of_text if r.block == row.block and 0 < abs(r.line - row.line) < reach]
    if kind == "prose" and not lines:
        lines = [r for r in report.lines_of_text if r.block == row.block and r.text != row.text]
    if row.kind != "line" or (kind == "code" and len({q.kind for q in row.quantities} - {*UNTYPED}) > 1):
        lines = []  # a log's line of several kinds is about itself
    held = [[t for t in terms(r) if t.figure] for r in lines]
    # A sentence of several kinds is about itself, the one right before goes on.
    timed = {"time", "s_per_item", "s_per_token"}
    timed = timed if any(q.kind in timed for q in row.quantities) else set()
    before = [t for some in held[-1:] if kind == "prose" and len(some) == 2 for t in some if t.kind not in timed]
    near = [t for some in held if kind == "code" or len({t.kind for t in some}) == 1 for t in some]
    near += before + [t for t in _price(row) if not any(x.kind == t.kind for x in (*near, *before))]
    return near


def _price(row: Row) -> list[Term]:
    """The report's only price of an hour, for a row with costs."""
    if not any(q.kind.startswith("$/") for q in row.quantities):
        return []
    rows = [r for r in row.report.all_rows if r.of("$/s", "$/gpu*s") and r is not row]
    prices = [t for r in rows for t in terms(r) if t.kind == "$/s"]
    return prices[:1] if len({t.value.mid for t in prices}) == 1 else []


def _check(row: Row, held: tuple[list[Term], ...], lent: bool) -> Iterator[Finding]:
    """a × b = c, of every a, b and c in the row: a derived figure that no other two make."""
    law = law_of(*(some[0].kind for some in held))
    text = re.sub(r"requests? ?(?:/|per)", "", row.text) if row.kind != "record" else ""
    if not re.search(r"(?i)decod|generat|output", text):
        text = re.sub(
            "(?i)prefill|prompt|ttft|(?:time to )?first token" if "prefill" in text else "(?i)prefill", "", text
        )
    if len(held[0]) * len(held[1]) * len(held[2]) > 12 or re.search(law.unless, text):
        return
    held = tuple([*some] for some in held)
    for some in held:
        if some[0].kind in ("bytes", "tokens") and 1 < len(some) < 4:  # what is read and what is written, together
            total, lines = sum((t.value for t in some[1:]), some[0].value), tuple(n for t in some for n in t.lines)
            some.append(Term(some[0].kind, total, " + ".join(t.text for t in some), lines))
    made = derived(tuple(some[0].kind for some in held))
    at = next(i for i, some in enumerate(held) if some[0].kind == made)
    also = law.also
    if law.rule == "bandwidth" and (
        ONE_WAY.search(row.text) or any(t.figure and _WRITTEN.search(row.text[: t.figure.start]) for t in held[at][:1])
    ):
        also = GIB
    factors = tuple(f * n for f in also for n in (multiples(row) if law.several else (1.0,)))
    if lent and made == "rate" and law.rule == "product" and held[at][0].text.endswith("FLOPs"):
        return  # of one item
    broken = []
    for target in (t for t in held[at] if t.figure):
        combos = [c for c in itertools.product(*held) if c[at] is target and _one_run(row, law, c)]
        if combos and not any(_fits(c, factors, law.slack) for c in combos):
            broken.append((target, combos[0]))
    if len(broken) != 1 and not (broken and len(broken) == sum(bool(t.figure) for t in held[at])):
        return
    combo = broken[0][1]
    alone = all(len(some) == 1 for some in held)
    near = all(t.near for t in combo) and not lent
    by = {t.kind: t for t in combo}
    sure = (
        alone
        and near
        and (
            made == "rate"
            or (law.sure is not None and law.sure(row, *(by.get(k, combo[-1]) for k in law.kinds.split())))
        )
    )
    yield broken_law(law, INCONSISTENT if sure else QUESTION, combo, at)


_WALL = re.compile(
    r"(?i)^(?!.*(?:mean|avg|average|p\d\d|median|latency|delta)).*(?:duration|elapsed|wall|time|step|iter|took|total)"
)


def _one_run(row: Row, law: Law, combo: tuple[Term, ...]) -> bool:
    times = [t.figure.label for t in combo if t.figure and t.kind == "time"] if row.kind == "record" else []
    if any(re.search(law.unless, label) or (law.several and not _WALL.search(label)) for label in times):
        return False
    labels = [t.figure.label for t in combo if t.figure]
    sides = {m[0].lower() for x in labels if (m := re.search(r"(?i)input|output|prompt|generated", x))}
    if len({s.replace("prompt", "input").replace("generated", "output") for s in sides}) > 1:
        return False
    nouns = {t.figure.noun for t in combo if t.figure and t.figure.noun}
    return len(nouns) < 2 and all(same_statistic(x, y) for x, y in itertools.combinations(labels, 2))


def _fits(combo: tuple[Term, ...], factors: tuple[float, ...], slack: float) -> bool:
    f = combo[0].value * combo[1].value / combo[2].value
    return not f.beyond(1.1) or any(f.meets(n * x, slack if n == 1 else 0.03) for n in factors for x in combo[2].also)


def broken_law(law: Law, verdict: str, combo: tuple[Term, ...], at: int) -> Finding:
    a, b, c = combo
    off = (a.value * b.value / c.value).mid
    figure = combo[at].figure
    assert figure is not None
    would = figure.value.mid * off if at == 2 else figure.value.mid / off
    others = [t for i, t in enumerate(combo) if i != at]
    sign = "×" if at == 2 else "÷"
    left, right = (others[1], others[0]) if at < 2 else others
    made = f"{left.text} {sign} {right.text}"
    if at < 2 and right.kind == "time":
        made = f"{left.text} in {right.text}"
    ask = "" if verdict == INCONSISTENT else ": is this the same run?"
    message = f"{made} is {si(would, UNIT_OF.get(figure.kind, ''))}, not {figure.text}{ask}"
    beside = [t.figure for t in others if t.figure]
    return finding(verdict, law.rule, message, figure, *beside, lines=tuple(n for t in combo for n in t.lines))


_ONE = re.compile(
    r"(?i)(?:per|each|every|a) (?:gpu|user|request|stream|sequence|client|session|slot)|/(?:gpu|user|req)"
)
_EQUALS = re.compile(
    r"(?i)(?:^|\W)(?:i\.e\.|that is|that means|which is|equals|or|=|amounts? to|comes? to|makes)[\W]*$"
)


def each(report: Report) -> Iterator[Finding]:
    """A figure of one GPU or user beside that of all, and one in two units: it asks where no count lies between."""
    for row in report.rows:
        for kind in ("rate", "bandwidth", "tokens_per_s", "items_per_s"):
            held = [q for q in row.of(kind) if q.exact and q.value.mid and not on_sheet(row, q)]
            if len(held) != 2 or row.kind != "line" or abs(held[1].start - held[0].end) > 60:
                continue
            said = [q.per_device or bool(_ONE.search(f"{q.label[-24:]}|{q.after[:16]}")) for q in held]
            one, whole = (held[0], held[1]) if said[0] else (held[1], held[0])
            n, units = whole.plain / one.plain, {re.sub(r"[\d., ]", "", q.text) for q in held}
            twice = len(units) > 1 and not any(said) and _EQUALS.search(row.text[held[0].end : held[1].start])
            counts = (1.0, 1.0737, 1 / 1.0737) if twice else multiples(row)
            hence = re.search(
                r"(?i)i\.e|that is|\bso\b|=|\btotal\b|\(|which|thus|\bor\b|→", row.text[held[0].end : held[1].start]
            )
            if (twice or (hence and sum(said) == 1 and len(counts) > 1)) and not any(n.meets(m, 0.03) for m in counts):
                message = f"{whole.text} is {n.mid:.4g} times {one.text}: of how many is it?"
                yield finding(QUESTION, "product", message, one, whole)


def macs(report: Report) -> Iterator[Finding]:
    """Multiply-adds called as many FLOPs: "0.3 GMACs, that is 0.3 GFLOPs"."""
    for row in (r for r in report.lines_of_text if "MAC" in r.text):
        for a, b in itertools.pairwise(q for q in row.of("flop", "flop/item", "rate") if q.exact):
            hence = "MAC" in a.text and "MAC" not in b.text and _EQUALS.search(row.text[a.end : b.start].split(",")[-1])
            if hence and not b.value.meets(a.value, 0.03):
                message = f"{a.text} is {si(a.value.mid, 'FLOP')}, two for each multiply-add, not {b.text}"
                yield finding(INCONSISTENT, "work", message, b, a)


_STEP = re.compile(
    r"(?i)(?:per|each|every|a) (?:optimizer |training |global |gradient )?(?:step|batch|update|iteration)|/step"
)


def steps(report: Report) -> Iterator[Finding]:
    """Tokens of a step that no product of the stated batch, length, accumulation and GPUs makes: it asks."""
    everything = report.everything
    names = ("batch", "seq", "accum", "gpus")
    sizes = [everything.of(n)[0] for n in names if len(everything.of(n)) == 1]
    for row in report.rows if len(sizes) > 2 and everything.of("seq") and everything.of("batch") else ():
        for q in row.of("tokens", "token/item") if _STEP.search(row.text) else ():
            made = {prod(some) for k in range(1, 5) for some in itertools.combinations(sizes, k)}
            if q.exact and q.value.mid > 1 and not any(q.value.meets(m, 0.03) for m in made):
                text = " × ".join(f"{s:.0f}" for s in sizes)
                yield finding(
                    QUESTION, "product", f"{text} is {prod(sizes):.0f} tokens, not {q.text}: which sizes make it?", q
                )
