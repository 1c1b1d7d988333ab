"""Device code of `gluon_int4`: packed nibbles -> wgmma's register operand.

A nibble v put into the low bits of the 16-bit float 128 (bfloat16, 0x4300) or 1024 (float16, 0x6400), whose last bit is
worth 1, is 128 + v or 1024 + v; subtracting that power of two, or that and the zero point 8, is exact.

wgmma wants two neighbours in K in each register of its left operand. Two neighbouring bytes are read from shared memory
as one 16-bit number, and spread: their low nibbles are one register of the operand, their high ones another. That is
1 byte permutation, 1 shift, 2 logic operations and 2 subtractions for 4 values.

MASKED does without the shift, which shares a half-rate pipe with permutations and logic. Alone in the low byte of a
bfloat16, a nibble v is a number already: v / 2^133 in bits 0 to 3, and v / 2^129 in bits 4 to 7, whose highest is the
exponent's last: subnormal numbers and those of the first binade lie on one line. A fused multiply-add, by 2^127 or
2^123, makes both (v - zero) / 64, exactly; scales make good for that (`unit_of`). In float16 bits 4 to 7 are 16 v, and
the multiply-add divides.
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def unit_of(bf16, masked):
    """What unpacked weights are to be multiplied by, beside their scale: 64 or 1."""
    return 64.0 if bf16 and masked else 1.0


@gluon.constexpr_function
def masked_ptx(bf16, zeros, scaled):
    """`unpack_ptx` without a shift: (v - zero) / unit_of() * scale. bfloat16 zeros come as `minus_64th`."""
    lines = [
        ".reg .b32 t, low, high, a, b, c;",
        "cvt.u32.u16 t, $4;",
        "prmt.b32 t, t, 0, 0x4140;",
    ]
    at = 5
    if bf16:
        less = ("$5", "$6") if zeros else ("c", "c")
        lines += [
            "mov.b32 a, 0x7f007f00;",
            "mov.b32 b, 0x7d007d00;",
            "mov.b32 c, 0xbe00be00;",
            "and.b32 low, t, 0x000f000f;",
            "and.b32 high, t, 0x00f000f0;",
            f"fma.rn.bf16x2 low, low, a, {less[0]};",
            f"fma.rn.bf16x2 high, high, b, {less[1]};",
        ]
    else:
        one, sixteenth = ("0xe400e400", "0xd400d400") if zeros else ("0xe408e408", "0xd480d480")
        lines += [
            f"mov.b32 a, {one};",
            "mov.b32 b, 0x2c002c00;",
            f"mov.b32 c, {sixteenth};",
            "lop3.b32 low, t, 0x000f000f, 0x64006400, 0xea;",
            "lop3.b32 high, t, 0x00f000f0, 0x64006400, 0xea;",
            "add.rn.f16x2 low, low, a;",
            "fma.rn.f16x2 high, high, b, c;",
        ]
        if zeros:
            lines += ["sub.rn.f16x2 low, low, $5;", "sub.rn.f16x2 high, high, $6;"]
    if zeros:
        at += 2
    if scaled:
        kind = "bf16x2" if bf16 else "f16x2"
        lines += [f"mul.rn.{kind} low, low, ${at};", f"mul.rn.{kind} high, high, ${at + 1};"]
    return "{ " + " ".join(lines) + " mov.b32 {$0, $1}, low; mov.b32 {$2, $3}, high; }"


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


@gluon.constexpr_function
def _twice_times_ptx(factor):
    return "{ .reg .b32 x, f; mov.b32 x, {$1, $1}; mov.b32 f, " + factor + "; mul.rn.bf16x2 $0, x, f; }"


@gluon.jit
def minus_64th(x):
    """-x / 64 of bfloat16 numbers, each twice in 32 bits."""
    ptx: gl.constexpr = _twice_times_ptx("0xbc80bc80")
    return gl.inline_asm_elementwise(ptx, "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def times_64(x):
    """64 x of bfloat16 numbers, each twice in 32 bits."""
    ptx: gl.constexpr = _twice_times_ptx("0x42804280")
    return gl.inline_asm_elementwise(ptx, "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _joined(even, odd, layout: gl.constexpr):
    """[rows, n] twice -> [rows, 2n], in turn, as wgmma's left operand: the same registers."""
    x = gl.reshape(gl.join(even, odd), [even.shape[0], 2 * even.shape[1]])
    return gl.convert_layout(x, layout)


@gluon.jit
def unpacked(q, zeros, scales, BF16: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    """The low and the high nibbles of pairs of bytes q [rows, n], each [rows, 2n] of bfloat16 or float16.

    zeros, scales: those of the low and of the high nibbles, [rows, 1], as `twice` makes them, or where bfloat16 is
    MASKED `minus_64th` and `times_64`; or ()."""
    ZEROS: gl.constexpr = len(zeros) > 0
    SCALED: gl.constexpr = len(scales) > 0
    ptx: gl.constexpr = masked_ptx(BF16, ZEROS, SCALED) if MASKED else unpack_ptx(BF16, ZEROS, SCALED)
    constraints: gl.constexpr = _constraints(len(zeros) + len(scales))
    operands = (q,) + zeros + scales
    bf16: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    fp16: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    if BF16:
        a, b, c, d = gl.inline_asm_elementwise(ptx, constraints, operands, dtype=bf16, is_pure=True, pack=1)
    else:
        a, b, c, d = gl.inline_asm_elementwise(ptx, constraints, operands, dtype=fp16, is_pure=True, pack=1)
    return _joined(a, b, layout), _joined(c, d, layout)
