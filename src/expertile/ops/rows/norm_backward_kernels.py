"""Triton kernels of layer norm and RMS norm, backward; see layer_norm.py and rms_norm.py for formulas and limits. The
sums over rows have no atomics: every program adds up its own rows in registers, always in the same order, and
`sum_partials_kernel` adds up the programs."""

import triton
import triton.language as tl

from expertile.ops.launch.shape import constants
from expertile.ops.rows import cluster as peers
from expertile.ops.rows import tile as piece
from expertile.ops.rows.config import Shape
from expertile.ops.rows.norm_kernels import load_vector_pieces


@triton.jit
def _zeros(N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    pieces = piece.nothing()
    for _ in tl.static_range(N):
        pieces = piece.append(pieces, tl.zeros((BLOCK_R, BLOCK_C), tl.float32))
    return pieces


@triton.jit
def _rows_added(x, KEPT: tl.constexpr):
    """x [BLOCK_R, BLOCK_C], or the sum of its rows [1, BLOCK_C]."""
    return x if x.shape[0] == KEPT else tl.sum(x, 0)[None, :]


@triton.jit
def _store_partial(ptr, sums, first, C, s):
    """One row [1, C] of partial sums from accumulators [BLOCK_R, BLOCK_C]."""
    for i in tl.static_range(s.PIECES):
        total = tl.sum(sums[i], 0)[None, :]
        cols = first + i * sums[i].shape[1] + tl.arange(0, sums[i].shape[1])[None, :]
        past = piece.ragged(i, s.PIECES, s.CLUSTER, s.EVEN_C)
        piece.store(ptr + tl.zeros((1, 1), tl.int32), cols, total, None, C, False, past)


@triton.jit
def norm_backward_kernel(
    tensors,
    scalars,
    CENTERED: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    SPREAD: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """dh of all rows, and partial sums [SUM_WEIGHT + SUM_BIAS, programs, C] of dweight and dbias, one read of dy and h.
    A program (a cluster, if rows are shared) strides over the tiles; dsum is the gradient that reaches h directly."""
    s: tl.constexpr = constants(Shape, SHAPE)
    dy_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dsum_ptr, dh_ptr, partial_ptr = tensors
    R, c_units, dy_stride_units, h_stride_units, dsum_stride_units = scalars
    C = c_units * s.UNIT
    rank = tl.program_id(0) % s.CLUSTER
    program = tl.program_id(0) // s.CLUSTER
    programs = tl.num_programs(0) // s.CLUSTER
    place = peers.join() if s.CLUSTER > 1 else 0
    first = rank * (s.PIECES * s.BLOCK_C)
    cols = first + tl.arange(0, s.BLOCK_C)[None, :]
    weights = load_vector_pieces(weight_ptr, first, C, s, SPREAD)
    # With slices every thread has the same columns of all rows of the tile: they are added before they are kept.
    KEPT: tl.constexpr = s.BLOCK_R if s.CLUSTER == 1 else 1
    dweights = _zeros(s.PIECES if SUM_WEIGHT else 0, KEPT, s.BLOCK_C)
    dbiases = _zeros(s.PIECES if SUM_BIAS else 0, KEPT, s.BLOCK_C)
    if s.CLUSTER > 1:
        peers.joined()
    exchange = 0
    for tile in tl.range(program, tl.cdiv(R, s.BLOCK_R), programs, num_stages=s.STAGES):
        rows = tile * s.BLOCK_R + tl.arange(0, s.BLOCK_R)[:, None]
        row_mask = rows < R
        rows_64 = rows.to(tl.int64)
        dy_rows = dy_ptr + rows_64 * (dy_stride_units * s.UNIT)
        h_rows = h_ptr + rows_64 * (h_stride_units * s.UNIT)
        dh_rows = dh_ptr + rows_64 * C
        at = piece.Spot(cols, row_mask, C)
        dys = piece.nothing()
        hs = piece.nothing()
        for i in tl.static_range(s.PIECES):
            dys = piece.append(dys, piece.load_piece(i, dy_rows, at, s, 0.0))
            hs = piece.append(hs, piece.load_piece(i, h_rows, at, s, 0.0))
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0) if CENTERED else tl.zeros((s.BLOCK_R, 1), tl.float32)

        lane_g = tl.zeros((s.BLOCK_R, s.BLOCK_C), tl.float32)
        lane_gn = tl.zeros((s.BLOCK_R, s.BLOCK_C), tl.float32)
        for i in tl.static_range(s.PIECES):
            g = dys[i].to(tl.float32)
            if weight_ptr is not None:
                g *= weights[i].to(tl.float32)
            # Padding lanes have g = 0: their n counts for nothing.
            lane_gn += g * ((hs[i].to(tl.float32) - mean) * rstd)
            if CENTERED:
                lane_g += g
        if CENTERED:
            sum_g, sum_gn = tl.split(tl.sum(tl.join(lane_g, lane_gn), 1))
        else:
            sum_gn = tl.sum(lane_gn, 1)
            sum_g = tl.zeros_like(sum_gn)
        if s.CLUSTER > 1:
            peers.send(place, exchange, rank, sum_g, sum_gn, s.CLUSTER)
            peers.wait(place, exchange)
            for r in tl.static_range(s.BLOCK_R):
                all_g, all_gn = peers.received(place, exchange, r, s.BLOCK_R, s.CLUSTER)
                sum_g = peers.with_one(sum_g, r, tl.sum(all_g, 0))
                sum_gn = peers.with_one(sum_gn, r, tl.sum(all_gn, 0))
        exchange += 1  # noqa: SIM113 (Triton has no enumerate)
        mean_g = (sum_g / C)[:, None]
        mean_gn = (sum_gn / C)[:, None]

        next_dweights = piece.nothing()
        next_dbiases = piece.nothing()
        for i in tl.static_range(s.PIECES):
            dy = dys[i].to(tl.float32)
            g = dy
            if weight_ptr is not None:
                g *= weights[i].to(tl.float32)
            n = (hs[i].to(tl.float32) - mean) * rstd
            dh = g - n * mean_gn
            if CENTERED:
                dh -= mean_g
            dh *= rstd
            if dsum_ptr is not None:
                dsum_rows = dsum_ptr + rows_64 * (dsum_stride_units * s.UNIT)
                dh += piece.load_piece(i, dsum_rows, at, s, 0.0).to(tl.float32)
            piece.store_piece(i, dh_rows, dh, at, s)
            if SUM_WEIGHT:
                next_dweights = piece.append(next_dweights, dweights[i] + _rows_added(dy * n, KEPT))
            if SUM_BIAS:
                next_dbiases = piece.append(next_dbiases, dbiases[i] + _rows_added(dy, KEPT))
        dweights = next_dweights
        dbiases = next_dbiases
    own = partial_ptr + program.to(tl.int64) * C
    if SUM_WEIGHT:
        _store_partial(own, dweights, first, C, s)
        own += programs * C
    if SUM_BIAS:
        _store_partial(own, dbiases, first, C, s)


@triton.jit
def norm_backward_streamed_kernel(tensors, scalars, CENTERED: tl.constexpr, SHAPE: tl.constexpr):
    """dh alone, one row per program, read twice: for the two means, then backwards for dh."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_C: tl.constexpr = s.BLOCK_C
    dy_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dsum_ptr, dh_ptr = tensors
    c_units, dy_stride_units, h_stride_units, dsum_stride_units = scalars
    C = c_units * s.UNIT
    row = tl.program_id(0).to(tl.int64)
    here = tl.zeros((1, 1), tl.int32)
    dy_row = dy_ptr + row * (dy_stride_units * s.UNIT) + here
    h_row = h_ptr + row * (h_stride_units * s.UNIT) + here
    dsum_row = dy_row if dsum_ptr is None else dsum_ptr + row * (dsum_stride_units * s.UNIT) + here
    lanes = tl.arange(0, BLOCK_C)[None, :]
    rstd = tl.load(rstd_ptr + row)
    mean = tl.load(mean_ptr + row) if CENTERED else 0.0
    lane_g = tl.zeros((1, BLOCK_C), tl.float32)
    lane_gn = tl.zeros((1, BLOCK_C), tl.float32)
    for start in range(0, C, BLOCK_C):
        g = piece.load_again_later(dy_row, start + lanes, C, 0.0).to(tl.float32)
        h = piece.load_again_later(h_row, start + lanes, C, 0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= piece.load_vector(weight_ptr, start + lanes, C, True).to(tl.float32)
        lane_g += g
        lane_gn += g * ((h - mean) * rstd)
    mean_gn = tl.sum(lane_gn, 1)[:, None] / C
    mean_g = tl.sum(lane_g, 1)[:, None] / C
    steps = tl.cdiv(C, BLOCK_C)
    for step in range(0, steps):
        cols = (steps - 1 - step) * BLOCK_C + lanes
        g = piece.load(dy_row, cols, None, C, 0.0, False, True).to(tl.float32)
        h = piece.load(h_row, cols, None, C, 0.0, False, True).to(tl.float32)
        if weight_ptr is not None:
            g *= piece.load_vector(weight_ptr, cols, C, True).to(tl.float32)
        dh = g - ((h - mean) * rstd) * mean_gn
        if CENTERED:
            dh -= mean_g
        dh *= rstd
        if dsum_ptr is not None:
            dh += piece.load(dsum_row, cols, None, C, 0.0, False, True).to(tl.float32)
        piece.store(dh_ptr + row * C + here, cols, dh, None, C, False, True)


@triton.jit
def norm_columns_kernel(
    tensors, scalars, CENTERED: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, SHAPE: tl.constexpr
):
    """Partial sums [SUM_WEIGHT + SUM_BIAS, splits, C] of dweight and dbias, for rows too long to hold: a program has
    one block of columns and every splits-th tile of rows."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_R: tl.constexpr = s.BLOCK_R
    BLOCK_C: tl.constexpr = s.BLOCK_C
    dy_ptr, h_ptr, mean_ptr, rstd_ptr, partial_ptr = tensors
    R, splits, c_units, dy_stride_units, h_stride_units = scalars
    C = c_units * s.UNIT
    split = tl.program_id(0) % splits
    cols = (tl.program_id(0) // splits) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    dweight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in tl.range(split, tl.cdiv(R, BLOCK_R), splits, num_stages=s.STAGES):
        rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        row_mask = rows < R
        rows_64 = rows.to(tl.int64)
        dy_rows = dy_ptr + rows_64 * (dy_stride_units * s.UNIT)
        dy = piece.load(dy_rows, cols, row_mask, C, 0.0, True, True).to(tl.float32)
        dbias += dy
        if SUM_WEIGHT:
            h_rows = h_ptr + rows_64 * (h_stride_units * s.UNIT)
            h = piece.load(h_rows, cols, row_mask, C, 0.0, True, True).to(tl.float32)
            if CENTERED:
                h -= tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
            dweight += dy * (h * tl.load(rstd_ptr + rows, mask=row_mask, other=0.0))
    own = partial_ptr + split.to(tl.int64) * C + tl.zeros((1, 1), tl.int32)
    if SUM_WEIGHT:
        piece.store(own, cols, tl.sum(dweight, 0)[None, :], None, C, False, True)
        own += splits * C
    if SUM_BIAS:
        piece.store(own, cols, tl.sum(dbias, 0)[None, :], None, C, False, True)


@triton.jit
def sum_partials_kernel(
    tensors, scalars, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """dweight [C] and dbias [C] from partial sums [SUM_WEIGHT + SUM_BIAS, programs, C] float32, in a fixed order."""
    partial_ptr, dweight_ptr, dbias_ptr = tensors
    programs, C = scalars
    blocks = tl.cdiv(C, BLOCK_C)
    which = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    sums = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    part = partial_ptr + which.to(tl.int64) * programs * C
    for start in range(0, programs, BLOCK_P):
        ps = start + tl.arange(0, BLOCK_P)[:, None]
        sums += tl.load(part + ps.to(tl.int64) * C + cols, mask=(ps < programs) & (cols < C), other=0.0)
    total = tl.sum(sums, 0)[None, :]
    if SUM_WEIGHT:  # noqa: SIM102 (decided when compiling)
        if which == 0:
            piece.store(dweight_ptr + tl.zeros((1, 1), tl.int32), cols, total, None, C, False, True)
    if SUM_BIAS:  # noqa: SIM102
        if which == (1 if SUM_WEIGHT else 0):
            piece.store(dbias_ptr + tl.zeros((1, 1), tl.int32), cols, total, None, C, False, True)
