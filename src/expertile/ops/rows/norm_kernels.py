"""Triton kernels of layer norm and RMS norm, forward; see layer_norm.py and rms_norm.py for formulas and limits.

CENTERED tells them apart: layer norm subtracts the mean, RMS norm does not. The variance is taken about the mean in a
second pass over the registers, padding lanes left out; slices of a row are joined by Chan's formula (Chan, Golub,
LeVeque, "Algorithms for computing the sample variance", 1983), never as E[x^2] - E[x]^2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from expertile.ops.rows import cluster as peers
from expertile.ops.rows import head_tail
from expertile.ops.rows import tile as piece


@triton.jit
def load_vector_pieces(
    ptr,
    first,
    C,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EVEN_C: tl.constexpr,
    SPREAD: tl.constexpr,
    VECTOR: tl.constexpr = 1,
):
    """A weight or bias, piece by piece from column `first` on, [1, BLOCK_C] each; nothing where there is none. SPREAD:
    [BLOCK_R, BLOCK_C], each warp loading what its own rows need, which is cheaper than to exchange it where warps have
    different rows. So it is too for rows that are cut, whose `first` and end C are [BLOCK_R, 1]."""
    pieces = piece.nothing()
    if ptr is not None:
        for i in tl.static_range(PIECES):
            cols = first + i * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            if SPREAD:
                cols += tl.zeros((BLOCK_R, 1), tl.int32)
            pieces = piece.append(
                pieces, piece.load_vector(ptr, cols, C, piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR))
            )
    return pieces


@triton.jit
def _at_columns(ptr, given, cols, C, LATE: tl.constexpr, MASK_COLS: tl.constexpr):
    """A piece of a weight or bias in float32: `given`, or LATE loaded now."""
    if LATE:
        return piece.load_vector(ptr, cols, C, MASK_COLS).to(tl.float32)
    else:
        return given.to(tl.float32)


@triton.jit
def _ends(
    x_ptr, residual_ptr, tile, rank, R, C, x_stride, residual_stride, BLOCK_R: tl.constexpr, VECTOR: tl.constexpr
):
    """Heads and tails of a tile's rows of x and of the residual."""
    rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    x = head_tail.load(x_ptr, rows, x_stride, R, C, rank, 0.0, VECTOR)
    if residual_ptr is None:
        return x, 0.0
    else:
        return x, head_tail.load(residual_ptr, rows, residual_stride, R, C, rank, 0.0, VECTOR)


