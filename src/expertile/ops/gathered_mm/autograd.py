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
from expertile.ops.gathered_mm.op import call_wgrad, mm_op
from expertile.ops.gathered_mm.run import mm
from expertile.ops.gathered_mm.sum_rows import sum_rows
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.autograd import bias_gradient
from expertile.ops.grouped_mm.op import operator
from expertile.ops.grouped_mm.tail import zero_tail
from expertile.ops.torch_op import differentiable, gradients_of

_Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
    backend: str,
) -> _Grads:
    """(dx, db, dbias) for `grad` [R, N]; None where `needs` says so. In torch operators, all deterministic."""
    # out.sum().backward() hands over an expanded scalar: strides of 0, which no copy engine takes.
    grad = (grad if 0 not in grad.stride() or grad.numel() == 0 else grad.contiguous()).to(x.dtype)
    dx = db = dbias = None
    if needs[0]:
        dx = operator(grad, b.transpose(-2, -1), offs, None, None, "auto", False)
        dx = zero_tail(dx, offs, 0) if rows is None else sum_rows(dx, rows, offs, x.shape[0])
    if needs[1]:
        db = call_wgrad(x, rows, grad, offs, False, backend)
    if needs[2] and bias is not None:
        dbias = bias_gradient(_product, grad, offs, bias)
    return dx, db, dbias


def _product(
    a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return operator(a, b, offs, None, out_dtype, "auto", False)


def _formula(
    rows: torch.Tensor | None, offs: torch.Tensor, x: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """out [R, N], in operators that can be differentiated any number of times."""
    return grouped_mm(x if rows is None else x.index_select(0, rows), b, offs=offs, bias=bias)


class GatheredMM(torch.autograd.Function):
    """Autograd for eager calls, and for compiled ones through the operator in `op`, with the same `gradients`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        b: torch.Tensor,
        rows: torch.Tensor | None,
        offs: torch.Tensor,
        bias: torch.Tensor | None,
        request: Request,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, b, rows, offs, bias)
        ctx.backend = request.backend
        return mm(x, b, rows, offs, bias, request)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, b, rows, offs, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated in turn
            dx, db, dbias = gradients_of(partial(_formula, rows, offs), (x, b, bias), grad)
            return dx, db, None, None, dbias, None
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4])
        dx, db, dbias = gradients(grad, x, b, rows, offs, bias, needs, ctx.backend)
        return dx, db, None, None, dbias, None


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, b, rows, offs, bias, ctx.backend = inputs
    ctx.save_for_backward(x, b, rows, offs, bias)


def _mm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, b, rows, offs, bias = ctx.saved_tensors
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4])
    dx, db, dbias = gradients(grad, x, b, rows, offs, bias, needs, ctx.backend)
    return dx, db, None, None, dbias, None


call_mm = differentiable(mm_op, _mm_backward, _mm_setup)
