"""The tiles of a row kernel's program: its only one, or every so many, if the program stays on its SM."""

from __future__ import annotations

import triton
import triton.language as tl

from expertile.ops.rows import cluster as peers
from expertile.ops.rows import head_tail
from expertile.ops.rows import tile as piece


@triton.jit
def _ends(inputs, tile, rank, R, C, s, OTHER: tl.constexpr):
    """Heads and tails of a tile's rows of each input."""
    lanes = tl.arange(0, s.BLOCK_R)[None, :]
    rows = tile * s.BLOCK_R + lanes
    ends = piece.nothing()
    for i in tl.static_range(len(inputs)):
        ends = piece.append(ends, head_tail.load(inputs[i][0], rows, inputs[i][1], R, C, rank, OTHER, s.VECTOR))
    return ends


@triton.jit
def over_tiles(
    ONE: tl.constexpr,
    inputs,
    given,
    held,
    position,
    R,
    C,
    s,
    OTHER: tl.constexpr,
    STAYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ONE(inputs, given, held, ends, tile, rank, place, exchange, R, C, s, STAYS) for each tile of this program.

    `inputs`: pairs of a pointer and the stride of its rows in elements. `ends`: a tile's heads and tails of
    each, OTHER outside; () where rows are not cut. `position`: as `cluster.position` has it. s: a Shape. STAYS: the
    program strides over the tiles, STAGES of which are on their way at once."""
    program, rank, place = position
    ends = _ends(inputs, program, rank, R, C, s, OTHER) if s.VECTOR > 1 else piece.nothing()
    if STAYS:
        if s.CLUSTER > 1:
            peers.joined()
        exchange = 0
        for tile in tl.range(program, tl.cdiv(R, s.BLOCK_R), tl.num_programs(0) // s.CLUSTER, num_stages=STAGES):
            if s.VECTOR > 1:  # one tile ahead: such short loads are not copied to shared memory
                following = _ends(inputs, tile + tl.num_programs(0) // s.CLUSTER, rank, R, C, s, OTHER)
            ONE(inputs, given, held, ends, tile, rank, place, exchange, R, C, s, STAYS)
            if s.VECTOR > 1:
                ends = following
            exchange += 1  # noqa: SIM113 (Triton has no enumerate)
    else:
        ONE(inputs, given, held, ends, program, rank, place, 0, R, C, s, STAYS)
