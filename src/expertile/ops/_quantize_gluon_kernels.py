"""Gluon kernel of the FP8 quantisers that also write the transposed copy: each element is loaded once and held.

Same results to the bit as `quantize_tokens_kernel` of _quantize_kernels.py, which is for interpreters and for rows that
16-byte copies cannot take. What plain Triton cannot say is who holds what: here a thread holds a few neighbouring
tokens of 8 neighbouring channels. So a load fills 16 bytes, the values of a row go out 8 bytes a thread as they are,
and those of the transposed copy, packed along tokens, go through shared memory in whole words and out 16 bytes a
thread. Scales and their reciprocals, some 30 instructions, are worked out by one thread for each row or channel and
handed to those that hold its elements.

While a tile is quantised, cp.async brings the next one: 32 KB (64 KB for SwiGLU and float32) on their way for every
program, of which an SM has at least two; by Little's law it needs about 40 KB for its share of 4.2 TB/s.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import libdevice
from triton.runtime.jit import constexpr_function

_SMALLEST_SCALE: gl.constexpr = gl.constexpr(2.0**-126)
_LIFT_BELOW: gl.constexpr = gl.constexpr(2.0**-80)
_LIFT: gl.constexpr = gl.constexpr(2.0**100)
_UNLIFT: gl.constexpr = gl.constexpr(2.0**-100)
_BY_448: gl.constexpr = gl.constexpr(float.fromhex("0x1.24924ap-9"))  # RN(1 / 448)
_INFINITY: gl.constexpr = gl.constexpr(float("inf"))


@constexpr_function
def _powers(count):
    """1, 2, 4, … below `count`."""
    return [1 << i for i in range(count.bit_length() - 1)]


@constexpr_function
def tile_layout(warps, by_tokens, own=8):
    """128 tokens × 128 channels: a thread holds 64 / warps tokens of 8 channels, numbered `by_tokens` or by channels.

    Both numberings are of the same elements in the same thread: turning one into the other moves nothing. `own`: 4 for
    128 × 64 words of two channels each."""
    tokens = 64 // warps
    along = [[p, 0] for p in _powers(tokens)]
    across = [[0, p] for p in _powers(own)]
    lanes = [[0, own * p] for p in _powers(16)] + [[tokens, 0]]
    return gl.DistributedLinearLayout(
        along + across if by_tokens else across + along,
        lanes, [[2 * tokens * p, 0] for p in _powers(warps)], [], [128, 16 * own],
    )  # fmt: skip


@constexpr_function
def row_layout(warps):
    """128 tokens, one a thread, in the warp that holds that token in `tile_layout`."""
    tokens = 64 // warps
    spread = [[p] for p in _powers(tokens)]
    lanes = spread + [[0]] * (4 - len(spread)) + [[tokens]]
    return gl.DistributedLinearLayout([], lanes, [[2 * tokens * p] for p in _powers(warps)], [], [128])


@constexpr_function
def copy_layout(itemsize, width, warps):
    """128 tokens × `width` elements, 16 bytes a thread, neighbouring threads side by side."""
    vector = 16 // itemsize
    across = min(32, width // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _magnitude(x):
    return x.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def _larger_halves(x, y):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _half(bits, DTYPE: gl.constexpr):
    """float32 of the 16-bit float in the low half of each word."""
    if gl.bfloat16 == DTYPE:
        return (bits << 16).to(gl.float32, bitcast=True)
    else:
        return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _other_half(bits, DTYPE: gl.constexpr):
    if gl.bfloat16 == DTYPE:
        return (bits & -65536).to(gl.float32, bitcast=True)
    else:
        return _half(bits >> 16, DTYPE)


@gluon.jit
def _side_by_side(words, DTYPE: gl.constexpr):
    """Words [M, N] as float32 [M, 2 N]."""
    pair = gl.join(_half(words, DTYPE), _other_half(words, DTYPE))
    return gl.reshape(pair, (words.shape[0], 2 * words.shape[1]))


@gluon.jit
def _scale_of(largest, POWER: gl.constexpr):
    """As `scale_of` of _quantize_kernels.py."""
    amax = largest.to(gl.float32, bitcast=True)
    small = amax < _LIFT_BELOW
    lifted = gl.where(small, amax * _LIFT, amax)
    by_448 = gl.full_like(lifted, _BY_448)
    scale = lifted * by_448
    scale = gl.fma(gl.fma(scale, gl.full_like(lifted, -448.0), lifted), by_448, scale)
    scale = gl.where(small, scale * _UNLIFT, scale)
    scale = gl.where(amax == _INFINITY, amax, scale)
    scale = gl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    scale = gl.where(largest == 0, 1.0, scale)
    if POWER:
        bits = scale.to(gl.int32, bitcast=True)
        up = (bits + 0x7FFFFF) & 0x7F800000
        scale = gl.where(bits < 0x7F800000, up, bits).to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def _spread(values, AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(AXIS, LAYOUT)), AXIS)


@gluon.jit
def _in_two_parts(scale):
    """As `in_two_parts` of _quantize_kernels.py."""
    one = gl.full_like(scale, 1.0)
    high = gl.div_rn(one, scale)
    above = gl.fma(-scale, high, one) < 0
    high = (high.to(gl.int32, bitcast=True) - above.to(gl.int32)).to(gl.float32, bitcast=True)
    rest = gl.fma(-scale, high, one)
    return high, gl.where(rest >= 0, rest * high, 0.0)


@gluon.jit
def _spread_pair(first, second, AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    """Both float32 [128] along the other axis, in one word of 64 bits: they change threads once."""
    high = first.to(gl.uint32, bitcast=True).to(gl.uint64) << 32
    pair = _spread(high | second.to(gl.uint32, bitcast=True).to(gl.uint64), AXIS, LAYOUT)
    first = (pair >> 32).to(gl.uint32).to(gl.float32, bitcast=True)
    return first, (pair & 0xFFFFFFFF).to(gl.uint32).to(gl.float32, bitcast=True)


@gluon.jit
def _quotients(x, scale, AXIS: gl.constexpr, LAYOUT: gl.constexpr, DIVIDE: gl.constexpr):
    """x / scale, float32 that rounds to the right e4m3; `scale` [128] in any layout, one for each index but AXIS's.

    See _quantize_kernels.py for the three ways to DIVIDE."""
    if DIVIDE == 0:
        return x * _spread(gl.div_rn(gl.full_like(scale, 1.0), scale), AXIS, LAYOUT)
    elif DIVIDE == 1:
        high, low = _in_two_parts(scale)
        high, low = _spread_pair(high, low, AXIS, LAYOUT)
        rest = x * low
        _, high = gl.broadcast(rest, high)
        return gl.fma(x, high, rest)
    else:
        lift = gl.where(scale < _LIFT_BELOW, _LIFT, 1.0)
        inverse = gl.div_rn(gl.full_like(scale, -1.0), scale * lift)
        inverse, scale = _spread_pair(inverse, scale, AXIS, LAYOUT)
        lift = gl.where(scale < _LIFT_BELOW, _LIFT, 1.0)
        negative = x * (0.0 - lift)
        quotient = negative * inverse
        _, inverse = gl.broadcast(quotient, inverse)
        _, divisor = gl.broadcast(quotient, gl.where(scale == _INFINITY, 1.0, scale * lift))
        for _ in gl.static_range(2):
            quotient = gl.fma(gl.fma(quotient, divisor, negative), inverse, quotient)
        return quotient


@gluon.jit
def _anew(scalar):
    """The same number, but what follows from it is not worked out ahead of a loop and kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [scalar], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _silu(x):
    return libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(-x))


