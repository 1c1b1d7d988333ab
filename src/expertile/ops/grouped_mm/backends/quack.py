"""Dao-AILab's quack-kernels (CuTe DSL, Hopper and Blackwell): `quack.gemm_interface.gemm` with `cu_seqlens`.

    out[rows of g] = a[rows of g] @ b[g] (+ bias[g])      RAGGED_M, cu_seqlens_m
    out[g] = a[:, columns of g] @ b[rows of g]            RAGGED_K, cu_seqlens_k
    out[g] = a[g] @ b[g] (+ bias[g])                      BATCHED

Facts of 0.6.5, from its source: ragged M wants a's and out's rows contiguous; ragged K wants a column-major and b
row-major; every other stride must be a multiple of 16 bytes (TMA), as must the base addresses. Its result is always
row-major, so ragged N, the transpose of ragged M, is not offered. An empty group in ragged K gives zeros.

quack wants group boundaries with a leading zero, which our `offs` lack: one `torch.cat` on the device makes them and
belongs to the measured time (a caller who keeps cu_seqlens would save that launch, about 2 µs).

With `tuned` quack measures about 20 of its own configurations on the first call with a new set of shapes, total rows
included (each kernel is compiled once, seconds; results are kept in ~/.quack/cache), and then uses the best: that is
how its authors race it. Without, and without a tile, it takes one fixed configuration (tile 128x192, cluster 2x1,
ping-pong on sm_90).

With a tile it takes the named configuration at once, so that tables of measured times choose among them. The best of
the fixed one and the four of _TILES is within 1 % of the best of 13 on 152 random problems, where the fixed one alone
is at 0.87 (ragged M) and 0.94 (ragged K): docs/notes/grouped_mm.md, "quack".
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.backend import Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out
from expertile.ops.grouped_mm.backends._tma import unloadable_groups
from expertile.ops.grouped_mm.problem import Layout, Problem

find_spec = cache(util.find_spec)  # looks on the disk, and `supports` is asked for every new problem


@dataclass(frozen=True)
class Config:
    """`tuned`: let quack measure its configurations on the first call with these shapes. Else its kernel with a tile of
    block_m x block_n and a cluster of cluster_m x cluster_n, or, where these are 0, its fixed one. Kernels of sm_90."""

    tuned: bool = True
    block_m: int = 0
    block_n: int = 0
    cluster_m: int = 0
    cluster_n: int = 0
    pingpong: bool = False


# block_m, block_n, cluster_m, cluster_n, pingpong
_TILES = ((128, 192, 1, 2, True), (128, 256, 1, 2, False), (128, 256, 2, 1, False), (128, 128, 2, 1, True))


@cache
def _takes_tiles() -> bool:
    """Whether the installed quack has the interface of 0.6.5, by which it is handed a configuration."""
    try:
        return tuple(int(part) for part in metadata.version("quack-kernels").split(".")[:3]) >= (0, 6, 5)
    except (metadata.PackageNotFoundError, ValueError):
        return False


def _configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    own = (Config(tuned=True), Config(tuned=False))
    if (device.capability or (0, 0))[0] != 9 or not _takes_tiles():
        return own
    return (*own, *(Config(False, *tile) for tile in _TILES))


def _supports(problem: Problem, device: Device) -> str | None:
    if find_spec("quack") is None:
        return "needs quack-kernels (pip install quack-kernels)"
    if not device.at_least(9):
        return f"needs sm_90 or later, got {device.name}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be torch.bfloat16 or torch.float16, got {problem.dtype}"
    if problem.layout is Layout.RAGGED_N:
        return "writes row-major results only, ragged N would need a column-major one"
    if 0 in (problem.groups, problem.m, problem.n, problem.k):
        return "sizes must be at least 1"
    if reason := unloadable_groups(problem):
        return reason
    if problem.n * problem.out_dtype.itemsize % 16:
        return f"rows of the result must be multiples of 16 bytes, got {problem.n} columns of {problem.out_dtype}"
    return None


# One int32 zero per device. Not an lru_cache: what is allocated while a CUDA graph is captured belongs to that graph
# and must not be kept.
_ZEROS: dict[torch.device, torch.Tensor] = {}


def _cu_seqlens(offs: torch.Tensor) -> torch.Tensor:
    """offs [G] -> [0, *offs], [G + 1] int32, in one launch."""
    zero = _ZEROS.get(offs.device)
    if zero is None:
        zero = torch.zeros(1, dtype=torch.int32, device=offs.device)
        if not (offs.is_cuda and torch.cuda.is_current_stream_capturing()):
            _ZEROS[offs.device] = zero
    return torch.cat((zero, offs))


def _run(problem: Problem, operands: Operands, config: Config, out: torch.Tensor | None) -> torch.Tensor:
    out = new_out(problem, operands, out)
    ragged = {}
    if operands.offs is not None:
        name = "cu_seqlens_m" if problem.layout is Layout.RAGGED_M else "cu_seqlens_k"
        ragged[name] = _cu_seqlens(operands.offs)
    if config.tuned or not config.block_m:
        from quack.gemm_interface import gemm

        gemm(operands.a, operands.b, out=out, bias=operands.bias, tuned=config.tuned, **ragged)
    else:
        from quack.gemm_interface import gemm_tuned

        gemm_tuned.fn(operands.a, operands.b, out, C=None, bias=operands.bias, config=_gemm_config(config), **ragged)
    return out


@cache
def _gemm_config(config: Config) -> Any:
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=config.block_m,
        tile_n=config.block_n,
        cluster_m=config.cluster_m,
        cluster_n=config.cluster_n,
        pingpong=config.pingpong,
        is_dynamic_persistent=False,
        device_capacity=9,
    )


BACKEND = Backend(
    name="quack",
    summary="quack-kernels' grouped GEMM (CuTe DSL, sm_90 and later)",
    supports=_supports,
    configs=_configs,
    run=_run,
    peer=True,
    speed=Speed(0.66, 0.555, 7e-6, stores=0.77),
)
