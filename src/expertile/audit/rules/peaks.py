"""Above the peak of the stated format, of the memory, of a link; time under the bound; shares of a peak."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from expertile.audit.facts import facts
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FAR
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.work import conventions, largest_run, readings
from expertile.device import DTYPES, SPARSE_SHEET, Device, generous_peak

# A figure that is no measurement of dense work by one run.
NO_RUN_OF_ONE = re.compile(
    r"peak|theoretical|roofline|\bspec|data ?sheet|\blimit|\bbound\b|spars|2:4|effective|equivalent|emulat|winograd|"
    r"strassen|ideal|\bmax(?:imum)?\b|claimed|marketing|aggregate|cluster|\bsol\b|capab|hardware|advertised|"
    r"projected|"
    r"\brated\b|boost|would|deliver|offers|provid|\brack|\bpod|supercomput|eflop"
)
_CACHED = re.compile(
    r"cache|\bl[12]\b|shared|smem|register|nvlink|pci-?e|infiniband|\bib\b|network|disk|ssd|nvme|host|h2d|d2h|"
    r"h->d|p2p|tile|"
    r"sram|on-chip|movement|bus ?bw|alg ?bw|all-?reduce|all-?gather|nccl|effective|"
    r"logical|equivalent|xgmi|interconnect|bisect|lds|[dt]s?mem|per sm\b"
)
_MEMORY = re.compile(r"hbm|dram|\bmem(?:ory)?[ _](?:bandwidth|bw)|global memory|vram|gddr|\bstream\b|device memory")
_ASIDE = re.compile(r"\([^()]*\)")
_SEVERAL = re.compile(r"multi-?gpu|nodes?\b|cluster|distributed|(?:tensor|data)[ -]parallel|dgx|hgx|nvl72")


def _slack(device: Device) -> float:
    # Consumer boards boost beyond the clock of the data sheet.
    return 1.2 if any(w in device.name for w in ("GeForce", "Radeon", "TITAN")) else 1.06


def _peak(device: Device, formats: Iterable[str], sparse: bool = False) -> float:
    """The highest rate of any of `formats`; of all formats where one of them has no peak there (int4)."""
    known = [f for f in formats if device.peak(f)]
    # INT4 runs as fast as sparse INT8, where there is such.
    twice = 2.0 if "int4" in formats and not (device.peak("int4") or device.sparse_peak("int8")) else 1.0
    if not known or len(known) < len(list(formats)):
        known, sparse = list(DTYPES), True
    return twice * max((device.sparse_peak(f) if sparse else None) or generous_peak(device, f) or 0.0 for f in known)


def peaks_of(device: Device, formats: Sequence[str] = ()) -> tuple[float, ...]:
    """Every peak FLOP/s that anybody may mean of `formats`, or of all: dense, sparse, with the faster accumulation."""
    of = formats if formats and all(map(device.peak, formats)) else DTYPES
    known = (x for f in of for x in (device.peak(f), device.sparse_peak(f), generous_peak(device, f)))
    return tuple(dict.fromkeys(x for x in known if x))


def on_sheet(row: Row, q: Quantity) -> bool:
    """Whether a rate is a peak: called so, or that of a GPU that the report names."""
    if q.kind not in ("rate", "bandwidth"):
        return False
    sheet = [x for d in row.report.everything.of("devices") for x in (d.memory_bps, *(d.peak(f) for f in DTYPES))]
    if any(d.capability == (9, 0) for d in row.report.everything.of("devices")):
        sheet += [x for peak in SPARSE_SHEET.values() for x in (peak, peak / 2)]
    return bool(re.search(r"(?i)peak(?! at)|theoretical|roofline", q.words)) or any(
        x and q.plain.meets(x, 0.005) for x in sheet
    )


def _fastest(row: Row, formats: Iterable[str], sparse: bool) -> tuple[float, Device]:
    """The highest peak of the GPUs that the row may have run on, and whose it is."""
    return max(((_peak(d, formats, sparse), d) for d in row.devices), key=lambda pair: pair[0] * _slack(pair[1]))


def gpu_counts(row: Row) -> tuple[float, ...]:
    """How many GPUs a figure may be the sum of: 1 and every number that the report states."""
    return (1.0, *row.report.everything.of("gpus"), *([row.own["gpus"]] if "gpus" in row.own else []))


def rates(report: Report) -> Iterator[Finding]:
    """Every FLOP/s and GB/s against what the GPU in scope can do."""
    for row in report.all_rows:
        for q in row.of("rate", "bandwidth"):
            words = f"{q.words} {row.label}".lower() + (
                _ASIDE.sub("", row.clause(q)).lower() if row.kind == "line" else ""
            )
            words = words.replace("effective", "") if q.kind == "bandwidth" else words
            if not q.value.mid or NO_RUN_OF_ONE.search(words) or not row.devices:
                continue
            count = 1.0 if q.per_device else max(gpu_counts(row))
            if count > 1 or q.per_device or not _SEVERAL.search(row.words):
                yield from (_rate if q.kind == "rate" else _bandwidth)(report, row, q, count)


def _one_part(report: Report) -> bool:
    """Whether the report names one GPU and nothing else that may have run."""
    return len(report.everything.of("devices")) == 1 and not report.everything.foreign


def _rate(report: Report, row: Row, q: Quantity, count: float) -> Iterator[Finding]:
    lowest, sparse, stated = q.value.lo / count, "spars" in report.text or "2:4" in report.text, _formats_of(q, row)
    whole = report.everything.of("formats")
    own = stated or row.stated("formats") or (whole if whole in (("bf16",), ("fp16",), ("fp8",)) else ())
    # A row with its own share of a peak was run on a part with another peak.
    share = row.only("percent")
    other = share and share.value.mid <= 1.0 and _SHARE.search(share.words)

    def above(formats: Iterable[str], eased: bool = False) -> Finding | None:
        most, device = _fastest(row, formats, sparse)
        if lowest <= most * _slack(device):
            return None
        of = f"the {'/'.join(own)} peak" if own else "the peak of any format"
        sure = not (eased or other) and _one_part(report) and lowest > FAR * most
        message = f"{q.text} is more than {f'{count:.0f} × ' * (count > 1)}{si(most, 'FLOP/s')}, {of} of {device.name}"
        ask = "" if sure else ": which format and which GPU ran this?"
        return finding(IMPOSSIBLE if sure else QUESTION, "peak", message + ask, q)

    # float32 products run as tf32 where that is allowed.
    eased = "fp32" in stated and not above((*stated, "tf32"))
    everything = row.report.everything.of("formats") if own else DTYPES
    if found := above((*everything, *own)) or (above(stated, eased) if stated else None):
        yield found


def _formats_of(q: Quantity, row: Row) -> tuple[str, ...]:
    """What a table's column or row, or a sentence, calls the format of a figure; another column's is not its."""
    if row.kind != "table":
        return facts(row.text).of("formats")
    return facts(q.label).of("formats") or facts(row.label).of("formats")


def _bandwidth(report: Report, row: Row, q: Quantity, count: float) -> Iterator[Finding]:
    text = f"{q.words} {row.text.lower()}"
    text = text.replace("effective", "") if _MEMORY.search(text) else text
    device = max(row.devices, key=lambda d: d.memory_bps or 0)
    most = (device.memory_bps or float("inf")) * count
    slack = 1.1 if "GeForce" in device.name else 1.04
    # "… at 5.9 TB/s from HBM" says it of the figure itself.
    said = re.search(r"\b(?:from|to|of) (?:hbm|dram)|(?:hbm|dram) (?:bandwidth|throughput|traffic)", q.words)
    # So many bytes fit in no cache.
    moved = row.of("bytes") or report.bytes_near(row)
    big = bool(moved) and all(b.value.lo > 4 * max(device.l2_bytes, 2**25) for b in moved)
    other = not said and _CACHED.search(f"{text} {row.headings}")
    if q.value.lo <= most * slack or (other and not (big and other[0] == "effective")):
        return
    sure = big or (not row.of("bytes") and (said or _MEMORY.search(f"{text} {row.headings}")))
    sure = sure and not other and _one_part(report)
    message = f"{q.text} is more than the {si(most, 'B/s')} of {device.name}'s memory"
    ask = "" if sure else ": did the data fit in a cache?"
    yield finding(IMPOSSIBLE if sure else QUESTION, "memory bandwidth", message + ask, q)


_NO_RUN = re.compile(r"launch|overhead|compile|per |sync|saved|ttft|std|queue|h2d|d2h|copy|alloc|token")
_WHOLE = re.compile(
    r"(?i)time|latency|duration|elapsed|gemm|matmul|\bmm\b|kernel|blas|torch|triton|cutlass|attention|[=×]|^$"
)


def works(report: Report) -> Iterator[Finding]:
    """FLOPs that a row states beside the sizes that they follow from: it asks."""
    for row in (r for r in report.all_rows if r.of("flop")):
        q, w = row.only("flop"), readings(row)
        counted = [w.work.flops * c for c in conventions(w, row.words)] if w and w.named and w.near else []
        if q and w and counted and not any(q.value.meets(c, 0.05) for c in counted):
            message = f"{w.formula} is {si(w.work.flops, 'FLOP')}, not {q.text}: of which sizes is it?"
            yield finding(QUESTION, "work", message, q, lines=w.lines)


def bounds(report: Report) -> Iterator[Finding]:
    """Times in which the GPU in scope cannot do the work that the sizes mean."""
    largest = largest_run(report)
    for row in (row for row in report.all_rows if row.of("time") and row.devices):
        w = readings(row) or (largest if row.kind == "table" and not row.own else None)
        # Of lines far apart it asks, about figures too that say "about".
        certain = [q for q in row.of("time") if (q.exact or w is largest) and q.value.hi > 0]
        times = [q for q in certain if not _NO_RUN.search(q.words)]
        if not times or (row.kind == "line" and len(times) > 1) or w is None:
            continue
        if not w.named or re.search(r"conv|spars|winograd|layer|epoch|training", row.words):
            continue
        # INT4 weights are multiplied in another format.
        formats = [f for f in report.everything.of("formats") if w.near or f != "int4"]
        most, device = _fastest(row, formats, "spars" in report.text)
        least = w.work.flops * (0.5 if w.causal else 1.0) / max(gpu_counts(row))
        for q in times:
            # A time that is absurd, or a part of a profile, is of something else.
            part = least / q.value.mid > 100 * most or any(not _SHARE.search(p.words) for p in row.of("percent"))
            if least / q.value.hi > most * _slack(device) and not part:
                can = f"{device.name} can do ({si(most, 'FLOP/s')}, {'/'.join(formats) or 'its fastest format'})"
                message = f"{w.formula} FLOP in {q.text} is {si(w.work.flops / q.value.mid, 'FLOP/s')}, more than {can}"
                # A named step of a profile may be another operation.
                sure = w.near and _WHOLE.search(row.label if row.kind == "table" else row.text)
                ask = "" if sure else ": is this the time of that shape?"
                yield finding(IMPOSSIBLE if sure else QUESTION, "bound", message + ask, q, lines=w.lines)


_TRAFFIC = re.compile(r"(?i)traffic|\bmoved|\bread\b|written|transferred|\bmoves\b|loaded")


def traffic(report: Report) -> Iterator[Finding]:
    """Traffic for which the one time beside it, or the slowest of its shape, is too short: it asks."""
    lines = report.lines_of_text
    for row in (r for r in lines if r.of("bytes") and r.devices and not _CACHED.search(r.text.lower())):
        shape = next((found for b in row.above if (found := report.facts[b].of("tuples"))), ())
        rows = [r for g in report.grids for r in g.rows if r.facts.of("tuples") == shape != ()]
        named = [t for r in rows for t in r.of("time")] if "traffic" in row.text.lower() else []
        near = [t for r in lines if r.block == row.block and not r.of("bandwidth") for t in r.of("time")]
        near = [t for t in near if not _NO_RUN.search(t.words)]
        moved = [
            q for q in row.of("bytes") if q.exact and (named or _TRAFFIC.search(f"{q.label[-24:]} {q.after[:16]}"))
        ]
        most = max(d.memory_bps or float("inf") for d in row.devices) * (1 if named else max(gpu_counts(row)))
        times = named or (near if len(near) == 1 else [])
        t = max(times, key=lambda t: t.value.hi) if times and moved else None
        if t and moved[0].value.lo / t.value.hi > 1.1 * most:
            rate = f"{moved[0].text} in the {t.text} of line {t.line} is {si(moved[0].value.mid / t.value.mid, 'B/s')}"
            message = f"{rate}, more than the memory's {si(most, 'B/s')}: is this the same run?"
            yield finding(QUESTION, "traffic", message, moved[0], lines=(t.line,))


_SHARE = re.compile(
    r"\bpeak\b|theoretical|roofline|\bmfu\b|speed of light|\bsol\b|of (?:the )?(?:hbm|memory|max)|of its \d"
)
_PEAK = re.compile(r"peak(?!s? at|ed)|theoretical|roofline|max(?:imum)?\b|spec|rated|limit|up to|of \(?$|\bof \d")


_OF = re.compile(r"(?i)\W*of (?:(?:the|its|a|peak|theoretical|gpu|dense|hbm|\w+'s)\W*)*")


def _of(row: Row, p: Quantity, base: Quantity) -> bool:
    """Whether a sentence says "64 % of 756 TFLOPS"."""
    if row.kind != "line" or p.end >= base.start or re.match(r"\W*(?:out )?of\b|\W*/", row.text[base.end :]):
        return False
    return bool(_OF.fullmatch(row.text[p.end : base.start]))


def is_sheet(row: Row, q: Quantity) -> bool:
    """Whether a figure that names its GPU just before it is that GPU's peak."""
    devices = facts(q.label).of("devices")
    return any(x and q.value.meets(x, 0.005) for d in devices for x in (d.memory_bps, *(d.peak(f) for f in DTYPES)))


