import pytest
import torch

from expertile.formats.int4 import Int4Weight
from expertile.formats.int4.qweight import from_gptq, to_gptq
from tests.formats.int4.layers import dense, gptq, random_layer, same


@pytest.mark.parametrize("version, low", [(1, 1), (2, 0)])
@pytest.mark.parametrize("k, group", [(256, 128), (256, 32), (192, 64), (192, 192)])
def test_bit_exact_both_ways(version, low, k, group):
    layer = random_layer(24, k, group, low=low)
    tensors = gptq(*layer, version)
    w = from_gptq(tensors, version=version)
    assert w.shape == (1, 24, k) and w.group_size == group and w.dtype == torch.float16
    assert torch.equal(w.values()[0], layer[0].to(torch.uint8))
    assert torch.equal(w.dequantize(torch.float32)[0], dense(*layer))
    same(to_gptq(w, version=version), tensors)


def test_zero_points_of_version_1_do_not_wrap():
    q, scale, _ = random_layer(8, 64, 64)
    zero = torch.full_like(scale, 16).long()
    w = from_gptq(gptq(q, scale, zero))
    assert (w.zeros == 16).all()
    with pytest.raises(ValueError, match="zeros: expected 0 … 15 for GPTQ version 2, got 16 … 16"):
        to_gptq(w, version=2)


def test_eights_are_symmetric():
    q, scale, zero = random_layer(8, 128, 64, low=8, high=8)
    tensors = gptq(q, scale, zero)
    w = from_gptq(tensors)
    assert w.zeros is None
    same(to_gptq(w), tensors)


def test_an_order_is_refused_and_a_missing_one_is_plain():
    layer = random_layer(8, 128, 64)
    tensors = gptq(*layer, 2)
    order = {**tensors, "g_idx": tensors["g_idx"].flip(0)}
    with pytest.raises(ValueError, match="g_idx: expected groups in order along K, got an activation order"):
        from_gptq(order, version=2)
    del tensors["g_idx"]
    assert torch.equal(from_gptq(tensors, version=2).dequantize(torch.float32)[0], dense(*layer))


def test_scales_of_another_dtype():
    tensors = gptq(*random_layer(8, 128, 64), 2)
    assert from_gptq(tensors, version=2, dtype=torch.bfloat16).dtype == torch.bfloat16
    tensors["scales"] = tensors["scales"].float()
    with pytest.raises(ValueError, match="dtype: expected bfloat16 or float16 for scales stored as torch.float32"):
        from_gptq(tensors, version=2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"qweight": None}, "qweight: expected a tensor of that name, got only g_idx, qzeros, scales"),
        ({"qweight": lambda x: x.long()}, "qweight: expected dtype torch.int32, got torch.int64"),
        ({"scales": lambda x: x[:, :5]}, r"scales: expected shape \[2, 8\] .*, got \[2, 5\]"),
        ({"qzeros": lambda x: x.t()}, r"qzeros: expected shape \[2, 1\] .*, got \[1, 2\]"),
        ({"g_idx": lambda x: x[:7]}, r"g_idx: expected shape \[128\]"),
    ],
)
def test_errors_name_the_tensor(changes, message):
    tensors = gptq(*random_layer(8, 128, 64), 2)
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        from_gptq(tensors, version=2)


def test_what_cannot_be_written():
    w = Int4Weight.quantize(torch.randn(12, 64), 64)
    with pytest.raises(ValueError, match="weight: expected N to be a multiple of 8 .*, got 12"):
        to_gptq(w)
    w = Int4Weight.of_values(torch.zeros(1, 8, 64), torch.ones(1, 1, 8).half(), torch.full((1, 1, 8), 7.5).half(), 64)
    with pytest.raises(ValueError, match="zeros: expected whole numbers"):
        to_gptq(w)
    with pytest.raises(ValueError, match="version: expected 1 .* or 2 .*, got 3"):
        to_gptq(w, version=3)
