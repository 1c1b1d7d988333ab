"""Laws between two figures of a row and its work: rate × time = FLOPs, GB/s × time = bytes, tokens/s × time = tokens.

The rows of a table, or lines alike, confirm one another: the one that breaks what the others keep is accused, or asked
about where the work is not known. A row alone is judged where it names its work.
"""

import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FAR, Interval, exact, odd_ones
from expertile.audit.quantity import Quantity, same_statistic
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import peaks_of
from expertile.audit.rules.work import conventions, readings


@dataclass(frozen=True)
class _Amount:
    """What a row does. `also`: factors by which it may be counted otherwise; `free`: not where other rows agree.
    `alone`: the verdict that a row without others gets, "" for none."""

    value: Interval
    text: str
    lines: tuple[int, ...] = ()
    also: tuple[float, ...] = ()
    free: bool = True
    alone: str = ""


@dataclass(frozen=True)
class _Law:
    """`a` × `b` (÷ `b` where it divides) is the amount; `any_pair`: of every two columns, however they are named."""

    rule: str
    a: str
    b: str
    amount: Callable[[Row, Quantity, Quantity], _Amount | None]
    usual: tuple[float, ...] = (1.0,)
    divides: bool = False
    any_pair: bool = False

    def factor(self, held: "_Held") -> Interval:
        _, a, b, amount = held
        return (a.plain / b.plain if self.divides else a.plain * b.plain) / (amount.value if amount else 1.0)


_Held = tuple[Row, Quantity, Quantity, _Amount | None]
_WIDE = 0.08  # a rate and a time are often of different runs: mean of rates, rate of the median
_NO_RUN = re.compile(r"peak|theoretical|roofline|limit|bound|expected|model|estimate|predict|ideal|\bmax\b")
# Times of a part of the run, and figures of several requests.
_NOT_ALL = re.compile(
    r"(?i)ttft|first token|prefill|load|warm-?up|compile|p9\d|std|queue|tpot|itl|inter-?token|(?:per|next) token|"
    r"concurren|requests|users?\b|clients|parallel|steady|decode only|chunk|per device|"
    r"excluding|worker|stream|pipeline|accum"
)
_HELD = re.compile(r"usage|alloc|vram|footprint|peak|model|param|\bweights\b|cache|reserved|chunk|batch|buffer")
_MOVED = re.compile(
    r"transfer|data|\bmove|copied|cop(?:y|ies)|traffic|\bread|writ|message|payload|memcpy|h2d|d2h|shard"
)
_ONE_WAY = re.compile(r"to (?:the )?(?:device|gpu|host|cpu)|h2d|d2h|\bmove[sd]\b|traffic|transferred|copied|^reading")


# "14 GB in 2 s = 7 GB/s", "9.8 ms for 4 GB, that is 400 GB/s"
_WRITTEN = re.compile(
    r"(?i)\b(?:[KMGT]i?B|[munµ]?s)\b (?:in|per|over|takes|took|needs|for)\b[^;]{2,24}"
    r"(?:[=→:,(~≈]|->|that is|i\.e\.|or|which is)\W*$"
)


def _counts(row: Row) -> list[float]:
    """Whole numbers of the row: a count of sequences may hide among them."""
    found = re.findall(r"(?<![\d.,])(\d{1,3})(?![\d.,%]|\s?(?:ms|s|x|tok\w*)\b)", row.text)
    return [float(n) for n in found if int(n)]


def _flops(row: Row, a: Quantity, b: Quantity) -> _Amount | None:
    w, words = readings(row), f"{a.label} {b.label}".lower()
    # "Total FLOP: 137.4 GFLOP" is the work.
    if re.search(r"(?i)flop\b", a.label) and re.search(r"(?i)flops?$", a.text) and row.kind != "table":
        return None
    if w is None or _NO_RUN.search(words) or re.search(r"sparse|winograd|strassen|effective", row.words):
        return None
    sized, f = row.size("m") is not None, a.value.mid * b.value.mid / w.work.flops
    if not sized and not 0.01 < f < 100:
        return None  # "128x128x8: 1.05 ms" is a tile
    sure = w.named and w.near
    also, free = conventions(w, row.words), w.named and not w.counts and not w.causal
    return _Amount(exact(w.work.flops), f"{w.formula} FLOP", w.lines, also, free, INCONSISTENT if sure else "")


def _bytes(row: Row, a: Quantity, b: Quantity) -> _Amount | None:
    q, text = row.only("bytes"), row.text.lower()
    told = q and row.kind == "line" and max(q.start, b.start) < a.start and _WRITTEN.search(row.text[: a.start])
    if q is None or (_HELD.search(q.label.lower()) and not told) or re.search(r"nccl|all-?reduce|ranks|gpus", text):
        return None
    once = _ONE_WAY.search(text)
    sure = row.kind == "line" and (once or told or _MOVED.search(text)) and not _NO_RUN.search(a.words)
    # GB may be GiB on either side, and each byte be read and written.
    copies = (2.0, 0.5, 3.0, 1 / 3, 4.0, *(() if told else (1.5, 2 / 3)))
    also = (1.0, 1.0737, 1 / 1.0737, *(() if once else copies))
    return _Amount(q.plain, q.text, (q.line,), also, False, INCONSISTENT if sure else "")