def shares(report: Report) -> Iterator[Finding]:
    """ "612 TFLOPS of 989 (68% of peak)" against the peak of its own row, record or the lines right above it."""
    for kind, unlike in (("rate", "bandwidth"), ("bandwidth", "rate")):
        # A table's row is one of peaks where its first words say so.
        stated = [
            q
            for row in report.all_rows
            for q in row.of(kind)
            if _PEAK.search(f"{q.words} {' '.join(row.label.lower().split()[:3])}")
            or is_sheet(row, q)
            or any(_of(row, p, q) for p in row.of("percent"))
            if not q.after.startswith("out of")
        ]
        for row in (r for r in report.all_rows if r.of("percent") and not r.of(unlike)):
            yield from _share(row, kind, stated, [s for s in stated if s in row.quantities])


def _share(row: Row, kind: str, stated: list[Quantity], here: list[Quantity]) -> Iterator[Finding]:
    told = re.compile(rf"{_SHARE.pattern}|efficien") if here else _SHARE
    said = [(p, any(_of(row, p, s) for s in here)) for p in row.of("percent") if p.exact and p.value.mid]
    said = [(p, of) for p, of in said if (told.search(p.words) and "hfu" not in p.words) or of]
    figures = [q for q in row.of(kind) if q.exact and q not in stated and not on_sheet(row, q)] or _per_second(
        row, kind
    )
    if len(said) != 1 or len(figures) != 1 or not (here or row.devices):
        return
    q, (p, of) = figures[0], said[0]
    formats = _formats_of(q, row)
    known = [x for d in row.devices for x in (peaks_of(d, formats) if kind == "rate" else (d.memory_bps,)) if x]
    known = [x for x in known if not any(s.value.meets(x, 0.05) for s in here)]
    other = [x * n for x in (*known, *(s.value.mid for s in stated if s not in here)) for n in gpu_counts(row)]
    # "88 % of the 1555 GB/s peak" leaves nothing open.
    near = any((q.plain / p.value).meets(s.plain, 0.05) for s in here) or any(q.plain.meets(s.plain) for s in stated)
    part, slack = q.plain / p.value, 0.03 if here else 0.06
    near |= not of and any(
        part.meets(x, slack) or (kind == "bandwidth" and (part * 1.0737).meets(x, 0.02)) for x in other
    )
    base = (*here, *stated, None)[0]
    if not near and (base or (len(row.devices) == 1 and known and (kind == "bandwidth" or formats))):
        peak, text, line = (
            (base.value.mid, base.text, base.line) if base else (known[0], si(known[0], UNIT_OF[kind]), row.line)
        )
        message = f"{q.text} of {text} is {100 * q.value.mid / peak:.3g} %, not {p.text}; no other peak gives it either"
        sure = here or (len(stated) == 1 and abs(line - row.line) <= 20)
        yield finding(INCONSISTENT if sure else QUESTION, "share of peak", message, p, q, lines=(line,))


