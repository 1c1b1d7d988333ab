"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

An analytic model: every backend that supports the problem gets an estimated time

    launch + host synchronisation + max(FLOPs of whole tile waves / reached FLOP/s, bytes / reached bytes/s)

and the smallest wins. The tile and wave terms are geometry. The reached shares of peak and the fixed costs were
measured on an NVIDIA H200 (results/nvidia-h200) and are taken over for other GPUs, so there they are a model only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import tiles_per_group


@dataclass(frozen=True)
class Speed:
    """What a backend reaches: shares of the dense peak and of memory bandwidth, and fixed costs in seconds."""

    compute: float
    memory: float
    launch_s: float  # once per call, kernel start and ramp included
    per_group_s: float = 0.0  # for every group (a launch each)
    copies: float = 0.0  # extra passes over a and out (padding)
    tile: tuple[int, int] = (128, 256)


# Host reads of offs on a GPU wait for everything queued before it.
HOST_SYNC_S = 25e-6

_SPEEDS = {
    "loop": Speed(0.66, 0.75, 4e-6, per_group_s=6e-6),
    "padded_bmm": Speed(0.64, 0.85, 8e-6),
    "torch_grouped": Speed(0.62, 0.62, 12e-6),
    "cublas_grouped": Speed(0.60, 0.60, 12e-6),
    "quack": Speed(0.67, 0.60, 12e-6),
    "triton_pointer": Speed(0.45, 0.75, 8e-6, tile=(128, 128)),
    "triton_tma": Speed(0.63, 0.83, 8e-6),
    "gluon_hopper": Speed(0.65, 0.85, 8e-6),
}
# On a CPU only torch's own kernels run in earnest; a loop over its products is what the others become.
_CPU_ORDER = ("loop", "torch_grouped", "padded_bmm")


@dataclass(frozen=True)
class Estimate:
    """One backend's modelled time, or the reason it cannot take the problem."""

    backend: str
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class Choice:
    """The backend and config to run, a sentence saying why, and what the model says of all the others."""

    backend: Backend
    config: Any
    why: str
    estimates: tuple[Estimate, ...]


@lru_cache(maxsize=4096)
def choose(problem: Problem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice:
    """The backend of `backends` with the smallest modelled time.

    Raises ValueError with every backend's reason when none supports the problem.
    """
    estimates = tuple(_estimate(b, problem, device) for b in backends)
    able = [(e, b) for e, b in zip(estimates, backends, strict=True) if e.seconds is not None]
    if not able:
        reasons = "; ".join(f"{e.backend}: {e.reason}" for e in estimates)
        raise ValueError(f"backend: none supports this problem ({reasons})")
    # min is stable: the earlier backend keeps a tie.
    best, backend = min(able, key=lambda pair: pair[0].seconds or 0.0)
    config = backend.configs(problem, device)[0]
    return Choice(backend, config, _why(best, [e for e, _ in able if e is not best], problem, device), estimates)


def _estimate(backend: Backend, problem: Problem, device: Device) -> Estimate:
    reason = backend.supports(problem, device)
    if reason is not None:
        return Estimate(backend.name, None, reason)
    speed = _SPEEDS.get(backend.name)
    if speed is None:
        return Estimate(backend.name, None, "no measured speed: choose it by name")
    if device.kind != "cuda":
        if backend.name not in _CPU_ORDER:
            return Estimate(backend.name, None, "on a CPU it runs only in the Triton interpreter")
        return Estimate(backend.name, 1e-6 * (1 + _CPU_ORDER.index(backend.name)), "torch's CPU kernels, fixed order")
    return Estimate(backend.name, modelled_seconds(backend, problem, device, speed), "modelled")


def modelled_seconds(backend: Backend, problem: Problem, device: Device, speed: Speed) -> float:
    """The estimate for one backend on a GPU; see the module's docstring for the formula."""
    peak = device.peak(problem.dtype_key) or device.peak("fp32") or 1e12
    bandwidth = device.memory_bps or 1e12
    work = problem.work()
    waves = wave_flops(problem, device, speed.tile, equal=backend.name == "padded_bmm")
    nbytes = work.nbytes
    if backend.name == "padded_bmm" and not _equal(problem):
        nbytes += 2 * (work.nbytes - problem.groups * problem.k * problem.n * problem.dtype.itemsize)
    seconds = max(waves / (peak * speed.compute), nbytes / (bandwidth * speed.memory))
    seconds += speed.launch_s + speed.per_group_s * problem.groups
    if backend.reads_offs_on_host and problem.group_sizes is None and problem.layout is not Layout.BATCHED:
        seconds += HOST_SYNC_S
    return seconds


def _equal(problem: Problem) -> bool:
    return problem.layout is Layout.BATCHED or (problem.group_sizes is not None and len(set(problem.group_sizes)) == 1)


def group_sizes_or_even(problem: Problem) -> tuple[int, ...]:
    """The known group sizes, else the ragged dimension divided evenly: what the model assumes of device-side offs."""
    if problem.group_sizes is not None:
        return problem.group_sizes
    if problem.layout is Layout.BATCHED:
        return (problem.m,) * problem.groups
    base, extra = divmod(problem.ragged_total, problem.groups)
    return tuple(base + (g < extra) for g in range(problem.groups))


def wave_flops(problem: Problem, device: Device, tile: tuple[int, int], equal: bool = False) -> float:
    """FLOPs that a full machine would do while the last wave of `tile`s (rows, columns) finishes.

    Tiles are handed to `sm_count` processors; a last wave that is not full costs as much as a full one.
    With `equal`, every group is padded to the largest.
    """
    sizes = group_sizes_or_even(problem)
    if equal and sizes:
        sizes = (max(sizes),) * len(sizes)
    tile_m, tile_n = tile
    if problem.layout is Layout.RAGGED_K:
        tiles = problem.groups * math.ceil(problem.m / tile_m) * math.ceil(problem.n / tile_n)
        depth = sum(sizes) / max(1, problem.groups)
    else:
        across = problem.m if problem.layout is Layout.RAGGED_N else problem.n
        # Small groups run on lower tiles: no kernel here is bound to 128 rows.
        height = min(tile_m, max(16, 1 << max(0, max(sizes, default=1) - 1).bit_length()))
        tiles = math.ceil(sum(tiles_per_group(sizes, height)) * math.ceil(across / tile_n) * height / tile_m)
        depth = problem.k
    waves = math.ceil(tiles / device.sm_count)
    return 2.0 * waves * device.sm_count * tile_m * tile_n * depth


def _why(best: Estimate, others: Sequence[Estimate], problem: Problem, device: Device) -> str:
    if device.kind != "cuda":
        return f"{best.backend}: on a CPU the products run in torch, and a plain loop copies nothing"
    work = problem.work()
    peak = device.peak(problem.dtype_key) or 1e12
    compute = work.flops / peak
    memory = work.nbytes / (device.memory_bps or 1e12)
    limit = "memory limits" if memory > compute else "compute limits"
    text = f"{best.backend}: {limit} ({work.intensity:.0f} FLOP/byte, mean group {problem.mean_group:.0f})"
    if others and best.seconds:
        second = min(others, key=lambda e: e.seconds or math.inf)
        ratio = (second.seconds or 0.0) / best.seconds
        text += f"; modelled {best.seconds * 1e6:.0f} µs, next {second.backend} at {ratio:.2f} times that"
    return text
