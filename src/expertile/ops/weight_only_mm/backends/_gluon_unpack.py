"""Device code of `gluon_int4` for INT4: packed nibbles -> wgmma's register operand.

wgmma wants two neighbours in K in each register of its left operand, and of 16 values of a row a lane has two such
registers: values 2t, 2t + 1 and 2t + 8, 2t + 9. Packed bytes lie so (`formats.int4.packing`) that one word has both,
and both of the high nibbles' operand: ldmatrix brings a lane its words, a mask finds the two nibbles of a register, and
the same mask those of the other one 8 bits higher. Nibbles are turned into numbers where they lie: 1 shift, 4 logic
operations and 4 additions or fused multiply-adds for 8 values, and no permutation.

bfloat16: alone in the low byte of one, a nibble v is a number already: v / 2^133 in bits 0 to 3, and v / 2^129 in bits
4 to 7, whose highest is the exponent's last: subnormal numbers and those of the first binade lie on one line. A fused
multiply-add by 2^127 or 2^123 makes both (v - zero) / 64, exactly for whole zeros. 2^133 itself is no bfloat16: the
sum of a tile is multiplied by 64 (`unit_of`). Scales stay as they are, so none overflows; a scaled weight below 2^-120
rounds to a multiple of 2^-127.

Without zero points a scale comes into the same fused multiply-add ("fused"): v / 2^133 times scale 2^101, or v / 2^129
times scale 2^97, less 8 scale / 2^32. So scales must be below 2^27 in magnitude (2^128 is infinite), and sums are
multiplied by 2^32. A weight is rounded once, as `Int4Weight.dequantize` rounds it, down to scales of 2^-94: below, its
last digits are those of subnormal numbers.

float16: put into the low bits of 1024 (0x6400), whose last bit is worth 1, v is 1024 + v in bits 0 to 3, of which an
addition takes 1024 and the zero, and 1024 + 16 v in bits 4 to 7, which a fused multiply-add also divides by 16. Exact.
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def unit_of(bf16, fused):
    """What sums of products with unpacked weights are to be multiplied by."""
    return 2.0**32 if fused else 64.0 if bf16 else 1.0


@gluon.constexpr_function
def unpack_ptx(bf16, zeros, scales):
    """PTX for a word $8 of packed bytes -> the low nibbles of values 2t, 2t + 1 ($0, $1) and 2t + 8, 2t + 9 ($2, $3) of
    16 and their high ones ($4 to $7): (v - zero) / unit * scale as 16-bit floats, each step rounded once. Zeros (as
    `zeros_twice` makes them) and scales, the last operands, are a number for the low and one for the high nibbles, each
    twice in 32 bits; without zeros: 8. Four scales are those of `fused_scales`."""
    kind = "bf16x2" if bf16 else "f16x2"
    lines = [".reg .b32 x, l, m, h, i, e, f, g;", "shr.b32 x, $8, 8;"]
    # Registers of the low nibbles, then of the high ones, and the words they are taken from.
    halves = ((("l", "$8"), ("m", "x")), (("h", "$8"), ("i", "x")))
    masks = ("0x000f000f", "0x00f000f0")
    if not bf16:
        # -1024 and -1024 / 16, less 8 unless the zeros come by themselves; 1 / 16.
        constants = ("0xe400e400", "0xd400d400") if zeros else ("0xe408e408", "0xd480d480")
        lines += [f"mov.b32 e, {constants[0]};", f"mov.b32 f, {constants[1]};", "mov.b32 g, 0x2c002c00;"]
    elif scales != 4:
        # 2^127, 2^123 and -8 / 64.
        lines += ["mov.b32 e, 0x7f007f00;", "mov.b32 f, 0x7d007d00;", "mov.b32 g, 0xbe00be00;"]
    for high in range(2):
        for to, word in halves[high]:
            if not bf16:
                lines.append(f"lop3.b32 {to}, {word}, {masks[high]}, 0x64006400, 0xea;")
                lines.append(f"fma.rn.f16x2 {to}, {to}, g, f;" if high else f"add.rn.f16x2 {to}, {to}, e;")
                if zeros:
                    lines.append(f"sub.rn.f16x2 {to}, {to}, ${9 + high};")
            else:
                lines.append(f"and.b32 {to}, {word}, {masks[high]};")
                if scales == 4:
                    lines.append(f"fma.rn.bf16x2 {to}, {to}, ${9 + 2 * high}, ${10 + 2 * high};")
                else:
                    less = f"${9 + high}" if zeros else "g"
                    lines.append(f"fma.rn.bf16x2 {to}, {to}, {'ef'[high]}, {less};")
            if scales == 2:
                lines.append(f"mul.rn.{kind} {to}, {to}, ${(11 if zeros else 9) + high};")
    lines += ["mov.b32 {$0, $1}, l;", "mov.b32 {$2, $3}, m;", "mov.b32 {$4, $5}, h;", "mov.b32 {$6, $7}, i;"]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _eight(dtype):
    return (dtype,) * 8


@gluon.constexpr_function
def _constraints(operands):
    """Eight results, and one register for each of the operands."""
    return "=h,=h,=h,=h,=h,=h,=h,=h" + ",r" * operands


@gluon.constexpr_function
def packed_layout(rows, slab):
    """How a warpgroup holds [rows, slab / 4] words of packed bytes, so that its registers become those of wgmma
    operands [rows, slab]: a lane has every fourth word of rows 8 apart."""
    registers = [[8, 0]]
    words = 4
    while words < slab // 4:
        registers.append([0, words])
        words *= 2
    if rows == 128:
        registers.append([64, 0])
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, slab // 4])


@gluon.constexpr_function
def rows_of(mma_layout):
    """Rows of a that a product takes: those of a tile, or half of them."""
    return mma_layout.instr_shape[1]


@gluon.constexpr_function
def half_layout(mma_layout):
    """The layout of products with half as many rows of a."""
    of_w, of_a, k = mma_layout.instr_shape
    return gl.NVMMADistributedLayout(mma_layout.version, mma_layout.warps_per_cta, [of_w, of_a // 2, k])


@gluon.jit
def twice(x):
    """16-bit floats, each twice in 32 bits."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _times_ptx(bits):
    """PTX for a bfloat16 $1 -> its product with the bfloat16 of these bits, twice in $0. (bfloat16 has no
    multiplication by an immediate.)"""
    return "{ .reg .b32 x, f; mov.b32 x, {$1, $1}; mov.b32 f, " + bits + bits[2:] + "; mul.rn.bf16x2 $0, x, f; }"


