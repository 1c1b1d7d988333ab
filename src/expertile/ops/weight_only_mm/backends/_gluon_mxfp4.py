"""Device code of `gluon_int4` for MXFP4: packed codes -> wgmma's register operand.

A word holds the four registers of a lane (`formats.mxfp4` says where the bits lie). Masked, and shifted where they are
not in place, a register has the codes of two neighbours as s at bit 15 and e1 e0 m at bits 8 to 6, which as a bfloat16
is the value / 2^126, subnormal ones too. One multiplication by a power of two makes it value · scale / 2^32:
5 logic operations, 4 shifts, 1 of them a rotation, and 4 multiplications for 8 values. Sums of a tile are multiplied by
2^32 (`unit_of_mxfp4`). The factor's exponent field is the scale's byte + 94, so scales may be as large as 2^33, and
down to 2^-93 every weight is exact.

float16 has five exponent bits: the three bits go to 11 to 9, which is the value / 2^14, and the factor's exponent field
is the byte - 98, kept within 0 (a weight that float16 rounds to zero) and 31 (infinite, for scales above 2).
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertile.ops.weight_only_mm.backends._gluon_unpack import by_ptx


@gluon.constexpr_function
def unit_of_mxfp4(bf16):
    """What sums of products with unpacked weights are to be multiplied by."""
    return 2.0**32 if bf16 else 1.0


@gluon.constexpr_function
def factor_ptx(byte, bf16):
    """PTX for a word $1 of four scales -> the power of two that register values of scale number `byte` are multiplied
    by, twice in 32 bits."""
    lines = [f"prmt.b32 $0, $1, 0, 0x444{byte};"]
    if bf16:
        lines.append("mad.lo.u32 $0, $0, 0x00800080, 0x2f002f00;")  # (byte + 94) · 2^7 in both halves
    else:
        lines += ["max.u32 $0, $0, 98;", "min.u32 $0, $0, 129;"]
        lines.append("mad.lo.u32 $0, $0, 0x04000400, 0x77fe7800;")  # (byte - 98) · 2^10, modulo 2^32
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def unpack_mxfp4_ptx(bf16):
    """PTX for a word $8 and the factors of its first ($9) and last 32 values ($10) -> the values 2t, 2t + 1 ($0, $1)
    and 2t + 8, 2t + 9 ($2, $3) of 16 of the first, and those of the last ($4 to $7), times their factor."""
    lines = [
        ".reg .b32 l, m, h, i, x;",
        "and.b32 l, $8, 0x81c081c0;",
        "shf.r.wrap.b32 m, $8, $8, 6;",
        "and.b32 m, m, 0x81c081c0;",
        "shl.b32 h, $8, 4;",
        "and.b32 h, h, 0x81c081c0;",
        "shr.b32 x, $8, 2;",
        "and.b32 x, x, 0x01000100;",
        "shl.b32 i, $8, 6;",
        "lop3.b32 i, i, 0x80c080c0, x, 0xea;",
    ]
    for register, factor in zip("lmhi", (9, 9, 10, 10)):  # noqa: B905
        if bf16:
            lines.append(f"mul.rn.bf16x2 {register}, {register}, ${factor};")
        else:
            lines += [
                f"and.b32 x, {register}, 0x01c001c0;",
                f"mad.lo.u32 {register}, x, 7, {register};",  # three bits further, the sign where it is
                f"mul.rn.f16x2 {register}, {register}, ${factor};",
            ]
    lines += ["mov.b32 {$0, $1}, l;", "mov.b32 {$2, $3}, m;", "mov.b32 {$4, $5}, h;", "mov.b32 {$6, $7}, i;"]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def _factor(words, BYTE: gl.constexpr, BF16: gl.constexpr):
    ptx: gl.constexpr = factor_ptx(BYTE, BF16)
    return gl.inline_asm_elementwise(ptx, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def factors(words, BLOCK: gl.constexpr, BF16: gl.constexpr):
    """Words of four scales [rows, 1] -> the factors of the first and of the last 32 values of block number BLOCK (0 or
    1) of their 128."""
    return _factor(words, 2 * BLOCK, BF16), _factor(words, 2 * BLOCK + 1, BF16)


@gluon.jit
def unpacked_mxfp4(q, scales, BF16: gl.constexpr, layout: gl.constexpr):
    """The first and the last 32 values of blocks of packed words q [rows, n], each [rows, 4n] of bfloat16 or float16,
    times their `factors` [rows, 1]: divided by `unit_of_mxfp4`."""
    return by_ptx(unpack_mxfp4_ptx(BF16), (q,) + scales, BF16, layout)
