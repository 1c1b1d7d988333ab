"""Layer norm and RMS norm as torch sees them: eager autograd, the operators expertile::row_norm and
expertile::row_norm_backward for torch.compile, and the same in plain torch for tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from expertile.ops.launch.device import FORMULA_DTYPES, on_kernels, wide
from expertile.ops.rows import norm as kernels
from expertile.ops.rows.config import RowConfig, check_input
from expertile.ops.torch_op import differentiable, differentiable_once, traced

Optional = torch.Tensor | None


def normalize(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    residual: Optional,
    eps: float,
    centered: bool,
    return_stats: bool,
    config: RowConfig | None,
    backward_config: RowConfig | None,
) -> tuple[torch.Tensor, Optional, Optional, Optional]:
    """(y, sum or None, mean or None, rstd or None), differentiable; checks the arguments."""
    check_input("x", x, FORMULA_DTYPES)
    if not eps >= 0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps!r}")
    cols = x.shape[-1]
    if residual is not None and not torch.compiler.is_compiling():  # compiled: checked where the operator runs
        _check_residual(residual, x)
    weight, bias = _checked_vector("weight", weight, x, cols), _checked_vector("bias", bias, x, cols)
    if traced(x):
        if config is not None or backward_config is not None:
            raise ValueError("config, backward_config: expected None under torch.compile, got a config")
        y, total, mean, rstd = _call_row_norm(x, residual, weight, bias, eps, centered)
        return y, None if residual is None else total, mean if centered else None, rstd
    needs = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    if needs:
        return _Norm.apply(x, residual, weight, bias, eps, centered, config, backward_config)
    return row_norm(x, residual, weight, bias, eps, centered, return_stats, config)


def asked_for(
    made: tuple[torch.Tensor, Optional, Optional, Optional], with_sum: bool, with_stats: bool
) -> tuple[torch.Tensor, ...]:
    """(y, sum, mean, rstd) without what was not asked for, or is not there."""
    y, total, mean, rstd = made
    rest = ((total,) if with_sum else ()) + ((mean, rstd) if with_stats else ())
    return (y, *(t for t in rest if t is not None))


def _check_residual(residual: object, x: torch.Tensor) -> None:
    if not isinstance(residual, torch.Tensor):
        raise ValueError(f"residual: expected a torch.Tensor, got {type(residual).__name__}")
    if residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"residual: expected x's shape {tuple(x.shape)} and device {x.device}, "
            f"got {tuple(residual.shape)} on {residual.device}"
        )
    if residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"residual: expected x's dtype {x.dtype} or float32, got {residual.dtype}")


def _checked_vector(name: str, vector: object, x: torch.Tensor, cols: int) -> Optional:
    """The vector with its elements side by side; ValueError unless it fits the rows of x."""
    if vector is None:
        return None
    if not isinstance(vector, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(vector).__name__}")
    if vector.dtype not in FORMULA_DTYPES:
        raise ValueError(f"{name}: expected float32, bfloat16, float16 or float64, got {vector.dtype}")
    if vector.dim() != 1 or vector.shape[0] != cols or vector.device != x.device:
        raise ValueError(
            f"{name}: expected shape ({cols},) on {x.device}, got {tuple(vector.shape)} on {vector.device}"
        )
    return vector.contiguous()


def row_norm(
    x: torch.Tensor,
    residual: Optional,
    weight: Optional,
    bias: Optional,
    eps: float,
    centered: bool,
    stats: bool,
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, Optional, Optional, Optional]:
    """(y, sum, mean, rstd) without autograd, by the kernels or in plain torch; see `norm.forward`."""
    if on_kernels(x):
        return kernels.forward(x, residual, weight, bias, eps, centered, stats, config)
    total = None if residual is None else (wide(x) + wide(residual)).to(residual.dtype).contiguous()
    n, mean, rstd = _standardize(x if total is None else total, eps, centered)
    y = n if weight is None else n * wide(weight)
    y = y if bias is None else y + wide(bias)
    return y.to(x.dtype).contiguous(), total, mean if stats else None, rstd if stats else None


def _standardize(h: torch.Tensor, eps: float, centered: bool) -> tuple[torch.Tensor, Optional, torch.Tensor]:
    """(h - mean) * rstd in float32, the mean (None for RMS norm) and rstd."""
    h = wide(h)
    mean = h.mean(-1) if centered else None
    if mean is not None:
        h = h - mean.unsqueeze(-1)
    rstd = torch.rsqrt(h.square().mean(-1) + eps)
    return h * rstd.unsqueeze(-1), mean, rstd


def _formula(
    dy: torch.Tensor,
    n: torch.Tensor,
    rstd: torch.Tensor,
    h_dtype: torch.dtype,
    weight: Optional,
    bias: Optional,
    dsum: Optional,
    centered: bool,
    sums: tuple[bool, bool],
) -> tuple[torch.Tensor, Optional, Optional]:
    """The gradients in plain torch, float32 inside, themselves differentiable."""
    dy = wide(dy)
    g = dy if weight is None else dy * wide(weight)
    dh = g - n * (g * n).mean(-1, keepdim=True)
    if centered:
        dh = dh - g.mean(-1, keepdim=True)
    dh = dh * rstd.unsqueeze(-1)
    if dsum is not None:
        dh = dh + wide(dsum)
    rows = tuple(range(n.dim() - 1))
    dweight = dbias = None
    if sums[0] and weight is not None:
        dweight = ((dy * n).sum(rows) if rows else dy * n).to(weight.dtype)
    if sums[1] and bias is not None:
        dbias = (dy.sum(rows) if rows else dy).to(bias.dtype)
    return dh.to(h_dtype), dweight, dbias


def row_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: Optional,
    rstd: torch.Tensor,
    dsum: Optional,
    sums: tuple[bool, bool],
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, Optional, Optional]:
    """(dh, dweight, dbias) by the kernels or in plain torch; see `norm.backward`."""
    if on_kernels(h):
        return kernels.backward(dy, h, weight, bias, mean, rstd, dsum, sums, config)
    n = wide(h) if mean is None else wide(h) - mean.unsqueeze(-1)
    dh, dweight, dbias = _formula(dy, n * rstd.unsqueeze(-1), rstd, h.dtype, weight, bias, dsum, mean is not None, sums)
    return dh.contiguous(), dweight, dbias


class _Norm(torch.autograd.Function):
    """Autograd for eager calls; compiled ones go through the operators below, with the same kernels."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        residual: Optional,
        weight: Optional,
        bias: Optional,
        eps: float,
        centered: bool,
        config: RowConfig | None,
        backward_config: RowConfig | None,
    ) -> tuple[torch.Tensor, Optional, Optional, Optional]:
        y, total, mean, rstd = row_norm(x, residual, weight, bias, eps, centered, True, config)
        ctx.save_for_backward(x if total is None else total, weight, bias, mean, rstd)
        ctx.eps, ctx.centered, ctx.config = eps, centered, backward_config
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in (mean, rstd) if t is not None])
        return y, total, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Optional, dsum: Optional, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        h, weight, bias, mean, rstd = ctx.saved_tensors
        need_x, need_residual, *sums = ctx.needs_input_grad[:4]
        dy = torch.zeros_like(h, dtype=ctx.dtypes[0]) if dy is None else dy
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated in turn
            n, _mean, rstd = _standardize(h, ctx.eps, ctx.centered)
            dh, dweight, dbias = _formula(dy, n, rstd, h.dtype, weight, bias, dsum, ctx.centered, tuple(sums))
        else:
            dh, dweight, dbias = row_norm_backward(dy, h, weight, bias, mean, rstd, dsum, tuple(sums), ctx.config)
        dx = dh.to(ctx.dtypes[0]) if need_x else None
        dresidual = dh.to(ctx.dtypes[1]) if need_residual else None
        return dx, dresidual, dweight, dbias, None, None, None, None


