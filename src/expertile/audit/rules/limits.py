"""What a run did in a second, stated or implied, against the most that its GPUs can do."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from expertile.audit.finding import IMPOSSIBLE, QUESTION, UNIT_OF, Finding, Lines, finding, si
from expertile.audit.interval import FAR, Interval
from expertile.audit.pattern import regex, says
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import (
    EQUATION,
    SHARE,
    fastest,
    formats_of,
    gpu_counts,
    is_limit,
    memory_of,
    on_sheet,
    own_words,
)
from expertile.audit.rules.terms import IF, SPARSE, terms, weights
from expertile.audit.rules.told import words_near
from expertile.device import DTYPES

# A figure that is no measurement of dense work by one run.
NO_RUN_OF_ONE = regex(
    r"peak(?!s? at)|theoretical|roofline|\bspec(?!ial|ul)|data ?sheet|\blimit|\bbound\b|spars|2:4|effective|equiv|"
    r"emulat|winograd|strassen|ideal|\bmax(?:imum)?\b|claimed|marketing|\bsol\b|capab|hardware|advertised|"
    r"projected|full square|square counted|\brated\b|boost|would|deliver|offers|provid|\brack|\bpod|supercomput|eflop"
)
_CACHED = regex(
    r"cache|\bl[12]\b|shared|smem|register|nvlink|pci-?e|infiniband|\bib\b|network|disk|ssd|nvme|host|h2d|d2h|"
    r"h->d|p2p|tile|sram|on-chip|movement|bus ?bw|alg ?bw|all-?reduce|all-?gather|nccl|effective|"
    r"logical|equivalent|xgmi|interconnect|bisect|lds|[dt]s?mem|per sm\b"
)
_CACHE = regex(r"(?i)\W*(?:of )?(?:l[12]|(?:last[- ]level )?cache|shared|smem|llc)\b")  # what follows its size
_BOARD = regex(r"(?<=\d)(?:gb)?[ -]pci-?e\b|(?<=\d )pci-?e[ -]\d+ ?gb")  # "A100 40GB PCIe"
COLD = (
    r"cold|\b(?:no|none|not|n't|never)\b[^.;]{0,40}\bfits?\b[^.;]{0,24}(?:cache|l2)|(?<!without )(?<!not )"
    r"(?<!n't )(?<!not\* )(?<!--)flush|rotat|cycl|(?:larger|bigger) than|"
    r"more than [^.;]{0,16}(?:\bl2\b|cache)|beyond|exceed|kv[ -]?cache|prefix cach"
)
_STOCK = r"\bstock (?:clock|memory|speed|setting|freq)|\b(?:no|not|without)(?: \w+)? (?:oc\b|over-?clock)"
_MEMORY = regex(r"hbm|dram|\bmem(?:ory)?[ _](?:bandwidth|bw)|global memory|vram|gddr|\bstream\b|device memory")
_OF_MACHINE = regex(  # "M3 Max, 64 GB (the 400 GB/s part)"
    r"(?i)memory|unified|ddr\dx?\b[^.;]*$|\bM[1-9] (?:pro|max|ultra)\b[^.;]*\||"
    r"\|[ -]*(?:part|version|variant|bin|model|chip|machine|(?:of )?(?:lp)?ddr)\b"
)
_OF_DRAM = regex(r"\b(?:from|to|of) (?:hb|dra)m|(?:hb|dra)m (?:band|through|traff)|memory throughput \([tg]byte/s")
# Beside one GPU of which the number is not stated.
_SEVERAL = regex(r"multi-?gpu|nodes?\b|cluster|aggregate|distributed|(?:tensor|data)[ -]parallel|dgx|hgx|nvl72")
_NO_RUN = regex(
    r"launch(?! takes| needs| took)|overhead|gap\b|compile|per |sync|saved|ttft|std|queue|h2d|d2h|copy|alloc|token|"
    r"sampling|interval|comm\b"
)
_WHOLE = regex(
    r"(?i)time|latency|duration|elapsed|gemm|matmul|\bmm\b|kernel|blas|torch|triton|cutlass|attention|[=×]|^$"
)
_TRAFFIC = regex(
    r"(?i)traffic|\bmoved|\bread(?:s|ing)?\b|writes\b|written|transferred|\bmoves\b|loaded|\bstream(?:s|ed)\b"
)
# What calls the bytes of a table those that every call reads.
_READ_ALL = (
    r"(?:one|a|each|every) (?:call|launch) (?:has to read|reads)|reads (?:all|each) of it once|"
    r"read once (?:per|for each|in each)"
)
_EACH_RUN = regex(r"(?i)per (?:launch|call|run|iteration|pass|step)|each (?:launch|call|run|pass)")
_THING = r"(?:\w+ )?(?:update|point|cell|key|element|item|site|lookup)"
_ITEM_BYTES = regex(
    rf"(?i)\b(\d+)[ -]?(?:bytes|B)\b[^.;\d]{{0,60}}?\b(?:per|for (?:each|every)|each|an?) {_THING}\b|"
    rf"\b(?:each|every|an?) {_THING} (?:reads|moves|needs|touches|takes) (?:at least )?(\d+) ?(?:bytes|B)\b"
)
_RESIDENT = regex(
    r"(?i)(?<!no )temporal|(?<!no )(?<!without )compression|l2.resident|on.chip|"
    r"cache.resident|in.cache|fits? in (?:the )?l2"
)
_NO_DECODE = regex(
    r"(?i)prefill|sampling|\b[mh]fu\b|bubble|recompute|(?:per|a) day|(?:reading the |the )prompt|"
    r"prompt (?:proc|eval|tok|read)|input|train|\bpp\d|\bttft|\bcpu time|overhead|\bwaits?\b"
)
_MADE = regex(r"(?i)\btg ?\d|\bdecod|\bgen(?:erat\w+)?\b")
_ALONE = regex(r"(?i)\b(?:one|a single) (?:gpu|card|accelerator)(?: each)?\b")
_STEP = regex(r"(?i)(?<![a-z])(?:step|tpot|itl)(?![a-z])")
# Of memory in use.
_HELD = regex(
    r"(?i)(?<![a-z])(?:max_?(?:memory_?)?)?(?:alloc(?:ated)?|reserved|vram|max[ _]mem\w*)(?![a-z])|"
    r"peak[ _](?:\w+ )?mem|mem\w*[ _.](?:used|peak|in use)|peak[ _(]+(?:gi?b|mi?b)\b"
)
_NOT_HELD = regex(
    r"(?i)offload|\bcpu\b|\bhost\b|\bram\b|managed|unified|\buvm\b|would|need|estimat|requir|predict|tried|out of|oom|"
    r"total|all gpus|\bsum\b|aggregate|theor|project|without|traffic|moved|per second|written|read\b|swap|"
    r"modded|disk|nvme"
)
_ELSEWHERE = regex(r"offload|streamed|managed|unified|\buvm\b|modded|windows|zero-infinity")
_EACH = regex(
    r"(?:each|per gpu|per card|per device)[ ,]+(?:unless|everywhere|throughout)|"
    r"(?:figures|numbers|gb) (?:are )?per gpu\b"
)


@lru_cache(maxsize=64)
def _says(report: Report, form: str) -> bool:
    """Whether the lower-case text of a report has something of a form."""
    return bool(re.search(form, report.text))


@dataclass(frozen=True)
class Demand:
    """What a run did in a second, of which the figure `q` is accused: where it is `certain` times the most, else the
    audit asks. `count`: GPUs that may have shared it; `most`: where the text states it."""

    q: Quantity
    kind: str
    value: Interval
    text: str
    rule: str
    ask: str
    certain: float = math.inf
    formats: tuple[str, ...] = DTYPES
    count: float = 1.0
    slack: float = 0.0
    most: float = 0.0
    sparse: bool = False
    lines: Lines = ()


def above(report: Report) -> Iterator[Finding]:
    """Rates above the peak of their format, traffic above the memory's, times too short for their work."""
    for row in (r for r in report.all_rows if r.quantities):
        others = (f(row) for f in (_moved_each, _moved, _generated, _updated))
        for d in itertools.chain(_stated(row), _computed(row), *others):
            most, slack = (d.most or memory_of(row), 1.1) if d.kind != "rate" else fastest(row, d.formats, d.sparse)
            over = d.value.lo / d.count / most
            if over > (d.slack or slack):
                formats = f", {'/'.join(d.formats)}" if d.kind == "rate" and d.formats not in (DTYPES, ()) else ""
                whose = f"{f'{d.count:.0f} × ' * (d.count > 1)}{row.devices[0].name if row.devices else 'the memory'}"
                does = d.text if d.text == d.q.text else f"{d.text} is {si(d.value.mid, UNIT_OF[d.kind])}, that"
                message = f"{does} is more than {whose} can do ({si(most * d.count, UNIT_OF[d.kind])}{formats})"
                message = message.replace(", that is more", ", more") + ("" if over > d.certain else f": {d.ask}")
                yield finding(IMPOSSIBLE if over > d.certain else QUESTION, d.rule, message, d.q, lines=d.lines)


