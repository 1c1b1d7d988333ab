"""An analytic model of every backend's time, for GPUs and problems that nobody has measured.

    time = launch + groups x launch per group + host synchronisation
           + max(FLOPs of whole tile waves / reached FLOP/s, bytes / reached bytes/s)

The tile and wave terms are geometry. The reached shares of peak and the fixed costs fit the times of an NVIDIA H200
under CUDA graphs (results/nvidia-h200, 2026-11-21, tune and auto, the best config of each backend) to 5-20 % in the
median and are taken over for other GPUs: there the figures are a model's and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from expertile.device import Device
from expertile.ops.backend import Estimate
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends.torch_grouped import uses_kernel
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import tiles_per_group


@dataclass(frozen=True)
class Speed:
    """What a backend reaches: shares of the dense peak and of memory bandwidth, and fixed costs in seconds."""

    compute: float
    memory: float
    launch_s: float  # once per call, kernel start and ramp included
    per_group_s: float = 0.0  # for every group (a launch each)
    tile: tuple[int, int] = (128, 128)
    stores: float | None = None  # in place of `memory` where K is ragged: most of the traffic is results


# Host reads of offs on a GPU wait for everything queued before it.
HOST_SYNC_S = 25e-6

# NVIDIA H200, 2026-11-21; no backend reaches more of the peak, which is stated at a clock that 700 W do not sustain.
SPEEDS = {
    "loop": Speed(0.60, 0.75, 1e-6, per_group_s=3.5e-6, tile=(128, 256)),
    "padded_bmm": Speed(0.65, 0.9, 3e-6),
    "torch_grouped": Speed(0.575, 0.6, 10e-6),
    "cublas_grouped": Speed(0.275, 0.70, 6e-6, tile=(128, 256)),
    "quack": Speed(0.625, 0.5, 8e-6, stores=0.73),
    "triton_pointer": Speed(0.55, 0.9, 5e-6, stores=0.53),
    "triton_tma": Speed(0.6, 0.85, 3e-6, stores=0.51),
    "gluon_hopper": Speed(0.625, 0.8, 3e-6, stores=0.74),
}
# On a CPU only torch's own products run in earnest, and one product a group costs what starting it does: less in C++
# (torch_grouped) than in Python (loop), and nothing in one product of all groups (padded_bmm).
CPU_ORDER = ("torch_grouped", "loop", "padded_bmm")
CPU_PADDED = ("padded_bmm", "torch_grouped", "loop")
# Groups from which on that is worth copying rows into padded buffers, in 16 bits, and the elements of the copies that a
# group may have: oneDNN takes some 20 µs to start a product, memory about as long for so many. (Intel Xeon with AMX,
# one thread, torch 2.13, 2026-11-23: within 0.97 of the fastest on 144 of 152 problems.)
_CPU_GROUPS, _CPU_COPIED = 16, 36 * 1024


def estimate(backend: Backend, problem: Problem, device: Device) -> Estimate:
    """The model's word on `backend`, which supports `problem`."""
    speed = SPEEDS.get(backend.name)
    if speed is None:
        return Estimate(backend.name, None, "no measured speed: choose it by name")
    if device.kind != "cuda":
        if backend.name not in CPU_ORDER:
            return Estimate(backend.name, None, "on a CPU it runs only in the Triton interpreter")
        return Estimate(
            backend.name, 1e-6 * (1 + cpu_order(problem).index(backend.name)), "torch's CPU kernels, by rule"
        )
    return Estimate(backend.name, modelled_seconds(backend, problem, device, speed), "modelled")


def cpu_order(problem: Problem) -> tuple[str, ...]:
    """The backends that run on a CPU, in order of preference."""
    p = problem
    if p.layout not in (Layout.RAGGED_M, Layout.RAGGED_K):
        return CPU_ORDER  # batched products are one call anyway; a ragged N is written column by column, at a crawl
    sizes, short = group_sizes_or_even(p), p.dtype.itemsize == 2
    if len(set(sizes)) == 1:  # nothing is padded, nothing copied
        return CPU_PADDED if short or len(sizes) >= 8 else CPU_ORDER
    copied = max(sizes, default=0) * (p.k + p.n)
    worth = short and p.layout is Layout.RAGGED_M and len(sizes) >= _CPU_GROUPS and 0 not in sizes
    return CPU_PADDED if worth and copied <= _CPU_COPIED else CPU_ORDER


def modelled_seconds(backend: Backend, problem: Problem, device: Device, speed: Speed) -> float:
    """The estimate for one backend on a GPU; see the module's docstring for the formula."""
    peak = device.peak(problem.dtype_key) or device.peak("fp32") or 1e12
    bandwidth = device.memory_bps or 1e12
    work = problem.work(group_sizes_or_even(problem))
    share = speed.stores if speed.stores and problem.layout is Layout.RAGGED_K else speed.memory
    waves = wave_flops(problem, device, speed.tile, equal=backend.name == "padded_bmm")
    nbytes = work.nbytes
    if backend.name == "padded_bmm" and not _equal(problem):
        nbytes += 2 * (work.nbytes - problem.groups * problem.k * problem.n * problem.dtype.itemsize)
    seconds = max(waves / (peak * speed.compute), nbytes / (bandwidth * share))
    seconds += speed.launch_s + speed.per_group_s * problem.groups
    if synchronises(backend, problem, device):
        seconds += HOST_SYNC_S
    return seconds


def synchronises(backend: Backend, problem: Problem, device: Device) -> bool:
    """Whether a call on a GPU makes the host wait for it, to read group sizes that it does not know."""
    if device.kind != "cuda" or problem.layout is Layout.BATCHED:
        return False
    if backend.name == "torch_grouped":
        # PyTorch's fallback copies offs to the host even where the caller knows the sizes (ATen GroupedMMUtils.h).
        return not uses_kernel(problem, device)
    return backend.reads_offs_on_host and problem.group_sizes is None


def _equal(problem: Problem) -> bool:
    return problem.layout is Layout.BATCHED or (problem.group_sizes is not None and len(set(problem.group_sizes)) == 1)


def group_sizes_or_even(problem: Problem) -> tuple[int, ...]:
    """The known group sizes, else the ragged dimension divided evenly: what the model assumes of device-side offs."""
    if problem.group_sizes is not None:
        return problem.group_sizes
    if problem.layout is Layout.BATCHED:
        return (problem.m,) * problem.groups
    base, extra = divmod(problem.ragged_total, max(1, problem.groups))
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
