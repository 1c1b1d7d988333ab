"""Gradients of `gathered_mm`.

With out[r] = x[rows[r]] @ b[g] + bias[g] for row r of expert g:

    dx[t]    = Σ over rows r before offs[-1] with rows[r] = t of dout[r] @ b[g]ᵀ      a grouped product, then `sum_rows`
    db[g]    = Σ over rows r of g of x[rows[r]]ᵀ dout[r]                              gathered_wgrad
    dbias[g] = Σ over rows r of g of dout[r]                                          a ragged-K product with ones
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from expertile.ops.backend import Request
from expertile.ops.gathered_mm.op import by_backend, call_wgrad, rows_of
from expertile.ops.gathered_mm.run import mm
from expertile.ops.gathered_mm.sum_rows import sum_rows
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.autograd import bias_gradient
from expertile.ops.grouped_mm.op import operator
from expertile.ops.grouped_mm.tail import zero_tail
from expertile.ops.torch_op import define, differentiable_eagerly, gradients_of


def _product(
    a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return operator(a, b, offs, None, out_dtype, "auto", False)


def _formula(
    rows: torch.Tensor | None, offs: torch.Tensor, x: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """out [R, N], in operators that can be differentiated any number of times."""
    return grouped_mm(x if rows is None else x.index_select(0, rows), b, offs=offs, bias=bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.backend = inputs[:6]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """(dx, db, dbias) for `grad` [R, N] in the places of x, b and bias. In torch operators, all deterministic."""
    x, b, rows, offs, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    # out.sum().backward() hands over an expanded scalar: strides of 0, which no copy engine takes.
    grad = (grad if 0 not in grad.stride() or grad.numel() == 0 else grad.contiguous()).to(x.dtype)
    dx = db = dbias = None
    if needs[0]:
        dx = operator(grad, b.transpose(-2, -1), offs, None, None, "auto", False)
        dx = zero_tail(dx, offs, 0) if rows is None else sum_rows(dx, rows, offs, x.shape[0])
    if needs[1]:
        db = call_wgrad(x, rows, grad, offs, False, ctx.backend)
    if needs[4] and bias is not None:
        dbias = bias_gradient(_product, grad, offs, bias)
    return dx, db, None, None, dbias, *(None,) * (len(needs) - 5)


def _second(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """`_backward` of create_graph=True."""
    x, b, rows, offs, bias = ctx.saved_tensors
    dx, db, dbias = gradients_of(partial(_formula, rows, offs), (x, b, bias), grad)
    return dx, db, None, None, dbias, *(None,) * (len(ctx.needs_input_grad) - 5)


def _forward(
    x: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str,
    config: Any,
) -> torch.Tensor:
    return mm(x, b, rows, offs, bias, Request(backend, config))


# What calls the operator; and gathered_mm in eager calls, with a config behind the operator's arguments.
call_mm = define(
    "gathered_mm",
    by_backend(mm),
    "(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str backend) -> Tensor",
    fake=lambda x, b, rows, *_: x.new_empty((rows_of(x, rows), b.shape[-1])),
    gradient=_backward,
    setup=_setup,
)
differentiable_mm = differentiable_eagerly(_forward, _setup, _backward, _second)
