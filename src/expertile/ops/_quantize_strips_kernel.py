"""Gluon kernel of the FP8 quantisers that also write the transposed copy: each element is loaded once and held.

Same results to the bit as `quantize_tokens_kernel` of _quantize_kernels.py, which is for interpreters and for rows that
16-byte copies cannot take. What plain Triton cannot say is who holds what: here a thread holds a strip of 16 or 8
neighbouring tokens of 8 neighbouring channels. So a load fills 16 bytes; 8 bytes of a row go out as they are; and the
transposed copy goes out as it is too, 16 or 8 bytes of a channel a thread, neighbouring threads filling the 32 bytes
in which memory is written: nothing is turned in shared memory. Only the largest magnitudes of strips go through it, to
the one thread that works out the scale of a row or channel and its reciprocal, some 50 instructions, and these back:
two barriers a tile. (For SwiGLU, whose strips are short, the copy goes through shared memory all the same, so that
neighbouring threads fill the 128 bytes of a channel: 5 % less time.)

Memory is kept busy by the 2 to 4 programs that share an SM, 32 KB (64 KB for SwiGLU and float32) on their way each; by
Little's law an SM needs about 40 KB for its share of 4.2 TB/s. A program of several tiles also brings the next one by
cp.async while it quantises one.

What bounds it is the access pattern, 128 bytes here and 128 there, one of each row and one of each channel. On an H200
the kernel moves 3.3 TB/s from bfloat16 (16384 × 7168: 146.5 µs, 0.79 of the speed of a copy of as many bytes) and
3.5 TB/s from SwiGLU (16384 × 2048: 58.7 µs, 0.85). The same loads and stores without any arithmetic take as long: 147.5
to 151 µs, and 58.0. 0.9 of a copy would need longer runs of a channel, that is tiles of more tokens.
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
def strip_layout(warps, by_tokens=False, own=8):
    """128 tokens × 128 channels in strips of 64 / warps tokens × 8 channels, 32 tokens a warp, numbered `by_tokens` or
    by channels: of the same elements in the same thread, so that turning one into the other moves nothing. `own`: 4
    for 128 × 64 words of two channels each."""
    tokens = 64 // warps
    along = [[p, 0] for p in _powers(tokens)]
    across = [[0, p] for p in _powers(own)]
    side_by_side = tokens  # strips of a warp
    lanes = [[0, own * p] for p in _powers(side_by_side)] + [[tokens * p, 0] for p in _powers(32 // tokens)]
    spread = [[32, 0], [64, 0]] + [[0, own * side_by_side * p] for p in _powers(warps // 4)]
    return gl.DistributedLinearLayout(
        along + across if by_tokens else across + along, lanes, spread, [], [128, 16 * own]
    )


@constexpr_function
def turned_layout(warps):
    """The same strips of the transposed tile, in words of four tokens: 128 channels × 32."""
    held = strip_layout(warps, True)

    def turned(bases):
        return [[channel, token // 4] for token, channel in bases if channel or token >= 4]

    return gl.DistributedLinearLayout(
        turned(held.reg_bases), turned(held.lane_bases), turned(held.warp_bases), [], [128, 32]
    )


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
def _larger(x, y):
    return gl.maximum(x, y)


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
def _store_factors(factors, scale, WHICH: gl.constexpr, DIVIDE: gl.constexpr):
    """What elements of blocks of that scale [128] are divided with: a pair of `factors`, (2 · WHICH, 2 · WHICH + 1).

    See _quantize_kernels.py for the three ways to DIVIDE."""
    if DIVIDE == 0:
        factors[2 * WHICH].store(gl.div_rn(gl.full_like(scale, 1.0), scale))
    elif DIVIDE == 1:
        # As `in_two_parts` of _quantize_kernels.py.
        one = gl.full_like(scale, 1.0)
        high = gl.div_rn(one, scale)
        above = gl.fma(-scale, high, one) < 0
        high = (high.to(gl.int32, bitcast=True) - above.to(gl.int32)).to(gl.float32, bitcast=True)
        rest = gl.fma(-scale, high, one)
        factors[2 * WHICH].store(high)
        factors[2 * WHICH + 1].store(gl.where(rest >= 0, rest * high, 0.0))
    else:
        lift = gl.where(scale < _LIFT_BELOW, _LIFT, 1.0)
        factors[2 * WHICH].store(gl.div_rn(gl.full_like(scale, -1.0), scale * lift))
        factors[2 * WHICH + 1].store(scale)


@constexpr_function
def _four_quotients(halves, again, divide):
    """PTX that makes four e4m3 values, a word, of four sources and the factors of one block.

    `halves`: which bfloat16 or float16 of four words, or of two where two are given for it, are divided; None: four
    float32. `again`: taken out of their words otherwise than without, so that ptxas does it anew, which takes fewer
    registers than keeping it."""
    count = 4 if halves is None else len({word for word, _, _ in halves})
    lines = [".reg .f32 x<4>, q<4>;", ".reg .b16 low, high, a, b;"]
    for i in range(4):
        if halves is None:
            lines.append(f"mov.b32 x{i}, ${1 + i};")
            continue
        word, upper, bfloat = halves[i]
        source = f"${1 + word}"
        if bfloat and again:
            lines.append(f"prmt.b32 x{i}, {source}, 0, {0x3244 if upper else 0x1044};")
        elif bfloat:
            lines.append(f"and.b32 x{i}, {source}, 0xffff0000;" if upper else f"shl.b32 x{i}, {source}, 16;")
        else:
            lines += [f"mov.b32 {{a, b}}, {source};", f"cvt.f32.f16 x{i}, {'b' if upper else 'a'};"]
    first, second, third = (f"${1 + count + i}" for i in range(3))
    for i in range(4):
        if divide == 0:
            lines.append(f"mul.rn.f32 q{i}, x{i}, {first};")
        elif divide == 1:
            lines += [f"mul.rn.f32 q{i}, x{i}, {second};", f"fma.rn.f32 q{i}, x{i}, {first}, q{i};"]
        else:
            lines += [f"mul.rn.f32 x{i}, x{i}, {third};", f"mul.rn.f32 q{i}, x{i}, {first};"]
            step = [".reg .f32 r;", f"fma.rn.f32 r, q{i}, {second}, x{i};", f"fma.rn.f32 q{i}, r, {first}, q{i};"]
            lines += ["{", *step, "}", "{", *step, "}"]
    lines += ["cvt.rn.satfinite.e4m3x2.f32 low, q1, q0;", "cvt.rn.satfinite.e4m3x2.f32 high, q3, q2;"]
    return "{ " + " ".join(lines) + " mov.b32 $0, {low, high}; }"


@constexpr_function
def _constraints(count):
    return ",".join(["=r"] + ["r"] * count)


@constexpr_function
def _of_channels(bfloat):
    """Two words with the four channels of a token."""
    return ((0, False, bfloat), (0, True, bfloat), (1, False, bfloat), (1, True, bfloat))


@constexpr_function
def _of_tokens(upper, bfloat):
    """The same half of four tokens' words."""
    return tuple((i, upper, bfloat) for i in range(4))


