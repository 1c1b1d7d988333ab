"""Triton kernels of softmax over rows; see softmax.py for what they compute and what limits them."""

from __future__ import annotations

import triton
import triton.language as tl

from expertile.ops.rows import cluster as peers
from expertile.ops.rows import head_tail
from expertile.ops.rows import tile as piece

_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _finite(maximum):
    """A maximum to subtract: 0 for lanes that have seen nothing but -inf, whose exp is then 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _forward_tile(
    x_ptr,
    y_ptr,
    ends_x,
    tile,
    rank,
    place,
    exchange,
    R,
    C,
    x_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EVEN_R: tl.constexpr,
    EVEN_C: tl.constexpr,
    STAYS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    row_mask = rows < R
    if VECTOR > 1:
        x_rows = x_ptr + head_tail.body_start(rows, x_stride, VECTOR)
        y_rows = y_ptr + head_tail.body_start(rows, C, VECTOR)
        _, width = head_tail.cut(rows, C, VECTOR)
    else:
        x_rows = x_ptr + rows.to(tl.int64) * x_stride
        y_rows = y_ptr + rows.to(tl.int64) * C
        width = C
    cols = rank * (PIECES * BLOCK_C) + tl.arange(0, BLOCK_C)[None, :]
    xs = piece.nothing()
    for i in tl.static_range(PIECES):
        xs = piece.append(
            xs,
            piece.load(
                x_rows,
                cols + i * BLOCK_C,
                row_mask,
                width,
                _NEVER,
                not EVEN_R,
                piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
            ),
        )
    if CLUSTER > 1 and not STAYS:
        peers.joined()
    lane_max = xs[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        lane_max = tl.maximum(lane_max, xs[i].to(tl.float32))
    row_max = tl.max(lane_max, 1)
    if VECTOR > 1:
        row_max = tl.maximum(row_max, tl.max(ends_x.to(tl.float32), 0))
    # A whole row of -inf is NaN, as in torch; a slice of it may be all -inf and count for nothing.
    subtract = row_max if CLUSTER == 1 else _finite(row_max)
    exps = piece.nothing()
    for i in tl.static_range(PIECES):
        exps = piece.append(exps, tl.exp(xs[i].to(tl.float32) - subtract[:, None]))
    lane_sum = exps[0]
    for i in tl.static_range(1, PIECES):
        lane_sum += exps[i]
    row_sum = tl.sum(lane_sum, 1)
    if VECTOR > 1:
        ends_exps = tl.exp(ends_x.to(tl.float32) - subtract[None, :])
        row_sum += tl.sum(ends_exps, 0)
    if CLUSTER > 1:
        peers.send(place, exchange, rank, row_max, row_sum, CLUSTER)
        peers.wait(place, exchange)
        scale = row_max
        for r in tl.static_range(BLOCK_R):
            maxima, sums = peers.received(place, exchange, r, BLOCK_R, CLUSTER)
            top = tl.max(maxima, 0)
            total = tl.sum(sums * tl.exp(maxima - top), 0)
            scale = peers.with_one(scale, r, tl.exp(peers.one_of(row_max, r) - top) / total)
    else:
        scale = 1.0 / row_sum
    for i in tl.static_range(PIECES):
        piece.store(
            y_rows,
            cols + i * BLOCK_C,
            exps[i] * scale[:, None],
            row_mask,
            width,
            not EVEN_R,
            piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
        )
    if VECTOR > 1:
        ends_rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        head_tail.store(y_ptr, ends_rows, ends_exps * scale[None, :], R, C, rank, VECTOR)


@triton.jit
def softmax_kernel(
    x_ptr,
    y_ptr,
    R,
    c_units,
    x_stride_units,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EVEN_R: tl.constexpr,
    EVEN_C: tl.constexpr,
    STAYS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """y[r] = exp(x[r] - max) / sum exp(x[r] - max). Lengths and strides come in units of UNIT elements, so that the
    compiler knows what they are multiples of. VECTOR: where rows are cut into body, head and tail (see
    head_tail.py); 1: they are not."""
    C = c_units * UNIT
    x_stride = x_stride_units * UNIT
    program = tl.program_id(0) // CLUSTER
    rank = tl.program_id(0) % CLUSTER
    place = peers.join() if CLUSTER > 1 else 0
    ends_x = 0.0
    if VECTOR > 1:
        lanes = tl.arange(0, BLOCK_R)[None, :]
        ends_x = head_tail.load(x_ptr, program * BLOCK_R + lanes, x_stride, R, C, rank, _NEVER, VECTOR)
    if STAYS:
        if CLUSTER > 1:
            peers.joined()
        exchange = 0
        for tile in tl.range(program, tl.cdiv(R, BLOCK_R), tl.num_programs(0) // CLUSTER, num_stages=STAGES):
            if VECTOR > 1:  # one tile ahead: such short loads are not copied to shared memory
                next_rows = (tile + tl.num_programs(0) // CLUSTER) * BLOCK_R + lanes
                next_x = head_tail.load(x_ptr, next_rows, x_stride, R, C, rank, _NEVER, VECTOR)
            _forward_tile(
                x_ptr,
                y_ptr,
                ends_x,
                tile,
                rank,
                place,
                exchange,
                R,
                C,
                x_stride,
                BLOCK_R,
                BLOCK_C,
                PIECES,
                CLUSTER,
                EVEN_R,
                EVEN_C,
                STAYS,
                VECTOR,
            )
            if VECTOR > 1:
                ends_x = next_x
            exchange += 1  # noqa: SIM113 (Triton has no enumerate)
    else:
        _forward_tile(
            x_ptr,
            y_ptr,
            ends_x,
            program,
            rank,
            place,
            0,
            R,
            C,
            x_stride,
            BLOCK_R,
            BLOCK_C,
            PIECES,
            CLUSTER,
            EVEN_R,
            EVEN_C,
            STAYS,
            VECTOR,
        )


@triton.jit
def softmax_streamed_kernel(x_ptr, y_ptr, c_units, x_stride_units, UNIT: tl.constexpr, BLOCK_C: tl.constexpr):
    """One row per program, read twice: every lane keeps a running maximum and the sum of exponentials below it
    (Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018), then the row is read backwards."""
    C = c_units * UNIT
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * (x_stride_units * UNIT) + tl.zeros((1, 1), tl.int32)
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
def _backward_tile(
    dy_ptr,
    y_ptr,
    dx_ptr,
    ends_dy,
    ends_y,
    tile,
    rank,
    place,
    exchange,
    R,
    C,
    dy_stride,
    y_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EVEN_R: tl.constexpr,
    EVEN_C: tl.constexpr,
    STAYS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    row_mask = rows < R
    if VECTOR > 1:
        dy_rows = dy_ptr + head_tail.body_start(rows, dy_stride, VECTOR)
        y_rows = y_ptr + head_tail.body_start(rows, y_stride, VECTOR)
        dx_rows = dx_ptr + head_tail.body_start(rows, C, VECTOR)
        _, width = head_tail.cut(rows, C, VECTOR)
    else:
        dy_rows = dy_ptr + rows.to(tl.int64) * dy_stride
        y_rows = y_ptr + rows.to(tl.int64) * y_stride
        dx_rows = dx_ptr + rows.to(tl.int64) * C
        width = C
    cols = rank * (PIECES * BLOCK_C) + tl.arange(0, BLOCK_C)[None, :]
    dys = piece.nothing()
    ys = piece.nothing()
    for i in tl.static_range(PIECES):
        dys = piece.append(
            dys,
            piece.load(
                dy_rows,
                cols + i * BLOCK_C,
                row_mask,
                width,
                0.0,
                not EVEN_R,
                piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
            ),
        )
        ys = piece.append(
            ys,
            piece.load(
                y_rows,
                cols + i * BLOCK_C,
                row_mask,
                width,
                0.0,
                not EVEN_R,
                piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
            ),
        )
    if CLUSTER > 1 and not STAYS:
        peers.joined()
    lane_dot = dys[0].to(tl.float32) * ys[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        lane_dot += dys[i].to(tl.float32) * ys[i].to(tl.float32)
    dot = tl.sum(lane_dot, 1)
    if VECTOR > 1:
        dot += tl.sum(ends_dy.to(tl.float32) * ends_y.to(tl.float32), 0)
    if CLUSTER > 1:
        peers.send(place, exchange, rank, dot, dot, CLUSTER)
        peers.wait(place, exchange)
        for r in tl.static_range(BLOCK_R):
            dots, _ = peers.received(place, exchange, r, BLOCK_R, CLUSTER)
            dot = peers.with_one(dot, r, tl.sum(dots, 0))
    for i in tl.static_range(PIECES):
        dx = ys[i].to(tl.float32) * (dys[i].to(tl.float32) - dot[:, None])
        piece.store(
            dx_rows,
            cols + i * BLOCK_C,
            dx,
            row_mask,
            width,
            not EVEN_R,
            piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
        )
    if VECTOR > 1:
        ends_rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        ends_dx = ends_y.to(tl.float32) * (ends_dy.to(tl.float32) - dot[None, :])
        head_tail.store(dx_ptr, ends_rows, ends_dx, R, C, rank, VECTOR)


@triton.jit
def softmax_backward_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    R,
    c_units,
    dy_stride_units,
    y_stride_units,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EVEN_R: tl.constexpr,
    EVEN_C: tl.constexpr,
    STAYS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """dx[r] = y[r] * (dy[r] - sum(dy[r] * y[r]))."""
    C = c_units * UNIT
    dy_stride = dy_stride_units * UNIT
    y_stride = y_stride_units * UNIT
    program = tl.program_id(0) // CLUSTER
    rank = tl.program_id(0) % CLUSTER
    place = peers.join() if CLUSTER > 1 else 0
    ends_dy = 0.0
    ends_y = 0.0
    if VECTOR > 1:
        lanes = tl.arange(0, BLOCK_R)[None, :]
        ends_dy = head_tail.load(dy_ptr, program * BLOCK_R + lanes, dy_stride, R, C, rank, 0.0, VECTOR)
        ends_y = head_tail.load(y_ptr, program * BLOCK_R + lanes, y_stride, R, C, rank, 0.0, VECTOR)
    if STAYS:
        if CLUSTER > 1:
            peers.joined()
        exchange = 0
        for tile in tl.range(program, tl.cdiv(R, BLOCK_R), tl.num_programs(0) // CLUSTER, num_stages=STAGES):
            if VECTOR > 1:  # one tile ahead: such short loads are not copied to shared memory
                next_rows = (tile + tl.num_programs(0) // CLUSTER) * BLOCK_R + lanes
                next_dy = head_tail.load(dy_ptr, next_rows, dy_stride, R, C, rank, 0.0, VECTOR)
                next_y = head_tail.load(y_ptr, next_rows, y_stride, R, C, rank, 0.0, VECTOR)
            _backward_tile(
                dy_ptr,
                y_ptr,
                dx_ptr,
                ends_dy,
                ends_y,
                tile,
                rank,
                place,
                exchange,
                R,
                C,
                dy_stride,
                y_stride,
                BLOCK_R,
                BLOCK_C,
                PIECES,
                CLUSTER,
                EVEN_R,
                EVEN_C,
                STAYS,
                VECTOR,
            )
            if VECTOR > 1:
                ends_dy = next_dy
                ends_y = next_y
            exchange += 1  # noqa: SIM113 (Triton has no enumerate)
    else:
        _backward_tile(
            dy_ptr,
            y_ptr,
            dx_ptr,
            ends_dy,
            ends_y,
            program,
            rank,
            place,
            0,
            R,
            C,
            dy_stride,
            y_stride,
            BLOCK_R,
            BLOCK_C,
            PIECES,
            CLUSTER,
            EVEN_R,
            EVEN_C,
            STAYS,
            VECTOR,
        )


@triton.jit
def softmax_backward_streamed_kernel(
    dy_ptr, y_ptr, dx_ptr, c_units, dy_stride_units, y_stride_units, UNIT: tl.constexpr, BLOCK_C: tl.constexpr
):
    """One row per program, read twice: for the dot product, then backwards for dx."""
    C = c_units * UNIT
    row = tl.program_id(0).to(tl.int64)
    dy_row = dy_ptr + row * (dy_stride_units * UNIT) + tl.zeros((1, 1), tl.int32)
    y_row = y_ptr + row * (y_stride_units * UNIT) + tl.zeros((1, 1), tl.int32)
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
