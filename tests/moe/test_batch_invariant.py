"""A token's bits do not depend on the batch that it stands in."""

from __future__ import annotations

import pytest
import torch

from expertile import MoE, grouped_mm, moe_mlp
from expertile.int4 import Int4Weight

LAYERS = {
    "plain": {},
    "sigmoid, shared expert": {"score": "sigmoid", "shared_intermediate_size": 24},
    "gpt-oss": {"activation": "gpt_oss", "interleaved": True, "bias": True, "router_bias": True},
    "float32 logits": {"router_dtype": torch.float32},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_tokens_are_alone_what_they_are_among_others(name, dtype):
    torch.manual_seed(0)
    layer = MoE(48, 40, 8, 2, dtype=dtype, batch_invariant=True, **LAYERS[name])
    x = torch.randn(70, 48, dtype=dtype)
    with torch.no_grad():
        whole = layer(x)
        for part in (slice(0, 1), slice(3, 20), slice(11, 70)):
            assert torch.equal(layer(x[part]), whole[part])
        order = torch.randperm(70)
        assert torch.equal(layer(x[order]), whole[order])


def test_the_gradient_of_a_token_is_alone_what_it_is_among_others():
    torch.manual_seed(0)
    layer = MoE(48, 40, 8, 2, batch_invariant=True)
    x = torch.randn(40, 48)

    def gradient(rows):
        part = x[rows].clone().requires_grad_()
        layer(part).pow(2).sum().backward()
        return part.grad

    whole = gradient(slice(None))
    for rows in (slice(0, 1), slice(7, 30)):
        assert torch.equal(gradient(rows), whole[rows])


def test_rows_of_a_product_do_not_depend_on_their_group():
    torch.manual_seed(0)
    a, b = torch.randn(64, 33), torch.randn(3, 33, 50)
    offs = torch.tensor([20, 20, 64], dtype=torch.int32)
    whole = grouped_mm(a, b, offs=offs, batch_invariant=True)
    for row in (0, 19, 20, 63):
        group = 0 if row < 20 else 2
        ends = torch.tensor([group <= g for g in range(3)], dtype=torch.int32)
        assert torch.equal(grouped_mm(a[row : row + 1], b, offs=ends, batch_invariant=True)[0], whole[row])


def test_what_cannot_be_invariant_is_refused():
    a, w = torch.randn(8, 128), Int4Weight.quantize(torch.randn(2, 32, 128), group_size=64)
    offs = torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="batch_invariant"):
        grouped_mm(a.bfloat16(), w, offs=offs, batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant"):
        MoE(48, 40, 8, 2, capacity_factor=1.0, batch_invariant=True)(torch.randn(4, 48))
    ids = torch.zeros(4, 1, dtype=torch.int32)
    up, down = (Int4Weight.quantize(torch.randn(1, n, 64), group_size=64) for n in (128, 64))
    with pytest.raises(ValueError, match="batch_invariant"):
        moe_mlp(torch.randn(4, 64).bfloat16(), up, down, ids, torch.ones(4, 1), batch_invariant=True)
