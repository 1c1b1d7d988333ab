"""The figures of docs/results/moe.md, put between its markers: work of each stage by formula, times from the newest
file of results/<gpu>/moe/ and from records (`moe_presets.py`), and what token rounding does to simulated routings.

A file, made by tools/measure_moe.py, is JSON lines, told apart by "part": `sizes` (whole layers, seconds by
contestant), `stages` (seconds of ours by stage) and `kernels` (µs in a CUDA graph). Only figures of one file, which is
of one machine and one set of versions, stand beside each other; those of one line were taken in turns. Blocks
`layer`, `stages`, `decode`, `sonic` and `rounding` stand between <!-- expertile:moe NAME --> and
<!-- /expertile:moe NAME -->.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.operators.moe_stages import STAGES, stage_works
from expertile.lab.race.parts import newest_parts, read_parts
from expertile.lab.race.record import Record, shipped_root
from expertile.lab.report.markers import fill_file
from expertile.lab.report.units import MISSING, markdown_table, percent, significant, times
from expertile.moe.rounding import MODES, RoundingEffect, round_groups, rounding_effect
from expertile.moe.router import RouterConfig, route
from expertile.roofline import bound
from tools.pages import moe_presets

NOT_MEASURED = "Not measured yet."
OURS = "ours"
Size = tuple[int, int, int, int, int]  # T, H, I, E, k

WAYS = {
    OURS: "expertile",
    "compile-gather": "`torch.compile`, results gathered by token",
    "compile-add": "`torch.compile`, results added by `index_add`",
    "eager-gather": "eager, gathered by token",
    "eager-add": "eager, `index_add`",
}
_OPTIONAL = "up+act (infer)"  # not a part of the sum: the stage above it in another form

ROUNDED = ((1024, 0.0), (4096, 0.0), (4096, 1.0), (32768, 0.0), (32768, 1.0))
_EXPERTS, _TOP_K, _TILE = 128, 8, 128


def shipped_moe(slug: str, root: str | Path | None = None) -> Path | None:
    """The newest file of `results/<slug>/moe/`, or None."""
    return newest_parts((shipped_root() if root is None else Path(root)) / slug / "moe")


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


def _ms(seconds: float) -> str:
    return significant(seconds * 1e3)


def _layer(part: Mapping[str, Any]) -> list[str]:
    forward, both, flops = part["fwd"], part["both"], part["flops"]
    ways = [way for way in WAYS if isinstance(forward.get(way), float) and isinstance(both.get(way), float)]
    if OURS not in ways:
        return []
    body = []
    for way in ways:
        row = [WAYS[way]]
        for seconds, work in ((forward, flops), (both, 3 * flops)):
            row += [_ms(seconds[way]), significant(work / seconds[way] / 1e12), times(seconds[way] / seconds[OURS])]
        row += [significant(gib) for gib in part["peak_gib"].get(way, ())] or [MISSING, MISSING]
        body.append([*row, MISSING if way == OURS else f"{part['err'][way]:.0e}"])
    header = [
        "layer",
        "forward, ms",
        "TFLOP/s",
        "to ours",
        "forward + backward, ms",
        "TFLOP/s",
        "to ours",
        "peak forward, GiB",
        "peak both, GiB",
        "difference",
    ]
    t, h, i, e, k = (part[name] for name in "THIEk")
    lines = [f"**T = {t}, H = {h}, I = {i}, E = {e}, k = {k}**, bf16", markdown_table(header, body)]
    others = [way for way in ways if way != OURS]
    if others:
        first, second = (min(s[way] for way in others) / s[OURS] for s in (forward, both))
        backward = 2 * flops / (both[OURS] - forward[OURS]) / 1e12
        lines.append(
            f"The fastest other takes {times(first)} our time forward and {times(second)} forward and backward; our "
            f"backward pass alone, the difference, runs at {significant(backward)} TFLOP/s."
        )
    return lines


def _layers(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line for part in parts if part["part"] == "sizes" for line in _layer(part)]


def _sums(seconds: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of all stages forward, and backward."""
    counted = {name: s for name, s in seconds.items() if name != _OPTIONAL}
    backward = sum(s for name, s in counted.items() if name.startswith("B "))
    return sum(counted.values()) - backward, backward


