"""A time and a rate that stand together must give the work that the shape says, and rivals the same work."""

from __future__ import annotations

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.columns import Column, TypedTable
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import show
from expertile.lab.audit.workload import Workload

_UNIT = {"flop_rate": "flops", "byte_rate": "bytes", "token_rate": "number"}
# Backward attention is 2.5 times the forward; training counts both (Dao, FlashAttention benchmarks).
_FACTORS = {"attention": (1.0, 2.5, 3.5), "moe": (1.0, 3.0), "grouped_gemm": (1.0, 3.0), "gemm": (1.0, 3.0)}


def time_against_rate(context: Context) -> list[Finding]:
    """Rate × time against the FLOPs or bytes of the shape, in every table row, line and block that holds both."""
    found: list[Finding] = []
    for t in range(len(context.report.tables)):
        found += _table(context, t)
    for time, rate in _pairs_in_text(context):
        finding = _judge(context, time, rate)
        if finding is not None:
            found.append(finding)
    return found


def _table(context: Context, t: int) -> list[Finding]:
    typed = context.report.tables[t]
    found: list[Finding] = []
    for kind in ("flop_rate", "byte_rate"):
        pairs = _column_pairs(typed, kind)
        rows: list[list[tuple[Claim, Claim]]] = []
        for row in typed.body():
            seen: list[tuple[Claim, Claim]] = []
            for time_column, rate_column in pairs:
                time = context.in_cell(t, row, time_column.index)
                rate = context.in_cell(t, row, rate_column.index)
                if time is not None and rate is not None and not rate.is_limit:
                    seen.append((time, rate))
            for time, rate in seen:
                finding = _judge(context, time, rate)
                if finding is not None:
                    found.append(finding)
            if len(seen) > 1 and (kind == "byte_rate" or isinstance(context.work(seen[0][0].place), str)):
                rows.append(seen)
        found += _same_work(context, rows)
    return found


def _column_pairs(typed: TypedTable, kind: str) -> list[tuple[Column, Column]]:
    times = [c for c in typed.of_kind("time") if not c.phase]
    times = [c for c in times if not c.statistic] or times
    rates = [c for c in typed.of_kind(kind) if "theoretical" not in c.header.lower()]
    if len(times) == 1 and len(rates) == 1:
        return [(times[0], rates[0])]
    pairs = []
    for rate in rates:
        same = [c for c in times if c.system and c.system == rate.system]
        if len(same) == 1:
            pairs.append((same[0], rate))
    return pairs


def _pairs_in_text(context: Context) -> list[tuple[Claim, Claim]]:
    """(time, rate) of the same line, or of a block that has one of each."""
    lines: dict[int, list[Claim]] = {}
    blocks: dict[int, list[Claim]] = {}
    for c in context.claims:
        if (
            c.place.table is None
            and not c.is_limit
            and (c.kind in ("flop_rate", "byte_rate") or (c.kind == "time" and c.is_run))
        ):
            lines.setdefault(c.place.line, []).append(c)
            if c.place.kind in ("fence", "list"):
                blocks.setdefault(c.place.block, []).append(c)
    pairs = []
    for group in lines.values():
        times = [c for c in group if c.kind == "time"]
        for kind in ("flop_rate", "byte_rate"):
            rates = [c for c in group if c.kind == kind]
            if times and len(times) == len(rates):
                pairs += list(zip(times, rates, strict=True))
    for group in blocks.values():
        if len({c.place.line for c in group}) < 2:
            continue
        times = [c for c in group if c.kind == "time"]
        for kind in ("flop_rate", "byte_rate"):
            rates = [c for c in group if c.kind == kind]
            if len(times) == 1 and len(rates) == 1 and times[0].place.line != rates[0].place.line:
                pairs.append((times[0], rates[0]))
    return pairs


