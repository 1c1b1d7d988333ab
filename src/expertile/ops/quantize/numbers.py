"""What the FP8 quantisers of plain Triton compute: scales, quotients, SwiGLU's activation.

Quotients decide e4m3 values that lie on a tie as IEEE division does: bit for bit what `Fp8Blocks.quantize` makes.
Dividing each element so would cost more than memory does; a block is divided for once, in one of three ways (DIVIDE):

1, of float16 and bfloat16: 1 / s in two parts, h + l with 0 <= l, and RN(x · h + RN(x · l)). Not the quotient in every
   bit, but on its side of every tie: elements and largest ones of 11 bits come near a tie only by lying on it
   (tests/ops/quantize/test_quotients.py).
2, of float32: q = RN(x · y) with y = RN(1 / s) is corrected by its remainder, q ← RN(q + RN(x - q · s) · y). q begins
   within 1.5 units in the last place and is within one after a first step; a second step makes it RN(x / s) (Markstein,
   "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). That needs remainders that do not
   underflow, so blocks below 2^-80 are lifted by 2^100.
0, of what float32 has computed (SwiGLU, a norm), and where s is a power of two: RN(x · y). Such an x is known
   to a few units in the last place, and its own rounding decides what lies on a tie.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

SMALLEST_SCALE = tl.constexpr(2.0**-126)
LIFT_BELOW = tl.constexpr(2.0**-80)
LIFT = tl.constexpr(2.0**100)
_UNLIFT = tl.constexpr(2.0**-100)
_BY_448 = tl.constexpr(float.fromhex("0x1.24924ap-9"))  # RN(1 / 448)
INFINITY = tl.constexpr(float("inf"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def magnitude(x):
    """|x| as the integer of its bits, whose order is that of magnitudes, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, POWER: tl.constexpr):
    """The scale of blocks whose largest `magnitude` is given: amax / 448, 1 for zeros; rounded up to 2^i for POWER."""
    amax = largest.to(tl.float32, bitcast=True)
    small = amax < LIFT_BELOW
    lifted = tl.where(small, amax * LIFT, amax)
    # amax / 448 as IEEE divides, by one correction: checked for every significand.
    scale = lifted * _BY_448
    scale = tl.fma(tl.fma(scale, -448.0, lifted), _BY_448, scale)
    scale = tl.where(small, scale * _UNLIFT, scale)
    scale = tl.where(amax == INFINITY, amax, scale)
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    scale = tl.where(largest == 0, 1.0, scale)
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, up, bits).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def from_below(scale):
    """(high, rest): 1 / scale = high + low with low = rest · high >= 0, so that -0 stays -0; for infinity rest is NaN,
    which stands for low = 0."""
    high = tl.div_rn(1.0, scale)
    above = tl.fma(-scale, high, 1.0) < 0
    high = (high.to(tl.int32, bitcast=True) - above.to(tl.int32)).to(tl.float32, bitcast=True)
    return high, tl.fma(-scale, high, 1.0)


@triton.jit
def divided(x, scale, DIVIDE: tl.constexpr):
    """x / scale as e4m3, `scale` of a shape that spreads over x's. Of a block with an infinity: zeros and NaN."""
    if DIVIDE == 0:
        return (x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)).to(tl.float8e4nv)
    elif DIVIDE == 1:
        high, rest = from_below(scale)
        low = tl.where(rest >= 0, rest * high, 0.0)
        return tl.fma(x, high, x * low).to(tl.float8e4nv)
    else:
        lift = tl.where(scale < LIFT_BELOW, LIFT, 1.0)
        inverse = tl.div_rn(tl.full(scale.shape, -1.0, tl.float32), scale * lift)
        divisor = tl.where(scale == INFINITY, 1.0, scale * lift)
        # All with the sign turned, so that the quotient of -0 is -0.
        negative = x * (0.0 - lift)
        quotient = negative * inverse
        for _ in tl.static_range(2):
            quotient = tl.fma(tl.fma(quotient, divisor, negative), inverse, quotient)
        return quotient.to(tl.float8e4nv)


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x):
    """The largest `magnitude` of each row of float32 x; the hardware takes |x| on the way."""
    return tl.max(magnitude(x), 1) if _INTERPRETED else magnitude(tl.reduce(tl.abs(x), 1, _larger))


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) from one exponential and one reciprocal of the hardware, which flush subnormals: what guards
    them otherwise takes as long as memory does. The interpreter has neither."""
    return x * tl.sigmoid(x) if _INTERPRETED else libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(-x))