def _stages(parts: Sequence[Mapping[str, Any]], device: Device) -> list[str]:
    measured = {tuple(part["size"]): part["seconds"] for part in parts if part["part"] == "stages"}
    if not measured:
        return []
    size = next(iter(measured))
    works, seconds = stage_works(size), measured[size]
    body = []
    for name, title in STAGES.items():
        if not isinstance(seconds.get(name), float):
            continue
        work, least = works[name], bound(works[name], device, "bf16")
        moved = least.limiter == "memory"
        rate = work.nbytes / seconds[name] / 1e12 if moved else work.flops / seconds[name] / 1e12
        body.append(
            [
                title,
                significant(work.flops / 1e9) if work.flops else MISSING,
                significant(work.nbytes / 1e6),
                _ms(least.seconds),
                least.limiter,
                _ms(seconds[name]),
                f"{significant(rate)} {'TB/s' if moved else 'TFLOP/s'}",
                percent(least.seconds / seconds[name]),
                *(_ms(other[name]) for other in list(measured.values())[1:]),
            ]
        )
    more = [f"ms at ({', '.join(map(str, other))})" for other in list(measured)[1:]]
    header = ["stage", "GFLOP", "MB", "bound, ms", "limited by", "ms", "rate", "of bound", *more]
    forward, backward = _sums(seconds)
    lines = [
        f"(T, H, I, E, k) = ({', '.join(map(str, size))}); FLOPs, bytes and bound by formula.",
        markdown_table(header, body),
        f"The stages sum to {_ms(forward)} ms forward and {_ms(backward)} ms backward.",
    ]
    graph = next(
        (p["us"] for p in parts if p["part"] == "kernels" and (p["T"], p["E"], p["k"]) == (size[0], *size[3:])), None
    )
    if graph and {"route", "perm", "torch topk"} <= graph.keys():
        lines.append(
            "Each stage is timed as a call from Python, so choice and permutation show the host's launches. In a CUDA "
            f"graph they take {significant(graph['route'])} µs and {significant(graph['perm'])} µs, and softmax and "
            f"`topk` of torch {significant(graph['torch topk'])} µs."
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
    header = [
        "tokens",
        "experts",
        "mode",
        "tiles",
        "of which used",
        "weight lost",
        "weight added",
        "tokens changed",
        "without expert",
        "worst token loses",
    ]
    return [markdown_table(header, body, left=3)]


def blocks(path: Path | None, records: Iterable[Record], device: Device) -> dict[str, str]:
    """Markdown of each block: of the file at `path` and the records of `moe_presets.PRESETS`, on `device`, and of
    arithmetic."""
    parts = [] if path is None else read_parts(path)
    found = {"layer": _layers(parts), "stages": _stages(parts, device), "rounding": _rounding()}
    found |= moe_presets.blocks(records, device.name)
    if path is not None:
        source = f"One run on {device.name}, {path.stem}: `results/{device.slug}/moe/{path.name}`."
        for name in ("layer", "stages"):
            found[name] = [source, *found[name]] if found[name] else []
    return {name: "\n\n".join(lines) or NOT_MEASURED for name, lines in found.items()}


def update_page(
    page: str | Path, path: Path | None, records: Iterable[Record], device: Device, check: bool = False
) -> bool:
    """Fill the blocks of the page; returns whether they were up to date. With `check` nothing is written. ValueError
    unless every block's markers stand in the page exactly once, in order."""
    return fill_file(page, {f"moe {name}": text for name, text in blocks(path, records, device).items()}, check)
