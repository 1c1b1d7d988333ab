import pytest
import torch

from expertile.formats.int4.compressed_tensors import from_compressed_tensors, to_compressed_tensors
from tests.formats.int4.layers import compressed, dense, random_layer, same


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("n, k, group", [(24, 256, 128), (24, 256, 32), (13, 192, 64), (24, 192, 192)])
def test_bit_exact_both_ways(n, k, group, symmetric):
    q, scale, zero = random_layer(n, k, group, dtype=torch.bfloat16)
    tensors = compressed(q, scale, None if symmetric else zero)
    w = from_compressed_tensors(tensors)
    assert w.shape == (1, n, k) and w.group_size == group and (w.zeros is None) == symmetric
    want = dense(q, scale, torch.full_like(zero, 8) if symmetric else zero)
    assert torch.equal(w.dequantize(torch.float32)[0], want)
    same(to_compressed_tensors(w), tensors)


def test_zero_points_that_are_not_packed():
    """Signed, as earlier versions of the library kept them."""
    q, scale, zero = random_layer(16, 128, 64)
    w = from_compressed_tensors({**compressed(q, scale), "weight_zero_point": (zero - 8).to(torch.int8)})
    assert torch.equal(w.dequantize(torch.float32)[0], dense(q, scale, zero))


def test_orders():
    tensors = compressed(*random_layer(16, 128, 64))
    plain = from_compressed_tensors(tensors)
    unset = from_compressed_tensors({**tensors, "weight_g_idx": torch.full((128,), -1, dtype=torch.int32)})
    assert torch.equal(plain.packed, unset.packed)
    with pytest.raises(ValueError, match="weight_g_idx: expected groups in order along K"):
        from_compressed_tensors({**tensors, "weight_g_idx": torch.arange(128) % 2})


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("weight_shape", torch.tensor([16, 64]), r"weight_packed: expected shape \[16, 8\] .*, got \[16, 16\]"),
        ("weight_scale", torch.ones(15, 2).half(), r"weight_scale: expected shape \[16, 2\]"),
        ("weight_scale", torch.ones(16, 3).half(), "weight_scale: expected columns that divide K = 128, got 3"),
        ("weight_zero_point", torch.zeros(16, 2, dtype=torch.int32), r"weight_zero_point: expected shape \[2, 2\]"),
        ("weight_zero_point", torch.zeros(16, 2), "weight_zero_point: expected dtype torch.int8, got torch.float32"),
    ],
)
def test_errors_name_the_tensor(name, value, message):
    with pytest.raises(ValueError, match=message):
        from_compressed_tensors({**compressed(*random_layer(16, 128, 64)), name: value})
