"""Second derivatives, torch.func and float64 on a GPU, against float64 on it."""

import copy

import pytest
import torch

import expertile as xt

OFFS = torch.tensor([24, 24, 64], dtype=torch.int32)


def layers(dtype: torch.dtype) -> tuple[xt.MoE, xt.MoE, torch.Tensor]:
    """A layer, the same in float64, and tokens."""
    torch.manual_seed(0)
    wide = xt.MoE(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2).double().cuda()
    return copy.deepcopy(wide).to(dtype), wide, torch.randn(40, 64, device="cuda")


def close(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert (got.double() - want).norm() <= limit * want.norm()


def test_second_derivatives_of_a_sum():
    layer, wide, x = layers(torch.float32)

    def gradients(layer: xt.MoE, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, *layer.parameters()))

    for got, want in zip(gradients(layer, x), gradients(wide, x.double()), strict=True):
        close(got, want, 1e-4)
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (first,) = torch.autograd.grad(xt.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="only the first derivative is there"):
        first.square().sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_functional_gradients_are_those_of_autograd(dtype):
    layer, _, x = layers(dtype)
    x = x.to(dtype)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).float().square().sum()

    parameters = dict(layer.named_parameters())
    loss(parameters, x).backward()
    for name, got in torch.func.grad(loss)(parameters, x).items():
        close(got, parameters[name].grad.double(), 2e-2 if dtype is torch.bfloat16 else 1e-5)
    a, b = torch.randn(3, 64, 32, device="cuda", dtype=dtype), torch.randn(3, 32, 16, device="cuda", dtype=dtype)
    got = torch.func.vmap(lambda a: xt.grouped_mm(a, b, offs=OFFS.cuda()))(a)
    for i in range(3):
        assert torch.equal(got[i], xt.grouped_mm(a[i], b, offs=OFFS.cuda()))


def test_float64_passes_gradcheck():
    a, b = (torch.randn(s, device="cuda", dtype=torch.float64, requires_grad=True) for s in ((64, 3), (3, 3, 2)))
    assert torch.autograd.gradcheck(lambda a, b: xt.grouped_mm(a, b, offs=OFFS.cuda()), (a, b))
    for operator in (xt.softmax, xt.layer_norm, xt.rms_norm):
        assert torch.autograd.gradcheck(operator, (a[:5].detach().requires_grad_(),))
