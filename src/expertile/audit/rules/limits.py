"""Every rate that a row states or implies, against the most that its GPUs can do; shares of it."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, Lines, finding, si
from expertile.audit.interval import FAR, Interval, exact
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import fastest, formats_of, gpu_counts, memory_of, on_sheet, peaks_of
from expertile.audit.rules.terms import parameters, terms, trained_work, weights
from expertile.audit.rules.work import Term, largest_run
from expertile.device import DTYPES, generous_peak

# A figure that is no measurement of dense work by one run.
NO_RUN_OF_ONE = re.compile(
    r"peak(?!s? at)|theoretical|roofline|\bspec(?!ial|ul)|data ?sheet|\blimit|\bbound\b|spars|2:4|effective|equivalent|"
    r"emulat|winograd|strassen|ideal|\bmax(?:imum)?\b|claimed|marketing|aggregate|cluster|\bsol\b|capab|hardware|advertised|"
    r"projected|\brated\b|boost|would|deliver|offers|provid|\brack|\bpod|supercomput|eflop"
)
_CACHED = re.compile(
    r"cache|\bl[12]\b|shared|smem|register|nvlink|pci-?e|infiniband|\bib\b|network|disk|ssd|nvme|host|h2d|d2h|"
    r"h->d|p2p|tile|sram|on-chip|movement|bus ?bw|alg ?bw|all-?reduce|all-?gather|nccl|effective|"
    r"logical|equivalent|xgmi|interconnect|bisect|lds|[dt]s?mem|per sm\b"
)
_BOARD = re.compile(r"(?<=\d)(?:gb)?[ -]pci-?e\b|(?<=\d )pci-?e[ -]\d+ ?gb")  # "A100 40GB PCIe"
_MEMORY = re.compile(r"hbm|dram|\bmem(?:ory)?[ _](?:bandwidth|bw)|global memory|vram|gddr|\bstream\b|device memory")
_SEVERAL = re.compile(r"multi-?gpu|nodes?\b|cluster|distributed|(?:tensor|data)[ -]parallel|dgx|hgx|nvl72")
_SHARE = re.compile(
    r"\bpeak\b|theoretical|roofline|\bmfu\b|speed of light|\bsol\b|of (?:the )?(?:hbm|memory|max)|of its \d"
)


@dataclass(frozen=True)
class Demand:
    """What a run did in a second, of which the figure `q` is accused; `sure` where it stands in one row. `count`: GPUs
    that may have shared it; `most`: where the text states it."""

    q: Quantity
    kind: str
    value: Interval
    text: str
    rule: str
    ask: str
    sure: bool = False
    formats: tuple[str, ...] = DTYPES
    count: float = 1.0
    slack: float = 0.0
    most: float = 0.0
    lines: Lines = ()


def above(report: Report) -> Iterator[Finding]:
    """Rates above the peak of their format, traffic above the memory's, times too short for their work."""
    largest = largest_run(report)
    for row in report.all_rows:
        for q in row.of("rate", "bandwidth") if row.devices else ():
            yield from _measured(row, q)
        for d in (*_computed(row, largest), *_moved(row), *_generated(row)):
            sparse = d.ask == _SHAPE and report.sparse
            most, slack = (d.most or memory_of(row), 1.1) if d.kind != "rate" else fastest(row, d.formats, sparse)
            if d.value.lo / d.count > most * (d.slack or slack):
                formats = f", {'/'.join(d.formats)}" if d.kind == "rate" and d.formats not in (DTYPES, ()) else ""
                whose = f"{f'{d.count:.0f} × ' * (d.count > 1)}{row.devices[0].name if row.devices else 'the memory'}"
                message = f"{d.text} is {si(d.value.mid, UNIT_OF[d.kind])}, more than {whose} can do"
                message += f" ({si(most * d.count, UNIT_OF[d.kind])}{formats}){'' if d.sure else ': ' + d.ask}"
                yield finding(IMPOSSIBLE if d.sure else QUESTION, d.rule, message, d.q, lines=d.lines)


def _one_part(report: Report) -> bool:
    """Whether the report names one GPU and nothing else that may have run."""
    return len(report.everything.of("devices")) == 1 and not report.everything.foreign


