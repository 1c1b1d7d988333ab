"""Sentences from the records of preset "diagnose": every number in them is computed from what was measured."""

from collections.abc import Iterable, Sequence

from expertile.lab.operators.diagnose import OPERATORS, larger
from expertile.lab.race.record import Record
from expertile.lab.report.contest import tied
from expertile.lab.report.rows import Row, by, rows

OPS = tuple(operator.name for operator in OPERATORS)


def conclude(records: Iterable[Record]) -> list[str]:
    """What the records of one run show; cases without a time are left out."""
    timed = [row for row in rows(records) if row.op in OPS and row.timed and not row.is_baseline]
    sentences: list[str] = []
    for policy in ("graph", "eager"):
        sentences += _split([r for r in timed if r.policy == policy], policy)
    best = [r for r in timed if r.policy == ("graph" if any(r.policy == "graph" for r in timed) else "eager")]
    sentences += _units(best)
    sentences += _launches(timed)
    return sentences


def _split(timed: Sequence[Row], policy: str) -> list[str]:
    """One large product against several small ones of the same FLOPs."""
    found = []
    for race in by((r for r in timed if r.op == "diagnose_split"), lambda r: r.workload).values():
        held = {r.backend: r for r in race}
        many, large = (held.get(name) for name in ("torch.mm loop", "one square"))
        if many is None or large is None:
            continue
        side = larger(many.shape["side"])
        unequal = next((r for r in timed if r.op == "diagnose_math" and r.shape["side"] == side), None)
        count, launches = many.config["count"], many.config["launches"]
        others = [(name, held.get(key)) for key, name in (("one long", ""), ("torch.bmm", "the same in one torch.bmm"))]
        extra = "".join(f", {name or f'one {_size(r)}'} {_us(r)}" for name, r in others if r is not None)
        found.append(
            f"Equal FLOPs ({many.flops / 1e9:.3g} GFLOP, {many.dtype}, {policy}): one {_size(large)} takes "
            f"{_us(large)}, {count} x {_size(many)} in {launches} launches {_us(many)}{extra}. "
            f"Splitting one large product into {count} launches {_verdict(many, large)}."
        )
        if unequal is not None:
            elements = side**2 / (count * many.config["m"] ** 2)
            found.append(
                f"Against one {_size(unequal)} ({_us(unequal)}) the {count} look {unequal.seconds / many.seconds:.2f} "
                f"times as fast ({policy}), but that product does {unequal.flops / many.flops:.2f} times their work: "
                f"its matrices have {elements:.3f} times the elements of the {count} together, and FLOPs grow with the "
                f"side cubed. Per FLOP the {count} take {_per_flop(many) / _per_flop(unequal):.2f} times as long as it "
                "does."
            )
    return found


def _verdict(many: Row, large: Row) -> str:
    if tied(many, large):
        return "makes no difference that this measurement can see"
    ratio = many.seconds / large.seconds
    return f"makes it {ratio:.2f} times slower" if ratio > 1 else f"makes it {1 / ratio:.2f} times faster"


def _units(timed: Sequence[Row]) -> list[str]:
    """Which units the products of each dtype run on."""
    squares = [r for r in timed if r.op == "diagnose_math"]
    found = []
    for side, of_side in sorted(by(squares, lambda r: r.config["m"]).items()):
        rates = ", ".join(f"{r.shape['math']} {_rate(r)}" for r in of_side)
        found += [f"{side}³: {rates}."] if len(of_side) > 1 else []
    plain = next((r for r in squares if r.shape["math"] == "fp32"), None)
    limit = None if plain is None else _peak(plain)
    if limit is None or plain is None or not str(plain.env.driver or ""):
        return found
    for dtype, own in by((r for r in squares if r.shape["math"] != "fp32"), lambda r: r.shape["math"]).items():
        fastest = max(own, key=lambda r: r.tflops or 0.0)
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


def _launches(timed: Sequence[Row]) -> list[str]:
    """What one launch costs, apart from what it computes."""
    held = {(r.workload, r.backend, r.policy): r for r in timed if r.op in ("diagnose_launch", "diagnose_add")}
    found = []
    for (workload, backend, policy), record in held.items():
        calls = record.config["launches"]
        name = "additions of one element" if backend == "torch.add loop" else f"products of {_size(record)}"
        eager, replay = record.seconds / calls, held.get((workload, backend, "graph"))
        loop = held.get((workload, "torch.mm loop", policy))
        if backend == "torch.bmm" and loop is not None:
            found.append(
                f"One torch.bmm for all {record.config['count']} ({policy}): {_us(record)} instead of {_us(loop)}, "
                f"{loop.seconds / record.seconds:.2f} times as fast as {loop.config['launches']} launches."
            )
        elif policy == "eager" and replay is None:
            found.append(f"{calls} {name}, one by one: {_duration(eager)} per call, launch and work together.")
        elif policy == "eager" and replay is not None:
            graph = replay.seconds / calls
            more = max(eager - graph, 0.0)
            found.append(
                f"{calls} {name}: {_duration(eager)} per call one by one, {_duration(graph)} replayed from a CUDA "
                f"graph, so {_duration(more)} ({more / eager:.0%}) of each eager call is launch and not work."
            )
    return found


def _size(record: Row) -> str:
    m, n, k = (record.config[key] for key in "mnk")
    return f"{m}³" if m == n == k else f"{m}x{n}x{k}"


def _us(record: Row) -> str:
    return _duration(record.seconds)


def _duration(seconds: float) -> str:
    micros = seconds * 1e6
    return f"{micros:.1f} us" if micros < 1000 else f"{micros / 1e3:.2f} ms"


def _per_flop(record: Row) -> float:
    return record.seconds / record.flops


def _peak(record: Row) -> float | None:
    """The peak behind a compute bound, TFLOP/s."""
    return record.flops / record.bound_s / 1e12 if record.limiter == "compute" and record.bound_s else None


def _rate(record: Row) -> str:
    peak = _peak(record)
    rate = f"{record.tflops or 0.0:.3g} TFLOP/s"
    return f"{rate} ({(record.tflops or 0.0) / peak:.0%} of {peak:,.4g})" if peak else rate
