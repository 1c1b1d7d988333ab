"""Triton kernels of the FP8 quantisers: what a program loads, and how a block gets its scale; see numbers.py."""

from typing import NamedTuple

import triton
import triton.language as tl

from expertile.ops.grouped_mm.persistent import group_of_tile, group_range, tile_ends
from expertile.ops.launch.shape import constants
from expertile.ops.quantize.numbers import SMALLEST_SCALE, divided, largest_magnitude, magnitude, scale_of, silu
from expertile.ops.rows.tile import inside, load_vector, ragged


class Shape(NamedTuple):
    """What a quantiser is compiled for. SOURCE: what is quantised, see `load_source`. Lengths and strides come in UNITs
    of elements. EVEN_R, EVEN_K: nothing reaches past the last row, or past a row. POWER: scales are powers of two;
    DIVIDE: see numbers.py. A program has BLOCK_R rows at a time, and PIECES one after another: of BLOCKS blocks of a
    row, or tiles of 128 columns."""

    SOURCE: str
    UNIT: int
    EVEN_R: bool
    EVEN_K: bool
    POWER: bool
    DIVIDE: int
    BLOCK_R: int = 128
    BLOCKS: int = 1
    PIECES: int = 1


@triton.jit
def load_as_is(pointers, live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr, EVICT: tl.constexpr):
    """Zeros outside."""
    if MASK_ROWS or MASK_COLS:
        mask = inside(cols, live, K, MASK_ROWS, MASK_COLS)
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    else:
        return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def load(pointers, live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr, EVICT: tl.constexpr):
    """In float32, zeros outside."""
    return load_as_is(pointers, live, cols, K, MASK_ROWS, MASK_COLS, EVICT).to(tl.float32)