def _measured(row: Row, q: Quantity) -> Iterator[Finding]:
    clause = re.sub(r"\([^()]*\)", "", row.clause(q)) if row.kind == "line" else ""
    words = f"{q.words} {row.label} {clause}".lower()
    words = words.replace("effective", "") if q.kind == "bandwidth" else words
    count = 1.0 if q.per_device else max(gpu_counts(row))
    several = count == 1 and not q.per_device and _SEVERAL.search(row.words)
    if q.value.mid and not NO_RUN_OF_ONE.search(words) and not several:
        yield from (_rate if q.kind == "rate" else _bandwidth)(row, q, count)


def _rate(row: Row, q: Quantity, count: float) -> Iterator[Finding]:
    report = row.report
    lowest, sparse, stated = q.value.lo / count, report.sparse, formats_of(q, row)
    whole = report.everything.of("formats")
    own = stated or row.stated("formats") or (whole if whole in (("bf16",), ("fp16",), ("fp8",)) else ())

    def over(formats: Iterable[str]) -> float:
        most, slack = fastest(row, [*formats], sparse)
        return most if lowest > most * slack else 0.0

    of_any = over((*whole, *own) if own else DTYPES)
    if most := of_any or (over(stated) if stated else 0.0):
        # float32 products run as tf32 where that is allowed; a row with its own share of a peak has another peak.
        eased = not of_any and "fp32" in stated and not over((*stated, "tf32"))
        share = row.only("percent")
        other = share and share.value.mid <= 1.0 and _SHARE.search(share.words)
        sure = not (eased or other) and _one_part(report) and lowest > FAR * most
        of = f"the {'/'.join(own)} peak" if own else "the peak of any format"
        message = f"{q.text} is more than {f'{count:.0f} × ' * (count > 1)}{si(most, 'FLOP/s')}, {of} of"
        message += f" {row.devices[0].name}{'' if sure else ': which format and which GPU ran this?'}"
        yield finding(IMPOSSIBLE if sure else QUESTION, "peak", message, q)


def _bandwidth(row: Row, q: Quantity, count: float) -> Iterator[Finding]:
    text = f"{q.words} {row.text.lower()}"
    text = text.replace("effective", "") if _MEMORY.search(text) else text
    device, most = max(row.devices, key=lambda d: d.memory_bps or 0), memory_of(row) * count
    # "… at 5.9 TB/s from HBM" says it of the figure itself.
    said = re.search(r"\b(?:from|to|of) (?:hbm|dram)|(?:hbm|dram) (?:bandwidth|throughput|traffic)", q.words)
    # So many bytes fit in no cache.
    moved = row.of("bytes") or row.report.bytes_near(row)
    big = bool(moved) and all(b.value.lo > 4 * max(device.l2_bytes, 2**25) for b in moved)
    other = not said and _CACHED.search(_BOARD.sub("", f"{text} {row.headings}"))
    slack = 1.1 if "GeForce" in device.name else 1.04
    if q.value.lo <= most * slack or (other and not (big and other[0] == "effective")):
        return
    sure = big or (not row.of("bytes") and (said or _MEMORY.search(f"{text} {row.headings}")))
    sure = sure and not other and _one_part(row.report)
    ask = "" if sure else ": did the data fit in a cache?"
    message = f"{q.text} is more than the {si(most, 'B/s')} of {device.name}'s memory{ask}"
    yield finding(IMPOSSIBLE if sure else QUESTION, "memory bandwidth", message, q)


_NO_RUN = re.compile(
    r"launch(?! takes| needs| took)|overhead|compile|per |sync|saved|ttft|std|queue|h2d|d2h|copy|alloc|token"
)
_WHOLE = re.compile(
    r"(?i)time|latency|duration|elapsed|gemm|matmul|\bmm\b|kernel|blas|torch|triton|cutlass|attention|[=×]|^$"
)
_TRAFFIC = re.compile(r"(?i)traffic|\bmoved|\breads?\b|writes\b|written|transferred|\bmoves\b|loaded")
_READ_OR_WRITTEN = re.compile(r"(?i)\breads?\b|\bwrit")
_SHAPE = "is this the time of that shape?"


