import pytest
import torch

from expertile.formats.int4.qweight import from_awq, to_awq
from tests.formats.int4.layers import awq, dense, random_layer, same


@pytest.mark.parametrize("k, group", [(256, 128), (256, 32), (192, 64), (192, 192)])
def test_bit_exact_both_ways(k, group):
    layer = random_layer(24, k, group)
    tensors = awq(*layer)
    w = from_awq(tensors)
    assert w.shape == (1, 24, k) and w.group_size == group
    assert torch.equal(w.values()[0], layer[0].to(torch.uint8))
    assert torch.equal(w.dequantize(torch.float32)[0], dense(*layer))
    same(to_awq(w), tensors)


def test_the_order_of_eight_columns():
    """Column 1 lies in nibble 4, column 2 in nibble 1."""
    tensors = {
        "qweight": torch.full((64, 1), 0x000B000A >> 0, dtype=torch.int32),  # nibbles 0 = 10, 4 = 11
        "qzeros": torch.full((1, 1), 0x00000030, dtype=torch.int32),  # nibble 1 = 3
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    w = from_awq(tensors)
    assert w.values()[0, :, 0].tolist() == [10, 11, 0, 0, 0, 0, 0, 0]
    assert w.zeros[0, 0].tolist() == [0, 0, 3, 0, 0, 0, 0, 0]


def test_errors_name_the_tensor():
    tensors = awq(*random_layer(8, 128, 64))
    with pytest.raises(ValueError, match=r"scales: expected shape \[2, 8\] .*, got \[2, 7\]"):
        from_awq({**tensors, "scales": tensors["scales"][:, :7]})
    with pytest.raises(ValueError, match="qzeros: expected a tensor of that name, got only qweight, scales"):
        from_awq({k: v for k, v in tensors.items() if k != "qzeros"})
