"""What layer norm and RMS norm must both do; `norm` is one of them, `centered` says which."""

from dataclasses import replace

import torch

from tests.ops.rows.cases import assert_close, leaf, norm64, random

EPS = 1e-5
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# (dtype of x, of weight or None, of bias or None, of residual or None)
KINDS = (
    (F32, F32, F32, None),
    (F32, None, None, None),
    (F32, F32, None, F32),
    (BF16, BF16, BF16, None),
    (BF16, F32, None, BF16),
    (BF16, None, F32, F32),
    (F16, F16, F16, F16),
)


def staying(config):
    """The config for the backward kernel, whose programs always stay."""
    if config is None or config.streamed or config.programs_per_sm:
        return config
    return replace(config, programs_per_sm=1)


def tensors(shape, kind, seed=0, offset=0.0, device="cpu"):
    """(x, weight, bias, residual) that take gradients; None where the kind has none."""
    x_dtype, weight_dtype, bias_dtype, residual_dtype = kind
    cols = shape[-1:]
    made = (
        (random(shape, F32, seed, device) + offset).to(x_dtype),
        None if weight_dtype is None else random(cols, weight_dtype, seed + 1, device),
        None if bias_dtype is None else random(cols, bias_dtype, seed + 2, device),
        None if residual_dtype is None else random(shape, residual_dtype, seed + 3, device),
    )
    return tuple(None if t is None else t.requires_grad_() for t in made)


def check(norm, centered, shape, kind, config=None, offset=0.0, device="cpu"):
    """Values, statistics and all gradients against float64."""
    x, weight, bias, residual = tensors(shape, kind, offset=offset, device=device)
    outputs = norm(
        x, weight, bias, eps=EPS, residual=residual, return_stats=True, config=config, backward_config=staying(config)
    )
    y, *rest = outputs
    total = rest.pop(0) if residual is not None else None
    assert len(rest) == (2 if centered else 1) and all(s.dtype is F32 and s.shape == shape[:-1] for s in rest)
    assert y.dtype is x.dtype and y.shape == x.shape and y.is_contiguous()
    if residual is not None:
        assert total.dtype is residual.dtype
        assert torch.equal(total, (x.float() + residual.float()).to(residual.dtype))
    dy = random(shape, x.dtype, 7, device)
    dtotal = None if total is None else random(shape, total.dtype, 8, device)
    torch.autograd.backward([y] if total is None else [y, total], [dy] if total is None else [dy, dtotal])

    h64, weight64, bias64 = leaf(x if total is None else total), leaf(weight), leaf(bias)
    y64 = norm64(h64, weight64, bias64, EPS, centered)
    y64.backward(dy.double())
    dh64 = h64.grad if dtotal is None else h64.grad + dtotal.double()
    y64 = y64.detach()
    if x.numel() == 0:
        return
    h64 = h64.detach()
    mean64 = h64.mean(-1, keepdim=True) if centered else 0.0 * h64[..., :1]
    rstd64 = torch.rsqrt((h64 - mean64).square().mean(-1, keepdim=True) + EPS)
    # How much a rounding of h shows in n = (h - mean) * rstd: where elements are nearly equal, much.
    shows = (h64.abs().amax(-1, keepdim=True) * rstd64).clamp_min(1.0)
    g64 = dy.double() if weight is None else dy.double() * weight64.detach()
    assert_within(y, y64, shows * (y64.abs() + 1.0), "y")
    assert_within(rest[-1], rstd64.squeeze(-1), (shows * rstd64).squeeze(-1), "rstd")
    if centered:
        assert_within(rest[0], mean64.squeeze(-1), h64.abs().amax(-1) + 1e-3, "mean")
    terms = rstd64 * shows.square() * (g64.abs() + 1.0) * (y64.abs() + 1.0)
    assert_within(x.grad, dh64, terms if total is None else terms + dtotal.double().abs(), "dx")
    if residual is not None:
        assert_within(residual.grad, dh64, terms + dtotal.double().abs(), "dresidual")
    per_column = (dy.double().abs() * shows).reshape(-1, shape[-1]).sum(0) + 1.0
    if weight is not None:
        assert_within(weight.grad, weight64.grad, 2.0 * per_column, "dweight")
    if bias is not None:
        assert_within(bias.grad, bias64.grad, per_column, "dbias")


def assert_within(actual, expected, terms, name):
    """Every element is off by no more than a few roundings of the terms it is made of."""
    unit = {F32: 4e-6, BF16: 8e-3, F16: 1e-3}[actual.dtype]
    excess = ((actual.double() - expected).abs() / (unit * terms)).max().item()
    assert excess <= 1.0, f"{name}: {excess:.2f} times the error allowed in {actual.dtype}"


def check_strides(norm, device="cpu"):
    """Rows of any stride give what contiguous ones give."""
    wide = random((6, 80), F32, 0, device)
    weight = random((80,), F32, 1, device)[::2]
    for x in (wide[:, 8:48], wide[::2, :40], random((40, 6), F32, 1, device).t(), wide[:1, :40].expand(3, 40)):
        expected = norm(x.contiguous(), weight.contiguous(), residual=x.contiguous())
        for actual, e in zip(norm(x, weight, residual=x), expected, strict=True):
            assert torch.equal(actual, e)


def check_large_mean(norm, config=None, device="cpu"):
    """E[x^2] - E[x]^2 would have no digit left here: variance 1 about a mean of 4096."""
    x = random((3, 100), F32, 0, device) + 4096.0
    y, _, rstd = norm(x, eps=0.0, return_stats=True, config=config)
    x64 = x.double()
    assert_close(rstd, torch.rsqrt(x64.var(-1, unbiased=False)), "rstd", 20.0)
    assert (y.double() - norm64(x64, None, None, 0.0, True)).abs().max() < 2e-3


def check_parts(norm, device="cpu"):
    """Only the gradients that are asked for; and a sum nobody uses, or only the sum used."""
    for wanted in range(4):
        x, weight, bias, residual = tensors((4, 20), (F32, F32, F32, F32), device=device)
        for i, t in enumerate((x, weight, bias, residual)):
            t.requires_grad_(i == wanted)
        y, total = norm(x, weight, bias, residual=residual)
        (y.square().sum() if wanted in (1, 2) else (y * y).sum() + total.sum()).backward()
        for i, t in enumerate((x, weight, bias, residual)):
            assert (t.grad is not None) == (i == wanted)
    x, weight, bias, residual = tensors((4, 20), (F32, F32, F32, F32), device=device)
    _, total = norm(x, weight, bias, residual=residual)
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(residual.grad, x.grad)
    y, _ = norm(x.detach(), weight, bias, residual=residual.detach())
    assert y.requires_grad
