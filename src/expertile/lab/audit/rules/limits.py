"""Times and rates against the hardware: more FLOP/s or bytes/s than the GPU can do is impossible."""

from __future__ import annotations

import math
import re

from expertile.lab.audit import vocabulary
from expertile.lab.audit.claims import Claim
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import IMPOSSIBLE, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.limits import Limit
from expertile.lab.audit.quantities import show
from expertile.lab.audit.work import Reading
from expertile.lab.audit.workload import Workload, itemsize, remote

_PROSE = 160  # characters: a longer line is prose, which may speak of any hardware
_NOT_DRAM = re.compile(
    r"nvlink|pcie|infiniband|interconnect|network|chip-to-chip|\brdma\b|ethernet|\bnvme\b|\bssd\b|\bdisk\b|sram"
    r"|shared memory|\bsmem\b"
    r"|\bl1\b|\bl2\b|on-chip|register|\bcache\b|per rack|all-?reduce|\bbus ?bw\b|\bnic\b|host-to-device|\bh2d\b"
    r"|\bd2h\b",
    re.I,
)
_DRAM = re.compile(r"\bhbm|\bdram|\bvram|\bgddr", re.I)


def rates(context: Context) -> list[Finding]:
    """FLOP/s and bytes/s as printed, against the GPU's peak and memory bandwidth."""
    found = []
    for claim in context.claims:
        if claim.kind == "flop_rate":
            found.append(_flop_rate(context, claim))
        elif claim.kind == "byte_rate":
            found.append(_byte_rate(context, claim))
    return [f for f in found if f is not None]


def _flop_rate(context: Context, claim: Claim) -> Finding | None:
    limit, why = context.report.compute_limit(claim.place)
    value = claim.quantity.span
    if limit is None:
        return context.finding(
            claim, NOT_CHECKABLE, "peak_compute", f"{show('flop_rate', claim.quantity.value)}: {why}"
        )
    top, words = limit.value, limit.why
    if claim.is_limit:  # datasheets like to print the figure for 2:4 sparse matrices
        top, words = 2 * top, f"{words}, doubled for sparse matrices"
    low = value.lo if claim.quantity.high is None else value.hi
    share = low / top
    if low > top and not _says_whose(claim):
        text = f"{show('flop_rate', claim.quantity.value)}: the sentence does not say of which GPU"
        return context.finding(claim, NOT_CHECKABLE, "peak_compute", text)
    if low > top:
        text = (
            f"{show('flop_rate', claim.quantity.value)} is {share:.3g} times the limit of {show('flop_rate', top)} "
            f"({words})"
        )
        return context.finding(
            claim, IMPOSSIBLE, "peak_compute", text, claim.quantity.value / 1e12, top / 1e12, "TFLOP/s"
        )
    text = f"{show('flop_rate', claim.quantity.value)} is {share:.1%} of {show('flop_rate', top)} ({words})"
    return context.finding(claim, POSSIBLE, "peak_compute", text, claim.quantity.value / 1e12, top / 1e12, "TFLOP/s")


def _says_whose(claim: Claim) -> bool:
    """Whether a figure is a result line's, or stands in a long paragraph whose sentence names one known GPU."""
    if claim.column is not None or len(claim.place.text) <= _PROSE:
        return True
    known, unknown = vocabulary.devices(claim.sentence)
    return len(known) == 1 and not unknown and not claim.is_limit and len(claim.sentence) <= _PROSE


