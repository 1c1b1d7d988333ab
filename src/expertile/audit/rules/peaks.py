"""Above the peak of the stated format, of the memory, of a link; time under the bound; shares of a peak."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNCHECKED, Finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row, Scope
from expertile.audit.rules.work import readings
from expertile.device import DTYPES, Device, generous_peak, known_devices

_BY_NAME = {d.name: d for d in known_devices()}
# A figure that is no measurement of dense work by one run.
_OTHER = re.compile(
    r"peak|theoretical|roofline|\bspec|data ?sheet|\blimit|\bbound\b|sparse|sparsity|2:4|effective|equivalent|winograd|strassen|"
    r"ideal|\bmax(?:imum)?\b|claimed|marketing|aggregate|cluster|\bsol\b|capab|hardware|advertised|projected|\brated\b|boost|would|deliver|offers|provid|\brack|\bpod|supercomput|eflop"
)
_CACHED = re.compile(
    r"cache|\bl[12]\b|shared|smem|register|nvlink|pcie|pci-?e|infiniband|\bib\b|network|disk|ssd|nvme|host|h2d|d2h|h->d|p2p|"
    r"bus ?bw|alg ?bw|all-?reduce|all-?gather|nccl|effective|logical|equivalent|xgmi|interconnect|bisection|dsmem|lds"
)


def _slack(device: Device) -> float:
    # Consumer boards boost beyond the clock of the data sheet.
    return 1.2 if any(w in device.name for w in ("GeForce", "Radeon", "TITAN")) else 1.06


def _peak(device: Device, formats: Iterable[str], sparse: bool = False) -> float | None:
    """The highest rate of any of `formats`; of all formats where one of them has no peak of its own (int4)."""
    known = [f for f in formats if f in DTYPES]
    if not known or len(known) < len(list(formats)):
        known = list(DTYPES)
        sparse = True
    rates = [(device.sparse_peak(f) if sparse else None) or generous_peak(device, f) or 0.0 for f in known]
    return max(rates) or None


def _devices(report: Report, scope: Scope) -> list[Device]:
    found = [_BY_NAME[name] for name in scope.devices if name in _BY_NAME]
    if scope.everything.foreign and not scope._row.facts.devices and not found:
        return []
    return found


def _count(report: Report, scope: Scope, q: Quantity) -> float | None:
    """How many GPUs a figure may be the sum of; None where several are meant but no number is given."""
    if q.per_device:
        return 1.0
    counts = scope.everything.sizes.get("gpus", ())
    if (
        re.search(
            r"multi-?gpu|nodes?\b|cluster|distributed|tensor[ -]parallel|data[ -]parallel|dgx|hgx|nvl72", scope.words
        )
        and not counts
    ):
        return None
    return max((1.0, *counts))


def rates(report: Report) -> Iterator[Finding]:
    """Every FLOP/s and GB/s against what the GPU in scope can do."""
    for row in _all_rows(report):
        for q in row.of("rate", "bandwidth"):
            scope = report.scope(row)
            words = f"{q.words} {row.label.lower()}"
            devices = _devices(report, scope)
            count = _count(report, scope, q) if devices else None
            if not devices or count is None or q.value.mid == 0 or _OTHER.search(words):
                continue
            if row.kind == "line" and _OTHER.search(row.text.lower()):
                continue
            if q.kind == "rate":
                yield from _rate(report, scope, row, q, devices, count)
            else:
                yield from _bandwidth(scope, row, q, devices, count)


def _rate(
    report: Report, scope: Scope, row: Row, q: Quantity, devices: list[Device], count: float
) -> Iterator[Finding]:
    everything = scope.everything.formats
    sparse = bool(re.search(r"spars|2:4", report.text))
    own = _formats_of(q, row) or scope.formats
    lowest = q.value.lo / count

    def limit(formats: tuple[str, ...]) -> tuple[float, Device]:
        best = max(devices, key=lambda d: (_peak(d, formats, sparse) or 0) * _slack(d))
        return (_peak(best, formats, sparse) or float("inf")) * _slack(best), best

    most, device = limit(tuple(dict.fromkeys((*everything, *own))))
    if lowest > most:
        yield _above(IMPOSSIBLE, q, most / _slack(device), device, own, count)
        return
    most, device = limit(own)
    if lowest > most and own:
        stated = _formats_of(q, row) or row.facts.formats
        # float32 products run as tf32 where that is allowed.
        eased = limit((*own, "tf32"))[0] if "fp32" in own else most
        verdict = IMPOSSIBLE if stated and lowest > eased else QUESTION
        yield _above(verdict, q, most / _slack(device), device, own, count)
    elif not own and lowest > min(_peak(d, ("fp16", "bf16")) or float("inf") for d in devices) * 1.05:
        yield Finding(
            UNCHECKED,
            "peak",
            q.line,
            q.text,
            f"{q.text} is above {device.name}'s fp16 peak and the format is not stated",
        )


def _formats_of(q: Quantity, row: Row) -> tuple[str, ...]:
    from expertile.audit.facts import facts

    return facts(q.label).formats or (facts(row.label).formats if row.label else ())


def _above(verdict: str, q: Quantity, peak: float, device: Device, formats: tuple[str, ...], count: float) -> Finding:
    unit = "FLOP/s"
    what = "/".join(formats) or "any format's"
    many = f"{count:.0f} × " if count > 1 else ""
    ask = "" if verdict == IMPOSSIBLE else ": which format and which GPU ran this?"
    return Finding(
        verdict, "peak", q.line, q.text,
        f"{q.text} is more than {many}{si(peak, unit)}, the {what} peak of {device.name}{ask}",
    )  # fmt: skip


def _bandwidth(scope: Scope, row: Row, q: Quantity, devices: list[Device], count: float) -> Iterator[Finding]:
    words = f"{q.words} {row.text.lower()} {scope.words}"
    if _CACHED.search(f"{q.words} {row.text.lower()} {scope.headings}"):
        return
    device = max(devices, key=lambda d: d.memory_bps or 0)
    most = (device.memory_bps or float("inf")) * (1.1 if "GeForce" in device.name else 1.04) * count
    if q.value.lo <= most:
        return
    held = [b.value.lo for b in row.of("bytes") if b is not q]
    big = any(b > 4 * max(device.l2_bytes, 2**25) for b in held)
    memory = re.search(
        r"hbm|dram|memory bandwidth|mem(?:ory)?[ _]bw|global memory|vram|gddr|\bstream\b|device memory", words
    )
    small = bool(held) and not big
    verdict = IMPOSSIBLE if (big or (memory and not small)) else QUESTION
    ask = "" if verdict == IMPOSSIBLE else ": did the data fit in a cache?"
    yield Finding(
        verdict, "memory bandwidth", q.line, q.text,
        f"{q.text} is more than the {si((device.memory_bps or 0) * count, 'B/s')} of {device.name}'s memory{ask}",
    )  # fmt: skip


def bounds(report: Report) -> Iterator[Finding]:
    """Times in which the GPU in scope cannot do the work that the sizes mean."""
    for row in _all_rows(report):
        times = [q for q in row.of("time") if q.exact and q.value.hi > 0]
        if not times or (row.kind == "line" and not row.facts.sizes and len(times) > 1):
            continue
        scope = report.scope(row)
        devices = _devices(report, scope)
        found = readings(scope, row) if devices else []
        if len(found) != 1 or re.search(r"conv|sparse|spars|winograd|layer|epoch|training", scope.words):
            continue
        w = found[0]
        device = max(devices, key=lambda d: _peak(d, ()) or 0)
        count = max((1.0, *scope.everything.sizes.get("gpus", ())))
        formats = scope.everything.formats
        least = w.work.flops * (0.5 if w.extra == (0.5,) else 1.0)
        for q in times:
            if re.search(
                r"launch|overhead|compile|per |launch|sync|saved|ttft|std|queue|h2d|d2h|copy|alloc|token", q.words
            ):
                continue
            rate = least / q.value.hi / count
            peak = _peak(device, formats, "spars" in report.text) or float("inf")
            if rate <= peak * _slack(device):
                continue
            sure = w.near and (w.named or rate > 3 * peak)
            yield Finding(
                IMPOSSIBLE if sure else QUESTION, "bound", q.line, q.text,
                f"{w.formula} FLOP in {q.text} is {si(w.work.flops / q.value.mid, 'FLOP/s')}, more than {device.name} can do "
                f"({si(peak, 'FLOP/s')}, {'/'.join(formats) or 'its fastest format'})"
                + ("" if sure else ": is this the time of that shape?"), w.lines,
            )  # fmt: skip


_SHARE = re.compile(r"(?i)\bpeak\b|theoretical|roofline|\bmfu\b|speed of light|\bsol\b|of (?:the )?(?:hbm|memory|max)")


def _stated_peaks(report: Report, kind: str) -> list[Quantity]:
    words = re.compile(r"peak|theoretical|roofline|max(?:imum)?\b|spec|rated|limit|up to|of \(?$|\bof \d")
    rows = _all_rows(report)
    return [q for row in rows for q in row.of(kind) if words.search(q.words) or words.search(row.label.lower())]


def shares(report: Report) -> Iterator[Finding]:
    """ "612 TFLOPS (68% of peak)" against every peak that may be meant, stated or known."""
    stated = {kind: _stated_peaks(report, kind) for kind in ("rate", "bandwidth")}
    for row in _all_rows(report):
        percents = [
            q for q in row.of("percent") if _SHARE.search(q.words) and not re.search(r"(?i)hfu|memory.used", q.words)
        ]
        for kind in ("rate", "bandwidth"):
            figures = [q for q in row.of(kind) if q.exact and q not in stated[kind]]
            if len(percents) != 1 or len(figures) != 1 or not percents[0].exact or not percents[0].value.mid:
                continue
            q, p = figures[0], percents[0]
            if kind == "bandwidth" and row.of("rate"):
                continue
            here = [s for s in stated[kind] if s in row.quantities]
            scope = report.scope(row)
            devices = _devices(report, scope)
            most = max((1.0, *scope.everything.sizes.get("gpus", ())))
            counts = {1.0, most}
            known = [s.value.mid for s in stated[kind]]
            for device in devices:
                if kind == "bandwidth":
                    known += [device.memory_bps] if device.memory_bps else []
                else:
                    own = [generous_peak(device, f) for f in DTYPES] + [device.peak(f) for f in DTYPES]
                    known += [x for x in (*own, *(device.sparse_peak(f) for f in DTYPES)) if x]
            if not here and (not devices or not stated[kind]):
                continue
            if here:
                known = [s.value.mid for s in here] + known
            part = q.value / p.value
            slack = 0.02 if here else 0.1
            if any(
                part.meets(peak * n, slack if peak in [s.value.mid for s in here] else 0.1)
                for peak in known
                for n in counts
            ):
                continue
            base = (here or stated[kind])[0]
            yield Finding(
                INCONSISTENT, "share of peak", p.line, f"{q.text}, {p.text}",
                f"{q.text} of {base.text} is {100 * q.value.mid / base.value.mid:.3g} %, not {p.text}; "
                "no other peak of the GPU gives it either", (q.line, base.line),
            )  # fmt: skip


def sparse_peaks(report: Report) -> Iterator[Finding]:
    """A peak with structured sparsity, stated where the report never speaks of sparsity."""
    if re.search(r"spars|2:4", report.text):
        return
    for q in _stated_peaks(report, "rate"):
        row = next(row for row in _all_rows(report) if q in row.quantities)
        scope = report.scope(row)
        for device in _devices(report, scope)[:1]:
            formats = _formats_of(q, row) or row.facts.formats or scope.formats
            dense = [x for f in DTYPES for x in (device.peak(f), generous_peak(device, f)) if x]
            for f in formats:
                sparse = _sheet_sparse(device, f)
                if (
                    len(formats) == 1
                    and sparse
                    and q.value.meets(sparse, 0.015)
                    and not any(q.value.meets(d, 0.015) for d in dense)
                ):
                    yield Finding(
                        INCONSISTENT, "sparse peak", q.line, q.text,
                        f"{q.text} is {device.name}'s {f} peak with 2:4 sparsity; the dense one is half of it",
                    )  # fmt: skip


# With sparsity, where the data sheet's clock is below the highest that the part boosts to (NVIDIA H100 data sheet).
_SHEETS = {"fp16": 1979e12, "bf16": 1979e12, "tf32": 989e12, "fp8": 3958e12, "int8": 3958e12}


def _sheet_sparse(device: Device, key: str) -> float | None:
    if device.capability == (9, 0) and device.sm_count == 132:
        return _SHEETS.get(key)
    return device.sparse_peak(key)


_LANES = {"3": 0.985e9, "4": 1.969e9, "5": 3.938e9, "6": 7.563e9}  # bytes/s of one PCIe lane, one direction
_PCIE = re.compile(r"(?i)pci-?e?(?:xpress)? ?(?:gen)? ?\.?(?P<g>[3-6])(?:\.0)?(?: ?[x×] ?(?P<n>\d+))?")
# Both directions together, bytes/s; NVIDIA data sheets.
_NVLINK = (("V100", 300e9), ("A100", 600e9), ("A800", 400e9), ("A30", 200e9), ("H800", 400e9), ("H100", 900e9), ("H200", 900e9),
           ("H20", 900e9), ("GH200", 900e9), ("B200", 1800e9), ("GB200", 1800e9), ("B300", 1800e9), ("A6000", 112.5e9),
           ("A40", 112.5e9), ("3090", 112.5e9))  # fmt: skip
_ONE_WAY = re.compile(r"(?i)h2d|d2h|host.to.device|device.to.host|unidirection|one[- ]way|per direction|h->d|d->h")


_NO_LINK = re.compile(
    r"(?i)alg ?bw|switch|all-?to-?all|all-?gather|ethernet|infiniband|\bib\b|\bnodes?\b|total|per node|system|domain|rack|nvl\d|"
    r"generation|supports?|provides?|offers?|up to|\b[48] ?[x×]|\b[48] gpus|aggregat|fabric|hbm|memory bandwidth"
)


def links(report: Report) -> Iterator[Finding]:
    """PCIe and NVLink against their own peaks."""
    for row in _all_rows(report):
        for q in row.of("bandwidth"):
            scope = report.scope(row)
            near = row.text if row.kind != "table" else q.label
            several = len(row.of("bandwidth")) > 1 and row.kind != "table"
            if several or _OTHER.search(f"{q.words} {near.lower()}") or _NO_LINK.search(near):
                continue
            found = _link(near, scope)
            if found is None:
                continue
            name, both = found
            limit = both / 2 if _ONE_WAY.search(near) else both
            if q.value.lo > 1.03 * limit:
                yield Finding(
                    IMPOSSIBLE, "link", q.line, q.text,
                    f"{q.text} is more than the {si(limit, 'B/s')} of {name}, {'one direction' if limit < both else 'both directions'}",
                )  # fmt: skip
                continue
            percents = row.of("percent")
            shares_ = [p for p in percents if re.search(r"(?i)peak|of|util|effic|theor|line rate", p.words) and p.exact]
            if len(percents) == 1 and shares_ and len(row.of("bandwidth")) == 1 and q.exact and shares_[0].value.mid:
                part = q.value / shares_[0].value
                if not any(part.meets(x, 0.06) for x in (both, both / 2, both / 2 * 0.985, both / 2 * 1.016)):
                    yield Finding(
                        INCONSISTENT, "link", q.line, f"{q.text}, {shares_[0].text}",
                        f"{q.text} is {100 * q.value.mid / (both / 2):.3g} % of one direction of {name} and "
                        f"{100 * q.value.mid / both:.3g} % of both, not {shares_[0].text}",
                    )  # fmt: skip


def _link(text: str, scope: Scope) -> tuple[str, float] | None:
    m = _PCIE.search(text)
    if m and not re.search(r"(?i)nvlink", text):
        lanes = int(m["n"] or 16)
        return f"PCIe {m['g']}.0 x{lanes}", 2 * _LANES[m["g"]] * lanes
    if re.search(r"(?i)nvlink", text) and not m:
        for name in scope.devices if len(scope.devices) == 1 else ():
            for part, total in _NVLINK:
                if re.search(rf"\b{part}\b", name):
                    return f"{part}'s NVLink", total
    return None


def _all_rows(report: Report) -> list[Row]:
    return [*report.rows, *(row for grid in report.grids for row in grid.rows)]