def _stated(row: Row) -> Iterator[Demand]:
    """The row's own rates."""
    report, count = row.report, max(gpu_counts(row))
    # The report names one GPU and nothing else that may have run.
    one_part = len(report.everything.of("devices")) == 1 and not report.everything.foreign
    for q in row.of("rate", "bandwidth") if row.devices and not IF.match(row.text) else ():
        clause = re.sub(r"\([^()]*\)", "", row.clause(q)) if row.kind == "line" else ""
        words, n = f"{q.words} {row.label} {clause}".lower(), 1.0 if q.per_device else count
        words = words.replace("effective", "") if q.kind == "bandwidth" else words
        several = count == 1 and _SEVERAL.search(row.words)
        if several or not q.value.mid or NO_RUN_OF_ONE.search(words) or EQUATION.search(row.text[: q.start]):
            continue
        if q.kind == "bandwidth":
            yield from _memory(row, q, n, one_part)
            continue
        stated, whole = formats_of(q, row), report.everything.of("formats")
        own = stated or row.stated("formats") or (whole if whole in (("bf16",), ("fp16",), ("fp8",)) else ())
        known = whole if {"bf16", "fp16"} & {*whole} else DTYPES
        formats = tuple(dict.fromkeys(stated or ((*whole, *own) if own else known)))
        # float32 products run as tf32 where that is allowed; a row with its own share of a peak has another peak.
        tf32, slack = fastest(row, (*formats, "tf32"), report.sparse)
        eased = "fp32" in formats and len(whole) > 1 and q.value.lo <= tf32 * slack * n
        share = row.only("percent")
        other = share and share.value.mid <= 1.0 and SHARE.search(share.words)
        certain = FAR if one_part and not (eased or other) and (own or known is DTYPES) else math.inf
        ask = "which format and which GPU ran this?"
        sparse = report.sparse and not re.search(r"\bdense\b", f"{words} {row.headings}")
        yield Demand(q, "rate", q.value, q.text, "peak", ask, certain, formats, n, sparse=sparse)


