"""The figures of docs/results/moe.md, put between its markers: work of each stage by formula, times and peaks of memory
from records, and what token rounding does to simulated routings.

Blocks `layer`, `stages`, `decode`, `sonic` and `rounding` stand between <!-- expertile:moe NAME --> and
<!-- /expertile:moe NAME -->; `decode` and `sonic` are written by `moe_presets.py`, the first two from `PRESETS`. The
layers and their stages are eager calls, the kernels between them calls of a CUDA graph.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from expertile.device import Device
from expertile.lab.race.record import PEAK_BYTES, SECONDS, Record
from expertile.lab.report.rows import by
from expertile.lab.report.units import MISSING, markdown_table, percent, significant, times
from expertile.moe.rounding import MODES, RoundingEffect, round_groups, rounding_effect
from expertile.moe.router import RouterConfig, route
from expertile.roofline import Work, bound
from tools.pages import moe_presets
from tools.pages.recorded import NOT_MEASURED, OURS, ms

PRESETS = ("moe", "moe-memory", "moe-stages", "moe-routing")
Size = tuple[int, int, int, int, int]  # T, H, I, E, k
Found = Mapping[tuple[str, str, str], Record]  # by operator, backend and metric

TITLES = {
    OURS: "expertile",
    "torch.compile": "`torch.compile`, results gathered by token",
    "torch.compile-index-add": "`torch.compile`, results added by `index_add`",
    "torch": "eager, gathered by token",
    "torch-index-add": "eager, `index_add`",
}
STAGES = {
    "router linear": "logits",
    "route": "choice of experts",
    "permutation": "permutation",
    "up+act (keeps pre)": "up-projection and activation",
    "up+act (infer)": "the same, pre not kept",
    "down": "down-projection",
    "combine": "combine",
    "B order dy": "dy in the order of rows",
    "B gated_backward": "dpre, act_w, dweights",
    "B wgrad down": "ddown",
    "B wgrad up": "dgate_up",
    "B dgrad": "dx of each row",
    "B combine": "dx of each token",
}
_OPTIONAL = "up+act (infer)"  # not a part of the sum: the stage above it in another form

ROUNDED = ((1024, 0.0), (4096, 0.0), (4096, 1.0), (32768, 0.0), (32768, 1.0))
_EXPERTS, _TOP_K, _TILE = 128, 8, 128


def rounded(tokens: int, skew: float, seed: int = 0) -> dict[str, RoundingEffect]:
    """What each mode does to top-8 of 128 experts, tiles of 128 rows and one candidate: logits are N(0, 1) less
    skew · ln(e + 1) for expert e; weights are normalised over the token's eight."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, _EXPERTS, generator=generator) - skew * torch.log(torch.arange(_EXPERTS) + 1.0)
    routing = route(logits, RouterConfig(_EXPERTS, _TOP_K + 1, normalize=False), want_scores=False)
    weights = routing.topk_weights / routing.topk_weights[:, :_TOP_K].sum(1, keepdim=True)
    found = {}
    for mode in MODES:
        columns = RouterConfig(_EXPERTS, _TOP_K, rounding=mode).columns
        before = routing.topk_ids[:, :columns], weights[:, :columns].contiguous()
        ids = round_groups(*before, _EXPERTS, top_k=_TOP_K, tile=_TILE, mode=mode)
        found[mode] = rounding_effect(*before, ids, _EXPERTS, top_k=_TOP_K, tile=_TILE)
    return found


def _size(record: Record) -> Size:
    t, h, i, e, k = (record.shape[name] for name in ("tokens", "hidden", "intermediate", "experts", "top_k"))
    return t, h, i, e, k


def _by_size(records: Iterable[Record], *ops: str) -> dict[Size, list[Record]]:
    """The eager records of the operators, size after size."""
    return by((r for r in records if r.op in ops and r.policy == "eager" and r.status == "ok"), _size)


def _source(record: Record, preset: str, device: Device) -> str:
    day = record.date[:10]
    return f"One run on {device.name}, {day}: `results/{device.slug}/{day}-{preset}.jsonl`."


def _time(record: Record) -> float:
    assert record.time_s is not None
    return record.time_s


def _layer(size: Size, records: Sequence[Record]) -> list[str]:
    found: Found = {(r.op, r.backend, r.metric): r for r in records}
    timed = [way for way in TITLES if all((op, way, SECONDS) in found for op in ("moe", "moe_train"))]
    if OURS not in timed:
        return []
    body = []
    for way in timed:
        row = [TITLES[way]]
        for op in ("moe", "moe_train"):
            record, ours = found[op, way, SECONDS], found[op, OURS, SECONDS]
            row += [ms(_time(record)), significant(record.tflops or 0.0), times(_time(record) / _time(ours))]
        for op in ("moe", "moe_train"):
            peak = found.get((op, way, PEAK_BYTES))
            row.append(MISSING if peak is None or peak.value is None else significant(peak.value / 2**30))
        distance = found["moe", way, SECONDS].details.get("distance")
        body.append([*row, MISSING if way == OURS or distance is None else f"{distance:.0e}"])
    header = (
        "layer | forward, ms | TFLOP/s | to ours | forward + backward, ms | TFLOP/s | to ours | "
        "peak forward, GiB | peak both, GiB | difference"
    )
    t, h, i, e, k = size
    lines = [f"**T = {t}, H = {h}, I = {i}, E = {e}, k = {k}**, bf16", markdown_table(header, body)]
    others = [way for way in timed if way != OURS]
    if others:
        forward, both = ({way: _time(found[op, way, SECONDS]) for way in timed} for op in ("moe", "moe_train"))
        first, second = (min(s[way] for way in others) / s[OURS] for s in (forward, both))
        backward = 2 * found["moe", OURS, SECONDS].flops / (both[OURS] - forward[OURS]) / 1e12
        lines.append(
            f"The fastest other takes {times(first)} our time forward and {times(second)} forward and backward; our "
            f"backward pass alone, the difference, runs at {significant(backward)} TFLOP/s."
        )
    return lines


