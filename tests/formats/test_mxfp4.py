"""Mxfp4Weight: every code and scale against a table of its own, rounding, other layouts and back, sizes, errors."""

import io
import math
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import expertile as xt
from expertile.formats.fp8 import QuantizedBuffers
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.quantized import QuantizedWeight
from expertile.formats.weight_only import WEIGHTS, weight_of

# OCP Microscaling Formats 1.0, table 5 (FP4, e2m1), as fractions; the sign is bit 3.
TABLE = [Fraction(x) for x in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
TABLE += [-x for x in TABLE]
LARGEST = Fraction(6)


def random(g=2, n=5, k=160, seed=0):
    gen = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (g, n, k // 32, 16), dtype=torch.uint8, generator=gen)
    return blocks, torch.randint(0, 255, (g, n, k // 32), dtype=torch.uint8, generator=gen)


def test_every_code_with_every_scale():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(1, 255, 32)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    got = Mxfp4Weight.of_codes(codes, scales).dequantize(torch.float64)[0]
    for scale in range(255):
        power = Fraction(2) ** (scale - 127)
        for i in range(32):
            want = TABLE[i % 16] * power
            # 6 · 2^127 and 4 · 2^127 are beyond float32, in which values are made.
            assert float(got[scale, i]) == (float(want) if abs(want) < 2**128 else math.copysign(math.inf, want))


def test_codes_lie_where_the_module_says():
    """One bit set of one value sets one bit of the row: the word, place and neighbour of the documentation."""
    places = [[15, 8, 7, 6], [21, 14, 13, 12], [11, 4, 3, 2], [9, 10, 1, 0]]
    for value in range(64):
        for bit in range(4):
            codes = torch.zeros(1, 1, 64, dtype=torch.uint8)
            codes[..., value] = 8 >> bit
            words = Mxfp4Weight.of_codes(codes, torch.full((1, 1, 2), 127, dtype=torch.uint8)).packed.view(torch.int32)
            half, sixteen, within = value // 32, value % 32 // 16, value % 16
            place = (places[2 * half + within // 8][bit] + 16 * (within % 2)) % 32
            want = torch.zeros(8, dtype=torch.int64)
            want[4 * sixteen + within % 8 // 2] = 1 << place
            assert torch.equal(words[0, 0].long() & 0xFFFFFFFF, want)


def nearest(x: Fraction) -> set[int]:
    """The magnitude's code to which OCP rounds: nearest, ties to the even code, saturating."""
    distances = [abs(abs(x) - v) for v in TABLE[:8]]
    found = [i for i, d in enumerate(distances) if d == min(distances)]
    return {min(found, key=lambda code: code % 2)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_rounding(numbers):
    w = Mxfp4Weight.quantize(torch.tensor(numbers).view(1, 1, 32))
    exact = [Fraction(x) for x in numbers]
    largest = max(map(abs, exact))
    scale = int(w.scale_bytes())
    if largest == 0:
        assert scale == 127
    else:
        exponent = math.frexp(float(largest))[1] - 1 - 2
        assert scale == max(0, exponent + 127)
    for x, code in zip(exact, w.codes()[0, 0].tolist(), strict=True):
        assert code & 7 in nearest(x / Fraction(2) ** (scale - 127))
        assert x == 0 or code >> 3 == (x < 0)


def test_ties_go_to_even_codes_and_large_values_saturate():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.99, 6.0, -0.25, -0.75, -7.5] + [0.0] * 20)
    got = Mxfp4Weight.quantize(x.view(1, 1, 32)).dequantize(torch.float32).flatten()
    assert got[:12].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, 0, -1, -6]


def test_what_is_representable_comes_back():
    blocks, scales = random()
    scales = scales.clamp(3, 250)
    blocks[..., 0] = 0x77  # a 6 in every block, so that its scale is found again
    w = Mxfp4Weight.from_blocks(blocks, scales)
    again = Mxfp4Weight.quantize(w.dequantize(torch.float32))
    assert torch.equal(again.scales, w.scales)
    assert torch.equal(again.dequantize(torch.float32), w.dequantize(torch.float32))


def test_error_of_normal_weights():
    w = torch.randn(1, 256, 1024, generator=torch.Generator().manual_seed(0))
    error = (Mxfp4Weight.quantize(w).dequantize(torch.float32) - w).norm() / w.norm()
    assert 0.113 < error < 0.117


@pytest.mark.parametrize("k", [32, 64, 96, 160, 256, 2880])
def test_blocks_and_back_bit_for_bit(k):
    blocks, scales = random(k=k)
    w = Mxfp4Weight.from_blocks(blocks, scales)
    assert w.shape == (2, 5, k)
    assert torch.equal(w.blocks(), blocks) and torch.equal(w.scale_bytes(), scales)
    # gpt-oss: the even value is the low nibble.
    assert torch.equal(w.codes()[..., ::2], blocks.flatten(2) & 15)
    assert torch.equal(w.codes()[..., 1::2], blocks.flatten(2) >> 4)
    assert torch.equal(Mxfp4Weight.from_blocks(blocks, scales.view(torch.float8_e8m0fnu)).scales, w.scales)


@pytest.mark.parametrize("k", [96, 256])
def test_compressed_tensors_and_back(k):
    blocks, scales = random(k=k)
    tensors = {"weight_packed": blocks[1].flatten(1), "weight_scale": scales[1]}
    one = Mxfp4Weight.from_compressed_tensors(tensors)
    w = Mxfp4Weight.from_blocks(blocks, scales)
    assert torch.equal(one.packed, w.packed[1:]) and torch.equal(one.scales, w.scales[1:])
    back = w.to_compressed_tensors(1)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], x) for name, x in tensors.items())


def test_sizes_are_true():
    w = Mxfp4Weight.quantize(torch.randn(3, 8, 256))
    assert w.nbytes * 8 == 4.25 * 3 * 8 * 256
    odd = Mxfp4Weight.quantize(torch.randn(3, 8, 96))
    assert odd.nbytes == 3 * 8 * (64 + 4) == odd.packed.nbytes + odd.scales.nbytes


def test_parts_stacks_and_rows():
    a, b = (Mxfp4Weight.quantize(torch.randn(2, 4, 96)) for _ in range(2))
    dense_a, dense_b = a.dequantize(), b.dequantize()
    assert dense_a.dtype == torch.bfloat16
    assert torch.equal(Mxfp4Weight.stack([a, b]).dequantize(), torch.cat([dense_a, dense_b]))
    assert torch.equal(Mxfp4Weight.cat_rows([a, b]).dequantize(), torch.cat([dense_a, dense_b], 1))
    part = a.part(1, 2)
    assert torch.equal(part.dequantize(), dense_a[1:]) and part.packed.data_ptr() == a.packed[1].data_ptr()
    with pytest.raises(ValueError, match="weights: expected at least one"):
        Mxfp4Weight.stack([])


@pytest.mark.parametrize("k", [96, 256])
def test_kept_moved_and_pickled(k):
    w = Mxfp4Weight.quantize(torch.randn(2, 4, k))
    assert w.to("cpu") is w and w.to("meta").device.type == "meta"
    assert Mxfp4Weight.quantize(torch.empty(2, 4, k, device="meta")).scales.shape == w.scales.shape
    copy = pickle.loads(pickle.dumps(w))
    held = QuantizedBuffers(w)
    empty = QuantizedBuffers(Mxfp4Weight.quantize(torch.zeros(2, 4, k)))
    file = io.BytesIO()
    torch.save({"w": w, **held.half().state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    empty.load_state_dict({name: loaded[name] for name in held.state_dict()})
    for other in (copy, loaded["w"], empty.weight, held.weight):
        assert isinstance(other, Mxfp4Weight) and other.shape == w.shape
        assert torch.equal(other.packed, w.packed) and torch.equal(other.scales, w.scales)
    assert repr(w) == f"Mxfp4Weight([2, 4, {k}], device=cpu)"


def test_the_protocol_is_that_of_both_formats():
    int4, mxfp4 = Int4Weight.quantize(torch.randn(2, 8, 128)), Mxfp4Weight.quantize(torch.randn(2, 8, 128))
    assert xt.Mxfp4Weight is Mxfp4Weight and set(WEIGHTS) == {"int4", "mxfp4", "mxfp4_fp8"}
    for w in (int4, mxfp4):
        assert isinstance(w, QuantizedWeight) and w.shape == (2, 8, 128)
        again = weight_of(*w.parts)
        assert type(again) is type(w) and torch.equal(again.dequantize(), w.dequantize())
        assert torch.equal(w.part(1, 2).dequantize(), w.dequantize()[1:])
        w.check_numbers(torch.bfloat16)


@pytest.mark.parametrize("dtype, largest", [(torch.bfloat16, 160), (torch.float16, 128)])
def test_scales_that_a_dtype_has_no_room_for(dtype, largest):
    blocks, scales = random(k=64)
    Mxfp4Weight.from_blocks(blocks, scales.clamp(max=largest)).check_numbers(dtype)
    scales[0, 0, 0] = largest + 1
    with pytest.raises(ValueError, match=r"scales: expected at most 2\^"):
        Mxfp4Weight.from_blocks(blocks, scales).check_numbers(dtype)


BLOCKS, SCALES = random()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Mxfp4Weight.quantize(torch.randn(2, 4, 80)), "K: expected a positive multiple of 32 .* got 80; pad"),
        (lambda: Mxfp4Weight.quantize(torch.randn(4)), r"w: expected a floating-point \[G, N, K\]"),
        (lambda: Mxfp4Weight.quantize(torch.ones(4, 32, dtype=torch.int8)), "w: expected a floating-point"),
        (lambda: Mxfp4Weight.quantize(torch.full((1, 32), math.nan)), "w: expected finite values, got NaN"),
        (lambda: Mxfp4Weight.quantize(torch.full((1, 32), math.inf)), "w: expected finite values, got NaN"),
        (lambda: Mxfp4Weight.from_blocks(BLOCKS.flatten(2), SCALES), r"blocks: expected uint8 \[G, N, K/32, 16\]"),
        (lambda: Mxfp4Weight.from_blocks(BLOCKS.int(), SCALES), "blocks: expected uint8 .* got torch.int32"),
        (lambda: Mxfp4Weight.from_blocks(BLOCKS, SCALES[..., :-1]), r"scales: expected uint8 \[2, 5, 5\]"),
        (lambda: Mxfp4Weight.from_blocks(BLOCKS, SCALES.float()), "scales: expected uint8 .* got torch.float32"),
        (
            lambda: Mxfp4Weight.from_blocks(BLOCKS, torch.full_like(SCALES, 255)),
            "scales: expected bytes below 255, which is e8m0's NaN, got 50 of them",
        ),
        (lambda: Mxfp4Weight.of_codes(BLOCKS, SCALES), r"codes: expected \[G, N, K\]"),
        (lambda: Mxfp4Weight(BLOCKS.flatten(2), SCALES, 160), r"packed: expected uint8 \[G, N, 96\] for K = 160"),
        (
            lambda: Mxfp4Weight(torch.zeros(2, 5, 96, dtype=torch.uint8), SCALES, 160),
            r"scales: expected uint8 \[2, 2, 5, 4\] .*from_blocks takes scales \[G, N, K/32\]",
        ),
        (
            lambda: Mxfp4Weight(torch.zeros(2, 96, 5, dtype=torch.uint8).mT, torch.zeros(2, 2, 5, 4).byte(), 160),
            "packed: expected a contiguous tensor",
        ),
        (lambda: Mxfp4Weight.from_compressed_tensors({"weight_scale": SCALES}), "weight_packed: expected a tensor"),
        (
            lambda: Mxfp4Weight.from_compressed_tensors({"weight_packed": BLOCKS, "weight_scale": SCALES}),
            r"weight_packed: expected uint8 \[N, K/2\]",
        ),
        (
            lambda: Mxfp4Weight.from_compressed_tensors(
                {"weight_packed": BLOCKS[0].flatten(1), "weight_scale": torch.full_like(SCALES[0], 255)}
            ),
            "weight_scale: expected bytes below 255",
        ),
    ],
)
def test_errors_are_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
