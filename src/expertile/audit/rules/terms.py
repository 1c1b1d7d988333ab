"""What a row states: its figures, and what its sizes and its model mean; and the laws that tie three of them.

Any three kinds whose units balance make a law (tokens/s × s = tokens, J/token × tokens/s = W, $/GPU-h × GPU-h = $).
LAWS says more of some of them.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from expertile.audit.facts import BITS, facts
from expertile.audit.interval import exact
from expertile.audit.pattern import regex, says
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import on_sheet
from expertile.audit.rules.work import Term, work_of
from expertile.audit.units import UNTYPED, product

NO_RUN = r"(?i)peak|theoret|roofline|limit|bound|expected|model\b|estimate|predict|ideal|\bmax\b|ridge|balance|\bcap\b"
# Times of a part of the run, and figures of several requests.
_NOT_ALL = (
    r"(?i)ttft|first token|prefill|load|warm-?up|compile|p9\d|std|queue|tpot|itl|inter-?token|(?:per|next) token|"
    r"concurren|requests|users?\b|clients|parallel|steady|decode only|chunk|per device|excluding|worker|stream|"
    r"pipelined|window|exposed|\bcomm\b|overlap|all-?reduce|\badd(?:s|ing)? \d"
)
_SHARED = (
    r"(?i)(?<!single[ -])(?<!one[ -])users?\b|concurren|total|clients|parallel|"
    r"\beach(?! (?:stream|user|request|client))"
)
COMMS = r"(?i)nccl|rccl|all-?(?:reduce|gather)|\bgpus|\bbus\b|bus ?b|B (?:per|on each|from each|for each) rank"
_ONE_PASS = r"(?i)ttft|first token|prefill|prompt|concurren|users?\b|p9\d|std"
# The directions of a link.
ONE_WAY = regex(
    r"(?i)h2d|d2h|host.(?:to|->).device|device.(?:to|->).host|unidir|one[- ]way|"
    r"(?:per|one|each|je) (?:direction|way|richtung)|"
    r"from (?:\w+ )?host|into (?:each|every|the|a) (?:gpu|rank)|to the (?:gpu|device)|(?:to|from) (?:the )?cpu|loading|"
    r"upload|download|h->d|d->h|pinned|transferring|sending|\bsent\b|received|bus ?b(?:w|andw)|reads? from|writes? to|"
    r"\(row\) (?:->|<-)(?!>)|(?<!bidirectional_)memcpy_(?:read|write)"
)
BOTH_WAYS = regex(r"(?i)bi-?dir|both|duplex|\bsummed|together|in total|two[- ]way|aggregat|<->|\bbeid(?:e|seit)")
IF = regex(r"(?i)\W*(?:if|suppose|assum\w+|imagine)\b")
NO_RENT = r"(?i)storage|egress|licen[cs]e|electric"
GIB, _PASSES = (1.0, 1.0737, 1 / 1.0737, 1.0486, 1 / 1.0486), (2.0, 0.5, 3.0, 1 / 3, 4.0, 1.5, 2 / 3)
# The figure that follows from the others, where several may.
_DERIVED = re.findall(
    r"\S+",
    "insn/cycle cycle/s $/token token/J flop/J J/token rate bandwidth tokens_per_s items_per_s intensity money energy "
    "power s_per_token s_per_item gpu*s bytes tokens flop time",
)
# Rates that are no work over the whole time.
_DONE = regex(r"(?i)really|actual|executed|issued|non-?zero")
_NO_MEAN = regex(r"(?i)^\W*(?:peak|max)\b|configured|target|offered|scheduled|\|peak")
_REST = regex(r"(?i)\W*(?:(?:for|of) (?:the )?(?:rest|others?|headroom|slack)|(?:are |is )?(?:left|free|spare))\b")
_MORE = regex(
    r"(?i)\b(?:add(?:s|ed|ing)?|sav(?:es?|ed|ing))\W+(?:(?:only|just|about|another|some)\W+)?$"
)  # "adds 9 us"
_HELD = r"usage|alloc|vram|footprint|peak|model|param|\bweights\b|cache|reserved|chunk|batch|buffer"
# "14 GB in 2 s = 7 GB/s", "9.8 ms for 4 GB, that is 400 GB/s"
WRITTEN = regex(
    r"(?i)\b(?:[KMGT]i?B|[munµ]?s)\b[^;]{0,30} (?:in|per|over|takes|took|needs|for)\b[^;]{2,30}"
    r"(?:[=→:,(~≈]|->|that is|i\.e\.|or|which is)\W*$"
)
# Models of which not every parameter is used, or not as often as 6·N says.
_PARTLY = regex(r"(?i)lora|frozen|vision|vit\b|diffusion|distill|offload|spars|prun")
SPARSE = regex(rf"{_PARTLY.pattern}|\bmoe\b|mixture|mixtral|\d+x\d+b|a\d+(?:\.\d+)?b\b|\bactive|gpt-?oss|deepseek")
_DRAFTED = regex(
    r"(?i)speculat|drafte|\bdraft(?:s|ing)? (?:model|token|head|step|len)|draft[:=] |medusa|eagle|lookahead"
)
_PARAMS = regex(r"(?i)\bparam\w*[ _]\(?([bm])\w*\)?: ?(\d+(?:\.\d+)?)\b")  # "params_b: 6.7"
# "params: 6738415616"
_COUNT = regex(r"(?i)\bparam\w*\"?[ :=|]+(\d[\d,]{8,}|\d\.?\d*e\+?\d+)(?![\d.,])|(?<![\d.,])(\d[\d,]{8,}) param")
MODEL = regex(
    r"(?i)(?<![\w.])(?<!\d,)(\d,\d{3}(?=m)|\d+(?:\.\d+)?)"
    r"(?:([bm])\b(?! ?(?:tokens|/s|gpu[ -]?h|rows|elem|param\w* active))|"
    r" ([bm])(?:illion)? (?=param|weights|(?:dense )?(?:model|decoder|transformer)\b)(?!\w+ active))"
)
SINGLE = regex(
    r"(?i)batch(?:[ -]?size)?[ =:-]*(?:of |is )?(?:1|one)\b|(?:one|single)[ -](?:stream|user|request|sequence|prompt|"
    r"client|batch)\b|\bbs ?=? ?1\b|\bn_gen\W+[1-9]|(?:no|without) batching|\btg ?\d"
)
_USED = (
    regex(r"(?<![\w.])(\d[\d.]*)(?: ?b)? of (?:the )?\d[\d.]* ?b (?:param\w* )?(?:are )?active"),
    regex(r"(?<![\w.])(?<!of )(?<!of the )(\d+(?:\.\d+)?) ?b (?:param\w* )?(?:are )?active"),
    regex(r"-a(\d+(?:\.\d+)?)b\b"),
)
_FILE = regex(r"(?i)\bi?q[2-8]_\w+|gguf|safetensors|\b(?:awq|gptq|exl2)\b")
_OF_WEIGHTS = regex(r"(?i)\b(\w+) weights\b")
_WEIGHTS = regex(r"(?i)weights?|checkpoint|\bfile\b|gguf|\bmodel\b|param|\bq\d_\w+ ?\($")


@dataclass(frozen=True)
class Law:
    """Says of `a` × `b` = `c` more than their units do. `sure`: whether a row alone is accused, "always", where the
    figures stand "near" each other or are said to be "moved"; `also`: factors that conventions bring; `several`:
    counts of GPUs, sequences and batches may stand between; `unless`: words that make it silent."""

    rule: str
    kinds: str
    also: tuple[float, ...] = (1.0,)
    several: bool = False
    unless: str = "(?!)"
    sure: str = ""


LAWS = (
    Law("rate", "rate time flop", unless=NO_RUN + r"|sparse|winograd|strassen|effective", sure="always"),
    Law("bandwidth", "bandwidth time bytes", (*GIB, *_PASSES), unless=COMMS, sure="moved"),
    Law("tokens/s", "tokens_per_s s_per_token ratio", several=True, unless=_SHARED, sure="near"),
    Law("tokens/s", "tokens_per_s time tokens", several=True, unless=_NOT_ALL, sure="always"),
    Law("tokens/s", "tokens_per_s s_per_item tokens", several=True, unless=_NOT_ALL, sure="always"),
    Law("tokens/s", "tokens_per_s s_per_item token/item", several=True, unless=_NOT_ALL, sure="always"),
    Law("tokens/s", "s_per_token tokens time", several=True, unless=_ONE_PASS, sure="near"),
    Law("throughput", "items_per_s time items", several=True, unless=_NOT_ALL, sure="near"),
    Law("throughput", "items_per_s s_per_item ratio", several=True, unless=_NOT_ALL, sure="near"),
    Law("tokens/s", "tokens_per_s items_per_s token/item", (1.0, 2.0, 0.5), several=True),
    Law("intensity", "intensity bandwidth rate", (1.0, 2.0, 0.5), unless="ridge|balance|machine"),
    Law("intensity", "intensity bytes flop", unless="ridge|balance|machine", sure="always"),
    Law("cycles", "instructions insn/cycle cycles", sure="always"),
    Law("cycles", "cycles cycle/s time", unless="(?i)boost|base clock|locked"),
    Law("energy", "energy power time", several=True),
    Law("cost", "money $/gpu*s gpu*s", unless=NO_RENT, sure="always"),
    Law("cost", "money $/s time", several=True, unless=NO_RENT),
    Law("cost", "$/s tokens_per_s $/token", unless="(?i)input|blend"),
    Law("memory", "bytes B/param params", several=True, sure="always"),
)
_BY_KINDS = {frozenset(law.kinds.split()): law for law in LAWS}


def law_of(a: str, b: str, c: str) -> Law:
    return _BY_KINDS.get(frozenset((a, b, c))) or Law("product", f"{a} {b} {c}", several=True)


def combine(a: Term, b: Term, sign: int) -> Term:
    """a × b, or a ÷ b with `sign` -1."""
    value, mark = (a.value * b.value, "×") if sign > 0 else (a.value / b.value, "in" if b.kind == "time" else "÷")
    mark = mark if a.lines else "÷"
    return Term(product(a.kind, b.kind, sign), value, f"{a.text} {mark} {b.text}", (*a.lines, *b.lines), None, a.also)


@lru_cache(maxsize=4096)
def derived(kinds: tuple[str, ...]) -> str:
    """The kind of the figure that a law makes of the others."""
    return min(kinds, key=lambda k: _DERIVED.index(k) if k in _DERIVED else 50 if "/" in k else 99)


@lru_cache(maxsize=1 << 14)
def terms(row: Row) -> tuple[Term, ...]:
    """The row's figures and what its sizes mean: FLOPs, tokens of a step, a batch, GPUs."""
    held = [q for q in row.quantities if q.kind == "bytes" and re.search(_HELD, q.label.lower())]
    each = any(q.kind.startswith("B/") for r in (row, row.before) if r for q in r.quantities)
    held = [
        q for q in held if not each and not WRITTEN.search(row.text[: q.start] + "GB in 1 s:")
    ]  # in memory, not moved
    held += [q for q in row.of("time") if row.kind == "line" and _MORE.search(row.text[: q.start])]
    held += [q for q in row.of("bytes") if _REST.match(q.after) or re.search(r"rest of [\w ]*$", row.text[: q.start])]
    if alg := [q for q in row.of("bandwidth") if re.search(r"(?i)\balg", q.label)]:
        held += [q for q in row.of("bandwidth") if q not in alg]  # the bus's is of no traffic
    typed = [q for q in row.quantities if q.kind not in UNTYPED and q.exact and q.value.mid > 0 and q not in held]
    typed = [q for q in typed if not (q.kind.endswith("_per_s") and _NO_MEAN.search(f"{q.label}|{q.after}"))]
    # Of zeros too are a sparse product's rates, not what it "really" multiplied.
    typed = [q for q in typed if not (q.kind == "flop" and row.report.sparse and _DONE.search(q.label))]
    found = [Term(q.kind, q.plain, q.text, (q.line,), q) for q in typed if not on_sheet(row, q)]
    if row.kind == "record":  # a line of several figures is about itself
        at = [t.lines for t in found]
        found = [t for t in found if at.count(t.lines) == 1]
    if work := work_of(row):
        found.append(work)
    batch, seq, gpus = (row.size(name) for name in ("batch", "seq", "gpus"))
    alone = (
        batch and batch.value == 1 and any(t.kind in ("s_per_item", "token/item") for t in found)
    )  # else it is of something else
    if batch and not alone and not any(t.kind == "items" for t in found):
        text = f"a batch of {batch.value:.0f}"
        found.append(Term("items", exact(batch.value), text, (batch.line,), None, (1.0, 1 / batch.value), batch.near))
    if batch and seq and not any(t.kind in ("tokens", "token/item") for t in found):
        text = f"{batch.value:.0f} × {seq.value:.0f} tokens"
        found.append(Term("tokens", exact(batch.value * seq.value), text, (batch.line, seq.line), near=False))
        found += [replace(found[-1], kind="token/item")] * any(t.kind == "s_per_item" for t in found)
    kinds = {t.kind for t in found}
    if gpus and ("gpu*s" in kinds or any("$" in kind for kind in kinds)):
        found.append(Term("gpu", exact(gpus.value), f"{gpus.value:.0f} GPUs", (gpus.line,), None, near=gpus.near))
    elif "gpu*s" in kinds:
        held_by = row.report.everything.of("gpus")[:3]
        found += [Term("gpu", exact(n), f"{n:.0f} GPUs", (), None, near=False) for n in held_by]
    if not any(t.kind == "$/s" or (t.figure and t.figure.per_device) for t in found):
        n, of = (gpus.value, f" × {gpus.value:.0f}") if gpus else (1.0, "")
        found += [replace(t, kind="$/s", value=t.value * n, text=t.text + of) for t in found if t.kind == "$/gpu*s"]
    times = [t for t in found if t.kind == "time"]
    one = gpus and (gpus.near or len(row.report.everything.of("gpus")) < 2)
    if gpus and one and len(times) == 1 and not any(t.kind == "gpu*s" for t in found):
        text = f"{gpus.value:.0f} × {times[0].text}"
        found.append(Term("gpu*s", times[0].value * gpus.value, text, times[0].lines, None, near=gpus.near))
    return tuple(found)


