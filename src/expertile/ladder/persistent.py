"""Rung 5, persistent: as many programs as the chip runs at once, each taking every P-th tile.

Changed from rung 4: instead of walking over the groups, each program makes a prefix sum of tile counts once, in
registers, and finds the group of each of its tiles by one reduction over them. Spends less of: metadata loads and
program starts. Spends more of: registers that outlive a tile, and the hardware no longer hands the next tile to a free
SM.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from expertile.device import Device
from expertile.ladder import masked_pointer
from expertile.ladder._common import launch, takes_aligned
from expertile.ladder.unmasked_pointer import multiply_tile
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.persistent import Tiles, group_of_tile, group_range, tile_ends
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.launch.shape import constants


@dataclass(frozen=True)
class Config(masked_pointer.Config):
    """Tile sizes in elements; `blocks_per_sm` programs launched per SM."""

    blocks_per_sm: int = 2


@triton.jit
def _persistent_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    offs_ptr,
    N,
    K,
    groups,
    a_stride_m,
    b_stride_g,
    b_stride_n,
    out_stride_m,
    EVEN_K: tl.constexpr,
    TILES: tl.constexpr,
):
    t: tl.constexpr = constants(Tiles, TILES)
    pointers, strides = (a_ptr, b_ptr, out_ptr), (a_stride_m, b_stride_g, b_stride_n, out_stride_m)
    tiles_n = tl.cdiv(N, t.BLOCK_N)
    ends = tile_ends(offs_ptr, groups, tiles_n, t.BLOCK_M, t.GROUPS_P2)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        group, first = group_of_tile(tile, ends, t.GROUPS_P2)
        start, end = group_range(offs_ptr, group)
        row = start + (tile - first) // tiles_n * t.BLOCK_M
        col = (tile - first) % tiles_n * t.BLOCK_N
        multiply_tile(pointers, strides, group, row, end, col, N, K, EVEN_K, t)


def _configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """Two programs per SM where registers allow: a thread takes 126 with wgmma on sm_90, 162 with mma.sync on sm_80."""
    return (Config(blocks_per_sm=2 if device.at_least(9) else 1),)


BACKEND = Backend(
    name="5_persistent",
    summary="as rung 4, with a resident grid and the group found by a prefix sum",
    supports=takes_aligned,
    configs=_configs,
    run=lambda problem, operands, config, out: launch(
        _persistent_kernel, problem, operands, config, out, EVEN_K=problem.k % config.block_k == 0
    ),
)