def _byte_rate(context: Context, claim: Claim) -> Finding | None:
    if _NOT_DRAM.search(claim.sentence + (claim.column.header if claim.column else "")):
        text = f"{show('byte_rate', claim.quantity.value)} is not said of DRAM"
        return context.finding(claim, NOT_CHECKABLE, "peak_bandwidth", text)
    limit, cache, why = context.report.memory_limit(claim.place)
    if limit is None:
        return context.finding(
            claim, NOT_CHECKABLE, "peak_bandwidth", f"{show('byte_rate', claim.quantity.value)}: {why}"
        )
    span = claim.quantity.span
    low = span.lo if claim.quantity.high is None else span.hi
    value, top = claim.quantity.value / 1e9, limit.value / 1e9
    shown = show("byte_rate", claim.quantity.value)
    if low <= limit.value:
        text = f"{shown} is {low / limit.value:.1%} of {show('byte_rate', limit.value)} ({limit.why})"
        return context.finding(claim, POSSIBLE, "peak_bandwidth", text, value, top, "GB/s")
    if not _says_whose(claim):
        text = f"{shown}: the sentence does not say of which GPU"
        return context.finding(claim, NOT_CHECKABLE, "peak_bandwidth", text)
    if _DRAM.search(claim.words) or claim.is_limit:
        text = f"{shown} is more than {show('byte_rate', limit.value)} ({limit.why})"
        return context.finding(claim, IMPOSSIBLE, "peak_bandwidth", text, value, top, "GB/s")
    moved, source = _bytes_near(context, claim)
    if moved is None:
        text = (
            f"{shown} is above {show('byte_rate', limit.value)} ({limit.why}); only data that stays in the "
            f"{show('bytes', cache)} of L2 allows that, and the size of the data is not stated"
        )
        return context.finding(claim, NOT_CHECKABLE, "peak_bandwidth", text, value, top, "GB/s")
    from_dram = max(0.0, moved - cache) / moved * low
    if from_dram > limit.value:
        text = (
            f"{shown} over {show('bytes', moved)} ({source}): even if {show('bytes', cache)} stay in L2, DRAM gives "
            f"{show('byte_rate', from_dram)}, more than {show('byte_rate', limit.value)} ({limit.why})"
        )
        return context.finding(claim, IMPOSSIBLE, "peak_bandwidth", text, value, top, "GB/s")
    text = (
        f"{shown} is above the DRAM limit, but {show('bytes', moved)} ({source}) may come from "
        f"{show('bytes', cache)} of L2"
    )
    return context.finding(claim, POSSIBLE, "peak_bandwidth", text, value, top, "GB/s")


def _bytes_near(context: Context, claim: Claim) -> tuple[float | None, str]:
    place = claim.place
    if place.table is not None and place.row is not None:
        typed = context.report.tables[place.table]
        for column in typed.of_kind("bytes"):
            cell = typed.at(place.row, column)
            if cell is not None and re.search(r"size|data|bytes|volume|traffic|moved|footprint", column.header, re.I):
                return 2 * cell.interval.hi, f"{column.header}, read and written"
    work = context.work(place)
    if isinstance(work, str):
        return None, work
    _, stated = itemsize(context.report, place, work.operation)
    factor = 1.0 if stated else 2.0
    most = max(work.readings, key=lambda r: r.nbytes)
    return most.nbytes * factor, most.how


def times(context: Context) -> list[Finding]:
    """Times of an operation whose sizes are known: the FLOP/s and bytes/s they imply, against the GPU's limits."""
    found = []
    for claim in context.claims:
        if claim.kind != "time" or not claim.is_run or claim.quantity.interval.hi <= 0:
            continue
        place = claim.place
        if place.table is not None and place.row is not None and context.report.tables[place.table].summary(place.row):
            continue
        work = context.work(claim.place)
        if isinstance(work, Workload):
            finding = _time(context, claim, work)
        else:
            far = remote(context.report, claim.place)
            finding = _time_of_far(context, claim, far) if far else None
            if finding is None and claim.place.kind != "paragraph":
                finding = context.finding(claim, NOT_CHECKABLE, "time_against_work", f"{claim.quantity.text}: {work}")
        if finding is not None:
            found.append(finding)
    return found


def _time(context: Context, claim: Claim, work: Workload) -> Finding | None:
    compute, why_compute = context.report.compute_limit(claim.place)
    memory, cache, why_memory = context.report.memory_limit(claim.place)
    if compute is None and memory is None:
        return context.finding(
            claim, NOT_CHECKABLE, "time_against_work", f"{claim.quantity.text}: {why_compute or why_memory}"
        )
    longest = claim.quantity.span.hi
    from_far = f" [{work.remote}]" if work.remote else ""
    least = work.least_flops
    if least is not None and least.flops and compute is not None:
        implied = least.flops / longest
        if implied > compute.value:
            text = _too_many_flops(claim, work, compute, longest) + from_far
            return context.finding(
                claim,
                IMPOSSIBLE,
                "time_against_work",
                text,
                least.flops / claim.quantity.value / 1e12,
                compute.value / 1e12,
                "TFLOP/s",
            )
    fewest = work.least_bytes
    if memory is not None:
        implied = max(0.0, fewest.nbytes - cache) / longest
        if implied > memory.value:
            text = (
                f"{fewest.how} = {show('bytes', fewest.nbytes)} in {claim.quantity.text}: even if "
                f"{show('bytes', cache)} stay in "
                f"L2 this is {show('byte_rate', implied)}, more than {show('byte_rate', memory.value)} "
                f"({memory.why}){from_far}"
            )
            return context.finding(
                claim,
                IMPOSSIBLE,
                "time_against_work",
                text,
                fewest.nbytes / claim.quantity.value / 1e9,
                memory.value / 1e9,
                "GB/s",
            )
    return _time_possible(context, claim, work, compute, memory, cache, from_far)


