"""Layer norm and RMS norm as torch sees them: eager autograd, the operators expertile::row_norm and
expertile::row_norm_backward for torch.compile, and the same in plain torch for tensors on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from expertile.ops.checks import check_number
from expertile.ops.launch.device import FORMULA_DTYPES, on_kernels, wide
from expertile.ops.rows import norm as kernels
from expertile.ops.rows.config import RowConfig, check_configs, check_input
from expertile.ops.torch_op import define, differentiable_eagerly, no_options, row_shardings, traced

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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """What `layer_norm` and `rms_norm` return, differentiable; checks the arguments."""
    check_input("x", x, FORMULA_DTYPES)
    check_number("eps", eps, 0)
    check_configs(config=config, backward_config=backward_config)
    if residual is not None and not torch.compiler.is_compiling():  # compiled: checked where the operator runs
        _check_residual(residual, x)
    weight, bias = _checked_vector("weight", weight, x), _checked_vector("bias", bias, x)
    made: Any
    if traced(x, residual, weight, bias):
        no_options(config=config, backward_config=backward_config)
        made = _call_row_norm(x, residual, weight, bias, eps, centered)
    elif torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        made = _differentiable_norm(x, residual, weight, bias, eps, centered, config, backward_config)
    else:
        made = row_norm(x, residual, weight, bias, eps, centered, return_stats, config)
    if residual is None and not return_stats:
        return made[0]  # type: ignore[no-any-return]
    y, *rest = made
    wanted = (residual is not None, return_stats and centered, return_stats)
    return (y, *(t for t, is_wanted in zip(rest, wanted, strict=True) if is_wanted))


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


def _checked_vector(name: str, vector: object, x: torch.Tensor) -> Optional:
    """The vector with its elements side by side; ValueError unless it fits the rows of x."""
    if vector is None:
        return None
    if not isinstance(vector, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(vector).__name__}")
    if vector.dtype not in FORMULA_DTYPES:
        raise ValueError(f"{name}: expected float32, bfloat16, float16 or float64, got {vector.dtype}")
    if vector.dim() != 1 or vector.shape[0] != x.shape[-1] or vector.device != x.device:
        raise ValueError(
            f"{name}: expected shape ({x.shape[-1]},) on {x.device}, got {tuple(vector.shape)} on {vector.device}"
        )
    return vector.contiguous()


def row_norm(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, Optional, Optional, Optional]:
    """(y, sum, mean, rstd) without autograd, by the kernels or in plain torch; arguments as of `norm.forward`."""
    if on_kernels(x):
        return kernels.forward(x, *given)
    residual, weight, bias, eps, centered, stats, *_ = given
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


def row_norm_backward(dy: torch.Tensor, h: torch.Tensor, *given: Any) -> tuple[torch.Tensor, Optional, Optional]:
    """(dh, dweight, dbias) by the kernels or in plain torch; arguments as of `norm.backward`."""
    if on_kernels(h):
        return kernels.backward(dy, h, *given)
    weight, bias, mean, rstd, dsum, sums, *_ = given
    n = wide(h) if mean is None else wide(h) - mean.unsqueeze(-1)
    dh, dweight, dbias = _formula(dy, n * rstd.unsqueeze(-1), rstd, h.dtype, weight, bias, dsum, mean is not None, sums)
    return dh.contiguous(), dweight, dbias


def _none(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What an operator returns where there is nothing: its outputs must be tensors."""
    return torch.empty(0, dtype=dtype or like.dtype, device=like.device)


def _kernel(
    x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional, eps: float, centered: bool
) -> tuple[torch.Tensor, ...]:
    if residual is not None:
        _check_residual(residual, x)
    y, total, mean, rstd = row_norm(x, residual, weight, bias, eps, centered, True)
    assert rstd is not None
    return y, _none(x) if total is None else total, _none(x, torch.float32) if mean is None else mean, rstd


