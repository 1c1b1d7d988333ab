"""router_logits is the product that it stands for, with its gradients, wherever the small kernel does not run."""

import pytest
import torch
import torch.nn.functional as F

from expertile.moe import MoE, router_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients(dtype, biased):
    torch.manual_seed(0)
    x, router = torch.randn(5, 24, dtype=dtype, requires_grad=True), torch.randn(7, 24, dtype=dtype, requires_grad=True)
    bias = torch.randn(7, dtype=dtype, requires_grad=True) if biased else None
    operands = [t for t in (x, router, bias) if t is not None]
    got, wanted = router_logits(x, router, bias), F.linear(x, router, bias)
    assert torch.equal(got, wanted)
    for a, b in zip(torch.autograd.grad(got.sum(), operands), torch.autograd.grad(wanted.sum(), operands), strict=True):
        assert torch.equal(a, b)


def test_the_layer_routes_by_them():
    torch.manual_seed(0)
    layer = MoE(24, 16, 7, 2, router_bias=True)
    x = torch.randn(5, 24)
    assert torch.equal(layer.logits(x), router_logits(x, layer.router, layer.router_bias))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError):
        router_logits(torch.randn(5, 24), torch.randn(7, 23))