def _whole(row: Row, text: str, held: bool = False) -> bool:
    """Whether every parameter is used once for each token, or `held`."""
    return not any(says(form, of) for form, of in ((_PARTLY if held else SPARSE, text), (_DRAFTED, row.words)))


@lru_cache(maxsize=1 << 14)
def parameters(row: Row, held: bool = False) -> float | None:
    """The one number of parameters that the row states, what leads to it, or the report; those `held`, or used."""
    column = [q.value.mid for q in row.of("params") if row.kind == "table" and "param" in q.label.lower()]
    if len(column) == 1 and column[0] > 1e7 and _whole(row, row.text, held):
        return column[0]
    for text in (row.text, row.headings, row.report.text):
        if found := _models(text):
            # "7B" and "7.24 B parameters" are one.
            one = max(found) < 1.1 * min(found) and _whole(row, text, held)
            return max(found, key=lambda n: found[n]) if one else None
    return None


@lru_cache(maxsize=1 << 10)
def _models(text: str) -> dict[float, int]:
    """Numbers of parameters that a text states, and the digits that it gives of each."""
    text = _COUNT.sub(lambda m: f" {float((m[1] or m[2]).replace(',', '')) / 1e9:.4f}B", _PARAMS.sub(r"\2\1", text))
    text = re.sub(r"(?i)\b(?:consumed|seen|processed)\b[ :=]{1,3}\d[\d.,]*[bmt]\b", " ", text)  # tokens
    text = re.sub(r"(?i)\bparam\w*[ :=|]+(\d[\d.]*) ([bm])\b", r" \1\2", text)  # "Parameters | 14.2 B"
    text = re.sub(r"\bN ?= ?(\d[\d.]*) (?=B\b)", r"\1", text)  # "N = 6.7 B"
    return {float(v.replace(",", "")) * (1e9 if (a or b) in "bB" else 1e6): len(v) for v, a, b in MODEL.findall(text)}


