"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a GPU the first backend of `BACKENDS` that takes the problem without waiting for the device, with the config that its
own model puts first; unless groups have so many rows that dequantising first costs less than unpacking for every tile
of rows (`DEQUANT_FROM_ROWS`). On a CPU the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from expertile.device import Device
from expertile.ops.int4_grouped_mm.backend import Backend
from expertile.ops.int4_grouped_mm.backends import BACKENDS, by_name
from expertile.ops.int4_grouped_mm.problem import Int4Problem

# Mean rows per group from which `dequant` beats a backend. Dequantising moves 4.5 bytes a value whatever the rows
# (1.1 ps at 4.2 TB/s), and a row costs 2 FLOP a value. On an H200 (preset int4-models) gluon_int4 stays ahead of it up
# to the 2048 rows measured, triton_int4 up to 512.
DEQUANT_FROM_ROWS: Mapping[str, float] = MappingProxyType({"triton_int4": 768.0})


@dataclass(frozen=True)
class Choice:
    """The backend and config to run, a sentence saying why, and why each earlier one was passed over."""

    backend: Backend
    config: Any
    why: str
    refused: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=4096)
def choose(problem: Int4Problem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice:
    """The backend and config for a problem. ValueError with every backend's reason when none supports it."""
    refused: list[tuple[str, str]] = []
    waiting: list[Backend] = []
    # A CPU dequantises an expert at a time, into float32, rather than all of them.
    for backend in backends if device.kind == "cuda" else (by_name("loop"),):
        reason = backend.supports(problem, device)
        if reason is not None:
            refused.append((backend.name, reason))
        elif backend.reads_offs_on_host and problem.group_sizes is None:
            waiting.append(backend)
        else:
            return _choice(backend, problem, device, refused)
    if waiting:
        config = waiting[0].configs(problem, device)[0]
        why = f"{waiting[0].name}: no other takes it; it waits for the GPU to read offs"
        return Choice(waiting[0], config, why, tuple(refused))
    raise ValueError("backend: none supports this problem (" + "; ".join(f"{b}: {r}" for b, r in refused) + ")")


def _choice(backend: Backend, problem: Int4Problem, device: Device, refused: Sequence[tuple[str, str]]) -> Choice:
    limit, rows = DEQUANT_FROM_ROWS.get(backend.name), problem.mean_group
    why = f"{backend.name}: the first that takes it"
    if limit is not None and rows >= limit:
        dense = by_name("dequant")
        if dense.supports(problem, device) is None:
            refused = (*refused, (backend.name, f"groups of {rows:.0f} rows: from {limit:.0f} on dequant is faster"))
            why = f"dequant: {rows:.0f} rows per group pay for dequantised weights"
            backend = dense
    return Choice(backend, backend.configs(problem, device)[0], why, tuple(refused))
