"""Loads and stores of a piece of some rows, masked only where it must be; and the tiles of a row kernel's program: its
only one, or every so many, if the program stays on its SM. Rows that are read or written once pass through L2 plainly:
docs/notes/rows.md has what marking them cost."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from expertile.ops.rows import cluster as peers
from expertile.ops.rows import head_tail

_PLAINLY = tl.constexpr("")  # Triton 3.6 takes no string for a default


class Spot(NamedTuple):
    """The elements of a tile: columns [1, BLOCK_C] of its first piece, which rows there are [BLOCK_R, 1], and where
    rows end."""

    cols: Any
    row_mask: Any
    width: Any


@triton.jit
def inside(cols, row_mask, C, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """The mask for rows [BLOCK_R, 1] and columns [1 or BLOCK_R, BLOCK_C], where anything is masked."""
    if MASK_ROWS and MASK_COLS:
        return row_mask & (cols < C)
    elif MASK_ROWS:
        return row_mask
    else:
        return cols < C


@triton.jit
def load(
    row_ptrs,
    cols,
    row_mask,
    C,
    OTHER: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    EVICT: tl.constexpr = _PLAINLY,
):
    """[BLOCK_R, BLOCK_C] at row_ptrs [BLOCK_R, 1] + cols [1, BLOCK_C]; OTHER outside. The only read of these bytes."""
    if MASK_ROWS or MASK_COLS:
        mask = inside(cols, row_mask, C, MASK_ROWS, MASK_COLS)
        return tl.load(row_ptrs + cols, mask=mask, other=OTHER, eviction_policy=EVICT)
    else:
        return tl.load(row_ptrs + cols, eviction_policy=EVICT)


@triton.jit
def load_again_later(row_ptrs, cols, C, OTHER: tl.constexpr):
    """As `load` with columns masked, of bytes that are read a second time soon: L2 should keep them."""
    return load(row_ptrs, cols, None, C, OTHER, False, True, "evict_last")


@triton.jit
def store(row_ptrs, cols, value, row_mask, C, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """The counterpart of `load`; converts to the element type."""
    value = value.to(row_ptrs.dtype.element_ty)
    if MASK_ROWS or MASK_COLS:
        mask = inside(cols, row_mask, C, MASK_ROWS, MASK_COLS)
        tl.store(row_ptrs + cols, value, mask=mask)
    else:
        tl.store(row_ptrs + cols, value)


@triton.constexpr_function
def ragged(i: int, PIECES: int, CLUSTER: int, EVEN_C: bool, VECTOR: int = 1) -> bool:
    """Whether piece i of a slice may reach past the row. Only the last one may, unless rows have several slices or are
    cut (VECTOR > 1): then bodies differ in length, and any piece may."""
    return not EVEN_C and (CLUSTER > 1 or VECTOR > 1 or i == PIECES - 1)


@triton.jit
def load_piece(i: tl.constexpr, row_ptrs, at, s, OTHER: tl.constexpr):
    """Piece i of the rows of a tile `at` a Spot, of Shape s."""
    RAGGED: tl.constexpr = ragged(i, s.PIECES, s.CLUSTER, s.EVEN_C, s.VECTOR)
    return load(row_ptrs, at.cols + i * s.BLOCK_C, at.row_mask, at.width, OTHER, not s.EVEN_R, RAGGED)


@triton.jit
def store_piece(i: tl.constexpr, row_ptrs, value, at, s):
    """The counterpart of `load_piece`."""
    RAGGED: tl.constexpr = ragged(i, s.PIECES, s.CLUSTER, s.EVEN_C, s.VECTOR)
    store(row_ptrs, at.cols + i * s.BLOCK_C, value, at.row_mask, at.width, not s.EVEN_R, RAGGED)


@triton.jit
def load_vector(ptr, cols, C, MASK_COLS: tl.constexpr):
    """A weight or bias at `cols`; every program reads it, so it should stay in the caches."""
    return load(ptr, cols, None, C, 0.0, False, MASK_COLS, "evict_last")


@triton.jit
def load_vector_piece(i: tl.constexpr, ptr, cols, C, s):
    """Piece i of a weight or bias, at `cols`; C: where rows end."""
    return load_vector(ptr, cols, C, ragged(i, s.PIECES, s.CLUSTER, s.EVEN_C, s.VECTOR))


@triton.jit
def load_vector_lanes(ptr, cols, inside):
    """As `load_vector`, in float32, where lanes are `inside`."""
    return tl.load(ptr + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def nothing():
    """A tuple to append to."""
    return ()


@triton.jit
def append(pieces, new):
    """A tuple of pieces and one more."""
    return pieces + (new,)  # noqa: RUF005 (Triton has no starred tuples)


@triton.jit
def _ends(inputs, tile, rank, R, C, s, OTHER: tl.constexpr):
    """Heads and tails of a tile's rows of each input."""
    lanes = tl.arange(0, s.BLOCK_R)[None, :]
    rows = tile * s.BLOCK_R + lanes
    ends = nothing()
    for i in tl.static_range(len(inputs)):
        ends = append(ends, head_tail.load(inputs[i][0], rows, inputs[i][1], R, C, rank, OTHER, s.VECTOR))
    return ends


@triton.jit
def over_tiles(ONE: tl.constexpr, inputs, given, held, position, R, C, s, OTHER: tl.constexpr):
    """ONE(inputs, given, held, ends, tile, rank, place, exchange, R, C, s) for each tile of this program.

    `inputs`: pairs of a pointer and the stride of its rows in elements. `ends`: a tile's heads and tails of
    each, OTHER outside; () where rows are not cut. `position`: as `cluster.position` has it. s: a Shape."""
    program, rank, place = position
    ends = _ends(inputs, program, rank, R, C, s, OTHER) if s.VECTOR > 1 else nothing()
    if s.STAYS:
        if s.CLUSTER > 1:
            peers.joined()
        exchange = 0
        for tile in tl.range(program, tl.cdiv(R, s.BLOCK_R), tl.num_programs(0) // s.CLUSTER, num_stages=s.STAGES):
            if s.VECTOR > 1:  # one tile ahead: such short loads are not copied to shared memory
                following = _ends(inputs, tile + tl.num_programs(0) // s.CLUSTER, rank, R, C, s, OTHER)
            ONE(inputs, given, held, ends, tile, rank, place, exchange, R, C, s)
            if s.VECTOR > 1:
                ends = following
            exchange += 1  # noqa: SIM113 (Triton has no enumerate)
    else:
        ONE(inputs, given, held, ends, program, rank, place, 0, R, C, s)
