"""The gathered products without a derivative as torch operators: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expertile.ops.backend import Request
from expertile.ops.gathered_mm import run
from expertile.ops.torch_op import define

_T = torch.Tensor


def rows_of(x: _T, rows: _T | None) -> Any:
    """R, the rows in expert order."""
    return x.shape[0] if rows is None else rows.shape[0]


def by_backend(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(*arguments, request)` as an operator's kernel, whose last argument is a backend's name."""
    return lambda *arguments: run(*arguments[:-1], Request(arguments[-1]))


def _gated(x: _T, b: _T, *arguments: Any) -> tuple[_T, _T]:
    act, pre = run.gated(x, b, *arguments)
    return act, x.new_empty((0, b.shape[-1])) if pre is None else pre


def _fake_gated(
    x: _T,
    b: _T,
    rows: _T | None,
    offs: _T,
    bias: _T | None,
    activation: str,
    interleaved: bool,
    save_pre: bool,
    *_: Any,
) -> tuple[_T, _T]:
    r, n = rows_of(x, rows), b.shape[-1]
    return x.new_empty((r, n // 2)), x.new_empty((r if save_pre else 0, n))


def _fake_backward(dy: _T, down: _T, rows: _T | None, slots: _T, weights: _T, pre: _T, *_: Any) -> tuple[_T, _T, _T]:
    r, inner = pre.shape[0], down.shape[1]
    return dy.new_empty((r, 2 * inner)), dy.new_empty((r, inner)), weights.new_empty(weights.shape)


def _fake_wgrad(x: _T, rows: _T | None, d: _T, offs: _T, *_: Any) -> _T:
    return x.new_empty((offs.shape[0], x.shape[1], d.shape[1]))


call_gated = define(
    "gathered_gated_mm",
    by_backend(_gated),
    "(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str activation, bool interleaved, "
    "bool save_pre, str backend) -> (Tensor, Tensor)",
    fake=_fake_gated,
)
call_backward = define(
    "gated_backward_mm",
    by_backend(run.backward),
    "(Tensor dy, Tensor down, Tensor? rows, Tensor slots, Tensor weights, Tensor pre, Tensor offs, "
    "str activation, bool interleaved, str backend) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
call_wgrad = define(
    "gathered_wgrad",
    by_backend(run.wgrad),
    "(Tensor x, Tensor? rows, Tensor d, Tensor offs, bool gather_b, str backend) -> Tensor",
    fake=_fake_wgrad,
)