def _per_second(row: Row, kind: str) -> list[Quantity]:
    """The rate that a row's only work and only time make."""
    held = row.of("flop" if kind == "rate" else "bytes")
    moved = [q for q in held if re.search(r"(?i)read|writ|mov|transfer|load|stream", q.label[-24:])] or held
    work, time = moved[0] if len(moved) == 1 else None, row.only("time")
    text = f"{work.text} in {time.text}" if work and time else ""
    return [replace(work, kind=kind, value=work.plain / time.value, text=text)] if work and time else []


def sparse_peaks(report: Report) -> Iterator[Finding]:
    """A peak with structured sparsity, stated where the report never speaks of sparsity; "dense" makes it certain."""
    sparse_too = re.search(r"(?<!no )(?<!without )spars|2:4", report.text)
    for row in (r for r in report.all_rows if len(r.devices) == 1):
        for q in row.of("rate"):
            formats, part = _formats_of(q, row) or row.stated("formats"), row.clause(q).lower()
            told = re.search(rf"dense|{_PEAK.pattern}", f"{q.text} {q.words} {row.headings}")
            if not formats or not told or (sparse_too and ("dense" not in q.words or re.search("spars|2:4", part))):
                continue
            device = row.devices[0]
            hopper = device.capability == (9, 0) and device.sm_count == 132
            sparse = max((SPARSE_SHEET.get(f) if hopper else device.sparse_peak(f)) or 0.0 for f in formats)
            dense = [x for f in formats for x in (device.peak(f), generous_peak(device, f)) if x]
            if sparse and q.value.meets(sparse, 0.015) and not any(q.value.meets(d, 0.015) for d in dense):
                sure = "dense" in row.text.lower()
                ask = "" if sure else ": is half of it meant?"
                message = f"{q.text} is {device.name}'s {'/'.join(formats)} peak with 2:4 sparsity{ask}"
                yield finding(INCONSISTENT if sure else QUESTION, "sparse peak", message, q)
