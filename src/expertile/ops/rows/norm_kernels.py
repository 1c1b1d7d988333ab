"""Triton kernels of layer norm and RMS norm, forward; see layer_norm.py and rms_norm.py for formulas and limits.

CENTERED tells them apart: layer norm subtracts the mean, RMS norm does not. The variance is taken about the mean in a
second pass over the registers, padding lanes left out; slices of a row are joined by Chan's formula (Chan, Golub,
LeVeque, "Algorithms for computing the sample variance", 1983), never as E[x^2] - E[x]^2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from expertile.ops.launch.shape import constants
from expertile.ops.rows import cluster as peers
from expertile.ops.rows import head_tail
from expertile.ops.rows import tile as piece
from expertile.ops.rows.config import Shape


@triton.jit
def load_vector_pieces(ptr, first, C, s, SPREAD: tl.constexpr):
    """A weight or bias, piece by piece from column `first` on, [1, BLOCK_C] each; nothing where there is none. SPREAD:
    [BLOCK_R, BLOCK_C], each warp loading what its own rows need, which is cheaper than to exchange it where warps have
    different rows. So it is too for rows that are cut, whose `first` and end C are [BLOCK_R, 1]."""
    pieces = piece.nothing()
    if ptr is not None:
        for i in tl.static_range(s.PIECES):
            cols = first + i * s.BLOCK_C + tl.arange(0, s.BLOCK_C)[None, :]
            if SPREAD:
                cols += tl.zeros((s.BLOCK_R, 1), tl.int32)
            pieces = piece.append(pieces, piece.load_vector_piece(i, ptr, cols, C, s))
    return pieces


class _Given(NamedTuple):
    """What a tile is computed with beside its rows, and where its results go; LATE: see `norm_kernel`."""

    weight_ptr: Any
    bias_ptr: Any
    y_ptr: Any
    sum_ptr: Any
    mean_ptr: Any
    rstd_ptr: Any
    eps: Any
    CENTERED: Any
    LATE: Any


@triton.jit
def _at_columns(i: tl.constexpr, ptr, held, cols, C, s, LATE: tl.constexpr):
    """Piece i of a weight or bias in float32: one of those held, or LATE loaded now."""
    return piece.load_vector_piece(i, ptr, cols, C, s).to(tl.float32) if LATE else held[i].to(tl.float32)


@triton.jit
def _forward_tile(inputs, given, held, ends, tile, rank, place, exchange, R, C, s):
    rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[:, None]
    row_mask = rows < R
    rows_64 = rows.to(tl.int64)
    cols = rank * (s.PIECES * s.BLOCK_C) + tl.arange(0, s.BLOCK_C)[None, :]
    x_rows = head_tail.row_pointers(inputs[0][0], rows_64, inputs[0][1], s.VECTOR)
    y_rows = head_tail.row_pointers(given.y_ptr, rows_64, C, s.VECTOR)
    if s.VECTOR > 1:
        head, width = head_tail.cut(rows, C, s.VECTOR)
        vector_cols = cols + head
        vector_width = head + width
        # Head and tail, upright: rows lie along the other dimension.
        ends_x = ends[0]
        ends_rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[None, :]
        ends_cols, on_end = head_tail.place(ends_rows, R, C, rank, s.VECTOR)
    else:
        width = C
        vector_cols = cols
        vector_width = C
    at = piece.Spot(cols, row_mask, width)
    xs = piece.nothing()
    for i in tl.static_range(s.PIECES):
        x = piece.load_piece(i, x_rows, at, s, 0.0)
        if given.sum_ptr is not None:
            residual_rows = head_tail.row_pointers(inputs[1][0], rows_64, inputs[1][1], s.VECTOR)
            sum_rows = head_tail.row_pointers(given.sum_ptr, rows_64, C, s.VECTOR)
            residual = piece.load_piece(i, residual_rows, at, s, 0.0)
            # What is normalised is the sum as it is returned, so that fused and separate calls agree.
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(given.sum_ptr.dtype.element_ty)
            piece.store_piece(i, sum_rows, x, at, s)
        xs = piece.append(xs, x)
    if s.VECTOR > 1 and given.sum_ptr is not None:
        ends_x = (ends_x.to(tl.float32) + ends[1].to(tl.float32)).to(given.sum_ptr.dtype.element_ty)
        head_tail.store(given.sum_ptr, ends_rows, ends_x, R, C, rank, s.VECTOR)

    if s.CLUSTER > 1 and not s.STAYS:
        peers.joined()
    if given.CENTERED:
        lane_sum = xs[0].to(tl.float32)
        for i in tl.static_range(1, s.PIECES):
            lane_sum += xs[i].to(tl.float32)
        total = tl.sum(lane_sum, 1)
        if s.VECTOR > 1:
            total += tl.sum(ends_x.to(tl.float32), 0)
        if s.CLUSTER == 1:
            # Rounded as IEEE says: a row of one constant has that mean exactly, and nothing for rstd to blow up.
            mean = tl.div_rn(total, C * 1.0)
        else:
            # Of the elements of this slice; head and tail count for slice 0.
            own = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)
            length = head_tail.slice_length(own, C, rank, s.PIECES * s.BLOCK_C, s.VECTOR)
            mean = total / tl.maximum(length.to(tl.float32), 1.0)
    else:
        mean = tl.zeros((s.BLOCK_R,), tl.float32)
    lane_square = tl.zeros((s.BLOCK_R, s.BLOCK_C), tl.float32)
    for i in tl.static_range(s.PIECES):
        centered = xs[i].to(tl.float32)
        if given.CENTERED:
            centered -= mean[:, None]
            if piece.ragged(i, s.PIECES, s.CLUSTER, s.EVEN_C, s.VECTOR):
                centered = tl.where(cols + i * s.BLOCK_C < width, centered, 0.0)
        lane_square += centered * centered
    squares = tl.sum(lane_square, 1)
    if s.VECTOR > 1:
        centered = ends_x.to(tl.float32)
        if given.CENTERED:
            centered = tl.where(on_end, centered - mean[None, :], 0.0)
        squares += tl.sum(centered * centered, 0)
    if s.CLUSTER > 1:
        peers.send(place, exchange, rank, mean, squares, s.CLUSTER)
        peers.wait(place, exchange)
        for r in tl.static_range(s.BLOCK_R):
            means, parts = peers.received(place, exchange, r, s.BLOCK_R, s.CLUSTER)
            total = tl.sum(parts, 0)
            if given.CENTERED:
                ranks = tl.arange(0, s.CLUSTER)
                length = head_tail.slice_length(tile * s.BLOCK_R + r, C, ranks, s.PIECES * s.BLOCK_C, s.VECTOR)
                counts = length.to(tl.float32)
                row_mean = tl.sum(means * counts, 0) / C
                total += tl.sum(counts * (means - row_mean) * (means - row_mean), 0)
                mean = peers.with_one(mean, r, row_mean)
            squares = peers.with_one(squares, r, total)
    rstd = tl.rsqrt(squares / C + given.eps)

    if rank == 0:
        stat_rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)
        if given.mean_ptr is not None:
            tl.store(given.mean_ptr + stat_rows, mean, mask=stat_rows < R)
        if given.rstd_ptr is not None:
            tl.store(given.rstd_ptr + stat_rows, rstd, mask=stat_rows < R)
    for i in tl.static_range(s.PIECES):
        y = xs[i].to(tl.float32)
        if given.CENTERED:
            y -= mean[:, None]
        y *= rstd[:, None]
        if given.weight_ptr is not None:
            y *= _at_columns(i, given.weight_ptr, held[0], vector_cols + i * s.BLOCK_C, vector_width, s, given.LATE)
        if given.bias_ptr is not None:
            y += _at_columns(i, given.bias_ptr, held[1], vector_cols + i * s.BLOCK_C, vector_width, s, given.LATE)
        piece.store_piece(i, y_rows, y, at, s)
    if s.VECTOR > 1:
        y = ends_x.to(tl.float32)
        if given.CENTERED:
            y -= mean[None, :]
        y *= rstd[None, :]
        if given.weight_ptr is not None:
            y *= piece.load_vector_lanes(given.weight_ptr, ends_cols, on_end)
        if given.bias_ptr is not None:
            y += piece.load_vector_lanes(given.bias_ptr, ends_cols, on_end)
        head_tail.store(given.y_ptr, ends_rows, y, R, C, rank, s.VECTOR)


@triton.jit
def _norm(inputs, given, R, C, s, SPREAD: tl.constexpr):
    """Weight and bias of this program's columns, unless LATE, then its tiles."""
    program, rank, place = peers.position(s.CLUSTER)
    first = rank * (s.PIECES * s.BLOCK_C)
    if s.VECTOR > 1:
        head, width = head_tail.cut(program * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[:, None], C, s.VECTOR)
        first += head
        limit = head + width
    else:
        limit = C
    weights = load_vector_pieces(None if given.LATE else given.weight_ptr, first, limit, s, SPREAD)
    biases = load_vector_pieces(None if given.LATE else given.bias_ptr, first, limit, s, SPREAD)
    piece.over_tiles(_forward_tile, inputs, given, (weights, biases), (program, rank, place), R, C, s, 0.0)