def _computed(row: Row, largest: Term | None) -> Iterator[Demand]:
    """The work of the row's sizes, or of a training run, in each of its times."""
    whole, count = row.report.everything.of("formats"), max(gpu_counts(row))
    times = [q for q in row.of("time") if row.devices and q.value.hi > 0 and not _NO_RUN.search(q.words)]
    trained, gpus = trained_work(row) if times else None, row.size("gpus")
    for q in (q for q in times if trained and gpus and q.exact and q.value.mid > 3600):
        rate, text = trained.value / q.value, f"{trained.text} in {q.text}"  # type: ignore[union-attr]
        n, known = gpus.value, tuple(f for f in ("bf16", "fp8") if any(d.peak(f) for d in row.devices))  # type: ignore[union-attr]
        yield Demand(q, "rate", rate, text, "bound", "on how many GPUs?", False, known, n, 1.0)
    work = next((t for t in terms(row) if t.kind == "flop" and not t.figure and t.named), None) if times else None
    guess = largest if times and not work and row.kind == "table" and not row.own else None
    # A part of a profile is of something else; a named step of it may be another operation.
    part = any(not _SHARE.search(p.words) for p in row.of("percent"))
    other = part or re.search(r"conv|spars|winograd|layer|epoch|training", row.words)
    for t in (work, guess) if not other and (row.kind != "line" or len(times) == 1) else ():
        if t is None:
            continue
        # INT4 weights are multiplied in another format.
        formats = tuple(f for f in whole if t.near or f != "int4")
        sure = t.near and bool(_WHOLE.search(row.label if row.kind == "table" else row.text))
        for q in (q for q in times if q.exact or t is guess):
            rate = t.value * (0.5 if 3.5 in t.also else 1.0) / q.value
            if rate.mid < 100 * fastest(row, formats)[0] * count:  # else of something else
                text = f"{t.text} in {q.text}"
                yield Demand(q, "rate", rate, text, "bound", _SHAPE, sure, formats, count, lines=t.lines)


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
    if re.search(r"(?i)per (?:launch|call|run|iteration|pass|step)|each (?:launch|call|run|pass)", row.text):
        near = [t for r in lines if report.sections[r.block] == report.sections[row.block] for t in r.of("time")]
        near = sorted(near, key=lambda t: t.value.mid)[:1]
    near = [t for t in near if not _NO_RUN.search(t.words)]
    moved = [q for q in row.of("bytes") if q.exact and (named or _TRAFFIC.search(f"{q.label[-24:]} {q.after[:16]}"))]
    times = named or (near if len(near) == 1 else [])
    if times and moved:
        t, count = max(times, key=lambda t: t.value.hi), 1.0 if named else max(gpu_counts(row))
        both = len(moved) == 2 and all(_READ_OR_WRITTEN.search(f"{q.label[-24:]} {q.after[:16]}") for q in moved)
        moved = moved if both else moved[:1]
        total, what = sum((q.value for q in moved[1:]), moved[0].value), " + ".join(q.text for q in moved)
        rate, text = total / t.value, f"{what} in the {t.text} of line {t.line}"
        ask = "is this the same run?"
        yield Demand(moved[0], "bandwidth", rate, text, "traffic", ask, count=count, lines=(t.line,))


_NO_DECODE = re.compile(r"(?i)prefill|prompt (?:proc|eval|tok|read)|input|train|\bpp\d|\bttft")


def _generated(row: Row) -> Iterator[Demand]:
    """2·N FLOPs for each token, and every weight once for each token of a single stream."""
    q, tokens, time, count = row.only("tokens_per_s"), row.only("tokens"), row.only("time"), max(gpu_counts(row))
    if q is None and tokens and time and re.search(r"(?i)prefill|prompt (?:proc|eval)", row.text):
        rate, text, slack = tokens.value / time.value, f"{tokens.text} in {time.text}", 1.06
    else:
        rate, text, slack = (q.value, q.text, 1.25) if q else (exact(0.0), "", 0.0)
    n = parameters(row) if text and len(row.devices) == 1 else None
    if n and not any(_MFU.search(p.words) for p in row.of("percent")):
        formats, each = row.report.everything.of("formats") or DTYPES, 1.0 if q and q.per_device else count
        text, of = f"2 · {n / 1e9:.3g} B · {text}", q or time or row.quantities[0]
        yield Demand(of, "rate", rate * (2 * n), text, "bound", "on how many GPUs?", False, formats, each, slack)
    q = row.only("s_per_token") or q
    lines = row.report.lines_of_text if q and not row.devices else []
    memory = [b.value.mid for r in lines for b in r.of("bandwidth") if "memory" in b.words]
    known = row.devices or len(memory) == 1
    if q and known and not _NO_DECODE.search(f"{q.words} {row.label} {row.text}") and (w := weights(row, q)):
        rate, most = (
            w.value / q.value if q.kind == "s_per_token" else q.value * w.value,
            0 if row.devices else memory[0],
        )
        text, ask = f"{w.text} in {q.text}", "how many tokens at once?"
        yield Demand(q, "bandwidth", rate, text, "decoding", ask, False, DTYPES, count, 1.2, most, w.lines)