@gluon.jit
def _divided(
    sources, factors, AXIS: gl.constexpr, HALVES: gl.constexpr, AGAIN: gl.constexpr, DIVIDE: gl.constexpr
):  # fmt: skip
    """int32 words of four e4m3 values each, as `_four_quotients`; factors for each index but AXIS's: (first, second or
    None) as `_store_factors` leaves them."""
    CONSTRAINTS: gl.constexpr = _constraints(len(sources) + (1 if DIVIDE == 0 else DIVIDE + 1))
    PTX: gl.constexpr = _four_quotients(HALVES, AGAIN, DIVIDE)
    _, first = gl.broadcast(sources[0], gl.expand_dims(factors[0], AXIS))
    if DIVIDE == 0:
        operands = sources + (first,)  # noqa: RUF005
    else:
        second = factors[1]
        if DIVIDE == 1:
            _, second = gl.broadcast(first, gl.expand_dims(second, AXIS))
            operands = sources + (first, second)  # noqa: RUF005
        else:
            lift = gl.where(second < _LIFT_BELOW, _LIFT, 1.0)
            divisor = gl.where(second == _INFINITY, 1.0, second * lift)
            _, divisor = gl.broadcast(first, gl.expand_dims(divisor, AXIS))
            _, lift = gl.broadcast(first, gl.expand_dims(0.0 - lift, AXIS))
            operands = sources + (first, divisor, lift)  # noqa: RUF005
    return gl.inline_asm_elementwise(PTX, CONSTRAINTS, operands, gl.int32, is_pure=True, pack=1)