@gluon.jit
def _times(x, BITS: gl.constexpr):
    ptx: gl.constexpr = _times_ptx(BITS)
    return gl.inline_asm_elementwise(ptx, "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def zeros_twice(x, BF16: gl.constexpr):
    """Zero points as `unpacked` takes them, each twice in 32 bits: of bfloat16, -x / 64."""
    return _times(x, "0xbc80") if BF16 else twice(x)


@gluon.jit
def fused_scales(low, high):
    """bfloat16 scales of the low and of the high nibbles -> of each what the nibbles are multiplied by (scale times
    2^101 or 2^97) and what is added then (-8 scale / 2^32), each twice in 32 bits."""
    return _times(low, "0x7200"), _times(low, "0xb100"), _times(high, "0x7000"), _times(high, "0xb100")


@gluon.jit
def joined(a, b, c, d, layout: gl.constexpr):
    """Values 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16, each [rows, n] -> [rows, 4n] in the order of K, as wgmma's left
    operand: the same registers."""
    ROWS: gl.constexpr = a.shape[0]
    WORDS: gl.constexpr = a.shape[1]
    x = gl.join(gl.join(a, b), gl.join(c, d))  # [.., 1 further, 8 further]
    x = gl.permute(gl.reshape(x, [ROWS, WORDS // 4, 4, 2, 2]), (0, 1, 4, 2, 3))
    return gl.convert_layout(gl.reshape(x, [ROWS, 4 * WORDS]), layout)


@gluon.jit
def by_ptx(PTX: gl.constexpr, operands, BF16: gl.constexpr, layout: gl.constexpr):
    """The first four ($0 to $3) and the last four ($4 to $7) of the eight values that PTX makes of each word, `joined`.
    Operands: the words [rows, n], then numbers [rows, 1]."""
    types: gl.constexpr = _eight(gl.bfloat16 if BF16 else gl.float16)
    constraints: gl.constexpr = _constraints(len(operands))
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(PTX, constraints, operands, dtype=types, is_pure=True, pack=1)
    return joined(a, b, c, d, layout), joined(e, f, g, h, layout)


@gluon.jit
def unpacked(q, zeros, scales, BF16: gl.constexpr, layout: gl.constexpr):
    """The low and the high nibbles of words of packed bytes q [rows, n], each [rows, 4n] of bfloat16 or float16.

    zeros, scales: those of the low and of the high nibbles, [rows, 1], as `zeros_twice` and `twice` make them; or ().
    Scales of bfloat16 without zeros may also be those of `fused_scales`.
    bfloat16 weights come divided by `unit_of`."""
    ZEROS: gl.constexpr = len(zeros) > 0
    SCALES: gl.constexpr = len(scales)
    return by_ptx(unpack_ptx(BF16, ZEROS, SCALES), (q,) + zeros + scales, BF16, layout)