def _tokens(row: Row, a: Quantity, b: Quantity) -> _Amount | None:
    """The tokens that the row counts, times every number of sequences or GPUs that the row or the report states."""
    counts = [c for c in row.of("tokens") if c.exact and c.value.mid]
    if (own := row.own.get("tokens")) and not counts:
        return _Amount(exact(own), f"{own:.0f} tokens", (), (), True)
    if len(counts) > 3 or row.of("rate") or _NOT_ALL.search(row.text):
        return None
    several = [n for name in ("batch", "gpus") for n in row.report.everything.of(name)]
    small = _counts(row)
    sums = [*(c.value for c in counts), sum((c.value for c in counts[1:]), counts[0].value)] if counts else []
    text, verdict = counts[0].text if counts else "", INCONSISTENT
    if not counts and b.kind != "s_per_token":
        batch, seq = row.size("batch"), row.size("seq")
        if not (batch and seq and batch.near and seq.near and re.search(r"(?i)step|iter|batch", b.words)):
            return None
        sums, text, verdict = [exact(batch.value * seq.value)], f"{batch.value:.0f} × {seq.value:.0f} tokens", QUESTION
    if not sums:
        return None
    also = (1.0, *several, *small, *(1 / n for n in (*several, *small)))
    more = tuple(s.mid / sums[0].mid * n for s in sums for n in also)
    return _Amount(sums[0], text, (), more, False, verdict if row.kind != "table" else "")


def _one(row: Row, a: Quantity, b: Quantity) -> _Amount | None:
    """One token takes one time per token; several sequences at once or waiting make more of it."""
    everything = row.report.everything
    several = tuple(n for name in ("batch", "gpus") for n in everything.of(name))
    shared = re.search(r"(?i)users?\b|concurren|total|clients|parallel|each", row.text)
    slower = shared or ((a.value * b.value).mid < 1 and (row.of("time") or _NOT_ALL.search(row.text)))
    close = row.kind == "line" and abs(a.start - b.start) < 40
    verdict = "" if slower or row.kind == "table" else INCONSISTENT if close else QUESTION
    return _Amount(exact(1.0), "1 token", (), (1.0, *several), True, verdict)


def _batch(row: Row, a: Quantity, b: Quantity) -> _Amount | None:
    size, items = row.size("batch"), row.only("items")
    # A table of requests is one of several at once, "requests/s" in a record is but a unit.
    if _NOT_ALL.search(row.text if row.kind == "table" else re.sub("requests ?/", "", row.text)):
        return None
    if items and a.kind == "items_per_s":
        return _Amount(items.value, items.text, (items.line,), (1.0,), True, INCONSISTENT if row.kind == "line" else "")
    if size is None or (a.kind == "tokens_per_s" and (row.size("seq") or (a.value * b.value).mid > 8 * size.value)):
        return None
    # "A batch of 32 takes 41 ms, so …"
    said = row.kind == "line" and row.facts.of("batch") and _HENCE.search(row.text)
    several = [n for n in (*row.report.everything.of("gpus"), *_counts(row)) if n > 1]
    also = (1.0, *several, *(n / size.value for n in (1.0, *several)), *(1 / n for n in several if n != size.value))
    own = size.near and row.kind != "table" and not re.search(r"(?i)\b(?:it|iter\w*|steps?|batch\w*)/", a.text)
    verdict = INCONSISTENT if said and own else QUESTION if own else ""
    return _Amount(exact(size.value), f"a batch of {size.value:.0f}", (size.line,), also, True, verdict)


_HENCE = re.compile(r"(?i)\b(?:i\.e\.|that is|which is)|=|→|batch of [\d,]+ in ")
_OF_PEAK = re.compile(r"peak|theor|of (?:hbm|max)|\bmfu\b|roof|\bsol\b")


def _peaks(row: Row, a: Quantity, b: Quantity) -> _Amount | None:
    """A share of a peak of the row's GPU, the same one in every row."""
    if row.of("rate") and row.of("bandwidth"):
        return None  # of which of the two?
    known = tuple(x for d in row.devices for x in (peaks_of(d) if a.kind == "rate" else (d.memory_bps or 0.0,)) if x)
    return _Amount(exact(1.0), "the others' peak", (), known) if known and _OF_PEAK.search(b.words) else None


def _none(row: Row, a: Quantity, b: Quantity) -> None:
    return None


_LAWS = (
    _Law("rate", "rate", "time", _flops),
    _Law("bandwidth", "bandwidth", "time", _bytes, (1.0, 2.0, 1.0486, 1.0737), any_pair=True),
    _Law("tokens/s", "tokens_per_s", "s_per_token", _one, any_pair=True),
    _Law("tokens/s", "tokens_per_s", "time", _tokens),
    _Law("tokens/s", "tokens_per_s", "s_per_item", _tokens),
    _Law("throughput", "items_per_s", "time", _batch),
    _Law("throughput", "items_per_s", "s_per_item", _batch),
    _Law("throughput", "tokens_per_s", "time", _batch),
    _Law("intensity", "rate", "bandwidth", _none, (), True),
    _Law("share", "time", "percent", _none, (), divides=True),
    _Law("share of peak", "bandwidth", "percent", _peaks, (), divides=True),
    _Law("share of peak", "rate", "percent", _peaks, (), divides=True, any_pair=True),
)