@triton.jit
def _forward_tile(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    weights,
    biases,
    ends_x,
    ends_residual,
    tile,
    rank,
    place,
    exchange,
    R,
    C,
    x_stride,
    residual_stride,
    eps,
    CENTERED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EVEN_R: tl.constexpr,
    EVEN_C: tl.constexpr,
    LATE: tl.constexpr,
    STAYS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    row_mask = rows < R
    rows_64 = rows.to(tl.int64)
    first = rank * (PIECES * BLOCK_C)
    cols = first + tl.arange(0, BLOCK_C)[None, :]
    if VECTOR > 1:
        x_rows = x_ptr + head_tail.body_start(rows, x_stride, VECTOR)
        y_rows = y_ptr + head_tail.body_start(rows, C, VECTOR)
        head, width = head_tail.cut(rows, C, VECTOR)
        vector_cols = cols + head
        vector_width = head + width
        # Head and tail, upright: rows lie along the other dimension.
        ends_rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        ends_cols, on_end = head_tail.place(ends_rows, R, C, rank, VECTOR)
    else:
        x_rows = x_ptr + rows_64 * x_stride
        y_rows = y_ptr + rows_64 * C
        width = C
        vector_cols = cols
        vector_width = C
    xs = piece.nothing()
    for i in tl.static_range(PIECES):
        x = piece.load(
            x_rows,
            cols + i * BLOCK_C,
            row_mask,
            width,
            0.0,
            not EVEN_R,
            piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
        )
        if residual_ptr is not None:
            if VECTOR > 1:
                residual_rows = residual_ptr + head_tail.body_start(rows, residual_stride, VECTOR)
                sum_rows = sum_ptr + head_tail.body_start(rows, C, VECTOR)
            else:
                residual_rows = residual_ptr + rows_64 * residual_stride
                sum_rows = sum_ptr + rows_64 * C
            residual = piece.load(
                residual_rows,
                cols + i * BLOCK_C,
                row_mask,
                width,
                0.0,
                not EVEN_R,
                piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
            )
            # What is normalised is the sum as it is returned, so that fused and separate calls agree.
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            piece.store(
                sum_rows,
                cols + i * BLOCK_C,
                x,
                row_mask,
                width,
                not EVEN_R,
                piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
            )
        xs = piece.append(xs, x)
    if VECTOR > 1 and residual_ptr is not None:
        ends_x = (ends_x.to(tl.float32) + ends_residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        head_tail.store(sum_ptr, ends_rows, ends_x, R, C, rank, VECTOR)

    if CLUSTER > 1 and not STAYS:
        peers.joined()
    if CENTERED:
        lane_sum = xs[0].to(tl.float32)
        for i in tl.static_range(1, PIECES):
            lane_sum += xs[i].to(tl.float32)
        total = tl.sum(lane_sum, 1)
        if VECTOR > 1:
            total += tl.sum(ends_x.to(tl.float32), 0)
        if CLUSTER == 1:
            # Rounded as IEEE says: a row of one constant has that mean exactly, and nothing for rstd to blow up.
            mean = tl.div_rn(total, C * 1.0)
        else:
            # Of the elements of this slice; head and tail count for slice 0.
            length = head_tail.slice_length(tile * BLOCK_R + tl.arange(0, BLOCK_R), C, rank, PIECES * BLOCK_C, VECTOR)
            mean = total / tl.maximum(length.to(tl.float32), 1.0)
    else:
        mean = tl.zeros((BLOCK_R,), tl.float32)
    lane_square = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for i in tl.static_range(PIECES):
        centered = xs[i].to(tl.float32)
        if CENTERED:
            centered -= mean[:, None]
            if piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR):
                centered = tl.where(cols + i * BLOCK_C < width, centered, 0.0)
        lane_square += centered * centered
    squares = tl.sum(lane_square, 1)
    if VECTOR > 1:
        centered = ends_x.to(tl.float32)
        if CENTERED:
            centered = tl.where(on_end, centered - mean[None, :], 0.0)
        squares += tl.sum(centered * centered, 0)
    if CLUSTER > 1:
        peers.send(place, exchange, rank, mean, squares, CLUSTER)
        peers.wait(place, exchange)
        for r in tl.static_range(BLOCK_R):
            means, parts = peers.received(place, exchange, r, BLOCK_R, CLUSTER)
            total = tl.sum(parts, 0)
            if CENTERED:
                ranks = tl.arange(0, CLUSTER)
                counts = head_tail.slice_length(tile * BLOCK_R + r, C, ranks, PIECES * BLOCK_C, VECTOR).to(tl.float32)
                row_mean = tl.sum(means * counts, 0) / C
                total += tl.sum(counts * (means - row_mean) * (means - row_mean), 0)
                mean = peers.with_one(mean, r, row_mean)
            squares = peers.with_one(squares, r, total)
    rstd = tl.rsqrt(squares / C + eps)

    if rank == 0:
        stat_rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        if mean_ptr is not None:
            tl.store(mean_ptr + stat_rows, mean, mask=stat_rows < R)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + stat_rows, rstd, mask=stat_rows < R)
    for i in tl.static_range(PIECES):
        y = xs[i].to(tl.float32)
        if CENTERED:
            y -= mean[:, None]
        y *= rstd[:, None]
        if weight_ptr is not None:
            y *= _at_columns(
                weight_ptr,
                None if LATE else weights[i],
                vector_cols + i * BLOCK_C,
                vector_width,
                LATE,
                piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
            )
        if bias_ptr is not None:
            y += _at_columns(
                bias_ptr,
                None if LATE else biases[i],
                vector_cols + i * BLOCK_C,
                vector_width,
                LATE,
                piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR),
            )
        piece.store(
            y_rows, cols + i * BLOCK_C, y, row_mask, width, not EVEN_R, piece.ragged(i, PIECES, CLUSTER, EVEN_C, VECTOR)
        )
    if VECTOR > 1:
        y = ends_x.to(tl.float32)
        if CENTERED:
            y -= mean[None, :]
        y *= rstd[None, :]
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + ends_cols, mask=on_end, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + ends_cols, mask=on_end, other=0.0, eviction_policy="evict_last").to(tl.float32)
        head_tail.store(y_ptr, ends_rows, y, R, C, rank, VECTOR)


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    R,
    c_units,
    x_stride_units,
    residual_stride_units,
    eps,
    CENTERED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EVEN_R: tl.constexpr,
    EVEN_C: tl.constexpr,
    SPREAD: tl.constexpr,
    LATE: tl.constexpr,
    STAYS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """y[r] = (h[r] - mean) * rstd * weight + bias with h = x (+ residual). Lengths and strides come in units of UNIT
    elements, so that the compiler knows what they are multiples of. Weight and bias are loaded beside x, so that no
    thread waits for them after the statistics; LATE: after, where registers are scarce. VECTOR > 1: rows are cut into
    body, head and tail (see head_tail.py). Unless LATE, all tiles of a program are then cut alike, since its weights
    are those of the columns of its bodies."""
    C = c_units * UNIT
    x_stride = x_stride_units * UNIT
    residual_stride = residual_stride_units * UNIT
    program = tl.program_id(0) // CLUSTER
    rank = tl.program_id(0) % CLUSTER
    place = peers.join() if CLUSTER > 1 else 0
    first = rank * (PIECES * BLOCK_C)
    if VECTOR > 1:
        head, width = head_tail.cut(program * BLOCK_R + tl.arange(0, BLOCK_R)[:, None], C, VECTOR)
        first += head
        limit = head + width
    else:
        limit = C
    weights = load_vector_pieces(
        None if LATE else weight_ptr, first, limit, BLOCK_R, BLOCK_C, PIECES, CLUSTER, EVEN_C, SPREAD, VECTOR
    )
    biases = load_vector_pieces(
        None if LATE else bias_ptr, first, limit, BLOCK_R, BLOCK_C, PIECES, CLUSTER, EVEN_C, SPREAD, VECTOR
    )
    ends_x = 0.0
    ends_residual = 0.0
    if VECTOR > 1:
        ends_x, ends_residual = _ends(
            x_ptr, residual_ptr, program, rank, R, C, x_stride, residual_stride, BLOCK_R, VECTOR
        )
    if STAYS:
        if CLUSTER > 1:
            peers.joined()
        exchange = 0
        for tile in tl.range(program, tl.cdiv(R, BLOCK_R), tl.num_programs(0) // CLUSTER, num_stages=STAGES):
            if VECTOR > 1:  # one tile ahead: such short loads are not copied to shared memory
                next_tile = tile + tl.num_programs(0) // CLUSTER
                next_x, next_residual = _ends(
                    x_ptr, residual_ptr, next_tile, rank, R, C, x_stride, residual_stride, BLOCK_R, VECTOR
                )
            _forward_tile(
                x_ptr,
                residual_ptr,
                weight_ptr,
                bias_ptr,
                y_ptr,
                sum_ptr,
                mean_ptr,
                rstd_ptr,
                weights,
                biases,
                ends_x,
                ends_residual,
                tile,
                rank,
                place,
                exchange,
                R,
                C,
                x_stride,
                residual_stride,
                eps,
                CENTERED,
                BLOCK_R,
                BLOCK_C,
                PIECES,
                CLUSTER,
                EVEN_R,
                EVEN_C,
                LATE,
                STAYS,
                VECTOR,
            )
            if VECTOR > 1:
                ends_x = next_x
                ends_residual = next_residual
            exchange += 1  # noqa: SIM113 (Triton has no enumerate)
    else:
        _forward_tile(
            x_ptr,
            residual_ptr,
            weight_ptr,
            bias_ptr,
            y_ptr,
            sum_ptr,
            mean_ptr,
            rstd_ptr,
            weights,
            biases,
            ends_x,
            ends_residual,
            program,
            rank,
            place,
            0,
            R,
            C,
            x_stride,
            residual_stride,
            eps,
            CENTERED,
            BLOCK_R,
            BLOCK_C,
            PIECES,
            CLUSTER,
            EVEN_R,
            EVEN_C,
            LATE,
            STAYS,
            VECTOR,
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
def norm_streamed_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    c_units,
    x_stride_units,
    residual_stride_units,
    eps,
    CENTERED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One row per program, read twice. In the first reading every lane keeps count, mean and squares about its mean
    (Welford, "Note on a method for calculating corrected sums of squares", 1962); Chan's formula joins the lanes."""
    C = c_units * UNIT
    row = tl.program_id(0).to(tl.int64)
    here = tl.zeros((1, 1), tl.int32)
    x_row = x_ptr + row * (x_stride_units * UNIT) + here
    y_row = y_ptr + row * C + here
    HAS_RESIDUAL: tl.constexpr = residual_ptr is not None
    DTYPE: tl.constexpr = sum_ptr.dtype.element_ty if HAS_RESIDUAL else tl.float32
    residual_row = residual_ptr + row * (residual_stride_units * UNIT) + here if HAS_RESIDUAL else x_row
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
