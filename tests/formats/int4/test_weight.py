from dataclasses import replace

import pytest
import torch

from expertile.formats.int4 import Int4Weight

G, N, K = 3, 24, 256


def weights(seed=0):
    return torch.randn(G, N, K, generator=torch.Generator().manual_seed(seed))


def int4(**changes):
    w = Int4Weight.quantize(weights(), 64, symmetric=False)
    return replace(w, **changes)


@pytest.mark.parametrize("group, error", [(32, 0.095), (64, 0.103), (128, 0.111), (None, 0.119)])
def test_errors_are_as_stated(group, error):
    w = weights()
    got = Int4Weight.quantize(w, group)
    assert got.zeros is None and got.shape == (G, N, K) and got.group_size == (group or K)
    assert (got.dequantize(torch.float32) - w).norm() / w.norm() == pytest.approx(error, rel=0.04)
    with_zeros = Int4Weight.quantize(w, group, symmetric=False).dequantize(torch.float32)
    assert (with_zeros - w).norm() < (got.dequantize(torch.float32) - w).norm()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_off_by_half_a_step_at_most(symmetric, dtype):
    w = weights().abs() + 3 if not symmetric else weights()
    got = Int4Weight.quantize(w.to(dtype), 32, symmetric)
    assert got.dtype == dtype
    step = got.scales.float().transpose(1, 2).repeat_interleave(32, -1)
    # The stored scale is rounded, so the last value may be 15/2 roundings short.
    assert (
        (got.dequantize(torch.float32) - w.to(dtype).float()).abs() <= step * (0.5 + 8 * torch.finfo(dtype).eps)
    ).all()


def test_bytes_are_told_truthfully():
    w = torch.zeros(2, 64, 1024, dtype=torch.bfloat16)
    dense = w.numel() * 2
    assert dense / Int4Weight.quantize(w, 128).nbytes == pytest.approx(3.879, abs=1e-3)
    assert dense / Int4Weight.quantize(w, 128, symmetric=False).nbytes == pytest.approx(3.765, abs=1e-3)
    assert dense / Int4Weight.quantize(w, 32).nbytes == pytest.approx(3.556, abs=1e-3)
    assert Int4Weight.quantize(w, 128).nbytes == 2 * 64 * (512 + 8 * 2)


@pytest.mark.parametrize("k, group", [(256, 128), (256, 64), (256, 32), (256, None), (192, 64), (192, None)])
def test_values_and_dequantize_by_the_definition(k, group):
    w = Int4Weight.quantize(torch.randn(2, 16, k), group, symmetric=False)
    q, size = w.values(), w.group_size
    got = w.dequantize()
    assert got.dtype == torch.bfloat16
    for g, n, i in [(0, 0, 0), (1, 15, k - 1), (0, 7, 33), (1, 3, 64), (0, 9, k // 2)]:
        zero, scale = w.zeros[g, i // size, n].float(), w.scales[g, i // size, n].float()
        assert got[g, n, i] == ((q[g, n, i].float() - zero) * scale).bfloat16()
    again = Int4Weight.of_values(q, w.scales, w.zeros, size)
    assert torch.equal(again.packed, w.packed)


def test_zeros_and_nan():
    w = torch.zeros(1, 2, 64)
    w[0, 1, 3] = float("nan")
    got = Int4Weight.quantize(w, 64)
    assert (got.dequantize()[0, 0] == 0).all() and got.scales[0, 0, 0] == 1
    assert got.scales[0, 0, 1].isnan()


def test_one_matrix_is_one_expert():
    assert Int4Weight.quantize(torch.randn(N, K)).shape == (1, N, K)


def test_to():
    w = int4()
    half = w.to(dtype=torch.float16)
    assert half.scales.dtype == half.zeros.dtype == torch.float16 and torch.equal(half.zeros.float(), w.zeros.float())
    assert w.to("cpu") is w and w.to("meta").device.type == "meta"


def test_stack_and_cat_rows():
    a, b = Int4Weight.quantize(weights(0)), Int4Weight.quantize(weights(1))
    both = Int4Weight.stack([a, b])
    assert torch.equal(both.dequantize(), torch.cat([a.dequantize(), b.dequantize()]))
    rows = Int4Weight.cat_rows([a, b])
    assert torch.equal(rows.dequantize(), torch.cat([a.dequantize(), b.dequantize()], 1))
    assert torch.equal(a.with_zeros().dequantize(), a.dequantize())
    with pytest.raises(ValueError, match="weights: expected one .group_size, symmetric, dtype of scales"):
        Int4Weight.stack([a, Int4Weight.quantize(weights(), 32)])
    with pytest.raises(ValueError, match="weights: expected at least one Int4Weight, got none"):
        Int4Weight.stack([])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"group_size": 48}, "group_size: expected 32, 64, 128 or K = 256 .per channel., got 48"),
        ({"group_size": 128}, r"scales: expected shape \[3, 2, 24\] \(G, K/group_size, N\), got \[3, 4, 24\]"),
        ({"packed": torch.zeros(3, 24, 128)}, "packed: expected uint8 .*, got torch.float32"),
        ({"packed": torch.zeros(3, 24, 100, dtype=torch.uint8)}, "K: expected a positive multiple of 64 .*, got 200"),
        (
            {"scales": torch.zeros(3, 4, 24)},
            "scales: expected dtype torch.bfloat16 or torch.float16, got torch.float32",
        ),
        ({"zeros": torch.zeros(3, 4, 24)}, "zeros: expected torch.bfloat16 .* as scales, got torch.float32"),
        ({"scales": torch.zeros(3, 24, 4).bfloat16().mT}, "scales: expected a contiguous tensor, got strides"),
        ({"scales": torch.zeros(3, 4, 24, device="meta").bfloat16()}, "scales: expected device cpu as packed has"),
    ],
)
def test_errors_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        int4(**changes)


@pytest.mark.parametrize(
    "w, group, message",
    [
        (torch.zeros(2, 96), 32, "K: expected a positive multiple of 64 .*, got 96; pad"),
        (torch.zeros(2, 192), 128, "group_size: expected a divisor of K = 192, got 128; 32 and 64 always"),
        (torch.zeros(2, 128, dtype=torch.int8), 32, "w: expected a floating-point .*, got torch.int8"),
        (torch.zeros(128), 32, r"w: expected .* got torch.float32 \[128\]"),
    ],
)
def test_what_quantize_refuses(w, group, message):
    with pytest.raises(ValueError, match=message):
        Int4Weight.quantize(w, group)


def test_values_that_four_bits_do_not_hold_are_refused():
    scales = torch.ones(1, 1, 2)
    for value in (16, -1, 2.5):
        with pytest.raises(ValueError, match=f"values: expected integers 0 … 15, got {value}"):
            Int4Weight.of_values(torch.full((1, 2, 64), value), scales, None, 64)


def test_two_weights_compare_without_a_sum_over_their_elements():
    weight = Int4Weight.quantize(torch.randn(1, 2, 64), 64)
    assert weight == weight and weight != Int4Weight.quantize(torch.randn(1, 2, 64), 64)
