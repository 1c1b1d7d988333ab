"""What the formats refuse: each argument that does not fit is named, with what came."""

import pytest
import torch

from expertile.formats.fp8 import Fp8Blocks, QuantizedBuffers
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight

X = torch.randn(9, 128)
VALUES, SCALES = X.to(torch.float8_e4m3fn), torch.ones(9, 1)
OFFS = torch.tensor([4, 9], dtype=torch.int32)
INT4 = Int4Weight.quantize(X[None])
MXFP4 = Mxfp4Weight.quantize(X[None])
BLOCK = r"block: expected \(rows, columns\), integers of at least 1, got "
REFUSED = [
    (lambda: Int4Weight.quantize(None), r"w: expected a floating-point \[G, N, K\] or \[N, K\], got NoneType"),
    (lambda: Int4Weight.quantize(X, 64.0), "group_size: expected 32, 64, 128 or K = 128 .*, got 64.0"),
    (
        lambda: Int4Weight.quantize(X, dtype=torch.float32),
        "dtype: expected torch.bfloat16 or torch.float16, got torch.fl",
    ),
    (lambda: Int4Weight.quantize(X * 1e7, dtype=torch.float16), "w: expected scales of at most 65504 in torch.float16"),
    (lambda: Int4Weight.quantize(X * 1e7, 64, False, torch.float16), "w: expected scales of at most 65504 in torch.fl"),
    (
        lambda: Int4Weight.of_values(None, None, None, 64),
        r"values: expected \[G, N, K\] of integers 0 … 15, got NoneType",
    ),
    (lambda: Int4Weight(None, INT4.scales, None, 128), r"packed: expected uint8 \[G, N, K/2\], got NoneType"),
    (lambda: Int4Weight(INT4.packed, [1.0], None, 128), "scales: expected dtype .*, got list"),
    (lambda: Int4Weight(INT4.packed, INT4.scales, 8, 128), "zeros: expected torch.bfloat16 .* as scales, got int"),
    (lambda: INT4.dequantize(torch.int8), "dtype: expected a floating-point dtype, got torch.int8"),
    (lambda: Mxfp4Weight.quantize(None), r"w: expected a floating-point \[G, N, K\] or \[N, K\], got NoneType"),
    (lambda: Mxfp4Weight.of_codes([0], None), r"codes: expected \[G, N, K\] of integers 0 … 15, got list"),
    (lambda: Mxfp4Weight.from_blocks(None, None), r"blocks: expected uint8 \[G, N, K/32, 16\], got NoneType"),
    (lambda: Mxfp4Weight.from_blocks(MXFP4.blocks(), None), "scales: expected uint8 .*, got NoneType"),
    (lambda: Mxfp4Weight(None, MXFP4.scales, 128), r"packed: expected uint8 \[G, N, 64\] for K = 128, got NoneType"),
    (lambda: Mxfp4Weight(MXFP4.packed, None, 128), "scales: expected uint8 .*, got NoneType"),
    (lambda: Mxfp4Weight(MXFP4.packed, MXFP4.scales, None), "K: expected a positive multiple of 32 .*, got None"),
    (lambda: Mxfp4Fp8Weight.of(X), "w: expected an Mxfp4Weight, got Tensor"),
    (lambda: Fp8Blocks(None, SCALES), r"values: expected float8_e4m3fn \[..., R, C\], got NoneType"),
    (lambda: Fp8Blocks(X, SCALES), r"values: expected float8_e4m3fn .*, got torch.float32 \[9, 128\]"),
    (lambda: Fp8Blocks(VALUES[0], SCALES[0]), r"values: expected float8_e4m3fn .*, got torch.float8_e4m3fn \[128\]"),
    (lambda: Fp8Blocks(VALUES, SCALES.half()), r"scales: expected float32 \[9, 1\] .*, got torch.float16 \[9, 1\]"),
    (
        lambda: Fp8Blocks(VALUES, SCALES[:3]),
        r"scales: expected float32 \[9, 1\] for blocks of \(1, 128\), got .* \[3, 1\]",
    ),
    (lambda: Fp8Blocks(VALUES, SCALES.to("meta")), "scales: expected device cpu as values has, got meta"),
    (lambda: Fp8Blocks(VALUES, SCALES, (128, 128)), r"scales: expected float32 \[1, 1\] for blocks of \(128, 128\)"),
    *((lambda b=b: Fp8Blocks(VALUES, SCALES, b), BLOCK) for b in (None, 128, (0, 128), (1, 128, 1), (1.0, 128))),
    *((lambda b=b: Fp8Blocks.quantize(X, b), BLOCK) for b in (None, 128, (0, 128), (1, -1), (1,), ("a", 1))),
    (lambda: Fp8Blocks.quantize(None), r"x: expected a floating-point \[..., R, C\], got NoneType"),
    (lambda: Fp8Blocks.quantize(X.int()), r"x: expected a floating-point .*, got torch.int32 \[9, 128\]"),
    (lambda: Fp8Blocks.quantize_tokens(X[None], OFFS), r"x: expected a floating-point \[T, C\], got .* \[1, 9, 128\]"),
    (lambda: Fp8Blocks.quantize_tokens(X, None), r"offs: expected int32 \[G\] of at least one group, got NoneType"),
    (lambda: Fp8Blocks.quantize_tokens(X, OFFS[:0]), r"offs: expected int32 .*, got torch.int32 \[0\]"),
    (lambda: QuantizedBuffers(X), "weight: expected Fp8Blocks or a quantised weight, got Tensor"),
    (lambda: Int4Weight.stack([INT4, None]), "weights: expected each to be an Int4Weight, got NoneType"),
    (lambda: Int4Weight.stack([MXFP4]), "weights: expected each to be an Int4Weight, got Mxfp4Weight"),
    (
        lambda: Int4Weight.stack([INT4, Int4Weight.quantize(X[:3])]),
        "weights: expected one shape but for dimension 0, got",
    ),
    (
        lambda: Mxfp4Weight.cat_rows([MXFP4, Mxfp4Weight.quantize(X[:, :64])]),
        "weights: expected one shape but for dim.* 1",
    ),
    (lambda: Fp8Blocks(VALUES, SCALES).dequantize(None), "dtype: expected a floating-point dtype, got None"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_errors_are_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_list_of_two_is_a_block():
    assert Fp8Blocks.quantize(X, [1, 128]).block == (1, 128)


def test_int4_scales_that_the_dtype_holds_are_finite():
    w = Int4Weight.quantize(X / X.abs().max() * 7.5 * 65504, dtype=torch.float16)
    assert bool(torch.isfinite(w.scales).all()) and w.scales.max() == 65504
    small = torch.full((1, 128), 2.0**-15)
    for factor, left in ((0.99, False), (1.01, True)):
        assert bool(Int4Weight.quantize(small * factor, dtype=torch.float16).dequantize().any()) is left
