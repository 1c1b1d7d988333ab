"""The gathered products as torch operators: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

from typing import Any

import torch

from expertile.ops.backend import Request
from expertile.ops.gathered_mm import run
from expertile.ops.torch_op import differentiable_once

_T = torch.Tensor


def _rows_of(x: _T, rows: _T | None) -> Any:
    return x.shape[0] if rows is None else rows.shape[0]


@torch.library.custom_op(
    "expertile::gathered_mm", mutates_args=(),
    schema="(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str backend) -> Tensor",
)  # fmt: skip
def mm_op(x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, backend: str) -> _T:
    return run.mm(x, b, rows, offs, bias, Request(backend))


@mm_op.register_fake
def _fake_mm(x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, backend: str) -> _T:
    return x.new_empty((_rows_of(x, rows), b.shape[-1]))


@torch.library.custom_op(
    "expertile::gathered_gated_mm", mutates_args=(),
    schema="(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str activation, bool interleaved, "
    "bool save_pre, str backend) -> (Tensor, Tensor)",
)  # fmt: skip
def _gated_op(
    x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, activation: str, interleaved: bool, save_pre: bool,
    backend: str,
) -> tuple[_T, _T]:  # fmt: skip
    act, pre = run.gated(x, b, rows, offs, bias, activation, interleaved, save_pre, Request(backend))
    return act, x.new_empty((0, b.shape[-1])) if pre is None else pre


@_gated_op.register_fake
def _fake_gated(
    x: _T, b: _T, rows: _T | None, offs: _T, bias: _T | None, activation: str, interleaved: bool, save_pre: bool,
    backend: str,
) -> tuple[_T, _T]:  # fmt: skip
    r, n = _rows_of(x, rows), b.shape[-1]
    return x.new_empty((r, n // 2)), x.new_empty((r if save_pre else 0, n))


@torch.library.custom_op(
    "expertile::gated_backward_mm", mutates_args=(),
    schema="(Tensor dy, Tensor down, Tensor? rows, Tensor slots, Tensor weights, Tensor pre, Tensor offs, "
    "str activation, bool interleaved, str backend) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def _backward_op(
    dy: _T, down: _T, rows: _T | None, slots: _T, weights: _T, pre: _T, offs: _T, activation: str,
    interleaved: bool, backend: str,
) -> tuple[_T, _T, _T]:  # fmt: skip
    return run.backward(dy, down, rows, slots, weights, pre, offs, activation, interleaved, Request(backend))


@_backward_op.register_fake
def _fake_backward(
    dy: _T, down: _T, rows: _T | None, slots: _T, weights: _T, pre: _T, offs: _T, activation: str, interleaved: bool,
    backend: str,
) -> tuple[_T, _T, _T]:  # fmt: skip
    r, inner = pre.shape[0], down.shape[1]
    return dy.new_empty((r, 2 * inner)), dy.new_empty((r, inner)), weights.new_empty(weights.shape)


@torch.library.custom_op(
    "expertile::gathered_wgrad", mutates_args=(),
    schema="(Tensor x, Tensor? rows, Tensor d, Tensor offs, bool gather_b, str backend) -> Tensor",
)  # fmt: skip
def _wgrad_op(x: _T, rows: _T | None, d: _T, offs: _T, gather_b: bool, backend: str) -> _T:
    return run.wgrad(x, rows, d, offs, gather_b, Request(backend))


@_wgrad_op.register_fake
def _fake_wgrad(x: _T, rows: _T | None, d: _T, offs: _T, gather_b: bool, backend: str) -> _T:
    return x.new_empty((offs.shape[0], x.shape[1], d.shape[1]))


call_gated = differentiable_once(_gated_op)
call_backward = differentiable_once(_backward_op)
call_wgrad = differentiable_once(_wgrad_op)
