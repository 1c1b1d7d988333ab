"""Amounts that the sizes of the whole report make: FLOPs, tokens of a step, weights, the cache of a token; hours, money
and energy of a run. It asks only."""

import itertools
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from math import prod

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import QUESTION, Finding, finding, si
from expertile.audit.interval import Interval, exact
from expertile.audit.pattern import regex, says
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import EQUATION, own_words
from expertile.audit.rules.solve import WALL, shown_as
from expertile.audit.rules.terms import parameters, terms
from expertile.audit.rules.work import Term

_STEP = regex(
    r"(?i)(?:per|each|every|a) (?:optimizer |training |global |gradient )?(?:step|batch|update|iteration)|"
    r"(?<!ckpt)/step\b(?!_)"
)
_NO_WEIGHTS = regex(r"(?i)kv|cache|per (?:gpu|layer|dev)|/gpu|moe|active|gradient|optimizer|activation|lora|shard")
_WEIGHTS = regex(r"(?i)\bweights?\b|\bmodel size\b|checkpoint")
_ELSEWHERE = regex(r"(?i)offload|shard|fsdp|zero-\d|mmap")
_SPENT = regex(
    r"(?i)\b(?:in all|total|used|took|consumed|spent|paid|charged|billed|costs?|c[ao]mes? to|bill|energy|needed)\b"
)
_AGAINST = regex(r"(?i)[ _](?:vs|over|than)[ _.]+\w+")  # "saving_vs_fp16_pct"
_ASKED = regex(
    r"(?i)budget|request|plan|limit|quota|estimat|idle|\bsav(?:e[sd]?|ings?)\b|per |storage|asked|\banother\b"
)
_VOCABULARY = regex(r"(?i)\bvocab(?:ulary)?(?:[ _-]size)?\W{1,4}(?:of )?(\d[\d,]{3,})(?![\d.kK])")
_NO_DECODER = regex(
    r"(?i)\bmoe\b|experts?\b|mixture|\bmla\b|latent|lora|encoder|cross|vision|\bt5\b|bert|mamba|ssm|adapter|"
    r"(?:mlp|ffn)[ _](?:ratio|mult|expan)\w*|distill|draft"
)
_PARAMETERS = regex(r"(?i)^(?!.*(?:decay|train|activ|\bnon|\bper\b|each|layer|embed|head|frozen)).*\bparam")
_OF_KV = regex(r"(?i)\bkv\b|keys and values|\bcache\b")
_HEADS = ("layers", "kv_heads", "head_dim")
_PUE = regex(r"(?:pue|cooling)[^.\d]{0,30}\b(1\.\d+)")
_OF_RUNS = ("time", "power", "gpu*s", "$/gpu*s", "$/s", "energy", "money", "tokens")


