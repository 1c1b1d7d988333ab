"""The ladder's workloads: one product that compute limits, report 000's two largest lists of squares, one of decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from expertile.device import Device
from expertile.lab.race.routing import draw, parse_routing
from expertile.lab.race.workloads import GroupedWorkload, ragged_m

PRESET = "ladder"
_CPU_FLOPS = 2e10  # about a second on a few cores
_SHAPES = (  # name, groups, tokens, top-k, K, N, dtype, routing
    ("moe-ffn-up", 8, 16384, 1, 4096, 14336, "bf16", "uneven(0.15)"),
    ("64x1024", 64, 65536, 1, 1024, 1024, "fp16", "balanced"),
    ("16x2048", 16, 32768, 1, 2048, 2048, "fp16", "balanced"),
    ("decode", 128, 128, 8, 2048, 1536, "bf16", "uniform"),
)


def ladder_workloads(seed: int = 0) -> list[GroupedWorkload]:
    """a [rows, K] times weights [G, N, K] passed transposed; `seed` of the rows per group."""
    out = []
    for name, groups, tokens, top_k, k, n, dtype, routing in _SHAPES:
        (drawn,) = draw(parse_routing(routing), tokens, groups, top_k, seed)
        out.append(ragged_m(name, PRESET, drawn.group_sizes, k, n, dtype, routing=drawn.label))
    return out


def for_device(workloads: Sequence[GroupedWorkload], device: Device) -> list[GroupedWorkload]:
    """`workloads`, of which a CPU is spared those that would take it minutes: they are listed with the reason."""
    if device.kind == "cuda":
        return list(workloads)
    reason = f"needs a GPU: more than {_CPU_FLOPS / 1e9:.0f} GFLOP a call"
    slow = [w.problem("cpu").work().flops > _CPU_FLOPS for w in workloads]
    return [replace(w, unsupported=reason) if s else w for w, s in zip(workloads, slow, strict=True)]