@triton.jit
def store(pointers, values, live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    if MASK_ROWS or MASK_COLS:
        tl.store(pointers, values, mask=inside(cols, live, K, MASK_ROWS, MASK_COLS))
    else:
        tl.store(pointers, values)


@triton.jit
def load_source(source, rows, live, rstd, first, s, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr, EVICT: tl.constexpr):
    """What is quantised, in float32 [U, WIDTH]: rows [U, 1] after that of x_ptr, columns from first [U or 1, 1] on;
    rstd [U, 1] or None, where the norm comes later. source: x_ptr, the norm's weight_ptr, the stride of x's rows and
    the length of those quantised."""
    x_ptr, weight_ptr, x_stride, K = source
    SOURCE: tl.constexpr = s.SOURCE
    MASK_COLS: tl.constexpr = not s.EVEN_K
    x_rows = x_ptr + rows * x_stride
    if SOURCE == "swiglu_interleaved":
        cols = 2 * first + tl.arange(0, 2 * WIDTH)[None, :]
        both = load(x_rows + cols, live, cols, 2 * K, MASK_ROWS, MASK_COLS, EVICT)
        gate, up = tl.split(tl.reshape(both, (both.shape[0], WIDTH, 2)))
        return silu(gate) * up
    elif SOURCE == "swiglu_words_bf16" or SOURCE == "swiglu_words_fp16":
        # Gate and up of a channel in one word: taken apart as bits, they stay in the thread that loads and stores.
        cols = first + tl.arange(0, WIDTH)[None, :]
        words = load_as_is(x_rows + cols, live, cols, K, MASK_ROWS, MASK_COLS, EVICT)
        if SOURCE == "swiglu_words_bf16":
            gate = (words << 16).to(tl.float32, bitcast=True)
            up = (words & -65536).to(tl.float32, bitcast=True)
        else:
            gate = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            up = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return silu(gate) * up
    else:
        cols = first + tl.arange(0, WIDTH)[None, :]
        x = load(x_rows + cols, live, cols, K, MASK_ROWS, MASK_COLS, EVICT)
        if SOURCE == "swiglu":
            x = silu(x) * load(x_rows + K + cols, live, cols, K, MASK_ROWS, MASK_COLS, EVICT)
        if rstd is not None:
            x *= rstd
            if weight_ptr is not None:
                x *= load_vector(weight_ptr, cols, K, MASK_COLS).to(tl.float32)
        return x


@triton.jit
def quantize_rows_kernel(tensors, scalars, SHAPE: tl.constexpr):
    """Program (tile of rows, chunk): BLOCK_R rows of BLOCKS blocks of 128 each. "rms_norm" comes with its rstd."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_R: tl.constexpr = s.BLOCK_R
    BLOCKS: tl.constexpr = s.BLOCKS
    x_ptr, weight_ptr, rstd_ptr, values_ptr, scales_ptr = tensors
    R, k_units, x_stride_units, chunks, scale_pitch = scalars
    K = k_units * s.UNIT
    x_stride = x_stride_units * s.UNIT
    chunk = tl.program_id(0) % chunks
    tile = tl.program_id(0) // chunks
    block = tl.arange(0, BLOCK_R * BLOCKS)
    row = block // BLOCKS  # of this tile
    place = chunk * BLOCKS + block % BLOCKS
    start = (tile * BLOCK_R).to(tl.int64)
    rows = row[:, None]
    live = rows < R - start
    cols = place[:, None] * 128 + tl.arange(0, 128)[None, :]
    rstd = None if rstd_ptr is None else tl.load(rstd_ptr + start + rows, mask=live, other=0.0)
    source = (x_ptr + start * x_stride, weight_ptr, x_stride, K)
    x = load_source(source, rows, live, rstd, place[:, None] * 128, s, 128, not s.EVEN_R, "evict_first")
    scale = scale_of(tl.max(magnitude(x), 1), s.POWER)
    values = divided(x, scale[:, None], s.DIVIDE)
    store(values_ptr + start * K + (rows * K + cols), values, live, cols, K, not s.EVEN_R, not s.EVEN_K)
    row += tile * BLOCK_R
    store_scales(scales_ptr, scale, row, place, row < R, K, scale_pitch, s.EVEN_R, s.EVEN_K)


@triton.jit
def store_scales(scales_ptr, scale, row, place, in_rows, K, pitch, EVEN_R: tl.constexpr, EVEN_K: tl.constexpr):
    """Of block `place` of each row, beside those of the same block of other rows: programs of neighbouring rows fill
    L2's sectors together."""
    scales_at = scales_ptr + (place.to(tl.int64) * pitch + row)
    if EVEN_R and EVEN_K:
        tl.store(scales_at, scale)
    else:
        tl.store(scales_at, scale, mask=in_rows & (place < tl.cdiv(K, 128)))


@triton.jit
def quantize_per_row_kernel(tensors, scalars, SHAPE: tl.constexpr):
    """BLOCK_R whole rows, a scale for each, of up to BLOCKS blocks of 128."""
    s: tl.constexpr = constants(Shape, SHAPE)
    x_ptr, values_ptr, scales_ptr = tensors
    R, k_units, x_stride_units = scalars
    K = k_units * s.UNIT
    x_stride = x_stride_units * s.UNIT
    start = tl.program_id(0).to(tl.int64) * s.BLOCK_R
    row = tl.arange(0, s.BLOCK_R)
    rows, cols = row[:, None], tl.arange(0, s.BLOCKS * 128)[None, :]
    live = rows < R - start
    x_rows = x_ptr + start * x_stride + rows * x_stride
    x = load(x_rows + cols, live, cols, K, not s.EVEN_R, not s.EVEN_K, "evict_first")
    scale = scale_of(tl.max(magnitude(x), 1), s.POWER)
    values = divided(x, scale[:, None], s.DIVIDE)
    store(values_ptr + start * K + (rows * K + cols), values, live, cols, K, not s.EVEN_R, not s.EVEN_K)
    tl.store(scales_ptr + start + row, scale, mask=row < R - start)


@triton.jit
def quantize_norm_kernel(tensors, scalars, SHAPE: tl.constexpr):
    """RMS norm and 1×128 blocks of it: BLOCK_R rows, in PIECES of BLOCKS blocks each, held from the only read on.

    rstd cancels in the values, x w rstd / (max |x w| rstd / 448): they go out while the row's sum is under way, and
    only scales wait for it. Not with POWER, where scales are rounded. Nothing is corrected: see DIVIDE = 0."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_R: tl.constexpr = s.BLOCK_R
    BLOCKS: tl.constexpr = s.BLOCKS
    PIECES: tl.constexpr = s.PIECES
    x_ptr, weight_ptr, values_ptr, scales_ptr = tensors
    R, k_units, x_stride_units, scale_pitch, eps = scalars
    K = k_units * s.UNIT
    x_stride = x_stride_units * s.UNIT
    block = tl.arange(0, BLOCK_R * BLOCKS)
    row = block // BLOCKS  # of this tile
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    rows = row[:, None]
    live = rows < R - start
    x_rows = x_ptr + start * x_stride + rows * x_stride
    to_rows = values_ptr + start * K + rows * K
    xs = ()
    weights = ()
    for i in tl.static_range(PIECES):
        cols = (block % BLOCKS + i * BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
        xs = xs + (load_as_is(x_rows + cols, live, cols, K, not s.EVEN_R, ragged(i, PIECES, 1, s.EVEN_K), ""),)  # type: ignore[assignment] # noqa: RUF005
        if weight_ptr is not None:
            weight = load_as_is(weight_ptr + cols, live, cols, K, False, ragged(i, PIECES, 1, s.EVEN_K), "evict_last")
            weights = weights + (weight,)  # type: ignore[assignment] # noqa: RUF005
    squares = tl.zeros((BLOCK_R * BLOCKS, 128), tl.float32)
    scales = ()
    for i in tl.static_range(PIECES):
        cols = (block % BLOCKS + i * BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = xs[i].to(tl.float32)  # type: ignore[var-annotated]
        squares += x * x
        if not s.POWER:
            y = x if weight_ptr is None else x * weights[i].to(tl.float32)
            largest = largest_magnitude(y)
            scale = scale_of(largest, False)
            values = divided(y, scale[:, None], 0)
            store(to_rows + cols, values, live, cols, K, not s.EVEN_R, ragged(i, PIECES, 1, s.EVEN_K))
            # -1: a block of zeros, whose scale stays 1.
            scales = scales + (tl.where(largest == 0, -1.0, scale),)  # noqa: RUF005
    rstd = tl.rsqrt(tl.sum(tl.reshape(squares, (BLOCK_R, BLOCKS * 128)), 1) / K + eps)
    rstd = tl.reshape(rstd[:, None] + tl.zeros((BLOCK_R, BLOCKS), tl.float32), (BLOCK_R * BLOCKS,))
    for i in tl.static_range(PIECES):
        place = block % BLOCKS + i * BLOCKS
        if s.POWER:
            cols = place[:, None] * 128 + tl.arange(0, 128)[None, :]
            y = xs[i].to(tl.float32) * rstd[:, None]
            if weight_ptr is not None:
                y *= weights[i].to(tl.float32)
            scale = scale_of(largest_magnitude(y), True)
            values = divided(y, scale[:, None], 0)
            store(to_rows + cols, values, live, cols, K, not s.EVEN_R, ragged(i, PIECES, 1, s.EVEN_K))
        else:
            scale = scales[i] * rstd
            scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
            scale = tl.where(scales[i] == -1.0, 1.0, scale)
        to_row, past = start + row, ragged(i, PIECES, 1, s.EVEN_K)
        store_scales(scales_ptr, scale, to_row, place, to_row < R, K, scale_pitch, s.EVEN_R, not past)


@triton.jit
def rstd_kernel(
    x_ptr, rstd_ptr, R, k_units, x_stride_units, eps, UNIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """rstd[r] = 1 / sqrt(mean of squares + eps), for rows that no program can hold or that several need."""
    K = k_units * UNIT
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_rows = x_ptr + row.to(tl.int64)[:, None] * (x_stride_units * UNIT)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, K, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)[None, :]
        x = tl.load(x_rows + cols, mask=(row[:, None] < R) & (cols < K), other=0.0).to(tl.float32)
        squares += x * x
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(squares, 1) / K + eps), mask=row < R)


@triton.jit(do_not_specialize=["zero"])
def quantize_tokens_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    offs_ptr,
    values_ptr,
    scales_ptr,
    turned_values_ptr,
    turned_scales_ptr,
    ends_ptr,
    R,
    k_units,
    x_stride_units,
    room_blocks,
    groups,
    chunks,
    zero,
    GROUPS_P2: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Program (128 tokens of one group, chunk): PIECES tiles of 128 tokens × 128 channels, each quantised along
    channels where values_ptr is given, BLOCK_R tokens at a time, and then along tokens, BLOCK_C channels at a time,
    and stored transposed. The second time L1 still holds the tile.

    Behind the last group follow the blocks of rows that are in none: quantised along channels only. What no group
    reaches of the transposed copy is zeros with scale 1."""
    s: tl.constexpr = constants(Shape, SHAPE)
    BLOCK_R: tl.constexpr = s.BLOCK_R
    K = k_units * s.UNIT
    x_stride = x_stride_units * s.UNIT
    chunk = tl.program_id(0) % chunks
    block = tl.program_id(0) // chunks
    ends = tile_ends(offs_ptr, groups, 1, 128, GROUPS_P2)
    if tl.program_id(0) == 0:
        g = tl.arange(0, GROUPS_P2)
        tl.store(ends_ptr + g, ends * 128, mask=g < groups)
    used = tl.max(ends, 0)
    if block < used:
        group, first_block = group_of_tile(block, ends, GROUPS_P2)
        start, end = group_range(offs_ptr, group)
        start += (block - first_block) * 128
    else:
        start = tl.load(offs_ptr + groups - 1) + (block - used) * 128
        end = R + 0 * start
    blocks_of_row = tl.cdiv(K, 128)
    room = room_blocks * 128
    pitch = tl.cdiv(R, 4) * 4  # `scales_like`'s
    # Rows of this block from its first on, so that 32 bits hold their places.
    count = end - start
    start = start.to(tl.int64)
    x_ptr += start * x_stride
    tokens = tl.arange(0, 128)[:, None]
    live = tokens < count
    rstd = None if rstd_ptr is None else tl.load(rstd_ptr + start + tokens, mask=live, other=0.0)
    for place in range(chunk * s.PIECES, tl.minimum((chunk + 1) * s.PIECES, blocks_of_row)):
        if values_ptr is not None:
            cols = place * 128 + tl.arange(0, 128)[None, :]
            for i in range(0, tl.minimum(128, count), BLOCK_R):
                row = i + tl.arange(0, BLOCK_R)
                rows, own = row[:, None], (row < count)[:, None]
                row_rstd = None if rstd_ptr is None else tl.load(rstd_ptr + start + rows, mask=own, other=0.0)
                at_col = tl.full((1, 1), 128, tl.int32) * place
                x = load_source((x_ptr, weight_ptr, x_stride, K), rows, own, row_rstd, at_col, s, 128, True, "")
                scale = scale_of(tl.max(magnitude(x), 1), s.POWER)
                values = divided(x, scale[:, None], s.DIVIDE)
                store(values_ptr + start * K + (rows * K + cols), values, own, cols, K, True, not s.EVEN_K)
                tl.store(scales_ptr + tl.full((), 1, tl.int64) * place * pitch + start + row, scale, mask=row < count)
        if block < room_blocks:
            for j in range(0, 128, BLOCK_C):
                col = j + tl.arange(0, BLOCK_C)
                first = tl.full((), 128, tl.int64) * place
                at = turned_values_ptr + first * room + block * 128 + (col[:, None] * room + tl.arange(0, 128)[None, :])
                scale_at = turned_scales_ptr + tl.full((), 1, tl.int64) * block * K + (place * 128 + col)
                if block < used:
                    # Of an address that may be odd two elements are loaded at a time, so that a thread has few
                    # channels and many tokens.
                    odd = (x_ptr + 2 * zero, weight_ptr, x_stride, K)
                    j_col = tl.full((1, 1), 128, tl.int32) * place + j
                    x = load_source(odd, tokens, live, rstd, j_col, s, BLOCK_C, True, "evict_first")
                    scale = scale_of(tl.max(magnitude(x), 0), s.POWER)
                    values = tl.trans(divided(x, scale[None, :], s.DIVIDE))
                else:
                    scale = tl.full((BLOCK_C,), 1.0, tl.float32)
                    values = tl.zeros((BLOCK_C, 128), tl.float8e4nv)
                channels = place * 128 + col
                store(at, values, channels[:, None] < K, channels[:, None], K, not s.EVEN_K, False)
                if s.EVEN_K:
                    tl.store(scale_at, scale)
                else:
                    tl.store(scale_at, scale, mask=channels < K)


@triton.jit
def quantize_weights_kernel(tensors, scalars, STAGES: tl.constexpr, SHAPE: tl.constexpr):
    """Program (group, 128 rows, chunk): PIECES tiles of 128×128, one scale each."""
    s: tl.constexpr = constants(Shape, SHAPE)
    w_ptr, values_ptr, scales_ptr = tensors
    N, k_units, group_stride_units, row_stride_units, chunks, row_tiles = scalars
    K = k_units * s.UNIT
    chunk = tl.program_id(0) % chunks
    tile = tl.program_id(0) // chunks
    group = tile // row_tiles
    start = (tile % row_tiles * 128).to(tl.int64)
    rows = tl.arange(0, 128)[:, None]
    live = rows < N - start
    blocks_of_row = tl.cdiv(K, 128)
    w_tile = w_ptr + (group.to(tl.int64) * group_stride_units + start * row_stride_units) * s.UNIT
    from_rows = w_tile + rows * row_stride_units * s.UNIT
    to_rows = values_ptr + (group.to(tl.int64) * N + start) * K + rows * K
    last = tl.minimum((chunk + 1) * s.PIECES, blocks_of_row)
    for place in tl.range(chunk * s.PIECES, last, num_stages=STAGES):
        cols = place * 128 + tl.arange(0, 128)[None, :]
        x = load(from_rows + cols, live, cols, K, not s.EVEN_R, not s.EVEN_K, "evict_first")
        largest = tl.max(tl.max(magnitude(x), 1, keep_dims=True), 0, keep_dims=True)
        scale = scale_of(largest, s.POWER)
        store(to_rows + cols, divided(x, scale, s.DIVIDE), live, cols, K, not s.EVEN_R, not s.EVEN_K)
        tl.store(scales_ptr + tile.to(tl.int64) * blocks_of_row + place + tl.zeros((1, 1), tl.int32), scale)