def _none(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What an operator returns where there is nothing: its outputs must be tensors."""
    return torch.empty(0, dtype=dtype or like.dtype, device=like.device)


@torch.library.custom_op(
    "expertile::row_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _row_norm(
    x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if residual is not None:
        _check_residual(residual, x)
    y, total, mean, rstd = row_norm(x, residual, weight, bias, eps, centered, True)
    assert rstd is not None
    return (
        y,
        _none(x) if total is None else total,
        _none(x, torch.float32) if mean is None else mean,
        rstd,
    )


@_row_norm.register_fake
def _(
    x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional, eps: float, centered: bool
) -> tuple[torch.Tensor, ...]:
    stats = x.new_empty(x.shape[:-1], dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
    return (
        x.new_empty(x.shape),
        _none(x) if residual is None else x.new_empty(x.shape, dtype=residual.dtype),
        torch.empty_like(stats) if centered else _none(x, torch.float32),
        stats,
    )


@torch.library.custom_op(
    "expertile::row_norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor h, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, Tensor? dsum,"
    " bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
)
def _row_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: Optional,
    rstd: torch.Tensor,
    dsum: Optional,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dh, dweight, dbias = row_norm_backward(dy, h, weight, bias, mean, rstd, dsum, (need_weight, need_bias))
    return dh, _none(h) if dweight is None else dweight, _none(h) if dbias is None else dbias


@_row_norm_backward.register_fake
def _(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: Optional,
    rstd: torch.Tensor,
    dsum: Optional,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, ...]:
    return (
        h.new_empty(h.shape),
        _none(h) if weight is None or not need_weight else torch.empty_like(weight),
        _none(h) if bias is None or not need_bias else torch.empty_like(bias),
    )


_call_backward = differentiable_once(_row_norm_backward)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, bias, ctx.eps, ctx.centered = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(x if residual is None else total, weight, bias, mean if ctx.centered else None, rstd)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)


def _gradients(ctx: Any, dy: Optional, dsum: Optional, *_: Any) -> tuple[Any, ...]:
    h, weight, bias, mean, rstd = ctx.saved_tensors
    need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
    dy = torch.zeros_like(h, dtype=ctx.dtypes[0]) if dy is None else dy
    dsum = None if ctx.dtypes[1] is None else dsum
    dh, dweight, dbias = _call_backward(dy, h, weight, bias, mean, rstd, dsum, need_weight, need_bias)
    return (
        dh.to(ctx.dtypes[0]) if need_x else None,
        dh.to(ctx.dtypes[1]) if need_residual else None,
        dweight if need_weight else None,
        dbias if need_bias else None,
        None,
        None,
    )


_call_row_norm = differentiable(_row_norm, _gradients, _setup)
