"""Device code of `gluon_int4`: packed nibbles -> wgmma's register operand.

A nibble v put into the low bits of the 16-bit float 128 (bfloat16, 0x4300) or 1024 (float16, 0x6400), whose last bit is
worth 1, is 128 + v or 1024 + v; subtracting that power of two, or that and the zero point 8, is exact.

wgmma wants two neighbours in K in each register of its left operand. Two neighbouring bytes are read from shared memory
as one 16-bit number, and spread: their low nibbles are one register of the operand, their high ones another. That is
1 byte permutation, 1 shift, 2 logic operations and 2 subtractions for 4 values.
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def unpack_ptx(bf16, zeros, scaled):
    """PTX for 2 bytes $4 -> their low nibbles in $0, $1 and their high ones in $2, $3: (v - zero) * scale as 16-bit
    floats, each step rounded once. Zeros and scales, the last operands, are a number for the low and one for the high
    nibbles, each twice in 32 bits; without zeros: 8."""
    one, kind = (0x43004300, "bf16x2") if bf16 else (0x64006400, "f16x2")
    less = one if zeros else one + 0x00080008
    lines = [
        ".reg .b32 t, low, high, less;",
        f"mov.b32 less, {less:#010x};",
        "cvt.u32.u16 t, $4;",
        "prmt.b32 low, t, 0, 0x4140;",
        "shr.u32 high, low, 4;",
        f"lop3.b32 low, low, 0x000f000f, {one:#010x}, 0xea;",
        f"lop3.b32 high, high, 0x000f000f, {one:#010x}, 0xea;",
        f"sub.rn.{kind} low, low, less;",
        f"sub.rn.{kind} high, high, less;",
    ]
    at = 5
    for wanted, operation in ((zeros, "sub"), (scaled, "mul")):
        if wanted:
            lines += [f"{operation}.rn.{kind} {x}, {x}, ${at + j};" for j, x in enumerate(("low", "high"))]
            at += 2
    return "{ " + " ".join(lines) + " mov.b32 {$0, $1}, low; mov.b32 {$2, $3}, high; }"


@gluon.constexpr_function
def _constraints(numbers):
    """Four results, the bytes, and one register for each of the other operands."""
    return "=h,=h,=h,=h,h" + ",r" * numbers


@gluon.constexpr_function
def packed_layout(rows, slab):
    """How a warpgroup holds [rows, slab / 2] pairs of packed bytes, so that its registers become those of a wgmma
    operand [rows, slab]: a lane has every fourth pair of rows 8 apart."""
    registers = [[8, 0]]
    pairs = 4
    while pairs < slab // 2:
        registers.append([0, pairs])
        pairs *= 2
    if rows == 128:
        registers.append([64, 0])
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, slab // 2])


@gluon.jit
def twice(x):
    """16-bit floats, each twice in 32 bits."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _joined(even, odd, layout: gl.constexpr):
    """[rows, n] twice -> [rows, 2n], in turn, as wgmma's left operand: the same registers."""
    x = gl.reshape(gl.join(even, odd), [even.shape[0], 2 * even.shape[1]])
    return gl.convert_layout(x, layout)


@gluon.jit
def unpacked(q, zeros, scales, BF16: gl.constexpr, layout: gl.constexpr):
    """The low and the high nibbles of pairs of bytes q [rows, n], each [rows, 2n] of bfloat16 or float16.

    zeros, scales: those of the low and of the high nibbles, [rows, 1], as `twice` makes them; or ()."""
    ZEROS: gl.constexpr = len(zeros) > 0
    SCALED: gl.constexpr = len(scales) > 0
    ptx: gl.constexpr = unpack_ptx(BF16, ZEROS, SCALED)
    constraints: gl.constexpr = _constraints(len(zeros) + len(scales))
    operands = (q,) + zeros + scales
    bf16: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    fp16: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    if BF16:
        a, b, c, d = gl.inline_asm_elementwise(ptx, constraints, operands, dtype=bf16, is_pure=True, pack=1)
    else:
        a, b, c, d = gl.inline_asm_elementwise(ptx, constraints, operands, dtype=fp16, is_pure=True, pack=1)
    return _joined(a, b, layout), _joined(c, d, layout)
