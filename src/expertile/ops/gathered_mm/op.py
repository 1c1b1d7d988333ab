"""The gathered products as torch operators: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expertile.ops.gathered_mm.autograd import gradients
from expertile.ops.torch_op import differentiable, differentiable_once

_T = torch.Tensor


def install(
    mm: Callable[..., _T],
    gated: Callable[..., tuple[_T, _T | None]],
    backward: Callable[..., tuple[_T, _T, _T]],
    wgrad: Callable[..., _T],
) -> tuple[Callable[..., Any], ...]:
    """Register the operators, with those functions (arguments in the order of the schemas) as their kernels; returns
    what calls them. `mm` is differentiable."""

    @torch.library.custom_op(
        "expertile::gathered_mm", mutates_args=(),
        schema="(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str backend) -> Tensor",
    )  # fmt: skip
    def mm_op(x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, backend: str) -> _T:
        return mm(x, b, rows, offs, bias, backend)

    @torch.library.custom_op(
        "expertile::gathered_gated_mm", mutates_args=(),
        schema="(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str activation, bool interleaved, "
        "bool save_pre, str backend) -> (Tensor, Tensor)",
    )  # fmt: skip
    def gated_op(
        x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, activation: str, interleaved: bool, save_pre: bool,
        backend: str,
    ) -> tuple[_T, _T]:  # fmt: skip
        act, pre = gated(x, b, rows, offs, bias, activation, interleaved, save_pre, backend)
        return act, x.new_empty((0, b.shape[-1])) if pre is None else pre

    @torch.library.custom_op(
        "expertile::gated_backward_mm", mutates_args=(),
        schema="(Tensor dy, Tensor down, Tensor? rows, Tensor slots, Tensor weights, Tensor pre, Tensor offs, "
        "str activation, bool interleaved, str backend) -> (Tensor, Tensor, Tensor)",
    )  # fmt: skip
    def backward_op(
        dy: _T, down: _T, rows: _T | None, slots: _T, weights: _T, pre: _T, offs: _T, activation: str,
        interleaved: bool, backend: str,
    ) -> tuple[_T, _T, _T]:  # fmt: skip
        return backward(dy, down, rows, slots, weights, pre, offs, activation, interleaved, backend)

    @torch.library.custom_op(
        "expertile::gathered_wgrad", mutates_args=(),
        schema="(Tensor x, Tensor? rows, Tensor d, Tensor offs, bool gather_b, str backend) -> Tensor",
    )  # fmt: skip
    def wgrad_op(x: _T, rows: _T | None, d: _T, offs: _T, gather_b: bool, backend: str) -> _T:
        return wgrad(x, rows, d, offs, gather_b, backend)

    mm_op.register_fake(_fake_mm)
    gated_op.register_fake(_fake_gated)
    backward_op.register_fake(_fake_backward)
    wgrad_op.register_fake(_fake_wgrad)
    others = (differentiable_once(o) for o in (gated_op, backward_op, wgrad_op))
    return differentiable(mm_op, _mm_backward, _mm_setup), *others


def _rows_of(x: _T, rows: _T | None) -> Any:
    return x.shape[0] if rows is None else rows.shape[0]


def _fake_mm(x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, backend: str) -> _T:
    return x.new_empty((_rows_of(x, rows), b.shape[-1]))


def _fake_gated(
    x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, activation: str, interleaved: bool, save_pre: bool,
    backend: str,
) -> tuple[_T, _T]:  # fmt: skip
    r, n = _rows_of(x, rows), b.shape[-1]
    return x.new_empty((r, n // 2)), x.new_empty((r if save_pre else 0, n))


def _fake_backward(
    dy: _T, down: _T, rows: _T | None, slots: _T, weights: _T, pre: _T, offs: _T, activation: str, interleaved: bool,
    backend: str,
) -> tuple[_T, _T, _T]:  # fmt: skip
    r, inner = pre.shape[0], down.shape[1]
    return dy.new_empty((r, 2 * inner)), dy.new_empty((r, inner)), weights.new_empty(weights.shape)


def _fake_wgrad(x: _T, rows: _T | None, d: _T, offs: _T, gather_b: bool, backend: str) -> _T:
    return x.new_empty((offs.shape[0], x.shape[1], d.shape[1]))


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: _T) -> None:
    x, b, rows, offs, bias, ctx.backend = inputs
    ctx.save_for_backward(x, b, rows, offs, bias)


def _mm_backward(ctx: Any, grad: _T) -> tuple[Any, ...]:
    x, b, rows, offs, bias = ctx.saved_tensors
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4])
    dx, db, dbias = gradients(grad, x, b, rows, offs, bias, needs, ctx.backend)
    return dx, db, None, None, dbias, None
