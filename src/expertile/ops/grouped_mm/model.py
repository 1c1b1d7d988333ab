"""An analytic model of every backend's time, for GPUs and problems without measurements.

    time = launch + groups x launch per group + host synchronisation
           + hypot(FLOPs of whole tile waves / reached FLOP/s, bytes / reached bytes/s)

The tile and wave terms are geometry. Products and memory overlap in part only: where memory limits, the backend with
the better pipeline of products still wins. The reached shares of peak and the fixed costs fit the times of an NVIDIA
H200 under CUDA graphs (results/nvidia-h200, 2026-11-21 to 23, tune and auto, 16-bit, the best config of each backend)
to 6-17 % in the median and are taken over for other GPUs: there the figures are a model's and nothing else. Each
backend states its own, as `speed`. A share is what the one term would reach without the other; no product reaches the
peak, which is stated at a clock that 700 W do not sustain.
"""

import math

from expertile.device import Device
from expertile.ops.backend import Estimate, Speed
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import power_of_two, tiles_per_group

# Host reads of offs on a GPU wait for everything queued before it.
HOST_SYNC_S = 25e-6


def estimate(backend: Backend, problem: Problem, device: Device) -> Estimate:
    """The model's word on `backend`, which supports `problem`."""
    speed, place = backend.speed, backend.cpu_place
    if speed is None:
        return Estimate(backend.name, None, "no measured speed: choose it by name")
    if device.kind == "cuda":
        return Estimate(backend.name, modelled_seconds(backend, problem, device, speed), "modelled")
    if place is None:
        return Estimate(backend.name, None, "on a CPU it runs only in the Triton interpreter")
    return Estimate(backend.name, 1e-6 * place(problem), "torch's CPU kernels, by rule")


def modelled_seconds(backend: Backend, problem: Problem, device: Device, speed: Speed) -> float:
    """The estimate for one backend on a GPU; see the module's docstring for the formula."""
    peak = device.peak(problem.dtype_key) or device.peak("fp32") or 1e12
    bandwidth = device.memory_bps or 1e12
    sizes = group_sizes_or_even(problem)
    work = problem.work(sizes)
    share = speed.stores if speed.stores and problem.layout is Layout.RAGGED_K else speed.memory
    waves = wave_flops(problem, device, speed.tile, equal=speed.pads)
    nbytes = work.nbytes
    unequal = problem.layout is not Layout.BATCHED and (problem.group_sizes is None or len(set(sizes)) > 1)
    if speed.pads and unequal:
        used = sum(size > 0 for size in sizes)
        nbytes += 2 * (work.nbytes - used * problem.k * problem.n * problem.dtype.itemsize)
    seconds = math.hypot(waves / (peak * speed.compute), nbytes / (bandwidth * share))
    seconds += speed.launch_s + speed.per_group_s * problem.groups
    if synchronises(backend, problem, device):
        seconds += HOST_SYNC_S
    return seconds


def synchronises(backend: Backend, problem: Problem, device: Device) -> bool:
    """Whether a call on a GPU makes the host wait for it, to read group sizes that it does not know."""
    return device.kind == "cuda" and problem.layout is not Layout.BATCHED and backend.waits(problem, device)


def group_sizes_or_even(problem: Problem) -> tuple[int, ...]:
    """The known group sizes, else the ragged dimension divided evenly: what the model assumes of device-side offs."""
    if problem.group_sizes is not None or problem.layout is Layout.BATCHED:
        return problem.sizes(None)
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
        height = min(tile_m, power_of_two(max(sizes, default=1), 16))
        tiles = math.ceil(sum(tiles_per_group(sizes, height)) * math.ceil(across / tile_n) * height / tile_m)
        depth = problem.k
    waves = math.ceil(tiles / device.sm_count)
    return 2.0 * waves * device.sm_count * tile_m * tile_n * depth
