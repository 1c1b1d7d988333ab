"""Four bits -> 16-bit floating point in registers, for Triton kernels.

`0x4300 | v` is the bfloat16 128 + v, and `0x6400 | v` the float16 1024 + v: nibbles are spread over 16-bit lanes, the
exponent is or-ed in, and a multiply-add with 1 (sm_80 has no sub.bf16x2) takes 128 + 8 or 1024 + 8 away, exactly. The
first operand of wgmma has K in pairs, so there packed bytes come two at a time; that of mma.sync may have it in fours.
"""

from __future__ import annotations

import triton
import triton.language as tl

_UNPACK_2 = """{
    .reg .b32 lo, hi, one, off;
    mov.b32 one, ONE;
    mov.b32 off, OFFSET;
    cvt.u32.u16 lo, $2;
    prmt.b32 lo, lo, 0, 0x4140;
    shr.u32 hi, lo, 4;
    lop3.b32 lo, lo, 0x000f000f, EXPONENT, 0xea;
    lop3.b32 hi, hi, 0x000f000f, EXPONENT, 0xea;
    fma.rn.TYPE $0, lo, one, off;
    fma.rn.TYPE $1, hi, one, off;
}"""
_UNPACK_4 = """{
    .reg .b32 a, b, c, d, one, off;
    mov.b32 one, ONE;
    mov.b32 off, OFFSET;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    lop3.b32 a, a, 0x000f000f, EXPONENT, 0xea;
    lop3.b32 b, b, 0x000f000f, EXPONENT, 0xea;
    lop3.b32 c, c, 0x000f000f, EXPONENT, 0xea;
    lop3.b32 d, d, 0x000f000f, EXPONENT, 0xea;
    fma.rn.TYPE $0, a, one, off;
    fma.rn.TYPE $1, b, one, off;
    fma.rn.TYPE $2, c, one, off;
    fma.rn.TYPE $3, d, one, off;
}"""


def _of_type(assembly: str, type: str, exponent: str, one: str, offset: str) -> tl.constexpr:
    for name, value in (("TYPE", type), ("EXPONENT", exponent), ("ONE", one), ("OFFSET", offset)):
        assembly = assembly.replace(name, value)
    return tl.constexpr(assembly)


_BF16_2 = _of_type(_UNPACK_2, "bf16x2", "0x43004300", "0x3f803f80", "0xc308c308")
_BF16_4 = _of_type(_UNPACK_4, "bf16x2", "0x43004300", "0x3f803f80", "0xc308c308")
_FP16_2 = _of_type(_UNPACK_2, "f16x2", "0x64006400", "0x3c003c00", "0xe408e408")
_FP16_4 = _of_type(_UNPACK_4, "f16x2", "0x64006400", "0x3c003c00", "0xe408e408")


@triton.jit
def unpack(q, DTYPE: tl.constexpr, BYTES: tl.constexpr):
    """Packed bytes -> (low nibbles − 8, high nibbles − 8) in DTYPE, exactly; BYTES at a time, or 0: without assembly,
    which the interpreter doesn't know."""
    BF16: tl.constexpr = tl.bfloat16 == DTYPE
    if BYTES == 0:
        low = ((q & 15).to(tl.float32) - 8.0).to(DTYPE)
        high = ((q >> 4).to(tl.float32) - 8.0).to(DTYPE)
    elif BF16:
        if BYTES == 2:
            low, high = tl.inline_asm_elementwise(
                _BF16_2, "=r,=r,h", [q], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _BF16_4, "=r,=r,=r,=r,r", [q], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    elif BYTES == 2:
        low, high = tl.inline_asm_elementwise(
            _FP16_2, "=r,=r,h", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _FP16_4, "=r,=r,=r,=r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def shifted(w, zero, DTYPE: tl.constexpr):
    """w = q − 8 -> q − zero; exact for whole zero points."""
    return w + (8.0 - zero.to(tl.float32)).to(DTYPE)[:, None]
