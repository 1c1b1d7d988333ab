"""Fresh random operands of grouped products, and the room that there is for tensors."""

from pathlib import Path

import torch

from expertile.lab.race.workloads import GroupedWorkload
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.problem import Layout
from expertile.ragged import offs_from_sizes


def make_operands(workload: GroupedWorkload, device: torch.device | str, seed: int, tail: int = 0) -> Operands:
    """Random operands of `workload` on `device`: a and b normal, b scaled by (mean summands per group)^-1/2, so that
    results are of the order of 1. `tail` adds that many random rows (RAGGED_M), columns (RAGGED_N) or summands
    (RAGGED_K) past offs[-1]; a batched product has none."""
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    a_shape, b_shape = list(workload.a_shape), list(workload.b_shape)
    if workload.layout is Layout.RAGGED_M:
        a_shape[0] += tail
    elif workload.layout is Layout.RAGGED_N:
        b_shape[1] += tail
    elif workload.layout is Layout.RAGGED_K:
        a_shape[1] += tail
        b_shape[0] += tail
    dtype = workload.torch_dtype
    a = _normal(a_shape, workload.a_layout == "km", dtype, device, generator)
    b = _normal(b_shape, workload.b_layout == "nk", dtype, device, generator)
    b.mul_(max(summands(workload), 1.0) ** -0.5)
    offs = offs_from_sizes(workload.group_sizes, device) if workload.layout is not Layout.BATCHED else None
    return Operands(a, b, offs)


def summands(workload: GroupedWorkload) -> float:
    """Length of the sums behind one element: k, or its mean over the groups where K is ragged."""
    return workload.k / workload.groups if workload.layout is Layout.RAGGED_K else float(workload.k)


def free_memory(device: torch.device) -> int:
    """Bytes that an allocation on `device` may take now; 0 where the device does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    return int(kib) * 1024


def _normal(
    shape: list[int], transposed: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    stored = [*shape[:-2], shape[-1], shape[-2]] if transposed else shape
    x = torch.randn(stored, dtype=dtype, device=device, generator=generator)
    return x.transpose(-1, -2) if transposed else x
