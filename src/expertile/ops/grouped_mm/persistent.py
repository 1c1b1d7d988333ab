"""What the persistent Triton kernels share: which tile of which group a program computes, and how many programs run.

The tiles of all groups stand in one line, group after group, and program p of P takes tiles p, p + P, p + 2P, … Every
program works out the plan for itself from `offs` [G] int32 on the device: group g has ceil(size_g / block) tiles in the
ragged dimension, prefix-summed in registers. Nothing is read back by the host, so a CUDA graph may be replayed with
other offs. Inside a group, panels of GROUP_M tile rows are walked column by column. So the programs of one wave read a
near-square part of a and b, and find the rest in L2. That height is an argument of the kernels, not a constant: it
follows from the sizes, and sizes that change from call to call must not compile anything.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import power_of_two

RAGGED = {Layout.RAGGED_M: "m", Layout.RAGGED_K: "k", Layout.RAGGED_N: "n", Layout.BATCHED: "none"}


class Tiles(NamedTuple):
    """What a kernel's tiles are compiled for. RAGGED: the ragged dimension, a value of the table above. GROUPS_P2: a
    power of two, the number of groups or more. ALIGN: of which multiple a group's first tile starts (`tile_ends`)."""

    RAGGED: str
    GROUPS_P2: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    ALIGN: int = 1