@gluon.jit
def _every_fourth(x, AXIS: gl.constexpr):
    """x[0::4], x[1::4], x[2::4], x[3::4] along an axis of which a thread holds these four."""
    if AXIS == 0:
        parts = gl.permute(gl.reshape(x, (x.shape[0] // 4, 2, 2, x.shape[1])), (0, 3, 2, 1))
    else:
        parts = gl.permute(gl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)), (0, 1, 3, 2))
    lower, upper = gl.split(parts)
    a, b = gl.split(lower)
    c, d = gl.split(upper)
    return a, b, c, d


@gluon.jit
def _factors_of(factors, WHICH: gl.constexpr, AXIS: gl.constexpr, LAYOUT: gl.constexpr, DIVIDE: gl.constexpr):
    ALONG: gl.constexpr = gl.SliceLayout(AXIS, LAYOUT)
    first = factors[2 * WHICH].load(ALONG)
    if DIVIDE == 0:
        return (first,)
    else:
        return first, factors[2 * WHICH + 1].load(ALONG)


@gluon.jit
def _anew(scalar):
    """The same number, but what follows from it is not worked out ahead of a loop and kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [scalar], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _silu(x):
    """As `silu` of _quantize_kernels.py; the sign is turned by the constant, not before it."""
    power = x * -1.4426950408889634
    exponential = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], gl.float32, is_pure=True, pack=1
    )
    return libdevice.fast_dividef(x, 1.0 + exponential)


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
def _start_tile(buffers, x_ptr, x_stride, place, K, count, SOURCE: gl.constexpr, EVEN_K: gl.constexpr):
    LAYOUT: gl.constexpr = copy_layout(
        x_ptr.dtype.element_ty.primitive_bitwidth // 8, buffers[0].shape[1], gl.num_warps()
    )
    if SOURCE == "swiglu_interleaved":
        _start_copy(buffers[0], x_ptr, x_stride, place * 256, 2 * K, count, LAYOUT, EVEN_K)
    else:
        _start_copy(buffers[0], x_ptr, x_stride, place * 128, K, count, LAYOUT, EVEN_K)
        if SOURCE == "swiglu":
            _start_copy(buffers[1], x_ptr + K, x_stride, place * 128, K, count, LAYOUT, EVEN_K)
    async_copy.commit_group()


@gluon.jit
def _words(buffer, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of 16-bit floats as 128 × WORDS words of two."""
    return buffer._reinterpret(gl.int32, [128, WORDS], buffer.layout).load(LAYOUT)


@gluon.jit
def _floats(buffer, TILE: gl.constexpr):
    """A tile in float32. 16-bit floats are loaded as words and taken apart as bits, an instruction each."""
    if buffer.dtype == gl.float32:
        return buffer.load(TILE)
    else:
        words = _words(buffer, 64, strip_layout(gl.num_warps(), False, 4))
        pairs = gl.join(_half(words, buffer.dtype), _other_half(words, buffer.dtype))
        return gl.convert_layout(gl.reshape(pairs, (128, 128)), TILE, assert_trivial=True)


@gluon.jit
def _held_tile(buffers, SOURCE: gl.constexpr, TILE: gl.constexpr):
    """The tile in float32."""
    DTYPE: gl.constexpr = buffers[0].dtype
    if SOURCE == "swiglu_interleaved":
        both = _words(buffers[0], 128, TILE)  # gate and up of a channel are a word
        return _silu(_half(both, DTYPE)) * _other_half(both, DTYPE)
    elif SOURCE == "swiglu":
        return _silu(_floats(buffers[0], TILE)) * _floats(buffers[1], TILE)
    else:
        return _floats(buffers[0], TILE)


@gluon.jit
def _locate(offs_ptr, ends_ptr, block, first_program, R, groups, GROUPS_P2: gl.constexpr):
    """(first token, end of its group, blocks that groups hold) of a block of 128 tokens."""
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
def _store_zeros(
    values_ptr, scales_ptr, block, room_blocks, first, last, K, EVEN_K: gl.constexpr
):  # fmt: skip
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
        scale_at = scales_ptr + first_channel * room_blocks + block + index * room_blocks
        if EVEN_K:
            gl.store(at, zeros)
            gl.store(scale_at, ones)
        else:
            gl.store(at, zeros, mask=place * 128 + channel < K)
            gl.store(scale_at, ones, mask=place * 128 + index < K)


@gluon.jit
def _store_rows(
    x, factors, values_ptr, stride, count, width, DTYPE: gl.constexpr, EVEN_K: gl.constexpr, DIVIDE: gl.constexpr
):  # fmt: skip
    """A tile quantised along channels: float32 [128, 128], or words [128, 64] of two."""
    if x.shape[1] == 64:
        sources = gl.split(gl.reshape(x, (128, 32, 2)))
        HALVES: gl.constexpr = _of_channels(gl.bfloat16 == DTYPE)
    else:
        sources = _every_fourth(x, 1)
        HALVES: gl.constexpr = None  # type: ignore[no-redef]
    LAYOUT: gl.constexpr = sources[0].type.layout
    mine = _factors_of(factors, 0, 1, LAYOUT, DIVIDE)
    values = _divided(sources, mine, 1, HALVES, False, DIVIDE)
    token = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    col = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT)), 0)
    mask = token < count
    if not EVEN_K:
        mask = mask & (4 * col < width)
    at = values_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (token * (stride // 4) + col)
    gl.store(at, values, mask=mask)


@gluon.jit
def _store_turned(
    x, factors, staging, values_ptr, stride, width, TILE: gl.constexpr, DTYPE: gl.constexpr, EVEN_K: gl.constexpr,
    DIVIDE: gl.constexpr,
):  # fmt: skip
    """A tile as in `_store_rows` quantised along tokens and stored as [channel, token], by way of `staging` if any."""
    if x.shape[1] == 64:
        sources = _every_fourth(x, 0)
        BFLOAT: gl.constexpr = gl.bfloat16 == DTYPE
        HALF: gl.constexpr = gl.SliceLayout(0, sources[0].type.layout)
        mine = _factors_of(factors, 1, 0, TILE, DIVIDE)
        even_first, odd_first = gl.split(gl.reshape(mine[0], (64, 2)))
        even_first = gl.convert_layout(even_first, HALF, assert_trivial=True)
        odd_first = gl.convert_layout(odd_first, HALF, assert_trivial=True)
        even = (even_first,)
        odd = (odd_first,)
        if DIVIDE != 0:
            even_second, odd_second = gl.split(gl.reshape(mine[1], (64, 2)))
            even += (gl.convert_layout(even_second, HALF, assert_trivial=True),)  # type: ignore[assignment]
            odd += (gl.convert_layout(odd_second, HALF, assert_trivial=True),)  # type: ignore[assignment]
        values = gl.join(
            _divided(sources, even, 0, _of_tokens(False, BFLOAT), True, DIVIDE),
            _divided(sources, odd, 0, _of_tokens(True, BFLOAT), True, DIVIDE),
        )
        values = gl.reshape(values, (32, 128))
    else:
        sources = _every_fourth(x, 0)
        QUARTER: gl.constexpr = sources[0].type.layout
        mine = _factors_of(factors, 1, 0, QUARTER, DIVIDE)
        values = _divided(sources, mine, 0, None, False, DIVIDE)
    HELD: gl.constexpr = turned_layout(gl.num_warps())
    values = gl.convert_layout(gl.permute(values, (1, 0)), HELD, assert_trivial=True)
    LAYOUT: gl.constexpr = HELD if staging is None else gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    if staging is not None:
        staging.store(values)
        gl.thread_barrier()
        values = staging.load(LAYOUT)
    channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    token = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT)), 0)
    at = values_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (channel * (stride // 4) + token)
    if EVEN_K:
        gl.store(at, values)
    else:
        gl.store(at, values, mask=channel < width)


@gluon.jit
def quantize_strips_kernel(
    x_ptr, weight_ptr, rstd_ptr, offs_ptr, values_ptr, scales_ptr, turned_values_ptr, turned_scales_ptr, ends_ptr,
    R, k_units, x_stride_units, room_blocks, groups, chunks,
    SOURCE: gl.constexpr, UNIT: gl.constexpr, GROUPS_P2: gl.constexpr, PER_PROGRAM: gl.constexpr,
    EVEN_K: gl.constexpr, POWER: gl.constexpr, DIVIDE: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Program (128 tokens of one group, chunk): PER_PROGRAM tiles of 128 tokens × 128 channels, each quantised along
    channels where values_ptr is given, and along tokens and stored transposed, by way of shared memory if STAGED.

    Blocks behind the groups are as in `quantize_tokens_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = 64 // WARPS
    TILE: gl.constexpr = strip_layout(WARPS)
    # One thread for a row, and one for a channel.
    OF_ROW: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    OF_CHANNEL: gl.constexpr = gl.BlockedLayout([128 // TOKENS, 1], [1, 32], [1, WARPS], [0, 1])
    ROW: gl.constexpr = gl.SliceLayout(1, OF_ROW)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, OF_CHANNEL)
    K = k_units * UNIT
    x_stride = x_stride_units * UNIT
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
    first = chunk * PER_PROGRAM
    last = gl.minimum(first + PER_PROGRAM, blocks_of_row)
    if (block >= used) & (block < room_blocks):
        _store_zeros(turned_values_ptr, turned_scales_ptr, block, room_blocks, first, last, K, EVEN_K)
    last = gl.where(count > 0, last, first)
    start = start.to(gl.int64)
    x_ptr += start * x_stride

    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WORDS: gl.constexpr = SOURCE == "plain" and DTYPE.primitive_bitwidth == 16
    WIDTH: gl.constexpr = 256 if SOURCE == "swiglu_interleaved" else 128
    HELD: gl.constexpr = gl.int32 if WORDS else gl.float32
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = (gl.allocate_shared_memory(DTYPE, [128, WIDTH], PLAIN),)
    if SOURCE == "swiglu":
        buffers += (gl.allocate_shared_memory(DTYPE, [128, WIDTH], PLAIN),)  # type: ignore[assignment]
    # The largest of each strip's rows, and of its channels (two of them a word).
    of_rows = gl.allocate_shared_memory(HELD, [128, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    of_channels = gl.allocate_shared_memory(HELD, [128 // TOKENS, 64 if WORDS else 128], PLAIN)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = (
        gl.allocate_shared_memory(gl.float32, [128], VECTOR), gl.allocate_shared_memory(gl.float32, [128], VECTOR),
        gl.allocate_shared_memory(gl.float32, [128], VECTOR), gl.allocate_shared_memory(gl.float32, [128], VECTOR),
    )  # fmt: skip
    staging = None
    if STAGED:
        STRIPS: gl.constexpr = gl.SwizzledSharedLayout(4, 8, 8, [1, 0])
        staging = gl.allocate_shared_memory(gl.int32, [128, 32], STRIPS)
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))
    row = gl.arange(0, 128, layout=ROW)
    channel = gl.arange(0, 128, layout=CHANNEL)
    if first < last:
        _start_tile(buffers, x_ptr, x_stride, first, K, count, SOURCE, EVEN_K)
    for place in range(first, last):
        K = _anew(k_units) * UNIT
        x_stride = _anew(x_stride_units) * UNIT
        room = _anew(room_blocks) * 128
        async_copy.wait_group(0)
        if WORDS:
            words = _words(buffers[0], 64, strip_layout(WARPS, False, 4))
            # Two at a time: bits without the sign have the order of magnitudes in 16 bits as in 32.
            magnitudes = words & 0x7FFF7FFF
            of_rows.store(gl.reduce(gl.reshape(magnitudes, (128, 16, 4)), 2, _larger_halves))
            of_channels.store(gl.reduce(gl.reshape(magnitudes, (128 // TOKENS, TOKENS, 64)), 1, _larger_halves))
        else:
            x = _held_tile(buffers, SOURCE, TILE)
            if rstd_ptr is not None:
                rstd = gl.load(rstd_ptr + start + token, mask=token < count, other=0.0)
                x *= gl.expand_dims(rstd, 1)
                if weight_ptr is not None:
                    weight = gl.load(weight_ptr + place * 128 + col, mask=place * 128 + col < K, other=0.0)
                    x *= gl.expand_dims(weight.to(gl.float32), 0)
            magnitudes = _magnitude(x)
            of_rows.store(gl.max(gl.reshape(magnitudes, (128, 16, 8)), 2).to(gl.float32, bitcast=True))
            of_channels.store(
                gl.max(gl.reshape(magnitudes, (128 // TOKENS, TOKENS, 128)), 1).to(gl.float32, bitcast=True)
            )
        gl.thread_barrier()
        # All have taken the tile out of its buffer.
        if place + 1 < last:
            _start_tile(buffers, x_ptr, x_stride, place + 1, K, count, SOURCE, EVEN_K)
        if values_ptr is not None:
            if WORDS:
                largest = gl.reduce(of_rows.load(OF_ROW), 1, _larger_halves)
                largest = _magnitude(_half(gl.maximum(largest & 0xFFFF, largest >> 16), DTYPE))
            else:
                largest = gl.max(_magnitude(of_rows.load(OF_ROW)), 1)
            scale = _scale_of(largest, POWER)
            gl.store(scales_ptr + start * blocks_of_row + (row * blocks_of_row + place), scale, mask=row < count)
            _store_factors(factors, scale, 0, DIVIDE)
        if WORDS:
            halves = of_channels._reinterpret(gl.uint16, [128 // TOKENS, 128], of_channels.layout).load(OF_CHANNEL)
            largest = _magnitude(_half(gl.max(halves.to(gl.int32), 0), DTYPE))
        else:
            largest = gl.max(_magnitude(of_channels.load(OF_CHANNEL)), 0)
        channel_scale = _scale_of(largest, POWER)
        _store_factors(factors, channel_scale, 1, DIVIDE)
        if block < used:
            first_channel = gl.to_tensor(place).to(gl.int64) * 128
            scale_at = turned_scales_ptr + first_channel * room_blocks + block + channel * room_blocks
            if EVEN_K:
                gl.store(scale_at, channel_scale)
            else:
                gl.store(scale_at, channel_scale, mask=place * 128 + channel < K)
        gl.thread_barrier()
        if values_ptr is not None:
            bytes_at = values_ptr + (start * K + place * 128)
            _store_rows(words if WORDS else x, factors, bytes_at, K, count, K - place * 128, DTYPE, EVEN_K, DIVIDE)
        if block < used:
            first_channel = gl.to_tensor(place).to(gl.int64) * 128
            bytes_at = turned_values_ptr + first_channel * room + block * 128
            _store_turned(
                words if WORDS else x, factors, staging, bytes_at, room, K - place * 128, TILE, DTYPE, EVEN_K, DIVIDE
            )
