"""Mxfp4Fp8Weight: what is exact, what is rounded, where bits lie, and what is refused."""

import io
import pickle
from dataclasses import replace

import pytest
import torch

import expertile as xt
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.formats.quantized import QuantizedWeight
from expertile.formats.weight_only import weight_of

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def weight(g=2, n=5, k=160, span=11, highest=130, seed=0) -> Mxfp4Weight:
    """Any codes; scales of a row up to 2^span apart."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (g, n, k), generator=gen, dtype=torch.uint8)
    below = torch.randint(0, span + 1, (g, n, k // 32), generator=gen)
    return Mxfp4Weight.of_codes(codes, (highest - below).to(torch.uint8))


@pytest.mark.parametrize("k", [32, 96, 128, 160, 512])
@pytest.mark.parametrize("highest", [11, 130, 254])
def test_exact_where_scales_of_a_row_are_at_most_2_to_the_11_apart(k, highest):
    w = weight(k=k, highest=highest)
    w8 = xt.Mxfp4Fp8Weight.of(w)
    assert torch.equal(w8.dequantize(torch.float32), w.dequantize(torch.float32))
    assert torch.equal(w8.dequantize(), w.dequantize()) and w8.dequantize().dtype is torch.bfloat16
    w8.check_numbers(torch.float8_e4m3fn)


def test_blocks_further_below_are_rounded_to_nearest():
    w = weight(n=400, span=20)
    given, got = w.dequantize(torch.float32), Mxfp4Fp8Weight.of(w).dequantize(torch.float32)
    assert not torch.equal(got, given)
    largest = torch.exp2(w.scale_bytes().float() - 127).amax(-1)[..., None]
    assert bool(((got - given).abs() <= largest * 2.0**-13).all())
    # To nearest of what the lowest exponent has, and each block that is no further below stays as it is.
    lowest = torch.cat([-VALUES, VALUES]) * 2.0**-11
    low = (w.scale_bytes().int() < w.scale_bytes().int().amax(-1, keepdim=True) - 11).repeat_interleave(32, -1)
    assert torch.equal(got[~low], given[~low])
    off = (given / largest)[low]
    nearest = (off[:, None] - lowest).abs().amin(-1)
    assert torch.equal(((got - given).abs() / largest)[low], nearest)


def test_blocks_of_zeros_do_not_count():
    codes = torch.full((1, 1, 64), 7, dtype=torch.uint8)
    codes[..., :32] = torch.tensor([0, 8]).repeat(16)
    for zeros, rest in ((200, 100), (1, 100)):
        w = Mxfp4Weight.of_codes(codes, torch.tensor([[[zeros, rest]]], dtype=torch.uint8))
        assert torch.equal(Mxfp4Fp8Weight.of(w).dequantize(torch.float32), w.dequantize(torch.float32))
    nothing = Mxfp4Weight.of_codes(codes[..., :32], torch.tensor([[[7]]], dtype=torch.uint8))
    assert bool((Mxfp4Fp8Weight.of(nothing).dequantize() == 0).all())


def test_e4m3_values_and_scales_of_rows_make_the_weights():
    w8 = Mxfp4Fp8Weight.of(weight())
    values, scales = w8.e4m3(), w8.row_scales()
    assert values.dtype is torch.float8_e4m3fn and scales.dtype is torch.float32 and scales.shape == (2, 5)
    assert torch.equal(values.float() * scales[..., None], w8.dequantize(torch.float32))
    assert float(values.float().abs().max()) <= 6 * 2.0**6


def test_bits_lie_where_the_module_says():
    """Each value and exponent read by the words of the documentation, and by no code of the package."""
    w = weight(g=1, n=3, k=192)
    w8 = Mxfp4Fp8Weight.of(w)
    words = w8.packed.view(torch.int32).long() & 0xFFFFFFFF
    got = torch.empty(w.shape)
    for k in range(192):
        block, place = k // 32, k % 32
        half, t, j = place // 16, place % 16 // 4, place % 4
        word = words[..., 4 * block + t]
        magnitude = word >> 16 * half + 4 * j & 7
        sign = word >> 8 * j + 7 - 4 * half & 1
        exponent = w8.scales[:, block // 4, :, block % 4].double()
        got[..., k] = VALUES[magnitude] * (1 - 2 * sign) * torch.exp2(exponent - 6)
    of_rows = w8.scales[:, -1].contiguous().view(torch.float32)
    assert torch.equal(got * of_rows, w.dequantize(torch.float32))


def test_kept_moved_and_pickled():
    w8 = Mxfp4Fp8Weight.of(weight())
    assert isinstance(w8, QuantizedWeight) and w8.shape == (2, 5, 160) and repr(w8).endswith("device=cpu)")
    assert w8.nbytes == 2 * 5 * (80 + 8 + 4)
    assert Mxfp4Fp8Weight.of(weight().to("meta")).scales.shape == w8.scales.shape
    assert w8.to("cpu") is w8 and w8.to("meta").device.type == "meta"
    file = io.BytesIO()
    torch.save(w8, file)
    file.seek(0)
    again = weight_of(*w8.parts)
    for other in (pickle.loads(pickle.dumps(w8)), torch.load(file, weights_only=True), again):
        assert torch.equal(other.packed, w8.packed) and torch.equal(other.scales, w8.scales)
    assert torch.equal(w8.part(1, 2).dequantize(), w8.dequantize()[1:])
    other, dense = Mxfp4Fp8Weight.of(weight(seed=1)), w8.dequantize()
    assert torch.equal(Mxfp4Fp8Weight.stack([w8, other]).dequantize(), torch.cat([dense, other.dequantize()]))
    assert torch.equal(Mxfp4Fp8Weight.cat_rows([w8, other]).dequantize(), torch.cat([dense, other.dequantize()], 1))
    with pytest.raises(ValueError, match="weights: expected at least one Mxfp4Fp8Weight, got none"):
        Mxfp4Fp8Weight.stack([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 100}, "K"),
        ({"packed": torch.zeros(2, 5, 64, dtype=torch.uint8)}, r"packed: expected uint8 \[G, N, 80\] for K = 160"),
        ({"packed": torch.zeros(2, 5, 80)}, r"packed: expected uint8 .* got torch.float32"),
        ({"scales": torch.zeros(2, 2, 5, 4, dtype=torch.uint8)}, r"scales: expected uint8 \[2, 3, 5, 4\]"),
        ({"scales": torch.zeros(2, 3, 5, 8, dtype=torch.uint8)[..., ::2]}, "scales: expected a contiguous tensor"),
        ({"scales": torch.zeros(2, 3, 5, 4, dtype=torch.uint8, device="meta")}, "scales: expected device cpu"),
    ],
)
def test_fields_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Mxfp4Fp8Weight.of(weight()), **change)


def test_numbers_that_no_weight_has_are_found_when_asked():
    w8 = Mxfp4Fp8Weight.of(weight())
    w8.scales[0, 0, 0, 0] = 13
    with pytest.raises(ValueError, match="scales: expected exponents from 1 to 12, got 1 others"):
        w8.check_numbers(torch.float8_e4m3fn)
    w8 = Mxfp4Fp8Weight.of(weight())
    w8.scales[1, -1, 2] = torch.tensor([float("nan")]).view(torch.uint8)
    with pytest.raises(ValueError, match="scales: expected finite ones of rows, got 1"):
        w8.check_numbers(torch.float8_e4m3fn)