@triton.jit
def tile_ends(offs_ptr, groups, tiles_across, BLOCK: tl.constexpr, GROUPS_P2: tl.constexpr, ALIGN: tl.constexpr = 1):
    """For each group the number of tiles up to and including it: int32 [GROUPS_P2], constant behind the last group.

    A group's first tile starts at the last multiple of ALIGN that is not behind the group's start."""
    g = tl.arange(0, GROUPS_P2)
    end = tl.load(offs_ptr + g, mask=g < groups, other=0)
    start = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g < groups), other=0)
    if ALIGN > 1:
        start = tl.where(end > start, start // ALIGN * ALIGN, end)
    return tl.cumsum(tl.cdiv(tl.maximum(end - start, 0), BLOCK), 0) * tiles_across


@triton.jit
def group_of_tile(tile, ends, GROUPS_P2: tl.constexpr):
    """(group, first tile of that group). One reduction finds both: the largest end <= tile with its place packed in."""
    place = tl.arange(0, GROUPS_P2) + 1
    packed = (ends.to(tl.int64) << 32) | place.to(tl.int64)
    last = tl.max(tl.where(ends <= tile, packed, 0), 0)
    return (last & 0xFFFFFFFF).to(tl.int32), (last >> 32).to(tl.int32)


@triton.jit
def group_range(offs_ptr, group):
    """Start and end of a group in the ragged dimension."""
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    return start, tl.load(offs_ptr + group)


@triton.jit
def raster(tile, tiles_m, tiles_n, GROUP_M):
    """(tile row, tile column) of the tile-th tile of one group, in panels of GROUP_M tile rows."""
    panel = GROUP_M * tiles_n
    first = tile // panel * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    place = tile % panel
    return first + place % height, place // height


@triton.jit
def count_tiles(offs_ptr, M, N, groups, t):
    """(tiles of all groups, tile_ends or 0 where every group has the same number of tiles), by t, the `Tiles`."""
    if t.RAGGED == "m":
        ends = tile_ends(offs_ptr, groups, tl.cdiv(N, t.BLOCK_N), t.BLOCK_M, t.GROUPS_P2, t.ALIGN)
        total = tl.max(ends, 0)
    elif t.RAGGED == "n":
        ends = tile_ends(offs_ptr, groups, tl.cdiv(M, t.BLOCK_M), t.BLOCK_N, t.GROUPS_P2, t.ALIGN)
        total = tl.max(ends, 0)
    else:
        ends = 0
        total = groups * tl.cdiv(M, t.BLOCK_M) * tl.cdiv(N, t.BLOCK_N)
    return total, ends


@triton.jit
def locate_tile(tile, ends, offs_ptr, M, N, K, GROUP_M, t):
    """(group, first row, end of the group's rows, first column, end of its columns, first summand, number of summands).

    In the ragged dimension the numbers count from the start of the whole tensor, in the others from the group's. With
    ALIGN a group's first tile may start up to ALIGN - 1 rows or columns ahead of the group (`tile_ends`)."""
    row_start, row_end = 0, M
    col_start, col_end = 0, N
    k_start, k_length = 0, K
    if t.RAGGED == "m":
        group, first = group_of_tile(tile, ends, t.GROUPS_P2)
        row_start, row_end = group_range(offs_ptr, group)
        row_start = row_start // t.ALIGN * t.ALIGN
    elif t.RAGGED == "n":
        group, first = group_of_tile(tile, ends, t.GROUPS_P2)
        col_start, col_end = group_range(offs_ptr, group)
        col_start = col_start // t.ALIGN * t.ALIGN
    else:
        tiles = tl.cdiv(M, t.BLOCK_M) * tl.cdiv(N, t.BLOCK_N)
        group = tile // tiles
        first = group * tiles
        if t.RAGGED == "k":
            k_start, k_end = group_range(offs_ptr, group)
            k_length = k_end - k_start
    tiles_m = tl.cdiv(row_end - row_start, t.BLOCK_M)
    tiles_n = tl.cdiv(col_end - col_start, t.BLOCK_N)
    tile_m, tile_n = raster(tile - first, tiles_m, tiles_n, GROUP_M)
    return group, row_start + tile_m * t.BLOCK_M, row_end, col_start + tile_n * t.BLOCK_N, col_end, k_start, k_length


@triton.jit
def _halves(block):
    """The left and the right half of a block's columns."""
    return block.reshape(block.shape[0], 2, block.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def columns(block, PARTS: tl.constexpr):
    """The block's columns in 1, 2 or 4 equal pieces, from left to right."""
    if PARTS == 1:
        pieces = (block,)
    elif PARTS == 2:
        pieces = _halves(block)
    else:
        left, right = _halves(block)
        pieces = _halves(left) + _halves(right)
    return pieces


@lru_cache(maxsize=4096)
def tiles_bound(tiles: Tiles, groups: int, m: int, n: int) -> int:
    """The most tiles a problem can have, whatever its offs: ceil(total / block) + groups in the ragged dimension."""
    across_m, across_n = -(-m // tiles.BLOCK_M), -(-n // tiles.BLOCK_N)
    if tiles.RAGGED == "m":
        return (across_m + groups) * across_n
    if tiles.RAGGED == "n":
        return across_m * (across_n + groups)
    return groups * across_m * across_n


def tiles_of(problem: Problem, block_m: int, block_n: int, block_k: int, align: int = 1) -> Tiles:
    """Tiles of that size for a problem; GROUPS_P2 is 32 where no kernel makes a plan of the groups."""
    planned = problem.layout in (Layout.RAGGED_M, Layout.RAGGED_N)
    groups_p2 = power_of_two(problem.groups, 32) if planned else 32
    return Tiles(RAGGED[problem.layout], groups_p2, block_m, block_n, block_k, align)


def tile_options(tiles: Tiles, config: Any) -> dict[str, Any]:
    """What a launch of a `config` is told of its tiles, its warps and its stages."""
    return {"TILES": tiles, "num_warps": config.num_warps, "num_stages": config.num_stages}


def sizes_read(problem: Problem) -> tuple[int, int, int]:
    """The kernels' M, N, K: the ragged one, which they take from `offs`, is 0, lest its alignment chose the code."""
    ragged = RAGGED[problem.layout]
    return (0 if ragged == "m" else problem.m, 0 if ragged == "n" else problem.n, 0 if ragged == "k" else problem.k)


def best_group_m(problem: Problem, block_m: int, block_n: int, programs: int, l2_bytes: int) -> int:
    """Tile rows per raster panel for the fewest bytes from memory, by a model of one group of mean size.

    A panel of h tile rows crosses all columns: it reads the group's b once, and its own h * block_m rows of a once if
    they stay in L2 (half of it, to leave room for b and the result), else again for each wave of programs.
    """
    rows, cols = mean_tile_extents(problem)
    summands = problem.mean_group if problem.layout is Layout.RAGGED_K else problem.k
    tiles_m, tiles_n = -(-rows // block_m), -(-cols // block_n)

    def elements(height: int) -> float:
        resident = height * block_m * summands * problem.dtype.itemsize <= l2_bytes / 2
        times_read = 1.0 if resident else max(1.0, tiles_n * height / programs)
        return -(-tiles_m // height) * (height * block_m * times_read + tiles_n * block_n)

    return min((h for h in (1, 2, 4, 8, 16, 32) if h < 2 * tiles_m), key=lambda h: (elements(h), h), default=1)


def mean_tile_extents(problem: Problem) -> tuple[float, float]:
    """(rows, columns) of the result of one group of mean size; at least 1 each."""
    rows = problem.mean_group if problem.layout is Layout.RAGGED_M else problem.m
    cols = problem.mean_group if problem.layout is Layout.RAGGED_N else problem.n
    return max(rows, 1), max(cols, 1)
