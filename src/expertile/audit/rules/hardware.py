"""What the GPUs in a row's scope can do at most."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from expertile.audit.facts import facts
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.device import DTYPES, SPARSE_SHEET, Device, generous_peak

# "61 x 12.9 GB = 787 GB/s": what follows is worked out, not measured.
EQUATION = regex(r"\d ?(?:[A-Za-z/]{1,8} )?[x×*/÷·] ?\d[^=;]*= ?$")
_LIMIT = regex(
    r"(?i)\bpeak(?!s? at|ed)|theoretical|line rate|\bspec(?!ial|ul)|\brated|data ?sheet|brochure|\blimit|ceiling|"
    r"roofline|\bhas (?=\d)|\bcan (?:carry|deliver|do)|capable|tops? out|(?:per|each|in either) (?:way|direction)\b|"
    r"channels of \w*ddr|"
    r"upper bound|at most|at best|cannot exceed|nominal|\(dense,? \d|\bmax(?:imum)?\b|(?:nvlink|pci-?e|hbm|ethernet|"
    r"infiniband)[^.,;]{0,12} (?:gives?|delivers|provides?|offers?|supports?|has)\b"
)
# What calls a percentage one of a peak.
SHARE = regex(
    r"\bpeak\b|theoret|roofline|(?<![a-z])mfu(?![a-z])|speed of light|\bsol\b|of (?:the )?(?:hbm|memory|max)|of its \d|"
    r"auslastung"
)
SHOWN = regex(
    r"(?i)measur|achiev|reach|moved|transferred|copied|\bgot|\bshow|\bsaw|took|\balg ?bw|sustain|hits?\b|sees?\b"
)


def fastest(row: Row, formats: Iterable[str], sparse: bool = False) -> tuple[float, float]:
    """The highest peak of the GPUs that the row may have run on, in any of `formats`; of all formats where one of them
    has no peak there (int4). And by which factor that GPU may exceed it."""

    def peak(device: Device) -> float:
        known = [f for f in formats if device.peak(f)]
        # INT4 runs as fast as sparse INT8, where there is such.
        twice = 2.0 if "int4" in formats and not (device.peak("int4") or device.sparse_peak("int8")) else 1.0
        known, both = (list(DTYPES), True) if not known or len(known) < len([*formats]) else (known, sparse)
        return twice * max((device.sparse_peak(f) if both else None) or generous_peak(device, f) or 0.0 for f in known)

    # Consumer boards boost beyond the clock of the data sheet.
    slack = (1.2 if any(w in d.name for w in ("GeForce", "Radeon", "TITAN")) else 1.06 for d in row.devices)
    return max(zip(map(peak, row.devices), slack, strict=True), key=lambda pair: pair[0] * pair[1])


def memory_of(row: Row) -> float:
    """Bytes/s of the fastest memory; infinity where none is known."""
    return max((d.memory_bps or float("inf") for d in row.devices), default=float("inf"))


def peaks_of(device: Device, formats: Sequence[str] = ()) -> tuple[float, ...]:
    """Every peak FLOP/s that anybody may mean of `formats`, or of all: dense, sparse, with the faster accumulation."""
    of = formats if formats and all(map(device.peak, formats)) else DTYPES
    known = [x for f in of for x in (device.peak(f), device.sparse_peak(f), generous_peak(device, f))]
    if device.capability == (9, 0):  # whose sheet gives a clock below the highest
        clock = 1513 / 1979 if "PCIe" in device.name else 1.0
        known += [clock * SPARSE_SHEET[f] / n for f in of if f in SPARSE_SHEET for n in (1, 2)]
    return tuple(dict.fromkeys(x for x in known if x))


def end_before(row: Row, q: Quantity) -> int:
    """Where the last figure before q ends, 0 before the first."""
    return max((x.end for x in row.quantities if x.end <= q.start), default=0)


def own_words(row: Row, q: Quantity) -> str:
    """The words of a figure: its column and row, or those of a sentence since the last figure."""
    if row.kind != "line":
        return f"{q.label} {row.label}"
    past = end_before(row, q)
    before = re.split(r"[,;)]|\. | and ", row.text[past : q.start], maxsplit=1)[-1] if past else row.text[: q.start]
    behind = row.text[q.end : q.end + 36]
    behind = re.split(r"[.;,] | \((?=[^)]*\d)| and | (?:al)?though | while | but |(?<![A-Za-z])\d|$", behind)[0]
    return before + q.text + behind


def is_limit(own: str) -> bool:
    # "1.73 TB/s of 2.04 TB/s", "the link isn't the limit: it carries 3.6 Gbit/s", "reaches half of what it can do"
    own = re.sub(r"(?i)(?:\bnot|n't|\bno) (?:the |a |its )?(?:limit|ceiling)|^.*\bof what\b", "", own)
    return bool(_LIMIT.search(own)) and not (SHOWN.search(own) or own.endswith(" of "))


@lru_cache(maxsize=8)
def _sheet(report: Report) -> tuple[float, ...]:
    """The peaks and bandwidths of the GPUs that a report names."""
    devices = report.everything.of("devices")
    formats = [f for f in DTYPES if f != "tf32" or "tf32" in report.text]  # else it is nobody's peak
    sheet = [x for d in devices for x in (d.memory_bps, *(d.peak(f) for f in formats)) if x]
    sheet += [x for d in devices for f in formats * report.sparse if (x := d.sparse_peak(f))]
    if any(d.capability == (9, 0) for d in devices):
        sheet += [x for peak in SPARSE_SHEET.values() for x in (peak, peak / 2)]
    return tuple(dict.fromkeys(sheet))


def on_sheet(row: Row, q: Quantity) -> bool:
    """Whether a rate is a peak: called so, or that of a GPU that the report names."""
    if q.kind not in ("rate", "bandwidth"):
        return False
    told = re.search(r"peak(?! at)|theoret|roofline", q.words) or (row.kind == "line" and is_limit(own_words(row, q)))
    told = told or (q.kind == "bandwidth" and q.text.endswith("E"))  # "100GbE"
    return bool(told) or any(q.plain.meets(x, 0.005) for x in _sheet(row.report))


def gpu_counts(row: Row) -> tuple[float, ...]:
    """How many GPUs a figure may be the sum of: 1, and every number that the report states."""
    return (1.0, *row.report.everything.of("gpus"), *([row.own["gpus"]] if "gpus" in row.own else []))


def formats_of(q: Quantity, row: Row) -> tuple[str, ...]:
    """What a table's column or row, or a sentence, calls the format of a figure; another column's is not its."""
    if row.kind != "table":
        return row.facts.of("formats") or _of_above(row)
    return facts(q.label).of("formats") or facts(row.label).of("formats") or _of_above(row)


def _of_above(row: Row) -> tuple[str, ...]:
    """The one format right above: of a sentence that leads to a list ("…, dense BF16, square problems:"), or of a line
    of a few words above a table ("**BF16**")."""
    text = row.report.blocks[row.block - 1].text if row.block else ""
    if row.kind == "table":
        title = text.strip() if len(text.strip()) < 30 and "\n" not in text.strip() else ""
    else:
        title = re.split(r"(?<=[.!?])\s", text.rstrip())[-1] if text.rstrip().endswith(":") else ""
        if row.report.blocks[row.block].kind == "list" and re.match(r"(?i)\w+ (?:inputs|operands|products)\b", text):
            title = re.sub(r"(?i)\bfp32 accum", "", text)
    found = facts(title).of("formats")
    return found if len(found) == 1 else ()