_MFU = re.compile(r"(?i)\bmfu\b|model flops? utili[sz]ation")


def mfu(report: Report) -> Iterator[Finding]:
    """6·N FLOPs for a trained token give the rate, and the rate the MFU (Chowdhery et al. 2022, arXiv:2204.02311).
    Attention over long texts adds to 6·N, and "7B" may be 6.7 or 7.6."""
    for row in (r for r in report.all_rows if r.of("percent")):
        shares = [q for q in row.of("percent") if _MFU.search(q.words) and q.exact and q.value.mid]
        shares = shares or [
            p for p in (row.only("percent"),) if p and row.kind == "line" and _MFU.search(row.text.lower())
        ]
        p, q = shares[0] if len(shares) == 1 else None, row.only("tokens_per_s")
        if p and not q and row.kind == "line":  # the one rate of its paragraph
            near = [x for r in report.lines_of_text if r.block == row.block for x in r.of("tokens_per_s")]
            q = near[0] if len(near) == 1 else None
        if p and p.value.lo > 1.0:
            yield finding(IMPOSSIBLE, "MFU", f"an MFU of {p.text} is above 100 %", p)
        n = parameters(row) if p and q else None
        if not (p and q and n):
            continue
        # Whatever was multiplied, many divide by the bf16 peak.
        formats = {"bf16", "fp16", *(f for f in report.everything.of("formats") if f in DTYPES and f != "fp32")}
        peaks = [(x, way) for d in row.devices for f in formats for way in (d.peak, d.sparse_peak) if (x := way(f))]
        counts = row.facts.of("gpus") or ((row.own["gpus"],) if "gpus" in row.own else gpu_counts(row))
        counts = (1.0,) if q.per_device else counts
        each = [n * q.value.mid / (x * g) for x, _ in peaks for g in counts]
        most = 8.3 if max(report.everything.of("seq") or (0,)) > 8000 else 7.6
        # Whoever only reads tokens spends 2·N, of a dense peak.
        read = [n * q.value.mid / (x * g) for x, way in peaks for g in counts if way.__name__ == "peak"]
        read = [] if re.search(r"(?i)train|step|fine-?tun|fsdp", f"{row.words} {row.lead}") else read
        spent = [*((5.1 * e, most * e) for e in each), *((1.7 * e, 5.1 * e) for e in read)]
        if each and not any(low <= p.value.hi and p.value.lo <= high for low, high in spent):
            best = min((6 * e for e in each), key=lambda x: abs(x - p.value.mid))
            at = f"{n / 1e9:.3g} B parameters at {q.text} on {row.devices[0].name}"
            message = f"{at} are an MFU of {100 * best:.3g} %, not {p.text}: on how many GPUs, of which peak?"
            yield finding(QUESTION, "MFU", message, p, q)


_PEAK = re.compile(
    r"peak(?!s? at|ed)|theoretical|roofline|max(?:imum)?\b|spec(?!ial|ul)|rated|limit|up to|of \(?$|\bof \d"
)
_OF = re.compile(
    r"(?i)\W*of (?:(?:the|its|a|peak|theoretical|gpu|dense|hbm|rtx|sxm|nvidia|amd|geforce|[a-z]{1,3}\d{2,4}\w*|"
    r"\w+'s)\W*)*"
)


def _of(row: Row, p: Quantity, base: Quantity) -> bool:
    """Whether a sentence says "64 % of 756 TFLOPS"."""
    if row.kind != "line" or p.end >= base.start or re.match(r"\W*(?:out )?of\b|\W*/", row.text[base.end :]):
        return False
    return bool(_OF.fullmatch(row.text[p.end : base.start]))


