"""MXFP4 codes -> floating point in registers, for Triton kernels; `formats.mxfp4` says where the bits lie.

Masked and shifted, a 32-bit register has two codes with the sign at bit 15 and the other three bits at 8 to 6 of either
half. That is the value / 2^126 as a bfloat16, and, with the three bits at 11 to 9, the value / 2^14 as a float16.
"""

import triton
import triton.language as tl

from expertile.ops.weight_only_mm.triton_unpack import eight_of

_UNPACK = """{
    .reg .b32 a, b, c, d, x, unit, none;
    mov.b32 unit, UNIT;
    mov.b32 none, 0x80008000;
    and.b32 a, $8, 0x81c081c0;
    shf.r.wrap.b32 b, $8, $8, 6;
    and.b32 b, b, 0x81c081c0;
    shl.b32 c, $8, 4;
    and.b32 c, c, 0x81c081c0;
    shr.b32 x, $8, 2;
    and.b32 x, x, 0x01000100;
    shl.b32 d, $8, 6;
    lop3.b32 d, d, 0x80c080c0, x, 0xea;
    FURTHER
    fma.rn.TYPE a, a, unit, none;
    fma.rn.TYPE b, b, unit, none;
    fma.rn.TYPE c, c, unit, none;
    fma.rn.TYPE d, d, unit, none;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    mov.b32 {$4, $5}, c;
    mov.b32 {$6, $7}, d;
}"""
_FURTHER = "\n".join(f"and.b32 x, {r}, 0x01c001c0;\nmad.lo.u32 {r}, x, 7, {r};" for r in "abcd")
_BF16 = tl.constexpr(_UNPACK.replace("UNIT", "0x7e807e80").replace("TYPE", "bf16x2").replace("FURTHER", ""))
_FP16 = tl.constexpr(_UNPACK.replace("UNIT", "0x74007400").replace("TYPE", "f16x2").replace("FURTHER", _FURTHER))


@triton.jit
def registers(q, HIGH: tl.constexpr):
    """The two registers of the first (HIGH 0) or last 32 values of words' blocks: values 2t, 2t + 1 and 2t + 8, 2t + 9
    of 16, as two codes each."""
    q = q.to(tl.uint32, bitcast=True)
    if HIGH:
        return (q << 4) & 0x81C081C0, ((q << 6) & 0x80C080C0) | ((q >> 2) & 0x01000100)
    else:
        return q & 0x81C081C0, ((q >> 6) | (q << 26)) & 0x81C081C0


@triton.jit
def value(register):
    """The value of a register's lower code, float32."""
    e, m = (register >> 7) & 3, ((register >> 6) & 1).to(tl.float32)
    power = (1 << e).to(tl.float32) * 0.5
    size = tl.where(e == 0, 0.5 * m, power * (1.0 + 0.5 * m))
    return tl.where((register & 0x8000) == 0, size, -size)


@triton.jit
def power_of_two(scale):
    """e8m0 bytes -> float32; that of 0 is subnormal."""
    bits = scale.to(tl.int32) << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def unpack_mxfp4(q, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Words int32 [N, words] -> the values 2t, 2t + 1, 2t + 8, 2t + 9 of every 16 of the first 32 values of their
    blocks, and the same of the last 32: eight of DTYPE, [N, words]. Without ASSEMBLY, which the interpreter doesn't
    know, in plain Triton."""
    if not ASSEMBLY:
        low, low_8 = registers(q, 0)
        high, high_8 = registers(q, 1)
        a, b, c, d = value(low), value(low >> 16), value(low_8), value(low_8 >> 16)
        e, f, g, h = value(high), value(high >> 16), value(high_8), value(high_8 >> 16)
        return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE), e.to(DTYPE), f.to(DTYPE), g.to(DTYPE), h.to(DTYPE)
    else:
        return eight_of(q, _BF16, _FP16, DTYPE)