def _memory(row: Row, q: Quantity, count: float, one_part: bool) -> Iterator[Demand]:
    # Bytes of weights times tokens/s are no measurement, and of a mixture of experts nobody reads them all.
    made = row.kind == "table" and [b.value * t.value for b in row.of("bytes") for t in row.of("tokens_per_s")]
    product = made and any(q.value.meets(x, 0.01) for x in made)
    if product and says(SPARSE, row.report.text):
        return
    text = f"{q.words} {row.text.lower()}"
    device = max(row.devices, key=lambda d: d.memory_bps or 0)
    # "… at 5.9 TB/s from HBM" says it of the figure itself; so many bytes fit in no cache.
    said = _OF_DRAM.search(q.words)
    blocks = row.report.blocks  # what the row's block or the text right above it states
    above = next((b for b in range(row.block - 1, -1, -1) if blocks[b].kind != "heading"), row.block)
    near = [
        b
        for r in row.report.lines_of_text
        if r.block in (row.block, above)
        for b in r.of("bytes")
        if not _CACHE.match(r.text[b.end :])
    ]
    moved = row.of("bytes") or near
    big = bool(moved) and all(b.value.lo > 4 * max(device.l2_bytes, 2**25) for b in moved)
    other = not said and _CACHED.search(_BOARD.sub("", f"{text} {row.headings}"))
    sure = big or (not row.of("bytes") and (said or _MEMORY.search(f"{text} {row.headings}")))
    # "… got 13.2 TB/s, where the H200 has 4.8 TB/s": the text knows.
    knows = row.kind == "line" and any(x is not q and on_sheet(row, x) for x in row.of("bandwidth"))
    certain = 1.0 if sure and not (other or knows or product) and one_part else math.inf
    slack = 1.1 if "GeForce" in device.name and not _says(row.report, _STOCK) else 1.03
    # Where the text speaks of caches and of no cold one, they may have held it.
    held = certain == math.inf and _says(row.report, r"\bl2\b|cache") and not _says(row.report, COLD)
    small = row.of("bytes") and all(b.value.mid < 2 * device.l2_bytes for b in row.of("bytes"))
    held |= bool(small) and not sure and _says(row.report, r"\bl2\b|cache")
    if not held and (not other or (big and other[0] == "effective")):
        ask = "did the data fit in a cache?"
        yield Demand(q, "bandwidth", q.value, q.text, "memory bandwidth", ask, certain, (), count, slack)