def shares(report: Report) -> Iterator[Finding]:
    """ "612 TFLOPS of 989 (68% of peak)" against the peak of its own row, record or the lines right above it."""
    for kind, unlike in (("rate", "bandwidth"), ("bandwidth", "rate")):
        # A table's row is one of peaks where its first words say so.
        figures = ((row, q, " ".join(row.label.lower().split()[:3])) for row in report.all_rows for q in row.of(kind))
        stated = [
            q
            for row, q, first in figures
            if _PEAK.search(f"{q.words} {first}") or on_sheet(row, q) or any(_of(row, p, q) for p in row.of("percent"))
            if not re.match(r"\W*(?:out )?of \d", row.text[q.end :])  # "1.7 TB/s of 2.0 TB/s"
        ]
        for row in (r for r in report.all_rows if r.of("percent") and not r.of(unlike)):
            yield from _share(row, kind, stated, [s for s in stated if s in row.quantities])


def _share(row: Row, kind: str, stated: list[Quantity], here: list[Quantity]) -> Iterator[Finding]:
    told = re.compile(rf"{_SHARE.pattern}|efficien|\bof (?:that|it)\b") if here else _SHARE
    said = [(p, any(_of(row, p, s) for s in here)) for p in row.of("percent") if p.exact and p.value.mid]
    said = [(p, of) for p, of in said if (told.search(p.words) and "hfu" not in p.words) or of]
    found = [(q, q.plain) for q in row.of(kind) if q.exact and q not in stated and not on_sheet(row, q)]
    work = [q for q in row.of("flop" if kind == "rate" else "bytes") if not found]
    work = [q for q in work if re.search(r"(?i)read|writ|mov|transfer|load|stream", q.label[-24:])] or work
    if len(work) == 1 and (time := row.only("time")):
        found = [(work[0], work[0].plain / time.value)]
    if len(said) != 1 or len(found) != 1 or not (here or row.devices):
        return
    (q, rate), (p, of) = found[0], said[0]
    formats = formats_of(q, row) or row.stated("formats")
    known = [x for d in row.devices for x in (peaks_of(d, formats) if kind == "rate" else (d.memory_bps,)) if x]
    known = [x for x in known if not any(s.value.meets(x, 0.05) for s in here)]
    other = [x * n for x in (*known, *(s.value.mid for s in stated if s not in here)) for n in gpu_counts(row)]
    # "88 % of the 1555 GB/s peak" leaves nothing open.
    part, slack = rate / p.value, 0.03 if here else 0.06
    near = any(part.meets(s.plain, 0.05) for s in here) or any(rate.meets(s.plain) for s in stated)
    near |= not of and any(
        part.meets(x, slack) or (kind == "bandwidth" and (part * 1.0737).meets(x, 0.02)) for x in other
    )
    base = (*here, *stated, None)[0]
    if not near and (base or (len(row.devices) == 1 and known and (kind == "bandwidth" or formats))):
        peak, line = (base.value.mid, base.line) if base else (known[0], row.line)
        peak_text, text = (
            base.text if base else si(peak, UNIT_OF[kind]),
            q.text if q.kind == kind else f"{q.text} a time",
        )
        message = f"{text} of {peak_text} is {100 * rate.mid / peak:.3g} %, not {p.text}; no other peak gives it either"
        sure = here or (len(stated) == 1 and abs(line - row.line) <= 20)
        yield finding(INCONSISTENT if sure else QUESTION, "share of peak", message, p, q, lines=(line,))


def sparse_peaks(report: Report) -> Iterator[Finding]:
    """A peak with structured sparsity, stated where the report never speaks of sparsity; "dense" makes it certain."""
    for row in (r for r in report.all_rows if len(r.devices) == 1):
        for q in row.of("rate"):
            formats, part = formats_of(q, row) or row.stated("formats"), row.clause(q).lower()
            told = re.search(rf"dense|{_PEAK.pattern}", f"{q.text} {q.words} {row.headings}")
            if not formats or not told or (report.sparse and ("dense" not in q.words or re.search("spars|2:4", part))):
                continue
            device = row.devices[0]
            # Data sheets state them at a clock below the highest that the part boosts to.
            dense = max(generous_peak(device, f) or 0.0 for f in formats)
            sparse = max(device.sparse_peak(f) or 0.0 for f in formats)
            if dense < 0.6 * sparse and 0.9 * sparse < q.value.mid < 1.015 * sparse:
                sure = "dense" in row.text.lower()
                message = f"{q.text} is {device.name}'s {'/'.join(formats)} peak with 2:4 sparsity"
                message += "" if sure else ": is half of it meant?"
                yield finding(INCONSISTENT if sure else QUESTION, "sparse peak", message, q)