def drafts(report: Report) -> bool:
    """Whether a pass may make more than one token of a stream."""
    return says(_DRAFTED, report.text)


def weights(row: Row, q: Quantity, step: bool = False) -> Term | None:
    """The bytes of weights that the memory yields for each token of a single stream, or for any `step`."""
    report, batch, n = row.report, row.size("batch"), parameters(row)
    every = n is not None  # is read, not those of some experts
    # One stream is a time for each token, or what is said to be one.
    alone = SINGLE.search(f"{row.words} {row.lead}")
    at_once = {row.own[name] for name in ("batch", "concurrency") if name in row.own}
    single = batch.value == 1 if batch else q.kind == "s_per_token" or alone
    printed = row.kind == "table" or report.blocks[row.block].kind == "code"  # the text below may say so
    drafted = printed and drafts(report)
    single = single or SINGLE.search(next(filter(str.strip, report.lines), ""))
    single = single or {*report.everything.of("concurrency")} == {1.0}
    lone = {*report.everything.of("batch"), *report.everything.of("concurrency")} <= {1.0}
    single = single or (row.kind == "table" and lone and SINGLE.search(report.text))
    active = next(({*map(float, of)} for form in _USED if (of := form.findall(report.text))), set())
    n = n or (active.pop() * 1e9 if len(active) == 1 else None)  # of a mixture of experts
    several = (
        not single
        or max(at_once, default=1.0) > 1
        or (not alone and max(report.everything.of("concurrency") or (1,)) > 1)
    )
    if drafted or (several and not step):
        return None
    formats = facts(re.sub(r"(?i)\bkv\b[^;.]*", "", row.text)).of("formats")  # not the cache's
    like = (r for r in report.lines_of_text if not formats or {*formats} & {*r.facts.of("formats")})
    held = [b for r in (*like, row) for b in r.of("bytes") if b.exact]
    sized = row.kind == "table" and (row.of("params") or _FILE.search(row.text))  # "| size | params |" are the model's
    held = [
        b
        for b in held
        if _WEIGHTS.search(f"{b.label[-40:]} {b.after[:12]}")
        or (sized and re.match(r"(?i)(?:file |model )?size\b|gguf|g(?:i?b)?$", b.label))
    ]
    formats = formats or report.everything.of("formats")
    formats = formats if len(formats) == 1 else facts(" ".join(_OF_WEIGHTS.findall(report.text))).of("formats")
    held = [b for b in held if b in row.quantities] or held
    if len({b.value.mid for b in held}) == 1 and (every or _whole(row, report.text)):
        return Term("B/token", held[0].value, f"{held[0].text} of weights", (held[0].line,))
    if n and len(formats) == 1:
        return Term("B/token", exact(n * BITS[formats[0]] / 8), f"{n / 1e9:.3g} B {formats[0]} weights", ())
    return None