@gluon.jit
def _start_copy(buffer, x_ptr, x_stride, first, width, count, LAYOUT: gl.constexpr, EVEN_K: gl.constexpr):
    """128 tokens × the buffer's columns from `first` on; zeros behind `count` tokens and `width` columns."""
    tokens = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    cols = gl.expand_dims(gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    mask = tokens < count
    if not EVEN_K:
        mask = mask & (cols < width - first)
    async_copy.async_copy_global_to_shared(buffer, x_ptr + first + (tokens * x_stride + cols), mask=mask)


@gluon.jit
def _start_tile(buffer, x_ptr, x_stride, place, K, count, SOURCE: gl.constexpr, EVEN_K: gl.constexpr):
    LAYOUT: gl.constexpr = copy_layout(x_ptr.dtype.element_ty.primitive_bitwidth // 8, buffer.shape[2], gl.num_warps())
    if SOURCE == "swiglu_interleaved":
        _start_copy(buffer.index(0), x_ptr, x_stride, place * 256, 2 * K, count, LAYOUT, EVEN_K)
    else:
        _start_copy(buffer.index(0), x_ptr, x_stride, place * 128, K, count, LAYOUT, EVEN_K)
        if SOURCE == "swiglu":
            _start_copy(buffer.index(1), x_ptr + K, x_stride, place * 128, K, count, LAYOUT, EVEN_K)
    async_copy.commit_group()


@gluon.jit
def _held_tile(buffer, SOURCE: gl.constexpr, LAYOUT: gl.constexpr):
    """The tile in float32."""
    if SOURCE == "swiglu_interleaved":
        TOKENS: gl.constexpr = 64 // gl.num_warps()
        PAIRS: gl.constexpr = gl.BlockedLayout([TOKENS, 16], [2, 16], [gl.num_warps(), 1], [1, 0])
        both = buffer.index(0).load(PAIRS).to(gl.float32)
        gate, up = gl.split(gl.reshape(both, (128, 128, 2)))
        return gl.convert_layout(_silu(gate) * up, LAYOUT)
    else:
        x = buffer.index(0).load(LAYOUT).to(gl.float32)
        if SOURCE == "swiglu":
            x = _silu(x) * buffer.index(1).load(LAYOUT).to(gl.float32)
        return x


@gluon.jit
def _locate(offs_ptr, ends_ptr, block, first_program, R, groups, GROUPS_P2: gl.constexpr):
    """(first token, end of its group, whether a group holds it, blocks that groups hold) of a block of 128 tokens."""
    g = gl.arange(0, GROUPS_P2, layout=gl.BlockedLayout([GROUPS_P2 // 32], [32], [gl.num_warps()], [0]))
    group_end = gl.load(offs_ptr + g, mask=g < groups, other=0)
    group_start = gl.load(offs_ptr + g - 1, mask=(g > 0) & (g < groups), other=0)
    blocks = (gl.maximum(group_end - group_start, 0) + 127) // 128
    ends = gl.associative_scan(blocks, 0, _add)
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
def quantize_tiles_kernel(
    x_ptr, weight_ptr, rstd_ptr, offs_ptr, values_ptr, scales_ptr, turned_values_ptr, turned_scales_ptr, ends_ptr,
    R, k_units, x_stride_units, room_blocks, groups, chunks,
    SOURCE: gl.constexpr, UNIT: gl.constexpr, GROUPS_P2: gl.constexpr, PER_PROGRAM: gl.constexpr,
    EVEN_K: gl.constexpr, POWER: gl.constexpr, DIVIDE: gl.constexpr,
):  # fmt: skip
    """Program (128 tokens of one group, chunk): PER_PROGRAM tiles of 128 tokens × 128 channels, each quantised along
    channels where values_ptr is given, and along tokens and stored transposed.

    Blocks behind the groups are as in `quantize_tokens_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = tile_layout(WARPS, False)
    TURNED: gl.constexpr = tile_layout(WARPS, True)
    ROW: gl.constexpr = row_layout(WARPS)
    # The largest of each warp's tokens, four of them a thread.
    OF_WARPS: gl.constexpr = gl.BlockedLayout([4, 1], [WARPS // 4, 128 // WARPS], [1, WARPS], [0, 1])
    CHANNEL: gl.constexpr = gl.SliceLayout(0, OF_WARPS)
    STORE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    K = k_units * UNIT
    x_stride = x_stride_units * UNIT
    block = gl.program_id(0) // chunks
    chunk = gl.program_id(0) % chunks
    start, end, used = _locate(offs_ptr, ends_ptr, block, gl.program_id(0) == 0, R, groups, GROUPS_P2)
    blocks_of_row = (K + 127) // 128
    room = room_blocks * 128
    # Rows of this block from its first on, so that 32 bits hold their places.
    count = end - start
    if values_ptr is None:
        count = gl.where(block < used, count, 0)
    first = chunk * PER_PROGRAM
    last = gl.minimum(first + PER_PROGRAM, blocks_of_row)
    last = gl.where((count > 0) | (block < room_blocks), last, first)
    start = start.to(gl.int64)
    x_ptr += start * x_stride

    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WORDS: gl.constexpr = SOURCE == "plain" and DTYPE.primitive_bitwidth == 16
    COPIES: gl.constexpr = 2 if SOURCE == "swiglu" else 1
    WIDTH: gl.constexpr = 256 if SOURCE == "swiglu_interleaved" else 128
    buffer = gl.allocate_shared_memory(DTYPE, [COPIES, 128, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))
    row = gl.arange(0, 128, layout=ROW)
    channel = gl.arange(0, 128, layout=CHANNEL)
    to_channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, STORE)), 1)
    to_token = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, STORE)), 0)
    if first < last:
        _start_tile(buffer, x_ptr, x_stride, first, K, count, SOURCE, EVEN_K)
    for place in range(first, last):
        K = _anew(k_units) * UNIT
        x_stride = _anew(x_stride_units) * UNIT
        room = _anew(room_blocks) * 128
        async_copy.wait_group(0)
        if WORDS:
            words = buffer.index(0)._reinterpret(gl.int32, [128, 64], buffer.layout).load(tile_layout(WARPS, False, 4))
            x = gl.convert_layout(_side_by_side(words, DTYPE), TILE, assert_trivial=True)
        else:
            x = _held_tile(buffer, SOURCE, TILE)
        if place + 1 < last:
            _start_tile(buffer, x_ptr, x_stride, place + 1, K, count, SOURCE, EVEN_K)
        if rstd_ptr is not None:
            rstd = gl.load(rstd_ptr + start + token, mask=token < count, other=0.0)
            x *= gl.expand_dims(rstd, 1)
            if weight_ptr is not None:
                weight = gl.load(weight_ptr + place * 128 + col, mask=place * 128 + col < K, other=0.0)
                x *= gl.expand_dims(weight.to(gl.float32), 0)
        # Both at once, so that no magnitudes are kept.
        if WORDS:
            # Two at a time: bits without the sign have the order of magnitudes in 16 bits as in 32.
            magnitudes = words & 0x7FFF7FFF
            of_warps = gl.reduce(gl.reshape(magnitudes, (WARPS, 128 // WARPS, 64)), 1, _larger_halves)
            of_warps = _magnitude(_side_by_side(of_warps, DTYPE))
        else:
            magnitudes = _magnitude(x)
            of_warps = gl.max(gl.reshape(magnitudes, (WARPS, 128 // WARPS, 128)), 1)
        channel_scale = _scale_of(gl.max(gl.convert_layout(of_warps, OF_WARPS), 0), POWER)
        if values_ptr is not None:
            if WORDS:
                largest = gl.convert_layout(gl.reduce(magnitudes, 1, _larger_halves), ROW)
                largest = _magnitude(_half(gl.maximum(largest & 0xFFFF, largest >> 16), DTYPE))
            else:
                largest = gl.convert_layout(gl.max(magnitudes, 1), ROW)
            row_scale = _scale_of(largest, POWER)
            row_values = _quotients(x, row_scale, 1, TILE, DIVIDE).to(gl.float8e4nv)
            row_at = gl.expand_dims(token * K, 1) + gl.expand_dims(col, 0)
            mask = gl.expand_dims(token < count, 1)
            if not EVEN_K:
                mask = mask & gl.expand_dims(place * 128 + col < K, 0)
            gl.store(values_ptr + (start * K + place * 128) + row_at, row_values, mask=mask)
            gl.store(scales_ptr + start * blocks_of_row + (row * blocks_of_row + place), row_scale, mask=row < count)
        if block < room_blocks:
            first_channel = gl.to_tensor(place).to(gl.int64) * 128
            at = turned_values_ptr + first_channel * room + block * 128 + (to_channel * room + to_token)
            scale_at = turned_scales_ptr + first_channel * room_blocks + block + channel * room_blocks
            if block < used:
                quotients = _quotients(x, channel_scale, 0, TILE, DIVIDE)
                # Packed along tokens, so that words go through shared memory.
                values = gl.convert_layout(quotients, TURNED, assert_trivial=True).to(gl.float8e4nv)
                values = gl.convert_layout(gl.permute(values, (1, 0)), STORE)
            else:
                channel_scale = gl.full([128], 1.0, gl.float32, layout=CHANNEL)
                values = gl.full([128, 128], 0.0, gl.float32, layout=STORE).to(gl.float8e4nv)
            if EVEN_K:
                gl.store(at, values)
                gl.store(scale_at, channel_scale)
            else:
                gl.store(at, values, mask=place * 128 + to_channel < K)
                gl.store(scale_at, channel_scale, mask=place * 128 + channel < K)
