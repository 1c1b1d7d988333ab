"""router_logits is the product that it stands for, with its gradients, wherever the small kernel does not run; and with
x beside it the sum of both gradients."""

import pytest
import torch
import torch.nn.functional as F

from expertile.moe import MoE, RouterConfig, moe_mlp, route, router_logits, router_logits_and_x


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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=["both", "logits", "x"])
def test_x_beside_the_logits_has_the_sum_of_both_gradients(biased, used):
    torch.manual_seed(0)
    x, router, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 6), (3, 6), (3,)))

    def call(x, router, bias):
        logits, beside = router_logits_and_x(x, router, bias if biased else None)
        assert torch.equal(beside, x) and torch.equal(logits, F.linear(x, router, bias if biased else None))
        return tuple(f(t) for f, t, u in ((torch.sin, logits, used[0]), (torch.cos, beside, used[1])) if u)

    operands = (x, router, bias) if biased else (x, router)
    assert torch.autograd.gradcheck(lambda *o: call(*o, *(() if biased else (bias,))), operands)
    assert torch.autograd.gradgradcheck(lambda *o: call(*o, *(() if biased else (bias,))), operands)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_gradient_that_comes_back_is_overwritten_where_asked(overwrite):
    x, router = torch.randn(5, 24, requires_grad=True), torch.randn(7, 24)
    logits, beside = router_logits_and_x(x, router, overwrite_gradient=overwrite)
    given = (torch.randn_like(logits), torch.randn_like(x))
    before = given[1].clone()
    (dx,) = torch.autograd.grad((logits, beside), x, given)
    torch.testing.assert_close(dx, before + given[0] @ router)
    assert torch.equal(given[1], dx if overwrite else before)


def test_x_beside_the_logits_is_x_where_nothing_is_fused():
    x, router = torch.randn(5, 24), torch.randn(7, 24, requires_grad=True)
    assert router_logits_and_x(x, router)[1] is x  # no gradient of x
    wanted = x.clone().requires_grad_()
    with torch.no_grad():
        assert router_logits_and_x(wanted, router)[1] is wanted
    assert router_logits_and_x(wanted, router, batch_invariant=True)[1] is wanted
    with torch.autocast("cpu", torch.bfloat16):
        assert router_logits_and_x(wanted, router)[1] is wanted
    compiled = torch.compile(lambda x: sum(t.sum() for t in router_logits_and_x(x, router)), backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(wanted), wanted)
    torch.testing.assert_close(got, router.sum(0).expand(5, -1) + 1)


def test_the_layer_adds_its_gradients_there(monkeypatch):
    """In one product, and with the values of the functions called one by one."""
    torch.manual_seed(0)
    layer, x, dy = MoE(24, 16, 7, 2), torch.randn(5, 24, requires_grad=True), torch.randn(5, 24)
    seen = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *o, out: seen.append(out is o[0]) or addmm(*o, out=out))
    got = torch.autograd.grad(layer(x), (x, layer.router), dy)
    assert seen == [True]  # over the experts' own gradient
    routing = route(router_logits(x, layer.router), RouterConfig(7, 2))
    out = moe_mlp(x, layer.gate_up, layer.down, routing.topk_ids, routing.topk_weights)
    torch.testing.assert_close(got, torch.autograd.grad(out, (x, layer.router), dy))
    assert seen == [True]  # over the experts' own gradient
