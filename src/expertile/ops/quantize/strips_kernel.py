"""Gluon kernel of the FP8 quantisers that also write the transposed copy: each element is loaded once and held.

Same results to the bit as `quantize_tokens_kernel` of kernels.py, which is for interpreters and for rows that 16-byte
copies cannot take. A thread holds a strip of 16 or 8 neighbouring tokens of 8 neighbouring channels, and both copies go
out as it holds them (SwiGLU's transposed one by way of shared memory). Through shared memory go the largest magnitudes
of strips, to the one thread that works out the scale of a row or channel, and its factors back: two barriers a tile.
A program of several tiles brings the next by cp.async while it quantises one. docs/notes/quantised.md has the times.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from expertile.ops.launch.shape import constants
from expertile.ops.launch.versions import cp_async, reinterpret, thread_barrier
from expertile.ops.quantize.kernels import Shape
from expertile.ops.quantize.numbers import magnitude, scale_of
from expertile.ops.quantize.strips import (
    add,
    anew,
    copy_layout,
    divided,
    every_fourth,
    factors_of,
    larger_halves,
    lower_half,
    silu,
    store_factors,
    strip_layout,
    turned_layout,
    upper_half,
    words_of_channels,
    words_of_tokens,
)


@gluon.jit
def _start_copy(buffer, x_ptr, x_stride, first, width, count, LAYOUT: gl.constexpr, EVEN_K: gl.constexpr):
    """128 tokens × the buffer's columns from `first` on; zeros behind `count` tokens and `width` columns."""
    tokens = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    cols = gl.expand_dims(gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    mask = tokens < count
    if not EVEN_K:
        mask = mask & (cols < width - first)
    cp_async(buffer, x_ptr + first + (tokens * x_stride + cols), mask=mask)


@gluon.jit
def _start_tile(buffers, x_ptr, x_stride, place, K, count, s):
    LAYOUT: gl.constexpr = copy_layout(
        x_ptr.dtype.element_ty.primitive_bitwidth // 8, buffers[0].shape[1], gl.num_warps()
    )
    if s.SOURCE == "swiglu_interleaved":
        _start_copy(buffers[0], x_ptr, x_stride, place * 256, 2 * K, count, LAYOUT, s.EVEN_K)
    else:
        _start_copy(buffers[0], x_ptr, x_stride, place * 128, K, count, LAYOUT, s.EVEN_K)
        if s.SOURCE == "swiglu":
            _start_copy(buffers[1], x_ptr + K, x_stride, place * 128, K, count, LAYOUT, s.EVEN_K)
    async_copy.commit_group()


@gluon.jit
def _words(buffer, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of 16-bit floats as 128 × WORDS words of two."""
    return reinterpret(buffer, gl.int32, [128, WORDS], buffer.layout).load(LAYOUT)


@gluon.jit
def _floats(buffer, TILE: gl.constexpr):
    """A tile in float32. 16-bit floats are loaded as words and taken apart as bits, an instruction each."""
    if buffer.dtype == gl.float32:
        return buffer.load(TILE)
    else:
        words = _words(buffer, 64, strip_layout(gl.num_warps(), False, 4))
        pairs = gl.join(lower_half(words, buffer.dtype), upper_half(words, buffer.dtype))
        return gl.convert_layout(gl.reshape(pairs, (128, 128)), TILE, assert_trivial=True)


@gluon.jit
def _held_tile(buffers, SOURCE: gl.constexpr, TILE: gl.constexpr):
    """The tile in float32."""
    DTYPE: gl.constexpr = buffers[0].dtype
    if SOURCE == "swiglu_interleaved":
        both = _words(buffers[0], 128, TILE)  # gate and up of a channel are a word
        return silu(lower_half(both, DTYPE)) * upper_half(both, DTYPE)
    elif SOURCE == "swiglu":
        return silu(_floats(buffers[0], TILE)) * _floats(buffers[1], TILE)
    else:
        return _floats(buffers[0], TILE)


@gluon.jit
def _locate(offs_ptr, ends_ptr, block, first_program, R, groups, GROUPS_P2: gl.constexpr):
    """(first token, end of its group, blocks that groups hold) of a block of 128 tokens."""
    g = gl.arange(0, GROUPS_P2, layout=gl.BlockedLayout([GROUPS_P2 // 32], [32], [gl.num_warps()], [0]))
    group_end = gl.load(offs_ptr + g, mask=g < groups, other=0)
    group_start = gl.load(offs_ptr + g - 1, mask=(g > 0) & (g < groups), other=0)
    blocks = (gl.maximum(group_end - group_start, 0) + 127) // 128
    ends = gl.associative_scan(blocks, 0, add)
    if first_program:
        gl.store(ends_ptr + g, ends * 128, mask=g < groups)
    used = gl.max(ends, 0)
    mine = (ends > block) & (ends - blocks <= block)
    # One group at most has this block: its start and end are sums over all of them.
    start = gl.sum(gl.where(mine, group_start + (block - ends + blocks) * 128, 0), 0)
    end = gl.sum(gl.where(mine, group_end, 0), 0)
    if block >= used:
        start = gl.load(offs_ptr + groups - 1) + (block - used) * 128
        end = R + 0 * start
    return start, end, used


@gluon.jit
def _store_zeros(values_ptr, scales_ptr, block, room_blocks, first, last, K, EVEN_K: gl.constexpr):
    """The transposed copy of tiles first to last of a block of tokens that no group has."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    token = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)), 0)
    index = gl.arange(0, 128, layout=ONE)
    room = room_blocks * 128
    zeros = gl.full([128, 128], 0.0, gl.float32, layout=LAYOUT).to(gl.float8e4nv)
    ones = gl.full([128], 1.0, gl.float32, layout=ONE)
    for place in range(first, last):
        first_channel = gl.to_tensor(place).to(gl.int64) * 128
        at = values_ptr + first_channel * room + block * 128 + (channel * room + token)
        scale_at = scales_ptr + gl.to_tensor(block).to(gl.int64) * K + (place * 128 + index)
        if EVEN_K:
            gl.store(at, zeros)
            gl.store(scale_at, ones)
        else:
            gl.store(at, zeros, mask=place * 128 + channel < K)
            gl.store(scale_at, ones, mask=place * 128 + index < K)


@gluon.jit
def _store_rows(x, factors, values_ptr, stride, count, width, DTYPE: gl.constexpr, s):
    """A tile quantised along channels: float32 [128, 128], or words [128, 64] of two."""
    if x.shape[1] == 64:
        sources = gl.split(gl.reshape(x, (128, 32, 2)))
        HALVES: gl.constexpr = words_of_channels(gl.bfloat16 == DTYPE)
    else:
        sources = every_fourth(x, 1)
        HALVES: gl.constexpr = None  # type: ignore[no-redef]
    LAYOUT: gl.constexpr = sources[0].type.layout
    mine = factors_of(factors, 0, 1, LAYOUT, s.DIVIDE)
    values = divided(sources, mine, 1, HALVES, False, s.DIVIDE)
    token = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    col = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT)), 0)
    mask = token < count
    if not s.EVEN_K:
        mask = mask & (4 * col < width)
    at = values_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (token * (stride // 4) + col)
    gl.store(at, values, mask=mask)


@gluon.jit
def _store_turned(x, factors, staging, values_ptr, stride, width, TILE: gl.constexpr, DTYPE: gl.constexpr, s):
    """A tile as in `_store_rows` quantised along tokens and stored as [channel, token], by way of `staging` if any."""
    if x.shape[1] == 64:
        sources = every_fourth(x, 0)
        BFLOAT: gl.constexpr = gl.bfloat16 == DTYPE
        HALF: gl.constexpr = gl.SliceLayout(0, sources[0].type.layout)
        mine = factors_of(factors, 1, 0, TILE, s.DIVIDE)
        even_first, odd_first = gl.split(gl.reshape(mine[0], (64, 2)))
        even_first = gl.convert_layout(even_first, HALF, assert_trivial=True)
        odd_first = gl.convert_layout(odd_first, HALF, assert_trivial=True)
        even = (even_first,)
        odd = (odd_first,)
        if s.DIVIDE != 0:
            even_second, odd_second = gl.split(gl.reshape(mine[1], (64, 2)))
            even += (gl.convert_layout(even_second, HALF, assert_trivial=True),)  # type: ignore[assignment]
            odd += (gl.convert_layout(odd_second, HALF, assert_trivial=True),)  # type: ignore[assignment]
        values = gl.join(
            divided(sources, even, 0, words_of_tokens(False, BFLOAT), True, s.DIVIDE),
            divided(sources, odd, 0, words_of_tokens(True, BFLOAT), True, s.DIVIDE),
        )
        values = gl.reshape(values, (32, 128))
    else:
        sources = every_fourth(x, 0)
        QUARTER: gl.constexpr = sources[0].type.layout
        mine = factors_of(factors, 1, 0, QUARTER, s.DIVIDE)
        values = divided(sources, mine, 0, None, False, s.DIVIDE)
    HELD: gl.constexpr = turned_layout(gl.num_warps())
    values = gl.convert_layout(gl.permute(values, (1, 0)), HELD, assert_trivial=True)
    LAYOUT: gl.constexpr = HELD if staging is None else gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    if staging is not None:
        staging.store(values)
        thread_barrier()
        values = staging.load(LAYOUT)
    channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    token = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT)), 0)
    at = values_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (channel * (stride // 4) + token)
    if s.EVEN_K:
        gl.store(at, values)
    else:
        gl.store(at, values, mask=channel < width)


@gluon.jit
def quantize_strips_kernel(tensors, scalars, GROUPS_P2: gl.constexpr, STAGED: gl.constexpr, SHAPE: gl.constexpr):
    """Program (128 tokens of one group, chunk): PIECES tiles of 128 tokens × 128 channels. Each is quantised along
    channels where values_ptr is given, then along tokens and stored transposed, by way of shared memory if STAGED.

    Blocks behind the groups are as in `quantize_tokens_kernel`."""
    s: gl.constexpr = constants(Shape, SHAPE)
    x_ptr, weight_ptr, rstd_ptr, offs_ptr, values_ptr, scales_ptr, turned_values_ptr, turned_scales_ptr, ends_ptr = (
        tensors
    )
    R, k_units, x_stride_units, room_blocks, groups, chunks = scalars
    WARPS: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = 64 // WARPS
    TILE: gl.constexpr = strip_layout(WARPS)
    # One thread for a row, and one for a channel.
    OF_ROW: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    OF_CHANNEL: gl.constexpr = gl.BlockedLayout([128 // TOKENS, 1], [1, 32], [1, WARPS], [0, 1])
    ROW: gl.constexpr = gl.SliceLayout(1, OF_ROW)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, OF_CHANNEL)
    K = k_units * s.UNIT
    x_stride = x_stride_units * s.UNIT
    block = gl.program_id(0) // chunks
    chunk = gl.program_id(0) % chunks
    if rstd_ptr is not None:
        # What was read last to work rstd out is in L2 still.
        block = gl.num_programs(0) // chunks - 1 - block
    start, end, used = _locate(offs_ptr, ends_ptr, block, gl.program_id(0) == 0, R, groups, GROUPS_P2)
    blocks_of_row = (K + 127) // 128
    # Rows of this block from its first on, so that 32 bits hold their places.
    count = end - start
    if values_ptr is None:
        count = gl.where(block < used, count, 0)
    first = chunk * s.PIECES
    last = gl.minimum(first + s.PIECES, blocks_of_row)
    if (block >= used) & (block < room_blocks):
        _store_zeros(turned_values_ptr, turned_scales_ptr, block, room_blocks, first, last, K, s.EVEN_K)
    last = gl.where(count > 0, last, first)
    start = start.to(gl.int64)
    x_ptr += start * x_stride

    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WORDS: gl.constexpr = s.SOURCE == "plain" and DTYPE.primitive_bitwidth == 16
    WIDTH: gl.constexpr = 256 if s.SOURCE == "swiglu_interleaved" else 128
    HELD: gl.constexpr = gl.int32 if WORDS else gl.float32
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = (gl.allocate_shared_memory(DTYPE, [128, WIDTH], PLAIN),)
    if s.SOURCE == "swiglu":
        buffers += (gl.allocate_shared_memory(DTYPE, [128, WIDTH], PLAIN),)  # type: ignore[assignment]
    # The largest of each strip's rows, and of its channels (two of them a word).
    of_rows = gl.allocate_shared_memory(HELD, [128, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    of_channels = gl.allocate_shared_memory(HELD, [128 // TOKENS, 64 if WORDS else 128], PLAIN)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = (
        gl.allocate_shared_memory(gl.float32, [128], VECTOR),
        gl.allocate_shared_memory(gl.float32, [128], VECTOR),
        gl.allocate_shared_memory(gl.float32, [128], VECTOR),
        gl.allocate_shared_memory(gl.float32, [128], VECTOR),
    )
    staging = None
    if STAGED:
        STRIPS: gl.constexpr = gl.SwizzledSharedLayout(4, 8, 8, [1, 0])
        staging = gl.allocate_shared_memory(gl.int32, [128, 32], STRIPS)
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))
    row = gl.arange(0, 128, layout=ROW)
    channel = gl.arange(0, 128, layout=CHANNEL)
    if first < last:
        _start_tile(buffers, x_ptr, x_stride, first, K, count, s)
    for place in range(first, last):
        K = anew(k_units) * s.UNIT
        x_stride = anew(x_stride_units) * s.UNIT
        room = anew(room_blocks) * 128
        async_copy.wait_group(0)
        if WORDS:
            words = _words(buffers[0], 64, strip_layout(WARPS, False, 4))
            # Two at a time: bits without the sign have the order of magnitudes in 16 bits as in 32.
            magnitudes = words & 0x7FFF7FFF
            of_rows.store(gl.reduce(gl.reshape(magnitudes, (128, 16, 4)), 2, larger_halves))
            of_channels.store(gl.reduce(gl.reshape(magnitudes, (128 // TOKENS, TOKENS, 64)), 1, larger_halves))
        else:
            x = _held_tile(buffers, s.SOURCE, TILE)
            if rstd_ptr is not None:
                rstd = gl.load(rstd_ptr + start + token, mask=token < count, other=0.0)
                x *= gl.expand_dims(rstd, 1)
                if weight_ptr is not None:
                    weight = gl.load(weight_ptr + place * 128 + col, mask=place * 128 + col < K, other=0.0)
                    x *= gl.expand_dims(weight.to(gl.float32), 0)
            magnitudes = magnitude(x)
            of_rows.store(gl.max(gl.reshape(magnitudes, (128, 16, 8)), 2).to(gl.float32, bitcast=True))
            of_channels.store(
                gl.max(gl.reshape(magnitudes, (128 // TOKENS, TOKENS, 128)), 1).to(gl.float32, bitcast=True)
            )
        thread_barrier()
        # All have taken the tile out of its buffer.
        if place + 1 < last:
            _start_tile(buffers, x_ptr, x_stride, place + 1, K, count, s)
        if values_ptr is not None:
            if WORDS:
                largest = gl.reduce(of_rows.load(OF_ROW), 1, larger_halves)
                largest = magnitude(lower_half(gl.maximum(largest & 0xFFFF, largest >> 16), DTYPE))
            else:
                largest = gl.max(magnitude(of_rows.load(OF_ROW)), 1)
            scale = scale_of(largest, s.POWER)
            pitch = (R + 3) // 4 * 4  # `scales_like`'s
            gl.store(scales_ptr + gl.to_tensor(place).to(gl.int64) * pitch + start + row, scale, mask=row < count)
            store_factors(factors, scale, 0, s.DIVIDE)
        if WORDS:
            halves = reinterpret(of_channels, gl.uint16, [128 // TOKENS, 128], of_channels.layout).load(OF_CHANNEL)
            largest = magnitude(lower_half(gl.max(halves.to(gl.int32), 0), DTYPE))
        else:
            largest = gl.max(magnitude(of_channels.load(OF_CHANNEL)), 0)
        channel_scale = scale_of(largest, s.POWER)
        store_factors(factors, channel_scale, 1, s.DIVIDE)
        if block < used:
            scale_at = turned_scales_ptr + gl.to_tensor(block).to(gl.int64) * K + (place * 128 + channel)
            if s.EVEN_K:
                gl.store(scale_at, channel_scale)
            else:
                gl.store(scale_at, channel_scale, mask=place * 128 + channel < K)
        thread_barrier()
        if values_ptr is not None:
            bytes_at = values_ptr + (start * K + place * 128)
            _store_rows(words if WORDS else x, factors, bytes_at, K, count, K - place * 128, DTYPE, s)
        if block < used:
            first_channel = gl.to_tensor(place).to(gl.int64) * 128
            bytes_at = turned_values_ptr + first_channel * room + block * 128
            _store_turned(words if WORDS else x, factors, staging, bytes_at, room, K - place * 128, TILE, DTYPE, s)
