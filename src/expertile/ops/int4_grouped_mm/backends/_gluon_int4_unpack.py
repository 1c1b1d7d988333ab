"""Device code of `gluon_int4`: packed nibbles -> wgmma's register operand.

wgmma wants two neighbours in K in each register of its left operand. Two neighbouring bytes are read from shared memory
as one 16-bit number and spread over 32 bits: their low nibbles are one register of the operand, their high ones
another. Each is masked where it lies and turned into a number without a shift, which would share a half-rate pipe with
permutations and logic: 1 permutation, 2 logic operations and 2 additions or fused multiply-adds for 4 values.

bfloat16: alone in the low byte of one, a nibble v is a number already: v / 2^133 in bits 0 to 3, and v / 2^129 in bits
4 to 7, whose highest is the exponent's last: subnormal numbers and those of the first binade lie on one line. A fused
multiply-add by 2^127 or 2^123 makes both (v - zero) / 64, exactly for whole zeros. 2^133 itself is no bfloat16: the
sum of a tile is multiplied by 64 (`unit_of`). Scales stay as they are, so none overflows; a scaled weight below 2^-120
rounds to a multiple of 2^-127.

float16: put into the low bits of 1024 (0x6400), whose last bit is worth 1, v is 1024 + v in bits 0 to 3, of which an
addition takes 1024 and the zero, and 1024 + 16 v in bits 4 to 7, which a fused multiply-add also divides by 16. Exact.
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def unit_of(bf16):
    """What sums of products with unpacked weights are to be multiplied by."""
    return 64.0 if bf16 else 1.0


@gluon.constexpr_function
def unpack_ptx(bf16, zeros, scaled):
    """PTX for 2 bytes $4 -> their low nibbles in $0, $1 and their high ones in $2, $3: (v - zero) / unit * scale as
    16-bit floats, each step rounded once. Zeros (as `zeros_twice` makes them) and scales, the last operands, are a
    number for the low and one for the high nibbles, each twice in 32 bits; without zeros: 8."""
    kind = "bf16x2" if bf16 else "f16x2"
    lines = [".reg .b32 t, low, high, a, b, c;", "cvt.u32.u16 t, $4;", "prmt.b32 t, t, 0, 0x4140;"]
    at = 5
    if bf16:
        less = ("$5", "$6") if zeros else ("c", "c")
        lines += [
            "mov.b32 a, 0x7f007f00;",  # 2^127
            "mov.b32 b, 0x7d007d00;",  # 2^123
            "mov.b32 c, 0xbe00be00;",  # -8 / 64
            "and.b32 low, t, 0x000f000f;",
            "and.b32 high, t, 0x00f000f0;",
            f"fma.rn.bf16x2 low, low, a, {less[0]};",
            f"fma.rn.bf16x2 high, high, b, {less[1]};",
        ]
    else:
        # -1024 and -1024 / 16, less 8 unless the zeros come by themselves.
        low, high = ("0xe400e400", "0xd400d400") if zeros else ("0xe408e408", "0xd480d480")
        lines += [
            f"mov.b32 a, {low};",
            "mov.b32 b, 0x2c002c00;",  # 1 / 16
            f"mov.b32 c, {high};",
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
        lines += [f"mul.rn.{kind} low, low, ${at};", f"mul.rn.{kind} high, high, ${at + 1};"]
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
def zeros_twice(x, BF16: gl.constexpr):
    """Zero points as `unpacked` takes them, each twice in 32 bits: of bfloat16, -x / 64."""
    if BF16:
        # bfloat16 has no multiplication by an immediate.
        ptx: gl.constexpr = "{ .reg .b32 x, f; mov.b32 x, {$1, $1}; mov.b32 f, 0xbc80bc80; mul.rn.bf16x2 $0, x, f; }"
        return gl.inline_asm_elementwise(ptx, "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return twice(x)


@gluon.jit
def _joined(even, odd, layout: gl.constexpr):
    """[rows, n] twice -> [rows, 2n], in turn, as wgmma's left operand: the same registers."""
    x = gl.reshape(gl.join(even, odd), [even.shape[0], 2 * even.shape[1]])
    return gl.convert_layout(x, layout)


@gluon.jit
def unpacked(q, zeros, scales, BF16: gl.constexpr, layout: gl.constexpr):
    """The low and the high nibbles of pairs of bytes q [rows, n], each [rows, 2n] of bfloat16 or float16.

    zeros, scales: those of the low and of the high nibbles, [rows, 1], as `zeros_twice` and `twice` make them; or ().
    bfloat16 weights come divided by `unit_of`."""
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
