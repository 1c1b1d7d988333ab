"""Vectorised rows that start anywhere: a body of whole 16-byte words, and a head and a tail of single elements.

The body of a row is its whole words, which move as vectors; head and tail, each of fewer than VECTOR elements, move one
element at a time. No byte of another row is read or written. VECTOR is 16 bytes in elements, or a multiple. Tensors
start at such a boundary and their strides are alike modulo VECTOR: all their rows are cut at the same columns.

Head and tail, the ends, stand upright: [2 * VECTOR, BLOCK_R], rows side by side. In the layout of the body a thread has
16 bytes side by side, and two threads of a warp would do all the work.
"""

import triton
import triton.language as tl


@triton.jit
def body_start(rows, stride, VECTOR: tl.constexpr):
    """Where the bodies of `rows` start in a tensor, in elements: a product, so that the compiler sees the alignment."""
    return (rows.to(tl.int64) * stride + (VECTOR - 1)) // VECTOR * VECTOR


@triton.jit
def row_pointers(ptr, rows, stride, VECTOR: tl.constexpr):
    """Where `rows` start in a tensor, or if they are cut (VECTOR > 1) their bodies."""
    return ptr + body_start(rows, stride, VECTOR) if VECTOR > 1 else ptr + rows.to(tl.int64) * stride


@triton.jit
def width(rows, C, VECTOR: tl.constexpr):
    """Elements of `rows`, or if they are cut of their bodies."""
    if VECTOR > 1:
        _, inside = cut(rows, C, VECTOR)
        return inside
    else:
        return C


@triton.jit
def cut(rows, C, VECTOR: tl.constexpr):
    """Elements before the bodies of `rows`, and in them."""
    head = tl.minimum(((VECTOR - (rows & (VECTOR - 1))) * C) & (VECTOR - 1), C)
    return head, (C - head) // VECTOR * VECTOR


@triton.jit
def slice_length(row, C, rank, SLICE: tl.constexpr, VECTOR: tl.constexpr):
    """Elements of a row's slice `rank`, of SLICE elements of the body or fewer; slice 0 has head and tail too."""
    if VECTOR > 1:
        _, body = cut(row, C, VECTOR)
        ends = tl.where(rank == 0, C - body, 0)
        return tl.minimum(tl.maximum(body - rank * SLICE, 0), SLICE) + ends
    else:
        return tl.minimum(tl.maximum(C - (rank + 0 * row) * SLICE, 0), SLICE)


@triton.jit
def place(rows, R, C, rank, VECTOR: tl.constexpr):
    """Columns of the heads and tails of `rows` [1, BLOCK_R], [2 * VECTOR, BLOCK_R], and which lanes have an element. If
    several programs share a row, the first has its head and tail."""
    head, body = cut(rows, C, VECTOR)
    lanes = tl.arange(0, 2 * VECTOR)[:, None]
    after = head + body - VECTOR + lanes
    is_head = lanes < VECTOR
    cols = tl.where(is_head, lanes, after)
    inside = (is_head & (lanes < head)) | ((lanes >= VECTOR) & (after < C))
    return cols, inside & (rows < R) & (rank == 0)


@triton.jit
def load(ptr, rows, stride, R, C, rank, OTHER: tl.constexpr, VECTOR: tl.constexpr):
    """Heads and tails of `rows` of a tensor; OTHER in lanes that have no element."""
    cols, inside = place(rows, R, C, rank, VECTOR)
    return tl.load(ptr + (rows.to(tl.int64) * stride + cols), mask=inside, other=OTHER)


@triton.jit
def store(ptr, rows, value, R, C, rank, VECTOR: tl.constexpr):
    """The counterpart of `load` for contiguous rows; converts to the element type."""
    cols, inside = place(rows, R, C, rank, VECTOR)
    tl.store(ptr + (rows.to(tl.int64) * C + cols), value.to(ptr.dtype.element_ty), mask=inside)
