"""Device code of `gluon_hopper`: which tile of which group a program computes, worked out from `offs` alone.

The tiles of all groups stand in one line, group after group; program p of P takes tiles p, p + P, p + 2P, … Every
partition of a program makes the plan for itself, in registers, the same in each of its warps: no barrier, no shared
memory, one trip to memory before the first load. `p` is the kernel's context.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertile.ops.hopper.context import context

# Ragged descriptors (triton.tools.ragged_tma) wrap 64-bit addresses around at this coordinate.
WRAP: gl.constexpr = gl.constexpr(0x40000000)
# Above every row number.
_FAR: gl.constexpr = gl.constexpr(0x7FFFFFFF)


@context
class Plan:
    """Over groups, in registers: tiles up to and including each group, and its last row + 1. And the tiles in all."""

    tile_ends: gl.tensor
    row_ends: gl.tensor
    total: gl.tensor


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def make_plan(p):
    """The plan of all tiles; only a ragged M needs more than their number."""
    PER_THREAD: gl.constexpr = p.GROUPS_POW2 // 32
    tiles_n = (p.N + p.BLOCK_N - 1) // p.BLOCK_N
    g = gl.arange(0, p.GROUPS_POW2, layout=gl.BlockedLayout([PER_THREAD], [32], [gl.num_warps()], [0]))
    if p.LAYOUT == "ragged_m":
        end = gl.load(p.offs + g, mask=g < p.G, other=_FAR)
        start = gl.load(p.offs + g - 1, mask=(g > 0) & (g < p.G), other=0)
        tiles = gl.where(g < p.G, (end - start + p.BLOCK_M - 1) // p.BLOCK_M * tiles_n, 0)
        tile_ends = gl.associative_scan(tiles, 0, _add)
        return Plan(tile_ends, end, gl.max(tile_ends, 0))
    else:
        return Plan(g, g, p.G * ((p.M + p.BLOCK_M - 1) // p.BLOCK_M) * tiles_n)


@gluon.jit
def _raster(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(row tile, column tile) of a group's tile: about GROUP_M rows of tiles at a time, down the rows first.

    The rows are cut evenly: 17 rows of tiles are one band, 25 are 13 and 12. A thin last band would read all of the
    group's weights once more for little work.
    """
    bands = gl.maximum((tiles_m + GROUP_M // 2) // GROUP_M, 1)
    height = gl.maximum((tiles_m + bands - 1) // bands, 1)
    band = tile // (height * tiles_n)
    within = tile - band * height * tiles_n
    height_here = gl.maximum(gl.minimum(height, tiles_m - band * height), 1)
    n = within // height_here
    return band * height + within - n * height_here, n


@gluon.jit
def k_range(p, plan, t):
    """Tile number -> (its group's first k, length of k) where K is ragged; past the last tile it means nothing."""
    g = gl.minimum(t, plan.total - 1) // (((p.M + p.BLOCK_M - 1) // p.BLOCK_M) * ((p.N + p.BLOCK_N - 1) // p.BLOCK_N))
    k = gl.load(p.offs + g - 1, mask=g > 0, other=0)
    return k, gl.load(p.offs + g) - k


@gluon.jit
def locate(p, plan, t):
    """Tile number -> (group, first row, row where the group ends, first column, first k, length of k).

    `t` may lie past the last tile: then the answer means nothing, but nothing is touched that does not exist.
    """
    t = gl.maximum(gl.minimum(t, plan.total - 1), 0)
    tiles_n = (p.N + p.BLOCK_N - 1) // p.BLOCK_N
    if p.LAYOUT == "ragged_m":
        before = plan.tile_ends <= t
        g = gl.sum(before.to(gl.int32), 0)
        first = gl.max(gl.where(before, plan.tile_ends, 0), 0)
        if p.GROUPS_POW2 <= 128:
            row = gl.max(gl.where(before, plan.row_ends, 0), 0)
            row_end = gl.min(gl.where(before, _FAR, plan.row_ends), 0)
        else:
            # So many row numbers would not stay in the producer's registers. Without any rows no group is the tile's.
            g = gl.minimum(g, p.G - 1)
            row = gl.load(p.offs + g - 1, mask=g > 0, other=0)
            row_end = gl.load(p.offs + g)
        tiles_m = (row_end - row + p.BLOCK_M - 1) // p.BLOCK_M
        m, n = _raster(t - first, tiles_m, tiles_n, p.GROUP_M)
        return g, row + m * p.BLOCK_M, row_end, n * p.BLOCK_N, 0, p.K
    else:
        tiles_m = (p.M + p.BLOCK_M - 1) // p.BLOCK_M
        g = t // (tiles_m * tiles_n)
        m, n = _raster(t - g * tiles_m * tiles_n, tiles_m, tiles_n, p.GROUP_M)
        k = 0
        k_len = p.K
        if p.LAYOUT == "ragged_k":
            k, k_len = k_range(p, plan, t)
        return g, m * p.BLOCK_M, p.M, n * p.BLOCK_N, k, k_len


@context
class Place:
    """Where a tile lies: see `locate`."""

    col: gl.tensor
    g: gl.tensor
    k0: gl.tensor
    k_len: gl.tensor
    row: gl.tensor
    row_end: gl.tensor


@gluon.jit
def place_of(p, plan, t):
    """`locate` as one value, which a loop carries from tile to tile."""
    g, row, row_end, col, k0, k_len = locate(p, plan, t)
    return Place(col, g, k0, k_len, row, row_end)
