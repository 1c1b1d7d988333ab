"""Device code that the Gluon kernels share: the line of work units that its programs take, p, p + P, p + 2P, …

A unit is a tile, or one of SPLIT_K parts of a tile's steps. With TAIL (tiles in two halves, K not split) the tiles of
the last wave are two units each, of 128 columns, where that makes the last wave half as long: where they are at most
half as many as programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _narrow_tiles(plan):
    """How many tiles at the end of the line are taken in halves."""
    over = plan.total % gl.num_programs(0)
    return gl.where(2 * over <= gl.num_programs(0), over, 0)


@gluon.jit
def units(p, plan):
    """Work units of all programs."""
    return plan.total + _narrow_tiles(plan) if p.TAIL else plan.total * p.SPLIT_K


@gluon.jit
def tile_of(p, plan, unit):
    """Unit -> (its tile, columns to the right of the tile's first, whether it has all of the tile's columns)."""
    if p.TAIL:
        first = plan.total - _narrow_tiles(plan)
        past = gl.maximum(unit - first, 0)
        wide = unit < first
        return gl.where(wide, unit, first + past // 2), past % 2 * 128, wide
    else:
        return unit // p.SPLIT_K, 0, True


@gluon.jit
def span(p, unit, k_len, BLOCK_K: gl.constexpr):
    """(first step, number of steps) of a work unit; an empty group has none."""
    steps = (k_len + BLOCK_K - 1) // BLOCK_K
    split = unit % p.SPLIT_K
    first = split * steps // p.SPLIT_K
    return first, (split + 1) * steps // p.SPLIT_K - first
