"""Device code of `gluon_w4a8`: packed 4-bit weights -> e4m3 in wgmma's register operand.

Of 32 values of a row, lane t of four holds 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3, each four in one register.

MXFP4 (`formats.mxfp4_fp8` says where the bits lie): the three bits of a magnitude select one of eight bytes. These are
the e4m3 codes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times the block's power of two.
Two multiply-adds make them of the block's exponent.
7 instructions for 8 values: 2 permutations, 2 shifts, 3 logic operations; and 3 for the table of a row's 32 values.

INT4 (`formats.int4.packing`): a nibble q is the e4m3 number q / 512 (subnormal numbers and those of the first binade
lie on one line), so |q - 8| is too, and exact. Packed bytes lie as 16-bit products take them: a lane needs half of two
words, which one permutation brings together. 11 instructions for 8 values: 3 permutations, 2 shifts, 4 logic operations
and 2 additions. Sums are multiplied by 512 (`UNIT_OF_INT4`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertile.ops.hopper.columns import beside, pieces
from expertile.ops.weight_only_mm.backends._gluon_unpack import packed_layout

UNIT_OF_INT4: gl.constexpr = gl.constexpr(512.0)

# Bytes of a block's exponent $1 -> the first and the last four of its table; 0 stays 0, 0.5 has the exponent itself.
_LOW_TABLE: gl.constexpr = gl.constexpr("mad.lo.u32 $0, $1, 0x08080800, 0x0c080000;")
_HIGH_TABLE: gl.constexpr = gl.constexpr("mad.lo.u32 $0, $1, 0x08080808, 0x1c181410;")

# Registers $0, $1 of a word $2 by the table $3, $4.
_UNPACK_MXFP4: gl.constexpr = gl.constexpr(
    "{ .reg .b32 i, h; and.b32 i, $2, 0x77777777; and.b32 h, $2, 0x80808080; prmt.b32 $0, $3, $4, i;"
    " or.b32 $0, $0, h; shr.b32 i, i, 16; shl.b32 h, $2, 4; and.b32 h, h, 0x80808080; prmt.b32 $1, $3, $4, i;"
    " or.b32 $1, $1, h; }"
)


@gluon.constexpr_function
def _exponent_ptx(block):
    """PTX for a word $1 -> its byte number `block`."""
    return f"prmt.b32 $0, $1, 0, 0x444{block};"


@gluon.constexpr_function
def _unpack_int4_ptx(high):
    """PTX for a register $1 of bytes -> e4m3 of their low or high nibbles less 8, in $0. Bytes of n are 255 where the
    nibble is 8 or more, else 0."""
    signs, magnitudes = ("mov.b32 s, $1;", "shr.b32 m, $1, 4;") if high else ("shl.b32 s, $1, 4;", "mov.b32 m, $1;")
    return (
        "{ .reg .b32 s, m, n; "
        + signs
        + magnitudes
        + " prmt.b32 n, s, 0, 0xba98; lop3.b32 m, m, n, 0x07070707, 0x82; lop3.b32 n, n, 0x81818181, 0, 0x0c;"
        + " add.u32 $0, m, n; }"
    )


@gluon.constexpr_function
def _bytes_layout():
    """[64, 4, 4]: rows, lanes of four, and the bytes of a register."""
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4])


@gluon.constexpr_function
def rows_layout():
    """One number for each row, where `_bytes_layout` has that row."""
    return gl.SliceLayout(1, gl.SliceLayout(2, _bytes_layout()))


@gluon.jit
def _exponent(words, BLOCK: gl.constexpr):
    return gl.inline_asm_elementwise(_exponent_ptx(BLOCK), "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _table(exponents, PTX: gl.constexpr):
    table = gl.inline_asm_elementwise(PTX, "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1)
    return gl.expand_dims(table, 1)


@gluon.constexpr_function
def _two_words():
    return (gl.int32, gl.int32)


@gluon.jit
def _e4m3(x, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Registers x [..., 1] as the four e4m3 numbers that each holds: SHAPE, [..., 4]. Free."""
    x = x + gl.zeros(SHAPE, gl.int32, layout)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _block_of_mxfp4(q, scales, BLOCK: gl.constexpr):
    """Words q [64, 4] of block number BLOCK of their 128 values -> registers of its first and of its last 16 values,
    each [64, 4]. scales: words of four exponents."""
    exponents = _exponent(scales, BLOCK)
    return gl.inline_asm_elementwise(
        _UNPACK_MXFP4,
        "=&r,=&r,r,r,r",
        [q, _table(exponents, _LOW_TABLE), _table(exponents, _HIGH_TABLE)],
        dtype=_two_words(),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _half_operand(a, b):
    a = _e4m3(gl.expand_dims(a, 2), [64, 4, 4], _bytes_layout())
    b = _e4m3(gl.expand_dims(b, 2), [64, 4, 4], _bytes_layout())
    return gl.reshape(gl.permute(gl.join(a, b), (0, 3, 1, 2)), [64, 32])


@gluon.jit
def words_of_mxfp4(w, SLAB: gl.constexpr):
    """Shared memory w [64, 16] words -> the words of values 64 SLAB to 64 SLAB + 63 of 128: [64, 8]."""
    return w.slice(SLAB * 8, 8, 1).load(packed_layout(64, 32))


@gluon.jit
def unpacked_mxfp4(words, scales, SLAB: gl.constexpr, layout: gl.constexpr):
    """`words_of_mxfp4` -> e4m3 [64, 64]. scales: a word of four exponents for each row, in `rows_layout`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _bytes_layout())
    first, second = pieces(words, 2)
    a, b = _block_of_mxfp4(gl.convert_layout(first, LAYOUT), scales, 2 * SLAB)
    c, d = _block_of_mxfp4(gl.convert_layout(second, LAYOUT), scales, 2 * SLAB + 1)
    return gl.convert_layout(beside(_half_operand(a, b), _half_operand(c, d)), layout)


@gluon.constexpr_function
def _halves_layout():
    """[64, 16] words: a lane has two neighbours of each four, which lanes two further have too."""
    lanes = [[0, 2], [0, 0], [1, 0], [2, 0], [4, 0]]
    registers = [[0, 1], [8, 0], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 16])


@gluon.constexpr_function
def _places_layout():
    """[64, 4, 2, 2, 4]: rows, 16 values, their first or last 8, of these the first or last 4, and the bytes of a
    register."""
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [8, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    warps = [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 4, 2, 2, 4])


@gluon.jit
def words_of_int4(w):
    """Shared memory w [64, 16] words -> their bytes, in the order of K, four in a register: [64, 4, 2, 2]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(4, _places_layout())
    q = gl.reshape(w.load(_halves_layout()), [64, 4, 2, 2])
    even, odd = gl.split(q)
    even = gl.expand_dims(gl.convert_layout(even, gl.SliceLayout(2, LAYOUT)), 2)
    odd = gl.expand_dims(gl.convert_layout(odd, gl.SliceLayout(2, LAYOUT)), 2)
    # Bytes 0 and 2 of a word are of the first 8 of 16 values, bytes 1 and 3 of the last.
    place = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    place = gl.expand_dims(gl.expand_dims(gl.expand_dims(place, 0), 1), 3)
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [even, odd, 0x6420 + place * 0x1111],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpacked_int4(words, HIGH: gl.constexpr, layout: gl.constexpr):
    """The low nibbles of `words_of_int4` (values 0 to 63 of 128) or the high ones (64 to 127), less 8 and divided by
    UNIT_OF_INT4: e4m3 [64, 64]."""
    x = gl.inline_asm_elementwise(_unpack_int4_ptx(HIGH), "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)
    x = _e4m3(gl.expand_dims(x, 4), [64, 4, 2, 2, 4], _places_layout())
    return gl.convert_layout(gl.reshape(x, [64, 64]), layout)