def _computed(row: Row) -> Iterator[Demand]:
    """The work of the row's sizes in each of its times."""
    whole, count = row.report.everything.of("formats"), max(gpu_counts(row))
    times = [q for q in row.of("time") if row.devices and q.value.hi > 0 and not _NO_RUN.search(q.words)]
    own = row.facts.of("formats")
    told = len(own) == 1  # "dgemm n=4096" is of one format, and of square matrices
    held = (t for t in terms(row) if t.kind == "flop" and not t.figure and (t.named or (told and t.near)))
    # A part of a profile is of something else; a named step of it may be another operation.
    part = any(not SHARE.search(p.words) for p in row.of("percent") if p.text[0] not in "+-−")
    other = part or re.search(r"conv|spars|winograd|layer|epoch|training", row.words)
    t = next(held, None) if times and not other and (row.kind != "line" or len(times) == 1) else None
    if t:
        formats = own if not t.named else tuple(f for f in whole if t.near or f != "int4")  # INT4 is a weight's
        sure = t.near and t.named and bool(_WHOLE.search(row.label if row.kind == "table" else row.text))
        for q in (q for q in times if q.exact):
            rate = t.value * (0.5 if 3.5 in t.also else 1.0) / q.value
            if rate.mid < 100 * fastest(row, formats)[0] * count:  # else of something else
                text, ask = f"{t.text} in {q.text}", "is this the time of that shape?"
                certain = 0.0 if sure else math.inf
                sparse = row.report.sparse
                yield Demand(q, "rate", rate, text, "bound", ask, certain, formats, count, sparse=sparse, lines=t.lines)


def _moved_each(row: Row) -> Iterator[Demand]:
    """Traffic of each run, in a table's column, in the one time of its row; with cold caches, what is called read, or a
    KV cache, in every time, other columns in the time that is named as they are ("fp16 MB", "fp16 us")."""
    text = re.sub(r"kv[ -]?cache|cache (?=\(m)", "kv ", f"{row.text.lower()} {row.headings}")  # what a KV cache holds
    if row.kind != "table" or not row.devices or _CACHED.search(text):
        return
    all_read = _says(row.report, _READ_ALL)
    cold, decode = _says(row.report, COLD) or all_read, _says(row.report, "decod")
    for b, t in itertools.product(row.of("bytes"), row.of("time", "s_per_item")):
        (first, *more), (name, *_) = (q.label.lower().split() or [""] for q in (b, t))
        only = _EACH_RUN.search(b.label) and row.only("bytes") and row.only("time")
        told = all_read or _TRAFFIC.search(b.label) or (decode and re.search(r"(?i)\bkv\b", b.label))
        read = bool(row.only("bytes") and told and b.label)
        if only or (cold and t.value.mid and ((more and first == name) or read)):
            rate, text, ask = b.plain / t.value, f"{b.text} in {t.text}", "is this the same run?"
            count, slack = max(gpu_counts(row)), 1.06 if cold and read else 0.0
            if all_read or not read or rate.mid < 8 * count * memory_of(row):  # else of all layers
                yield Demand(b, "bandwidth", rate, text, "traffic", ask, count=count, slack=slack)


