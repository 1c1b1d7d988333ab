"""Triton kernels of softmax over rows; see softmax.py for what they compute and what limits them."""

import triton
import triton.language as tl

from expertile.ops.launch.shape import constants
from expertile.ops.rows import cluster as peers
from expertile.ops.rows import head_tail
from expertile.ops.rows import tile as piece
from expertile.ops.rows.config import Shape

_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _finite(maximum):
    """A maximum to subtract: 0 for lanes that have seen nothing but -inf, whose exp is then 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _forward_tile(inputs, y_ptr, held, ends, tile, rank, place, exchange, R, C, s):
    rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[:, None]
    row_mask = rows < R
    x_rows = head_tail.row_pointers(inputs[0][0], rows, inputs[0][1], s.VECTOR)
    y_rows = head_tail.row_pointers(y_ptr, rows, C, s.VECTOR)
    width = head_tail.width(rows, C, s.VECTOR)
    cols = rank * (s.PIECES * s.BLOCK_C) + tl.arange(0, s.BLOCK_C)[None, :]
    at = piece.Spot(cols, row_mask, width)
    xs = piece.nothing()
    for i in tl.static_range(s.PIECES):
        xs = piece.append(xs, piece.load_piece(i, x_rows, at, s, _NEVER))
    if s.CLUSTER > 1 and not s.STAYS:
        peers.joined()
    lane_max = xs[0].to(tl.float32)
    for i in tl.static_range(1, s.PIECES):
        lane_max = tl.maximum(lane_max, xs[i].to(tl.float32))
    row_max = tl.max(lane_max, 1)
    if s.VECTOR > 1:
        row_max = tl.maximum(row_max, tl.max(ends[0].to(tl.float32), 0))
    # A whole row of -inf is NaN, as in torch; a slice of it may be all -inf and count for nothing.
    subtract = row_max if s.CLUSTER == 1 else _finite(row_max)
    exps = piece.nothing()
    for i in tl.static_range(s.PIECES):
        exps = piece.append(exps, tl.exp(xs[i].to(tl.float32) - subtract[:, None]))
    lane_sum = exps[0]
    for i in tl.static_range(1, s.PIECES):
        lane_sum += exps[i]
    row_sum = tl.sum(lane_sum, 1)
    if s.VECTOR > 1:
        ends_exps = tl.exp(ends[0].to(tl.float32) - subtract[None, :])
        row_sum += tl.sum(ends_exps, 0)
    if s.CLUSTER > 1:
        peers.send(place, exchange, rank, row_max, row_sum, s.CLUSTER)
        peers.wait(place, exchange)
        scale = row_max
        for r in tl.static_range(s.BLOCK_R):
            maxima, sums = peers.received(place, exchange, r, s.BLOCK_R, s.CLUSTER)
            top = tl.max(maxima, 0)
            total = tl.sum(sums * tl.exp(maxima - top), 0)
            scale = peers.with_one(scale, r, tl.exp(peers.one_of(row_max, r) - top) / total)
    else:
        scale = 1.0 / row_sum
    for i in tl.static_range(s.PIECES):
        piece.store_piece(i, y_rows, exps[i] * scale[:, None], at, s)
    if s.VECTOR > 1:
        ends_rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[None, :]
        head_tail.store(y_ptr, ends_rows, ends_exps * scale[None, :], R, C, rank, s.VECTOR)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, R, c_units, x_stride_units, SHAPE: tl.constexpr):
    """y[r] = exp(x[r] - max) / sum exp(x[r] - max). Lengths and strides come in units of UNIT elements, so that the
    compiler knows what they are multiples of."""
    s: tl.constexpr = constants(Shape, SHAPE)
    C = c_units * s.UNIT
    inputs = ((x_ptr, x_stride_units * s.UNIT),)
    piece.over_tiles(_forward_tile, inputs, y_ptr, (), peers.position(s.CLUSTER), R, C, s, _NEVER)


@triton.jit
def softmax_streamed_kernel(x_ptr, y_ptr, c_units, x_stride_units, SHAPE: tl.constexpr):
    """One row per program, read twice: every lane keeps a running maximum and the sum of exponentials below it
    (Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018), then the row is read backwards."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_C: tl.constexpr = s.BLOCK_C
    C = c_units * s.UNIT
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * (x_stride_units * s.UNIT) + tl.zeros((1, 1), tl.int32)
    y_row = y_ptr + row * C + tl.zeros((1, 1), tl.int32)
    lanes = tl.arange(0, BLOCK_C)[None, :]
    lane_max = tl.full((1, BLOCK_C), float("-inf"), tl.float32)
    lane_sum = tl.zeros((1, BLOCK_C), tl.float32)
    for start in range(0, C, BLOCK_C):
        x = piece.load_again_later(x_row, start + lanes, C, _NEVER).to(tl.float32)
        larger = tl.maximum(lane_max, x)
        lane_sum = lane_sum * tl.exp(lane_max - _finite(larger)) + tl.exp(x - _finite(larger))
        lane_max = larger
    row_max = tl.max(lane_max, 1)[:, None]
    total = tl.sum(lane_sum * tl.exp(lane_max - _finite(row_max)), 1)[:, None]
    scale = 1.0 / total
    steps = tl.cdiv(C, BLOCK_C)
    for step in range(0, steps):
        cols = (steps - 1 - step) * BLOCK_C + lanes
        x = piece.load(x_row, cols, None, C, _NEVER, False, True).to(tl.float32)
        piece.store(y_row, cols, tl.exp(x - row_max) * scale, None, C, False, True)


