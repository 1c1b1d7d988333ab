"""Four bits -> 16-bit floating point in registers, for Triton kernels.

`0x4300 | v` is the bfloat16 128 + v, and `0x6400 | v` the float16 1024 + v: nibbles are masked out of a word of packed
bytes, the exponent is or-ed in, and a multiply-add with 1 (sm_80 has no sub.bf16x2) takes 128 + 8 or 1024 + 8 away,
exactly. A word's nibbles are 16 bits apart where their values are neighbours in K (`formats.int4.packing`). So each
mask finds the two of one register of a matrix product's operand, and the four registers of a word are one lane's.
"""

import triton
import triton.language as tl

# Low nibbles: values 2t, 2t + 1 of 16 are $0, $1, and 2t + 8, 2t + 9 are $2, $3. High ones likewise: $4 to $7.
_UNPACK = """{
    .reg .b32 a, b, c, d, one, off;
    mov.b32 one, ONE;
    mov.b32 off, OFFSET;
    shr.u32 b, $8, 8;
    shr.u32 c, $8, 4;
    shr.u32 d, $8, 12;
    lop3.b32 a, $8, 0x000f000f, EXPONENT, 0xea;
    lop3.b32 b, b, 0x000f000f, EXPONENT, 0xea;
    lop3.b32 c, c, 0x000f000f, EXPONENT, 0xea;
    lop3.b32 d, d, 0x000f000f, EXPONENT, 0xea;
    fma.rn.TYPE a, a, one, off;
    fma.rn.TYPE b, b, one, off;
    fma.rn.TYPE c, c, one, off;
    fma.rn.TYPE d, d, one, off;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    mov.b32 {$4, $5}, c;
    mov.b32 {$6, $7}, d;
}"""


def _of_type(type: str, exponent: str, one: str, offset: str) -> tl.constexpr:
    assembly = _UNPACK
    for name, value in (("TYPE", type), ("EXPONENT", exponent), ("ONE", one), ("OFFSET", offset)):
        assembly = assembly.replace(name, value)
    return tl.constexpr(assembly)


_BF16 = _of_type("bf16x2", "0x43004300", "0x3f803f80", "0xc308c308")
_FP16 = _of_type("f16x2", "0x64006400", "0x3c003c00", "0xe408e408")


@triton.constexpr_function
def _eight(dtype):
    return (dtype,) * 8


@triton.jit
def eight_of(q, BF16: tl.constexpr, FP16: tl.constexpr, DTYPE: tl.constexpr):
    """The eight numbers of DTYPE that the PTX BF16 or FP16 makes of each word."""
    PTX: tl.constexpr = BF16 if tl.bfloat16 == DTYPE else FP16
    TYPES: tl.constexpr = _eight(DTYPE)
    return tl.inline_asm_elementwise(PTX, "=h,=h,=h,=h,=h,=h,=h,=h,r", [q], is_pure=True, pack=1, dtype=TYPES)


@triton.jit
def in_order(a, b, c, d):
    """Values 2t, 2t + 1, 2t + 8, 2t + 9 of every 16, each [N, words] with t the word's number of 4 -> [N, 4 words] in
    the order of K."""
    ROWS: tl.constexpr = a.shape[0]
    WORDS: tl.constexpr = a.shape[1]
    x = tl.join(tl.join(a, b), tl.join(c, d)).reshape(ROWS, WORDS // 4, 4, 2, 2)  # [.., t, 1 further, 8 further]
    return tl.permute(x, (0, 1, 4, 2, 3)).reshape(ROWS, 4 * WORDS)


@triton.jit
def side_by_side(a, b, c, d):
    """The same [N, words] -> [N, 4 words], a word's four values side by side: 2t, 2t + 1, 2t + 8, 2t + 9 of 16."""
    x = tl.join(tl.join(a, c), tl.join(b, d))  # [.., 8 further, 1 further]
    return x.reshape(a.shape[0], 4 * a.shape[1])


@triton.jit
def by_word(x):
    """[K, M] -> the same rows in the order of `side_by_side`'s columns."""
    K: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    return tl.permute(x.reshape(K // 16, 2, 4, 2, M), (0, 2, 1, 3, 4)).reshape(K, M)


@triton.jit
def unpack(q, DTYPE: tl.constexpr, BY_WORD: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Words of packed bytes, int32 [N, words] -> (low nibbles − 8, high nibbles − 8), each [N, 4 words] of DTYPE,
    exactly: in the order of K, or BY_WORD in that of `by_word`. Without ASSEMBLY, which the interpreter doesn't know,
    in plain Triton."""
    if not ASSEMBLY:
        a, b = _nibble(q, 0, DTYPE), _nibble(q, 16, DTYPE)
        c, d = _nibble(q, 8, DTYPE), _nibble(q, 24, DTYPE)
        e, f = _nibble(q, 4, DTYPE), _nibble(q, 20, DTYPE)
        g, h = _nibble(q, 12, DTYPE), _nibble(q, 28, DTYPE)
    else:
        a, b, c, d, e, f, g, h = eight_of(q, _BF16, _FP16, DTYPE)
    if BY_WORD:
        return side_by_side(a, b, c, d), side_by_side(e, f, g, h)
    else:
        return in_order(a, b, c, d), in_order(e, f, g, h)


@triton.jit
def _nibble(q, AT: tl.constexpr, DTYPE: tl.constexpr):
    return (((q >> AT) & 15).to(tl.float32) - 8.0).to(DTYPE)


@triton.jit
def shifted(w, zero, DTYPE: tl.constexpr):
    """w = q − 8 -> q − zero; exact for whole zero points."""
    return w + (8.0 - zero.to(tl.float32)).to(DTYPE)[:, None]