def _fake(x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional, eps: float, centered: bool) -> Any:
    stats = x.new_empty(x.shape[:-1], dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
    total = _none(x) if residual is None else x.new_empty(x.shape, dtype=residual.dtype)
    return x.new_empty(x.shape), total, torch.empty_like(stats) if centered else _none(x, torch.float32), stats


def _backward_kernel(*given: Any) -> tuple[torch.Tensor, ...]:
    dy, h, *rest, need_weight, need_bias = given
    dh, dweight, dbias = row_norm_backward(dy, h, *rest, (need_weight, need_bias))
    return dh, _none(dh) if dweight is None else dweight, _none(dh) if dbias is None else dbias


def _backward_fake(_dy: Any, h: torch.Tensor, weight: Optional, bias: Optional, *rest: Any) -> tuple[torch.Tensor, ...]:
    *_, need_weight, need_bias = rest
    return (
        h.new_empty(h.shape),
        _none(h) if weight is None or not need_weight else torch.empty_like(weight),
        _none(h) if bias is None or not need_bias else torch.empty_like(bias),
    )


def _placed(placed: Any, x: Any, residual: Any, weight: Any, bias: Any, eps: float, centered: bool) -> Any:
    """A case of `row_shardings` for the operator; what is not there has no elements, on every rank."""
    from torch.distributed.tensor import Replicate

    whole = Replicate()
    outputs = [placed, whole if residual is None else placed, placed if centered else whole, placed]
    vectors = [None if v is None else whole for v in (weight, bias)]
    return outputs, [placed, None if residual is None else placed, *vectors, None, None]


def _backward_placed(placed: Any, dy: Any, h: Any, weight: Any, bias: Any, mean: Any, rstd: Any, *rest: Any) -> Any:
    """The same for its gradient: sums over rows are partial where those are split."""
    from torch.distributed.tensor import Partial, Replicate

    dsum, *needs = rest
    whole, sums = Replicate(), Partial() if placed.is_shard() else Replicate()
    made = [sums if v is not None and need else whole for v, need in zip((weight, bias), needs, strict=True)]
    vectors = [None if v is None else whole for v in (weight, bias)]
    rows = [None if t is None else placed for t in (mean, rstd, dsum)]
    return [placed, *made], [placed, placed, *vectors, *rows, None, None]


_call_backward = define(
    "row_norm_backward",
    _backward_kernel,
    "(Tensor dy, Tensor h, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, Tensor? dsum,"
    " bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    fake=_backward_fake,
    sharding=partial(row_shardings, make=_backward_placed),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Of the operator, and of eager calls, whose last input is the config of the backward pass."""
    x, residual, weight, bias, ctx.eps, ctx.centered, *configs = inputs
    _, total, mean, rstd = output
    ctx.config = configs[-1] if configs else None
    ctx.save_for_backward(x if residual is None else total, weight, bias, mean if ctx.centered else None, rstd)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[t for t in (mean, rstd) if t is not None])


def _gradients(backward: Callable[..., Any], ctx: Any, dy: Optional, dsum: Optional, *_: Any) -> tuple[Any, ...]:
    """`backward(ctx, dy, h, weight, bias, mean, rstd, dsum, sums)` for the inputs that need it."""
    h, *rest = ctx.saved_tensors
    need_x, need_residual, *sums = ctx.needs_input_grad[:4]
    dy = torch.zeros_like(h, dtype=ctx.dtypes[0]) if dy is None else dy
    dsum = None if ctx.dtypes[1] is None else dsum
    dh, dweight, dbias = backward(ctx, dy, h, *rest, dsum, tuple(sums))
    dx = dh.to(ctx.dtypes[0]) if need_x else None
    dresidual = dh.to(ctx.dtypes[1]) if need_residual else None
    none = (None,) * (len(ctx.needs_input_grad) - 4)
    return dx, dresidual, dweight if sums[0] else None, dbias if sums[1] else None, *none


def _by_kernels(ctx: Any, dy: torch.Tensor, h: torch.Tensor, *rest: Any) -> Any:
    return row_norm_backward(dy, h, *rest, ctx.config)


def _by_formula(ctx: Any, dy: torch.Tensor, h: torch.Tensor, weight: Optional, bias: Optional, *rest: Any) -> Any:
    """For create_graph=True: the gradients are differentiated in turn."""
    n, _, rstd = _standardize(h, ctx.eps, ctx.centered)
    *_, dsum, sums = rest
    return _formula(dy, n, rstd, h.dtype, weight, bias, dsum, ctx.centered, sums)


def _eager(*inputs: Any) -> tuple[torch.Tensor, Optional, Optional, Optional]:
    x, residual, weight, bias, eps, centered, config, _ = inputs
    return row_norm(x, residual, weight, bias, eps, centered, True, config)


# What calls the operator; and eager calls, with the same kernels.
_call_row_norm = define(
    "row_norm",
    _kernel,
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    gradient=partial(_gradients, lambda ctx, *inputs: _call_backward(*inputs[:-1], *inputs[-1])),
    setup=_setup,
    sharding=partial(row_shardings, make=_placed),
)
_differentiable_norm = differentiable_eagerly(
    _eager, _setup, partial(_gradients, _by_kernels), partial(_gradients, _by_formula)
)