@triton.jit
def norm_kernel(
    tensors, scalars, CENTERED: tl.constexpr, SPREAD: tl.constexpr, LATE: tl.constexpr, SHAPE: tl.constexpr
):
    """y[r] = (h[r] - mean) * rstd * weight + bias with h = x (+ residual). Lengths and strides come in units of UNIT
    elements, so that the compiler knows what they are multiples of. Weight and bias are loaded beside x, so that no
    thread waits for them after the statistics; LATE: after, where registers are scarce. s.VECTOR > 1: rows are cut into
    body, head and tail (see head_tail.py). Unless LATE, all tiles of a program are then cut alike, since its weights
    are those of the columns of its bodies."""
    s: tl.constexpr = constants(Shape, SHAPE)
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr = tensors
    R, c_units, x_stride_units, residual_stride_units, eps = scalars
    C = c_units * s.UNIT
    x = (x_ptr, x_stride_units * s.UNIT)
    _norm(
        (x,) if residual_ptr is None else (x, (residual_ptr, residual_stride_units * s.UNIT)),
        _Given(weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, eps, CENTERED, LATE),
        R,
        C,
        s,
        SPREAD,
    )


@triton.jit
def _load_sum(x_row, residual_row, cols, C, DTYPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, AGAIN_LATER: tl.constexpr):
    """A piece of x, or of x + residual rounded as it is stored; in float32."""
    if AGAIN_LATER:
        x = piece.load_again_later(x_row, cols, C, 0.0).to(tl.float32)
    else:
        x = piece.load(x_row, cols, None, C, 0.0, False, True).to(tl.float32)
    if HAS_RESIDUAL:
        if AGAIN_LATER:
            x += piece.load_again_later(residual_row, cols, C, 0.0).to(tl.float32)
        else:
            x += piece.load(residual_row, cols, None, C, 0.0, False, True).to(tl.float32)
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def norm_streamed_kernel(tensors, scalars, CENTERED: tl.constexpr, SHAPE: tl.constexpr):
    """One row per program, read twice. In the first reading every lane keeps count, mean and squares about its mean
    (Welford, "Note on a method for calculating corrected sums of squares", 1962); Chan's formula joins the lanes."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_C: tl.constexpr = s.BLOCK_C
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr = tensors
    c_units, x_stride_units, residual_stride_units, eps = scalars
    C = c_units * s.UNIT
    row = tl.program_id(0).to(tl.int64)
    here = tl.zeros((1, 1), tl.int32)
    x_row = x_ptr + row * (x_stride_units * s.UNIT) + here
    y_row = y_ptr + row * C + here
    HAS_RESIDUAL: tl.constexpr = residual_ptr is not None
    DTYPE: tl.constexpr = sum_ptr.dtype.element_ty if HAS_RESIDUAL else tl.float32
    residual_row = residual_ptr + row * (residual_stride_units * s.UNIT) + here if HAS_RESIDUAL else x_row
    sum_row = sum_ptr + row * C + here if HAS_RESIDUAL else y_row
    lanes = tl.arange(0, BLOCK_C)[None, :]
    lane_mean = tl.zeros((1, BLOCK_C), tl.float32)
    lane_square = tl.zeros((1, BLOCK_C), tl.float32)
    for start in range(0, C, BLOCK_C):
        x = _load_sum(x_row, residual_row, start + lanes, C, DTYPE, HAS_RESIDUAL, True)
        if HAS_RESIDUAL:
            piece.store(sum_row, start + lanes, x, None, C, False, True)
        if CENTERED:
            change = tl.where(start + lanes < C, x - lane_mean, 0.0)
            lane_mean += change / (start // BLOCK_C + 1)
            lane_square += change * tl.where(start + lanes < C, x - lane_mean, 0.0)
        else:
            lane_square += x * x
    if CENTERED:
        counts = ((C - lanes + BLOCK_C - 1) // BLOCK_C).to(tl.float32)
        mean = tl.div_rn(tl.sum(lane_mean * counts, 1), C * 1.0)[:, None]
        square = tl.sum(lane_square + counts * (lane_mean - mean) * (lane_mean - mean), 1)[:, None]
    else:
        mean = tl.zeros((1, 1), tl.float32)
        square = tl.sum(lane_square, 1)[:, None]
    rstd = tl.rsqrt(square / C + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row + here, mean)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row + here, rstd)
    steps = tl.cdiv(C, BLOCK_C)
    for step in range(0, steps):
        cols = (steps - 1 - step) * BLOCK_C + lanes
        y = (_load_sum(x_row, residual_row, cols, C, DTYPE, HAS_RESIDUAL, False) - mean) * rstd
        if weight_ptr is not None:
            y *= piece.load_vector(weight_ptr, cols, C, True).to(tl.float32)
        if bias_ptr is not None:
            y += piece.load_vector(bias_ptr, cols, C, True).to(tl.float32)
        piece.store(y_row, cols, y, None, C, False, True)
