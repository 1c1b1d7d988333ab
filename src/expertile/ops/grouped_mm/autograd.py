"""Gradients of a grouped product: dgrad and wgrad are grouped products too.

With out = a · b (per group), da = dout · bᵀ and db = aᵀ · dout:

| forward  | da is       | db is       |
|----------|-------------|-------------|
| RAGGED_M | RAGGED_M    | RAGGED_K    |
| RAGGED_K | RAGGED_N    | RAGGED_M    |
| RAGGED_N | RAGGED_K    | RAGGED_N    |
| BATCHED  | BATCHED     | BATCHED     |

and dbias is a RAGGED_K (or BATCHED) product of a row of ones with dout.
"""

from collections.abc import Callable
from typing import Any

import torch

from expertile.ops.backend import AUTO
from expertile.ops.grouped_mm.tail import zero_tail
from expertile.ops.torch_op import batched, differentiable_eagerly

Product = Callable[..., torch.Tensor]


def gradients(
    product: Product,
    grad: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
    over_rows: Product | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(da, db, dbias) for `grad` of out's shape; None where `needs` says so.

    `product(a, b, offs=…, out_dtype=…)` computes grouped products; `over_rows`, if given, those that are sums over rows
    and can't be batch-invariant. Rows and columns past offs[-1] get zero gradient.
    """
    grad = laid_out(grad, a.dtype)
    da = db = dbias = None
    over_rows = product if over_rows is None else over_rows
    if needs[0]:
        da = product(grad, b.transpose(-2, -1), offs=offs, out_dtype=a.dtype)
        if offs is not None and a.dim() == 2:
            # Which dimension of a is ragged: its rows beside 3-D weights, its columns in a 2-D by 2-D product.
            da = zero_tail(da, offs, dim=0 if b.dim() == 3 else 1)
    if needs[1] and by_columns(b):
        db = over_rows(grad.transpose(-2, -1), a, offs=offs, out_dtype=b.dtype).transpose(-2, -1)
    elif needs[1]:
        db = over_rows(a.transpose(-2, -1), grad, offs=offs, out_dtype=b.dtype)
        if offs is not None and b.dim() == 2:
            db = zero_tail(db, offs, dim=1 if a.dim() == 3 else 0)
    if needs[2] and bias is not None:
        dbias = bias_gradient(over_rows, grad, offs, bias)
    return da, db, dbias


def by_columns(weights: torch.Tensor) -> bool:
    """Whether each matrix of [G, K, N] is stored column by column, as nn.Linear's transposed weight is. Its gradient is
    made so too: autograd would copy another into that order, which takes as long as half the product."""
    return weights.dim() == 3 and weights.stride(1) == 1 and weights.stride(2) != 1


def laid_out(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`grad` in `dtype`, in memory: out.sum().backward() hands over an expanded scalar, with strides of 0, which no
    copy engine takes."""
    return (grad if 0 not in grad.stride() or grad.numel() == 0 else grad.contiguous()).to(dtype)


def bias_gradient(product: Product, grad: torch.Tensor, offs: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """dbias[g] = sum of grad's rows of group g in the dtype of `like`, accumulated in float32 (float64 for float64)."""
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    if grad.dim() == 3:  # [G, M, N]: every group has M rows
        return grad.to(wide).sum(1).to(like.dtype)
    # 8 equal rows of ones, so that every stride is a multiple of 16 bytes; one row of the result is kept.
    ones = grad.new_ones(grad.shape[0], 8)
    sums = product(ones.t(), grad, offs=offs, out_dtype=wide)
    return sums[:, 0].to(like.dtype).contiguous()


def _grouped_mm(
    product: Product, over_rows: Product, a: Any, b: Any, offs: Any, bias: Any, out_dtype: torch.dtype | None
) -> torch.Tensor:
    return product(a, b, offs=offs, bias=bias, out_dtype=out_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.product, ctx.over_rows, *operands, _ = inputs
    ctx.save_for_backward(*operands)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b, offs, bias = ctx.saved_tensors
    needs = (ctx.needs_input_grad[2], ctx.needs_input_grad[3], ctx.needs_input_grad[5])
    product, over_rows = ctx.product, ctx.over_rows
    if batched(grad):
        product, over_rows = _by_operator(product), _by_operator(over_rows)
    elif torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated in turn
        product, over_rows = _differentiable(product, over_rows), _differentiable(over_rows, over_rows)
    da, db, dbias = gradients(product, grad, a, b, offs, bias, needs, over_rows)
    return None, None, da, db, None, dbias, None


def _differentiable(product: Product, over_rows: Product) -> Product:
    return lambda x, y, offs, out_dtype: differentiable_mm(product, over_rows, x, y, offs, None, out_dtype)


def _by_operator(product: Product) -> Product:
    """`product`, with no config of its own, by the torch operator: that takes a batch an element at a time."""
    request = getattr(product, "keywords", {}).get("request", AUTO)
    how = request.backend, request.batch_invariant
    return lambda x, y, offs, out_dtype: torch.ops.expertile.grouped_mm(x, y, offs, None, out_dtype, *how)


# For eager calls; compiled ones go through the operator in `api`, with the same `gradients`.
differentiable_mm = differentiable_eagerly(_grouped_mm, _setup, _gradient)