def _moved(row: Row) -> Iterator[Demand]:
    """Traffic that a line states in the one time beside it, or in the slowest of its shape."""
    report, lines = row.report, row.report.lines_of_text
    if row.kind != "line" or not row.of("bytes") or not row.devices or _CACHED.search(row.text.lower()):
        return
    shape = next((found for b in row.above if (found := report.facts[b].of("tuples"))), ())
    rows = [r for g in report.grids for r in g.rows if r.facts.of("tuples") == shape != ()]
    named = [t for r in rows for t in r.of("time")] if "traffic" in row.text.lower() else []
    rated = {r.line for r in lines if any(not on_sheet(r, b) for b in r.of("bandwidth"))}
    near = [t for r in lines if r.block == row.block and r.line not in rated for t in r.of("time")]
    if _EACH_RUN.search(row.text) and not row.of("time"):
        near = [t for r in lines if report.sections[r.block] == report.sections[row.block] for t in r.of("time")]
        near = sorted(near, key=lambda t: t.value.mid)[:1]
    times = named or [t for t in near if t.exact and not _NO_RUN.search(t.words)]
    told = [(q, f"{q.label[-24:]} {q.after[:16]}") for q in row.of("bytes") if q.exact]
    ends = [(q, words) for q, words in told if re.search(r"(?i)\b(?:reads?|writ\w+)\W*(?:and )?$", q.label[-16:])]
    told = ends if len(ends) == 2 else told
    only = len(told) == 1 and re.search(r"(?i)memcpy|d2d|\bcopy\b|\btriad\b", f"{row.lead} {row.headings}")
    moved = [q for q, words in told if named or only or _TRAFFIC.search(words)]
    if moved and times and (named or len(times) == 1):
        t, count = max(times, key=lambda t: t.value.hi), 1.0 if named else max(gpu_counts(row))
        both = len(moved) == 2 and all(re.search(r"(?i)\breads?\b|\bwrit", words) for _, words in told)
        moved = moved if both else moved[:1]
        total, what = sum((q.value for q in moved[1:]), moved[0].value), " + ".join(q.text for q in moved)
        text, ask = f"{what} in the {t.text} of line {t.line}", "is this the same run?"
        its = [r.facts for r in lines if t in r.quantities]
        most = max((d.memory_bps or 0.0 for f in its for d in f.of("devices")), default=0.0)  # that its sentence names
        count = count if not most or any(f.of("gpus") for f in its) else 1.0
        yield Demand(
            moved[0], "bandwidth", total / t.value, text, "traffic", ask, count=count, most=most, lines=(t.line,)
        )


@lru_cache(maxsize=8)
def _item_bytes(report: Report) -> tuple[float, int] | None:
    """The bytes of each item, where the report states one number and no cache that holds them, and the line."""
    said = [(float(m[1] or m[2]), r.line) for r in report.lines_of_text if (m := _ITEM_BYTES.search(r.text))]
    held = said and _RESIDENT.search(re.sub(r"(?i)\bno\b[^.;]*", "", report.text))
    return said[0] if len({n for n, _ in said}) == 1 and not held else None


def _updated(row: Row) -> Iterator[Demand]:
    """ "16 bytes for each update", the only ones that the report states, at so many updates a second."""
    q = row.only("items_per_s") if row.devices else None
    if q and (said := _item_bytes(row.report)) and q.noun in ("", "other", "element"):
        (n, at), count = said, max(row.report.everything.of("gpus") or (1.0,))
        moved, text = q.value * n, f"{q.text} × {n:.0f} bytes"
        if moved.lo < 40 * count * memory_of(row):
            ask = "did a cache hold it?"
            yield Demand(q, "bandwidth", moved, text, "traffic", ask, count=count, slack=1.05, lines=(at,))