def _transformer(report: Report) -> list[float]:
    """The parameters that a dense decoder of the stated sizes may have; none where one of them is not stated."""
    every = report.everything.of
    sizes = {n: every(n)[0] for n in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim") if len(every(n)) == 1}
    words = {int(w.replace(",", "")) for w in _VOCABULARY.findall(report.text)}
    needed = {"layers", "hidden"} | ({"heads", "ffn"} if "kv_heads" in sizes else set())
    if not needed <= sizes.keys() or len(words) != 1 or _NO_DECODER.search(report.text):
        return []
    d, heads = sizes["hidden"], sizes.get("heads", 1.0)
    side = heads * sizes.get("head_dim", d / heads)
    # Four times as wide, or three products of a width that makes the same of them.
    wide = [n * d * sizes["ffn"] for n in (2, 3)] if "ffn" in sizes else [8 * d * d]
    each = [sizes["layers"] * (2 * d * side * (1 + sizes.get("kv_heads", heads) / heads) + w) for w in wide]
    most = 1 if re.search(r"(?<!un-)(?<!not )\btied\b", report.text) else 2  # embedding and head
    return [x + n * d * max(words) for x in each for n in range(most + 1)]


def counted(report: Report) -> Iterator[Finding]:
    """FLOPs, and tokens of a step, that the stated sizes do not make: it asks."""
    of = report.everything.of
    sizes = [of(n)[0] for n in ("batch", "seq", "accum", "gpus") if len(of(n)) == 1]
    made = [prod(some) for k in range(1, 5) for some in itertools.combinations(sizes, k)]
    models = _transformer(report)
    for row in report.all_rows:
        for q in (q for q in row.of("params") if models and row.kind != "table" and q.exact and q.value.mid > 1e6):
            own = f"{q.label[-24:]}|{q.after[:12]}"
            near = min(models, key=lambda x: abs(math.log(x / q.value.mid)))
            if _PARAMETERS.search(own) and 0.5 < near / q.value.mid < 2 and not q.value.meets(near, 0.03):
                message = f"a decoder of the stated sizes has {near / 1e6:,.1f} M parameters, not {q.text}"
                yield finding(QUESTION, "work", f"{message}: of which sizes is it?", q)
        for q in (q for q in row.of("flop", "bytes", "B/token") if q.exact and q.value.mid):
            for t, slack, rule in _amounts(row, q):
                said = row.of(q.kind) if row.kind == "line" else [q]
                if t and not any(x.value.meets(t.value * f, slack) for f in t.also for x in said):
                    take = f"are {si(t.value.mid, 'FLOP')}" if rule == "work" else f"take {si(t.value.mid, 'B')}"
                    message = f"{t.text} {take}, not {q.text}: of which sizes is it?"
                    yield finding(QUESTION, rule, message, q, lines=t.lines)
        stepped = row.kind != "table" and len(sizes) > 2 and of("batch")
        for q in row.of(*(("tokens", "token/item") if of("seq") else ("items",))) if stepped else ():
            if not _STEP.search(row.text if row.kind == "line" else row.report.lines[q.line - 1]):
                continue
            steps = q.kind == "items" and q.noun == "step"  # which are counted themselves
            steps |= row.kind == "line" and bool(EQUATION.search(row.text[: q.start]))
            if q.exact and q.value.mid > 1 and not steps and not any(q.value.meets(m, 0.03) for m in made):
                text = f"{' × '.join(f'{s:.0f}' for s in sizes)} is {made[-1]:.0f}"
                yield finding(QUESTION, "product", f"{text}, not {q.text}: which sizes make it?", q)


@lru_cache(maxsize=8)
def _placed(text: str) -> tuple[bool, bool]:
    """Whether a report is of one GPU, and whether something may lie elsewhere than in its memory."""
    one = re.search(r"(?i)\b(?:single|one) (?:gpu|[\w-]*\d{2,4})", text)
    return bool(one), says(_ELSEWHERE, text)


def _amounts(row: Row, q: Quantity) -> Iterator[tuple[Term | None, float, str]]:
    """What FLOPs and bytes of weights may be, and by which share they may be off."""
    if q.kind == "flop" and row.only("flop"):
        work = (t for t in terms(row) if t.kind == "flop" and not t.figure)
        yield from ((t, 0.05, "work") for t in work if t.near and t.named)
    if q.kind != "flop" and (cache := _cache(row, q)):
        yield cache, 0.03, "memory"
    words, formats = own_words(row, q) if row.kind == "line" else f"{q.label} {q.after}", row.facts.of("formats")
    formats = facts(_AGAINST.sub("", row.text)).of("formats") if formats else ()
    if row.kind == "record":  # of its own line, else of those without another size
        rest = re.sub(r"(?m)^.*\d ?[KMGT]i?B\b.*$", "", row.text)
        formats = next(filter(None, (facts(t).of("formats") for t in (row.report.lines[q.line - 1], rest))), ())
    weights = r"(?i)\bweights|param" + r"|checkpoint" * (row.kind == "line")
    listed = row.kind == "line" and row.report.blocks[row.block].kind == "code" and _WEIGHTS.search(row.lead)
    table, gpus = row.kind == "table", row.facts.of("gpus")
    file = re.search(r"(?i)checkpoint|on disk|\bfile|download|safetensors", words + row.label * table)
    memory = q.kind == "bytes" and table and bool(re.search(r"(?i)\bmem|\bvram|\bpeak", q.label))
    one, elsewhere = _placed(row.report.text) if memory else (False, True)
    gpus = gpus or (1.0,) * one
    memory = memory and len(gpus) == 1 and not elsewhere
    words = re.sub(r"(?i)(?:/|per) ?gpu", "", words) if memory else words
    if re.search(r"(?i)\b(?:fp\d+|int\d+|bf16)(?: kv)? cache", row.text):
        formats = ()  # it is the cache's
    formats = facts(row.label).of("formats") if file and table else formats
    file = file if not table or any(BITS[f] > 8 for f in formats) else None
    if (
        q.kind == "bytes"
        and (file or memory or listed or re.search(weights, row.text))
        and not _NO_WEIGHTS.search(words.replace("_", " "))
    ):
        own = facts(own_words(row, q)).of("formats") if row.kind == "line" else ()
        before = row.before if row.kind == "line" else None
        if not formats and before and len(row.of("bytes")) == 1:  # of the sentence before, the narrowest
            formats = tuple(sorted(before.facts.of("formats"), key=lambda f: BITS[f])[:1])
        formats = own or (formats if len(row.of("bytes")) == 1 else formats * (not re.search(r"\bbits?\b", words)))
        n = parameters(row, held=True) if len(formats) == 1 and q is row.of("bytes")[0] else None
        stated = {*re.findall(r"\b([2-8])[- ]?bits?\b", row.text)}
        bits = float(stated.pop()) if len(stated) == 1 and n else BITS[formats[0]] if n else 0.0
        least = (n or 0.0) * bits / 8 / (gpus[0] if memory else 1)
        if n and q.value.hi > 0.2 * least:  # else of a part; scales and embeddings add to it
            text = f"{n / 1e9:.3g} B parameters in {formats[0] if bits == BITS[formats[0]] else f'{bits:.0f} bits'}"
            # Nothing adds to unquantised weights but what their name leaves out.
            plain = file and BITS[formats[0]] > 8 and not re.search(r"(?i)gemma|optim|state|adam|vision", row.text)
            most = 1.15 * least if plain and q.value.lo < 3 * least else math.inf
            yield Term("bytes", Interval(0.93 * least, least, most), text, ()), 0.0, "compression"


def _cache(row: Row, q: Quantity) -> Term | None:
    """Keys and values of one token: 2 · layers · KV heads · head dimension, in the one format named,
    else of two bytes each."""
    report, said = row.report, f"{row.before.text if row.before else ''} {row.text} {row.headings}"
    said_each = re.search(r"(?i)\b(?:a|one|each|per|every) token\b", row.text)
    each = q.kind == "B/token" or (said_each and not row.of("B/token"))
    pool = re.search(r"\b(?:pool|left|free|budget)\b", row.text)
    tokens = row.only("tokens") if q.kind == "bytes" and not pool else None
    held = row.kind != "table" and (each or tokens) and _OF_KV.search(said)
    sizes = _heads(row) if held else []
    if not sizes:
        return None
    widths = {BITS[f] / 8 for f in row.facts.of("formats")} or {2.0}
    if len(widths) > 1:
        return None
    (nbytes,) = widths
    each_of = f"2 · {' · '.join(f'{s:.0f}' for s in sizes)} values of {nbytes:g} bytes"
    count = tokens.value.mid if tokens and not each else 1.0
    text = f"{tokens.text} of {each_of}" if tokens and not each else each_of
    named = row.facts.of("formats") or report.everything.of("formats")
    half = () if named and min(BITS[f] for f in named) == 16 else (0.5,)  # of a cache in one byte
    also = (1.0, *half, 1.024, 1 / 1.0737, *(1 / n for n in report.everything.of("gpus")))
    also += tuple(report.everything.of("batch")) * (count > 1)
    return Term("bytes", exact(2 * prod(sizes) * nbytes * count), text, (), also=also)


def _heads(row: Row) -> list[float]:
    """Layers, KV heads and head dimension of the one decoder that caches all of them; else nothing."""
    report = row.report
    stated = [(report.everything.of(n), [v for f in report.facts for v in f.of(n)], n) for n in _HEADS]
    in_rows = {n: {r.own[n] for r in report.all_rows if n in r.own} for n in _HEADS}
    held = [{*row.facts.of(n)} or {*some, *of} or in_rows[n] for some, of, n in stated]
    other = re.search(r"(?i)\bmla\b|latent|cross-layer|sliding|window", report.text)
    return [] if other or any(len(some) != 1 for some in held) else [n for (n,) in held]


def spent(report: Report) -> Iterator[Finding]:
    """GPU-hours, money and energy of a run that no time, price and power of the whole report make: it asks."""
    held = {kind: [q for r in report.all_rows for q in r.of(kind) if q.exact] for kind in _OF_RUNS}
    gpus = report.everything.of("gpus")
    whole = [t for t in held["tokens"] if t.value.mid > 1e9]
    # A run of days is one that is told of; a shorter time may be of anything.
    lasted = [t.value for t in held["time"] if t.value.mid >= 86400 or (t.value.mid >= 600 and WALL.search(t.label))]
    hours = [t * n for t in lasted for n in gpus if n > 1]
    made = {
        "gpu*s": hours,
        "money": [p.value * h for p in held["$/gpu*s"] for h in [q.value for q in held["gpu*s"]] or hours]
        + [p.value * t * n for p in held["$/s"] for t in lasted for n in (1.0, *gpus)],
        "energy": [p.value * t * n for p in held["power"] for t in lasted for n in (1.0, *gpus)],
        "J/token": [e.value / t.value for e in held["energy"] for t in whole],
        "$/token": [p.value / t.value for p in held["money"] for t in whole],
    }
    rows = [*report.lines_of_text, *(r for r in report.rows if r.kind == "record")]
    for row, q in ((r, q) for r in rows for q in r.of(*made) if q.exact and q.value.mid):
        beside = [row] if row.kind == "record" else [r for r in report.lines_of_text if r.block == row.block]
        parts = [x.value for r in beside for x in r.of(q.kind) if x is not q]
        some = made[q.kind] + [a + b for a, b in itertools.combinations(parts[:9], 2)] * bool(made[q.kind])
        known = [*some, *(x * float(n) for x in (*some, *parts) for n in _PUE.findall(report.text))]
        near = min(some, key=lambda x: abs(math.log(x.mid / q.value.mid)), default=None)
        record = row.kind == "record"
        words = q.label if record else re.sub(r"\([^()]*\)", "", row.text)
        asked = _ASKED.search(words.partition("per ")[0] if "/" in q.kind else words)
        said = (record or _SPENT.search(row.text)) and not asked
        close = near and (near.meets(q.value, 0.6) or any((near * k).meets(q.value, 0.03) for k in (1e3, 1e-3)))
        if near and said and close and not any(x.meets(q.value, 0.03) for x in known):
            message = f"the times, prices and powers stated make {shown_as(near.mid, q)}, not {q.text}"
            yield finding(QUESTION, "cost", f"{message}: of which run is it?", q)