def _layers(records: Sequence[Record], device: Device) -> list[str]:
    """Of the last run that timed torch's layers too, with the peaks that another one measured."""
    timed = [
        r.run for r in records if r.op == "moe" and r.policy == "eager" and r.backend in TITLES and r.backend != OURS
    ]
    of_run = [r for r in records if r.metric != SECONDS or r.run in timed[-1:]]
    sizes = _by_size(of_run, "moe", "moe_train")
    lines = [line for size, found in sizes.items() for line in _layer(size, found)]
    return [_source(next(iter(sizes.values()))[0], "moe", device), *lines] if lines else []


def _sums(seconds: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of all stages forward, and backward."""
    counted = {name: s for name, s in seconds.items() if name != _OPTIONAL}
    backward = sum(s for name, s in counted.items() if name.startswith("B "))
    return sum(counted.values()) - backward, backward


def _stages(records: Sequence[Record], device: Device) -> list[str]:
    measured = {size: {r.shape["stage"]: r for r in found} for size, found in _by_size(records, "moe_stage").items()}
    if not measured:
        return []
    size = next(iter(measured))
    stages = measured[size]
    body = []
    for name, title in STAGES.items():
        if name not in stages:
            continue
        work, seconds = stages[name], _time(stages[name])
        least = bound(Work(work.flops, work.nbytes), device, "bf16")
        moved = least.limiter == "memory"
        rate = (work.nbytes if moved else work.flops) / seconds / 1e12
        body.append(
            [
                title,
                significant(work.flops / 1e9) if work.flops else MISSING,
                significant(work.nbytes / 1e6),
                ms(least.seconds),
                least.limiter,
                ms(seconds),
                f"{significant(rate)} {'TB/s' if moved else 'TFLOP/s'}",
                percent(least.seconds / seconds),
                *(ms(_time(other[name])) for other in list(measured.values())[1:]),
            ]
        )
    more = [f"ms at ({', '.join(map(str, other))})" for other in list(measured)[1:]]
    header = ["stage", "GFLOP", "MB", "bound, ms", "limited by", "ms", "rate", "of bound", *more]
    forward, backward = _sums({name: _time(record) for name, record in stages.items()})
    lines = [
        _source(next(iter(stages.values())), "moe-stages", device),
        f"(T, H, I, E, k) = ({', '.join(map(str, size))}); FLOPs, bytes and bound by formula.",
        markdown_table(header, body),
        f"The stages sum to {ms(forward)} ms forward and {ms(backward)} ms backward.",
    ]
    graph = {
        (r.op, r.backend): f"{significant(_time(r) * 1e6)} µs"
        for r in records
        if r.policy == "graph"
        and r.status == "ok"
        and tuple(r.shape.get(name) for name in ("tokens", "experts", "top_k")) == (size[0], *size[3:])
    }
    needed = (("moe_route", OURS), ("moe_permutation", OURS), ("moe_route", "torch.topk"))
    if graph.keys() >= set(needed):
        choice, order, topk = (graph[key] for key in needed)
        lines.append(
            "Each stage is timed as a call from Python, so choice and permutation show the host's launches. In a CUDA "
            f"graph they take {choice} and {order}, and softmax and `topk` of torch {topk}."
        )
    return lines


def _rounding() -> list[str]:
    body = []
    for tokens, skew in ROUNDED:
        for mode, e in rounded(tokens, skew).items():
            body.append(
                [
                    f"{tokens}",
                    "even" if not skew else f"skew {skew:g}",
                    mode,
                    f"{e.tiles_before} → {e.tiles_after}",
                    f"{percent(e.tile_use_before)} → {percent(e.tile_use_after)}" if e.tiles_after else MISSING,
                    percent(e.weight_dropped),
                    percent(e.weight_added),
                    percent(e.tokens_changed),
                    percent(e.tokens_without_expert),
                    percent(e.largest_loss),
                ]
            )
    header = (
        "tokens | experts | mode | tiles | of which used | weight lost | weight added | tokens changed | "
        "without expert | worst token loses"
    )
    return [markdown_table(header, body, left=3)]


def blocks(records: Sequence[Record], presets: Iterable[Record], device: Device) -> dict[str, str]:
    """Markdown of each block: of the records of `PRESETS` and `moe_presets.PRESETS` on `device`, and of arithmetic."""
    here = [r for r in records if r.env.gpu == device.name]
    found = {"layer": _layers(here, device), "stages": _stages(here, device), "rounding": _rounding()}
    found |= moe_presets.blocks(presets, device.name)
    return {name: "\n\n".join(lines) or NOT_MEASURED for name, lines in found.items()}
