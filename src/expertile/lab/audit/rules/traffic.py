"""Claimed memory traffic over the measured time of the same operation, shape and system: it must fit the bandwidth."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.columns import Column, TypedTable
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import IMPOSSIBLE, INCONSISTENT, POSSIBLE, Finding
from expertile.lab.audit.quantities import show
from expertile.lab.audit.rules.columns import BASELINE
from expertile.lab.audit.workload import Workload

_TRAFFIC = re.compile(
    r"traffic|bytes (?:moved|accessed|transferred)|memory (?:moved|accesses)|data (?:moved|movement)|\bi/o\b", re.I
)
_ARROW = re.compile(r"→|->|\bto\b|=>")


@dataclass(frozen=True)
class _Traffic:
    claim: Claim
    system: str  # "first" (before an arrow), "second", or the words around it
    work: Workload


def traffic(context: Context) -> list[Finding]:
    """Every claimed traffic whose time is known, and traffics claimed twice with different figures."""
    stated = _stated(context)
    found: list[Finding] = []
    matched: dict[tuple[str, str, str], _Traffic] = {}
    for item in stated:
        times = _times(context, item)
        finding = _against_time(context, item, times)
        if finding is not None:
            found.append(finding)
        for _, column in times:
            key = (item.work.operation, _sizes(item.work), column.header.lower())
            first = matched.setdefault(key, item)
            if first is not item:
                found += _conflict(context, first, item, column)
    return found


def _stated(context: Context) -> list[_Traffic]:
    found = []
    for claim in context.claims:
        if claim.kind != "bytes" or claim.place.table is not None or not _TRAFFIC.search(claim.place.text):
            continue
        work = context.work(claim.place)
        if isinstance(work, str):
            continue
        pair = [c for c in context.by_line[claim.place.line] if c.kind == "bytes"]
        text = claim.place.text
        if len(pair) == 2 and _ARROW.search(text[pair[0].quantity.end : pair[1].quantity.start]):
            system = "first" if claim is pair[0] else "second"
        elif len(pair) == 1:
            system = f"{claim.place.text} {claim.place.lead}".lower()
        else:
            continue
        found.append(_Traffic(claim, system, work))
    return found


def _times(context: Context, item: _Traffic) -> list[tuple[Claim, Column]]:
    """Measured times of the same operation and shape, by the system the traffic is said of."""
    found = []
    for claim in context.claims:
        if claim.kind != "time" or claim.column is None or claim.place.table is None or not claim.is_run:
            continue
        work = context.work(claim.place)
        if isinstance(work, str) or work.operation != item.work.operation or _sizes(work) != _sizes(item.work):
            continue
        if _is_system(context.report.tables[claim.place.table], claim.column, item.system):
            found.append((claim, claim.column))
    return found


def _sizes(work: Workload) -> str:
    """The sizes of the reading, without the width of its values."""
    return re.sub(r" × [\d.]+ B.*", "", work.standard.how)


def _is_system(typed: TypedTable, column: Column, system: str) -> bool:
    times = typed.of_kind("time")
    if system in ("first", "second"):
        if len(times) != 2:
            return False
        baselines = [c for c in times if BASELINE.search(c.header)]
        if len(baselines) != 1:
            return False
        return (column is baselines[0]) == (system == "first")
    named = [c for c in times if c.system and any(re.search(rf"\b{re.escape(w)}\b", system) for w in c.system)]
    return named == [column]


def _against_time(context: Context, item: _Traffic, times: list[tuple[Claim, Column]]) -> Finding | None:
    if not times:
        return None
    claim = item.claim
    limit, cache, _ = context.report.memory_limit(times[0][0].place)
    if limit is None:
        return None
    tensor = times_tensor(context, times[0][0], item)
    passes = max(1, math.ceil(claim.quantity.value / tensor - 1e-3))
    spared = min(passes * cache, 0.9 * claim.quantity.interval.lo)
    judged = []
    for time, column in times:
        rate = (claim.quantity.interval.lo - spared) / time.quantity.span.hi
        printed = claim.quantity.value / time.quantity.value
        judged.append((rate, printed, time, column))
    rate, printed, time, column = min(judged, key=lambda j: j[0])
    text = (
        f"{claim.quantity.text} in {column.header} {show('time', time.quantity.value)} (line {time.place.line}) is "
        f"{show('byte_rate', printed)}"
    )
    if rate > limit.value:
        text += (
            f"; even if L2 spares {show('bytes', cache)} in each of {passes} passes it is "
            f"{show('byte_rate', rate)}, more than "
            f"{show('byte_rate', limit.value)} ({limit.why}): the traffic or the time is wrong"
        )
        return context.finding(claim, IMPOSSIBLE, "traffic_over_time", text, printed / 1e9, limit.value / 1e9, "GB/s")
    text += f", {printed / limit.value:.1%} of {show('byte_rate', limit.value)}"
    return context.finding(claim, POSSIBLE, "traffic_over_time", text, printed / 1e9, limit.value / 1e9, "GB/s")


def times_tensor(context: Context, time: Claim, item: _Traffic) -> float:
    """Bytes of one pass over the tensor, in the format stated where the time is."""
    work = context.work(time.place)
    return (item.work if isinstance(work, str) else work).least_bytes.nbytes / 2


def _conflict(context: Context, first: _Traffic, second: _Traffic, column: Column) -> list[Finding]:
    a, b = first.claim.quantity, second.claim.quantity
    if a.span.widened(0.01).meets(b.span.widened(0.01)):
        return []
    text = (
        f"{show('bytes', b.value)} here, {show('bytes', a.value)} on line {first.claim.place.line}, for the same "
        f"{second.work.operation} of "
        f"the same shape by the same system ({column.header}): {b.value / a.value:.3g} times as much"
    )
    return [context.finding(second.claim, INCONSISTENT, "traffic_conflict", text, b.value / 1e6, a.value / 1e6, "MB")]