def laws(report: Report) -> Iterator[Finding]:
    """Every law over every table, over lines alike, and over each row alone."""
    for law in _LAWS:
        done: set[int] = set()  # lines that have been judged with their like
        groups = [(cells, False) for grid in report.tables for cells in grid.pairs(law.a, law.b, law.any_pair)]
        rows = [(part, part.mean(law.a), part.mean(law.b)) for row in report.rows for part in row.parts()]
        lone = [(r, a, b) for r, a, b in rows if a and b and same_statistic(a.label, b.label)]
        for cells, alone in (*groups, (lone, True)):
            held = [(row, a, b, law.amount(row, a, b)) for row, a, b in cells if not alone or row.line not in done]
            done |= yield from _judge(law, held, alone)


def _judge(law: _Law, cells: list[_Held], alone: bool) -> Generator[Finding, None, set[int]]:
    """Returns the lines that it has judged."""
    known = [h for h in cells if h[3] is not None]
    several = law.amount is not _batch or len({h[3].value.mid for h in known if h[3]}) > 1
    # Rows without a size, in a table, do the work of the others; so do those of the one batch of the report.
    unsized = not alone and (len(known) < len(cells) or not several) and law.amount is not _peaks
    held = cells if unsized else known
    factors = [law.factor((r, a, b, None if unsized else n)) for r, a, b, n in held]
    # The work that is stated for all of them is what they keep.
    stated = {n.value.mid for *_, n in held if n} if unsized else set[float]()
    usual = () if unsized else law.usual or next((n.also for *_, n in held if n), ())
    usual = tuple(stated) if len(stated) == 1 else usual
    found = odd_ones(factors, usual) if several or unsized else None
    if found is not None and len(held) - len(found[1]) < 2 and not (alone or len(held) == 2):
        found = None
    for r in found[1] if found else ():
        _, a, b, n = held[r]
        off = factors[r] / found[0]  # type: ignore[index]
        if n is not None and not alone and found[0] in stated and len(held) - len(found[1]) > 1:  # type: ignore[index]
            if off.beyond(1.1) and not any(off.meets(c, 0.04) for c in n.also):
                yield _broken(law, INCONSISTENT, a, b, n, factors[r] / n.value)
            continue
        if n is None or unsized:
            # Twice the work is twice the size, but not twice the intensity.
            like = law.rule == "intensity" and len({re.sub(r"\d+", "", h[0].label) for h in held}) == 1
            whole = {1.0} if like else {max(1.0, round(off.mid)), 1 / max(1.0, round(1 / off.mid))}
            if off.beyond(1.4 if law.divides else 1.15) and not any(off.meets(w, 0.04) for w in whole):
                of = f"{a.text} {'÷' if law.divides else '×'} {b.text}"
                message = f"{of} is {off.mid:.3g} times that of the other rows: is it of the same work?"
                yield finding(QUESTION, law.rule, message, a, b)
            continue
        # Where the others count 2·M·N·K so does this one.
        plain = found[0] == 1.0 and n.free  # type: ignore[index]
        if alone and not (n.alone and _off(factors[r], n, plain)):
            continue
        sure = found[0] in usual or len(held) - len(found[1]) > 2  # type: ignore[index]
        other = (factors[r] if law.amount is _peaks else off).meets
        if off.beyond(1.1 if sure else FAR) and (plain or not any(other(c, 0.02) for c in n.also)):
            yield _broken(law, INCONSISTENT, a, b, n, off if law.amount is _peaks else factors[r])
    # Where all of them break it alike they count something else, if it is not in the row itself.
    agree = found is not None and (found[0] in usual or law.amount is _flops)
    if not agree and (alone or len(held) <= 2) and not unsized:
        for (_, a, b, n), f in zip(held, factors, strict=True):
            if n and n.alone and _off(f, n, False):
                yield _broken(law, n.alone, a, b, n, f)
    return {row.line for row, *_ in held} if agree and not alone else set()


def _off(f: Interval, n: _Amount, plain: bool) -> bool:
    return f.beyond(1.1) and (plain or not any(f.meets(c, _WIDE) for c in n.also))


def _broken(law: _Law, verdict: str, a: Quantity, b: Quantity, n: _Amount, f: Interval) -> Finding:
    would, unit = a.value.mid / f.mid, UNIT_OF.get(a.kind, "")
    ask = "" if verdict == INCONSISTENT else ": is this the same run?"
    message = f"{n.text} {'at' if law.divides else 'in'} {b.text} is {si(would, unit)}, not {a.text}{ask}"
    return finding(verdict, law.rule, message, a, b, lines=n.lines)