@triton.jit
def _backward_tile(inputs, dx_ptr, held, ends, tile, rank, place, exchange, R, C, s):
    rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[:, None]
    row_mask = rows < R
    dy_rows = head_tail.row_pointers(inputs[0][0], rows, inputs[0][1], s.VECTOR)
    y_rows = head_tail.row_pointers(inputs[1][0], rows, inputs[1][1], s.VECTOR)
    dx_rows = head_tail.row_pointers(dx_ptr, rows, C, s.VECTOR)
    width = head_tail.width(rows, C, s.VECTOR)
    cols = rank * (s.PIECES * s.BLOCK_C) + tl.arange(0, s.BLOCK_C)[None, :]
    at = piece.Spot(cols, row_mask, width)
    dys = piece.nothing()
    ys = piece.nothing()
    for i in tl.static_range(s.PIECES):
        dys = piece.append(dys, piece.load_piece(i, dy_rows, at, s, 0.0))
        ys = piece.append(ys, piece.load_piece(i, y_rows, at, s, 0.0))
    if s.CLUSTER > 1 and not s.STAYS:
        peers.joined()
    lane_dot = dys[0].to(tl.float32) * ys[0].to(tl.float32)
    for i in tl.static_range(1, s.PIECES):
        lane_dot += dys[i].to(tl.float32) * ys[i].to(tl.float32)
    dot = tl.sum(lane_dot, 1)
    if s.VECTOR > 1:
        dot += tl.sum(ends[0].to(tl.float32) * ends[1].to(tl.float32), 0)
    if s.CLUSTER > 1:
        peers.send(place, exchange, rank, dot, dot, s.CLUSTER)
        peers.wait(place, exchange)
        for r in tl.static_range(s.BLOCK_R):
            dots, _ = peers.received(place, exchange, r, s.BLOCK_R, s.CLUSTER)
            dot = peers.with_one(dot, r, tl.sum(dots, 0))
    for i in tl.static_range(s.PIECES):
        dx = ys[i].to(tl.float32) * (dys[i].to(tl.float32) - dot[:, None])
        piece.store_piece(i, dx_rows, dx, at, s)
    if s.VECTOR > 1:
        ends_rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[None, :]
        ends_dx = ends[1].to(tl.float32) * (ends[0].to(tl.float32) - dot[None, :])
        head_tail.store(dx_ptr, ends_rows, ends_dx, R, C, rank, s.VECTOR)


@triton.jit
def softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, R, c_units, dy_stride_units, y_stride_units, SHAPE: tl.constexpr):
    """dx[r] = y[r] * (dy[r] - sum(dy[r] * y[r]))."""
    s: tl.constexpr = constants(Shape, SHAPE)
    C = c_units * s.UNIT
    inputs = ((dy_ptr, dy_stride_units * s.UNIT), (y_ptr, y_stride_units * s.UNIT))
    piece.over_tiles(_backward_tile, inputs, dx_ptr, (), peers.position(s.CLUSTER), R, C, s, 0.0)


@triton.jit
def softmax_backward_streamed_kernel(
    dy_ptr, y_ptr, dx_ptr, c_units, dy_stride_units, y_stride_units, SHAPE: tl.constexpr
):
    """One row per program, read twice: for the dot product, then backwards for dx."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_C: tl.constexpr = s.BLOCK_C
    C = c_units * s.UNIT
    row = tl.program_id(0).to(tl.int64)
    dy_row = dy_ptr + row * (dy_stride_units * s.UNIT) + tl.zeros((1, 1), tl.int32)
    y_row = y_ptr + row * (y_stride_units * s.UNIT) + tl.zeros((1, 1), tl.int32)
    dx_row = dx_ptr + row * C + tl.zeros((1, 1), tl.int32)
    lanes = tl.arange(0, BLOCK_C)[None, :]
    lane_dot = tl.zeros((1, BLOCK_C), tl.float32)
    for start in range(0, C, BLOCK_C):
        dy = piece.load_again_later(dy_row, start + lanes, C, 0.0).to(tl.float32)
        lane_dot += dy * piece.load_again_later(y_row, start + lanes, C, 0.0).to(tl.float32)
    dot = tl.sum(lane_dot, 1)[:, None]
    steps = tl.cdiv(C, BLOCK_C)
    for step in range(0, steps):
        cols = (steps - 1 - step) * BLOCK_C + lanes
        dy = piece.load(dy_row, cols, None, C, 0.0, False, True).to(tl.float32)
        y = piece.load(y_row, cols, None, C, 0.0, False, True).to(tl.float32)
        piece.store(dx_row, cols, y * (dy - dot), None, C, False, True)
