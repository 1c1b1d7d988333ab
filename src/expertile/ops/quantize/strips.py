"""What `quantize_strips_kernel` does with the elements that a thread holds: who holds what, scales, and quotients.

The quotients are those of a division by the scale, to the bit, at the price of a product: see `divided`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import libdevice
from triton.runtime.jit import constexpr_function

from expertile.ops.quantize.numbers import INFINITY, LIFT, LIFT_BELOW, from_below


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
def add(x, y):
    return x + y


@gluon.jit
def larger_halves(x, y):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)


@gluon.jit
def lower_half(bits, DTYPE: gl.constexpr):
    """float32 of the 16-bit float in the low half of each word."""
    if gl.bfloat16 == DTYPE:
        return (bits << 16).to(gl.float32, bitcast=True)
    else:
        return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def upper_half(bits, DTYPE: gl.constexpr):
    return (bits & -65536).to(gl.float32, bitcast=True) if gl.bfloat16 == DTYPE else lower_half(bits >> 16, DTYPE)


@gluon.jit
def store_factors(factors, scale, WHICH: gl.constexpr, DIVIDE: gl.constexpr):
    """What elements of blocks of that scale [128] are divided with: a pair of `factors`, (2 · WHICH, 2 · WHICH + 1).

    See kernels.py for the three ways to DIVIDE."""
    if DIVIDE == 0:
        factors[2 * WHICH].store(gl.div_rn(gl.full_like(scale, 1.0), scale))
    elif DIVIDE == 1:
        high, rest = from_below(scale)
        factors[2 * WHICH].store(high)
        factors[2 * WHICH + 1].store(gl.where(rest >= 0, rest * high, 0.0))
    else:
        lift = gl.where(scale < LIFT_BELOW, LIFT, 1.0)
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
def words_of_channels(bfloat):
    """Two words with the four channels of a token."""
    return ((0, False, bfloat), (0, True, bfloat), (1, False, bfloat), (1, True, bfloat))


@constexpr_function
def words_of_tokens(upper, bfloat):
    """The same half of four tokens' words."""
    return tuple((i, upper, bfloat) for i in range(4))


@gluon.jit
def divided(sources, factors, AXIS: gl.constexpr, HALVES: gl.constexpr, AGAIN: gl.constexpr, DIVIDE: gl.constexpr):
    """int32 words of four e4m3 values each, as `_four_quotients`; factors for each index but AXIS's: (first, second or
    None) as `store_factors` leaves them."""
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
            lift = gl.where(second < LIFT_BELOW, LIFT, 1.0)
            divisor = gl.where(second == INFINITY, 1.0, second * lift)
            _, divisor = gl.broadcast(first, gl.expand_dims(divisor, AXIS))
            _, lift = gl.broadcast(first, gl.expand_dims(0.0 - lift, AXIS))
            operands = sources + (first, divisor, lift)  # noqa: RUF005
    return gl.inline_asm_elementwise(PTX, CONSTRAINTS, operands, gl.int32, is_pure=True, pack=1)


@gluon.jit
def every_fourth(x, AXIS: gl.constexpr):
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
def factors_of(factors, WHICH: gl.constexpr, AXIS: gl.constexpr, LAYOUT: gl.constexpr, DIVIDE: gl.constexpr):
    ALONG: gl.constexpr = gl.SliceLayout(AXIS, LAYOUT)
    first = factors[2 * WHICH].load(ALONG)
    return (first,) if DIVIDE == 0 else (first, factors[2 * WHICH + 1].load(ALONG))


@gluon.jit
def anew(scalar):
    """The same number, but what follows from it is not worked out ahead of a loop and kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [scalar], gl.int32, is_pure=False, pack=1)


@gluon.jit
def silu(x):
    """As `silu` of kernels.py; the sign is turned by the constant, not before it."""
    power = x * -1.4426950408889634
    exponential = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], gl.float32, is_pure=True, pack=1
    )
    return libdevice.fast_dividef(x, 1.0 + exponential)