def _generated(row: Row) -> Iterator[Demand]:
    """Every weight once for each token of a single stream."""
    q, count = row.only("tokens_per_s"), 1.0 if _ALONE.search(row.lead) else max(gpu_counts(row))
    made = [x for x in row.of("tokens_per_s") if _MADE.search(x.label)]
    decoded = not q and row.kind == "table" and len(made) == 1 and made[0].exact
    q = row.only("s_per_token") or (made[0] if decoded else q)
    step = not q and row.only("time") and "decod" in f"{row.words} {row.lead.lower()}" and _STEP.search(row.text)
    q = row.only("time") if step else q
    lines = row.report.lines_of_text if q and not row.devices else []
    memory = [b.value.mid for r in lines for b in r.of("bandwidth") if _OF_MACHINE.search(words_near(r, b, 70, 20))]
    known = memory_of(row) < math.inf or len(memory) == 1
    prefill = row.headings if "prefill" in row.headings and "decod" not in row.headings else row.label
    # A time for each token is of no other column.
    text = "" if decoded or (q and q.kind == "s_per_token" and row.kind == "table") else row.text
    worked_out = q and row.kind == "line" and (EQUATION.search(row.text[: q.start]) or is_limit(own_words(row, q)))
    if (
        q
        and known
        and not worked_out
        and not _NO_DECODE.search(f"{q.words} {text} {prefill}")
        and (w := weights(row, q, bool(step)))
    ):
        rate = q.value * w.value if q.kind == "tokens_per_s" else w.value / q.value
        most = memory[0] if len(memory) == 1 else 0.0
        how = f"× {si(q.value.mid, 'tokens/s')}" if q.kind == "tokens_per_s" else f"in {q.text}"
        text, ask = f"{w.text} {how}", "how many tokens at once?"
        if rate.mid < 12 * count * (most or memory_of(row)):  # else it is of something else
            yield Demand(q, "bandwidth", rate, text, "decoding", ask, count=count, slack=1.05, most=most, lines=w.lines)


def held(report: Report) -> Iterator[Finding]:
    """Memory in use above what the GPUs have."""
    if says(_ELSEWHERE, report.text):
        return
    for row in report.all_rows:
        for q in (q for q in row.of("bytes") if row.devices):
            heads = " ".join(report.blocks[b].text for b in report.sections[row.block])
            own = f"{q.label} {heads}" if row.kind == "table" else own_words(row, q)
            own = own.replace("_", " ")
            if row.kind == "table" and _NOT_HELD.search(q.label.replace("_", " ")):
                continue
            if not q.exact or not _HELD.search(own) or (row.kind != "table" and _NOT_HELD.search(own)):
                continue
            each = q.per_device or _EACH.search(report.text)
            count = 1.0 if each else max(gpu_counts(row))
            most = count * max(d.memory_bytes for d in row.devices) * 2**30 / 1e9
            if 1.03 * most < q.value.lo < 40 * most:
                whose = f"{f'{count:.0f} × ' * (count > 1)}{row.devices[0].name}"
                # Of a part that is sold with more memory the report names which.
                told = re.search(rf"(?<!\d){row.devices[0].memory_bytes / 1e9:.0f} ?g", report.text)
                one = len(report.everything.of("devices")) == 1 and not report.everything.foreign
                several = not each and (
                    count > 1 or re.search(r"multi(?!pl)|dual|nodes?\b|cluster|parallel|fsdp|zero", report.text)
                )
                sure = one and not several and (told or q.value.lo > 1.25 * most)
                message = f"{q.text} is more than {whose} has, {si(most / 1.073741824, 'B')}"
                if sure:
                    yield finding(IMPOSSIBLE, "memory", message, q)
                elif one and not several:
                    yield finding(QUESTION, "memory", f"{message}: was it one GPU, as it is sold?", q)
