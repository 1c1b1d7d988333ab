"""Sentences from the records of `diagnose`: every number in them is computed from what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from expertile.lab.measure.stats import is_tie
from expertile.lab.race.record import Record


def conclude(records: Iterable[Record]) -> list[str]:
    """What the records of one `diagnose` run show; cases without a time are left out, with the reason last."""
    mine = [r for r in records if r.workload.startswith("diagnose/")]
    timed = [r for r in mine if r.status == "ok" and r.time_s]
    sentences: list[str] = []
    for policy in ("graph", "eager"):
        sentences += _split([r for r in timed if r.policy == policy], policy)
    best = [r for r in timed if r.policy == ("graph" if any(r.policy == "graph" for r in timed) else "eager")]
    sentences += _units(best)
    sentences += _launches(timed)
    failed = [f"{r.workload} {r.dtype} {r.backend} ({r.policy}): {r.reason}" for r in mine if r.status != "ok"]
    return sentences + ([f"Without a time: {'; '.join(failed)}."] if failed else [])


def _split(timed: Sequence[Record], policy: str) -> list[str]:
    """One large product against several small ones of the same FLOPs."""
    loops = [r for r in timed if r.backend == "torch.mm loop" and r.op == "mm"]
    found = []
    for many in loops:
        count, side = many.shape["count"], many.shape["m"]
        # A size may have been measured in two experiments; the first was timed against the split one.
        singles = list(
            {r.workload: r for r in reversed(timed) if r.dtype == many.dtype and r.shape["count"] == 1}.values()
        )
        singles.reverse()
        equal = [r for r in singles if r.flops == many.flops]
        if not equal:
            continue
        batched = next((r for r in timed if r.backend == "torch.bmm" and r.workload == many.workload), None)
        large = next((r for r in equal if r.shape["m"] == r.shape["n"]), equal[0])
        others = [(f"one {_size(r)}", r) for r in equal if r is not large]
        others += [("the same in one torch.bmm", batched)] if batched else []
        extra = "".join(f", {name} {_us(r)}" for name, r in others)
        found.append(
            f"Equal FLOPs ({many.flops / 1e9:.3g} GFLOP, {many.dtype}, {policy}): one {_size(large)} takes "
            f"{_us(large)}, {count} x {_size(many)} in {many.shape['launches']} launches {_us(many)}{extra}. "
            f"Splitting one large product into {count} launches {_verdict(many, large)}."
        )
        for odd in (r for r in singles if r.shape["m"] == r.shape["n"] == r.shape["k"] and r not in equal):
            elements = odd.shape["m"] * odd.shape["n"] / (count * side * many.shape["n"])
            if not 0.9 < elements < 1.1:
                continue
            found.append(
                f"Against one {_size(odd)} ({_us(odd)}) the {count} look {_time(odd) / _time(many):.2f} times as "
                f"fast ({policy}), but that product does {odd.flops / many.flops:.2f} times their work: its matrices "
                f"have {elements:.3f} times the elements of the {count} together, and FLOPs grow with the side cubed. "
                f"Per FLOP the {count} take {_per_flop(many) / _per_flop(odd):.2f} times as long as it does."
            )
    return found


def _verdict(many: Record, large: Record) -> str:
    assert many.ci95_s is not None and large.ci95_s is not None
    if is_tie(_time(many), many.ci95_s, _time(large), large.ci95_s):
        return "makes no difference that this measurement can see"
    ratio = _time(many) / _time(large)
    return f"makes it {ratio:.2f} times slower" if ratio > 1 else f"makes it {1 / ratio:.2f} times faster"


def _units(timed: Sequence[Record]) -> list[str]:
    """Which units the products of each dtype run on."""
    squares = [r for r in timed if r.backend == "torch.mm" and r.shape["m"] == r.shape["n"] == r.shape["k"]]
    sizes = sorted({r.shape["m"] for r in squares if len({q.dtype for q in squares if _size(q) == _size(r)}) > 1})
    found = []
    for side in sizes:
        by_dtype = {r.dtype: r for r in squares if r.shape["m"] == side}
        rates = ", ".join(f"{d} {_rate(r)}" for d, r in by_dtype.items())
        found.append(f"{side}³: {rates}.")
    plain = next((r for r in squares if r.dtype == "fp32"), None)
    limit = None if plain is None else _peak(plain)
    if limit is None or plain is None or not str(plain.env.driver or ""):
        return found
    for dtype in dict.fromkeys(r.dtype for r in squares if r.dtype != "fp32"):
        fastest = max((r for r in squares if r.dtype == dtype), key=lambda r: r.tflops or 0.0)
        tflops = fastest.tflops or 0.0
        if tflops > limit:
            found.append(
                f"{dtype} runs on tensor cores: {tflops:.0f} TFLOP/s at {_size(fastest)} is {tflops / limit:.1f} times "
                f"the {limit:.0f} TFLOP/s that float32 units can reach."
            )
        else:
            found.append(
                f"{dtype} is not shown to run on tensor cores: {tflops:.3g} TFLOP/s at {_size(fastest)} stays below "
                f"the {limit:.3g} TFLOP/s that float32 units can reach."
            )
    return found


def _launches(timed: Sequence[Record]) -> list[str]:
    """What one launch costs, apart from what it computes."""
    counts = {r.shape["count"] for r in timed if r.op == "add"}
    found = []
    for record in (r for r in timed if r.policy == "eager" and r.shape["count"] in counts):
        calls, name = record.shape["launches"], _what(record)
        if calls == 1:
            continue
        eager = _time(record) / calls
        replay = next((r for r in timed if r.policy == "graph" and _same_case(r, record)), None)
        if replay is None:
            found.append(f"{calls} {name}, one by one: {_duration(eager)} per call, launch and work together.")
            continue
        graph = _time(replay) / calls
        share = max(eager - graph, 0.0) / eager
        found.append(
            f"{calls} {name}: {_duration(eager)} per call one by one, {_duration(graph)} replayed from a CUDA graph, "
            f"so {_duration(max(eager - graph, 0.0))} ({share:.0%}) of each eager call is launch and not work."
        )
    for whole in (r for r in timed if r.backend == "torch.bmm" and r.shape["count"] in counts):
        loop = next((r for r in timed if r.backend == "torch.mm loop" and _same_place(r, whole)), None)
        if loop is not None:
            found.append(
                f"One torch.bmm for all {whole.shape['count']} ({whole.policy}): {_us(whole)} instead of {_us(loop)}, "
                f"{_time(loop) / _time(whole):.2f} times as fast as {loop.shape['launches']} launches."
            )
    return found


def _same_case(first: Record, second: Record) -> bool:
    return (first.workload, first.dtype, first.backend) == (second.workload, second.dtype, second.backend)


def _same_place(first: Record, second: Record) -> bool:
    return (first.workload, first.dtype, first.policy) == (second.workload, second.dtype, second.policy)


def _what(record: Record) -> str:
    return "additions of one element" if record.op == "add" else f"products of {_size(record)}"


def _size(record: Record) -> str:
    m, n, k = record.shape["m"], record.shape["n"], record.shape["k"]
    return f"{m}³" if m == n == k else f"{m}x{n}x{k}"


def _time(record: Record) -> float:
    assert record.time_s is not None
    return record.time_s


def _us(record: Record) -> str:
    return _duration(_time(record))


def _duration(seconds: float) -> str:
    micros = seconds * 1e6
    return f"{micros:.1f} us" if micros < 1000 else f"{micros / 1e3:.2f} ms"


def _per_flop(record: Record) -> float:
    return _time(record) / record.flops


def _peak(record: Record) -> float | None:
    """The peak behind a compute bound, TFLOP/s."""
    return record.flops / record.bound_s / 1e12 if record.limiter == "compute" and record.bound_s else None


def _rate(record: Record) -> str:
    peak = _peak(record)
    rate = f"{record.tflops or 0.0:.3g} TFLOP/s"
    return f"{rate} ({(record.tflops or 0.0) / peak:.0%} of {peak:,.4g})" if peak else rate