def _judge(context: Context, time: Claim, rate: Claim) -> Finding | None:
    work = context.work(time.place)
    if isinstance(work, str):
        work = context.work(rate.place)
    if isinstance(work, str) or time.quantity.bound or rate.quantity.bound:
        return None
    product = time.quantity.span * rate.quantity.span
    amount = rate.quantity.value * time.quantity.value
    kind = _UNIT[rate.kind]
    said = f"{rate.quantity.text} × {time.quantity.text} = {show(kind, amount)}"
    if not time.is_run:
        return None
    if rate.kind == "byte_rate":
        return _judge_bytes(context, rate, work, product, amount, said)
    options = _flop_options(work)
    for value, how in options:
        if product.widened(0.005).meets(Interval.of(value)):
            return context.finding(rate, POSSIBLE, "time_against_rate", f"{said}, and {how} = {show('flops', value)}")
    first = options[0] if options else None
    if first is None:
        return None
    value, how = first
    implied = value / time.quantity.value
    text = (
        f"{said}, but {how} = {show('flops', value)}: {time.quantity.text} would be {show('flop_rate', implied)}, "
        f"and {rate.quantity.text} would take {show('time', value / rate.quantity.value)}"
    )
    if all("(square)" in words for _, words in options) and not _cube_stated(context, time):
        return context.finding(rate, NOT_CHECKABLE, "time_against_rate", f"{text}; but the third size is not stated")
    off = implied / rate.quantity.value
    for factor in (1e3, 1e6, 1e-3, 1e-6):
        if 0.98 < off / factor < 1.02:
            text += f"; they differ by {factor:g}, as if one of the units were wrong"
    if len(options) > 1:
        text += f"; no other reading of the shape fits ({len(options)} tried)"
    return context.finding(
        rate, INCONSISTENT, "time_against_rate", text, rate.quantity.value / 1e12, implied / 1e12, "TFLOP/s"
    )


def _cube_stated(context: Context, claim: Claim) -> bool:
    scopes = context.report.scopes(claim.place)
    return any("k" in s.dims or any(len(x.sizes) == 3 for x in s.shapes) for s in scopes)


def _flop_options(work: Workload) -> list[tuple[float, str]]:
    found = []
    for reading in work.readings:
        for factor in _FACTORS.get(work.operation, (1.0,)):
            if reading.flops:
                how = reading.how if factor == 1.0 else f"{factor:g} × {reading.how} (with the backward pass)"
                found.append((reading.flops * factor, how))
    return found


def _judge_bytes(
    context: Context, rate: Claim, work: Workload, product: Interval, amount: float, said: str
) -> Finding | None:
    least = work.least_bytes
    passes = amount / least.nbytes
    tensor = least.nbytes / 2 if least.flops is None else least.nbytes
    for count in range(1, 17):
        if product.widened(0.02).meets(Interval.of(tensor * count)):
            text = f"{said}, {count} × {show('bytes', tensor)} ({least.how})"
            return context.finding(rate, POSSIBLE, "time_against_rate", text)
    text = f"{said}, {passes:.3g} times the least bytes ({least.how} = {show('bytes', least.nbytes)})"
    if passes < 0.2 or passes > 64:
        value = rate.quantity.value
        return context.finding(rate, INCONSISTENT, "time_against_rate", text, value / 1e9, value / passes / 1e9, "GB/s")
    return context.finding(rate, NOT_CHECKABLE, "time_against_rate", f"{text}; what traffic is counted is not stated")


def _same_work(context: Context, rows: list[list[tuple[Claim, Claim]]]) -> list[Finding]:
    """Systems of one row did the same work: rate × time must agree, if the other rows show that it is counted so."""
    agree: list[Finding] = []
    differ: list[Finding] = []
    for seen in rows:
        time, rate = seen[0]
        first = (time.quantity.span * rate.quantity.span).widened(0.01)
        kind = _UNIT[rate.kind]
        amount = show(kind, time.quantity.value * rate.quantity.value)
        for other_time, other_rate in seen[1:]:
            product = (other_time.quantity.span * other_rate.quantity.span).widened(0.01)
            other = show(kind, other_time.quantity.value * other_rate.quantity.value)
            text = (
                f"{other_rate.quantity.text} × {other_time.quantity.text} = {other}, "
                f"{rate.quantity.text} × {time.quantity.text} = {amount} in the same row"
            )
            same = product.meets(first)
            finding = context.finding(other_rate, POSSIBLE if same else INCONSISTENT, "same_work_in_row", text)
            (agree if same else differ).append(finding)
    return agree + (differ if len(agree) >= 2 and len(agree) >= len(differ) else [])