def _too_many_flops(claim: Claim, work: Workload, compute: Limit, longest: float) -> str:
    least = work.least_flops
    assert least is not None and least.flops is not None
    most = (
        ""
        if math.isclose(longest, claim.quantity.value)
        else f" ({show('flop_rate', least.flops / longest)} at the most generous rounding)"
    )
    text = (
        f"{least.how} = {show('flops', least.flops)} in {claim.quantity.text} is "
        f"{show('flop_rate', least.flops / claim.quantity.value)}{most}, more than "
        f"{show('flop_rate', compute.value)} ({compute.why})"
    )
    if len(work.readings) > 1:
        text += "; this is the reading with the least work"
    return text


def _time_possible(
    context: Context,
    claim: Claim,
    work: Workload,
    compute: Limit | None,
    memory: Limit | None,
    cache: float,
    from_far: str,
) -> Finding:
    parts = []
    longest = claim.quantity.span.hi
    reading = _possible_reading(work, compute, memory, cache, longest)
    value = limit = None
    unit = ""
    if reading.flops and compute is not None:
        rate = reading.flops / claim.quantity.value
        value, limit, unit = rate / 1e12, compute.value / 1e12, "TFLOP/s"
        parts.append(
            f"{reading.how} = {show('flops', reading.flops)}: "
            f"{show('flop_rate', rate)}, {rate / compute.value:.2%} "
            "of "
            f"{show('flop_rate', compute.value)} ({compute.why})"
        )
        more = [r for r in work.readings if r.flops and r.flops / longest > compute.value]
        if more:
            worst = min(more, key=lambda r: r.flops or 0.0)
            parts.append(
                f"but {worst.how} would be {show('flop_rate', (worst.flops or 0) / claim.quantity.value)}, which "
                "is impossible"
            )
    if memory is not None:
        rate = reading.nbytes / claim.quantity.value
        if not unit:
            value, limit, unit = rate / 1e9, memory.value / 1e9, "GB/s"
        how = "" if reading.flops else f"{reading.how} = "
        parts.append(
            f"{how}{show('bytes', reading.nbytes)} at least: "
            f"{show('byte_rate', rate)}, {rate / memory.value:.2%} of "
            f"{show('byte_rate', memory.value)}"
        )
    return context.finding(claim, POSSIBLE, "time_against_work", "; ".join(parts) + from_far, value, limit, unit)


def _possible_reading(
    work: Workload, compute: Limit | None, memory: Limit | None, cache: float, longest: float
) -> Reading:
    """The reading that makes a time possible: the standard one unless it breaks a limit, else the first that does not.

    FLOPs and bytes are judged apart, so it may be that none keeps both; then it is the one with the fewest FLOPs."""
    for r in (work.standard, *work.readings):
        if (compute is None or (r.flops or 0.0) / longest <= compute.value) and (
            memory is None or max(0.0, r.nbytes - cache) / longest <= memory.value
        ):
            return r
    return work.least_flops or work.least_bytes


def _time_of_far(context: Context, claim: Claim, far: list[Workload]) -> Finding | None:
    """A time whose sizes stand elsewhere: impossible only if every configuration that it may mean is impossible."""
    judged = [f for work in far if (f := _time(context, claim, work)) is not None]
    if not judged:
        return None
    bad = [f for f in judged if f.verdict == IMPOSSIBLE]
    if len(bad) == len(judged):
        return min(bad, key=lambda f: f.value or 0.0)
    if not bad:
        return judged[0]
    text = (
        f"depends on which configuration was run: {bad[0].explanation}; but with "
        f"{next(f for f in judged if f.verdict != IMPOSSIBLE).explanation}"
    )
    return context.finding(claim, NOT_CHECKABLE, "time_against_work", text)
