"""expertile::attention_forward and _backward as torch operators: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from expertile.ops.attention import run
from expertile.ops.torch_op import define, differentiable_eagerly, once_differentiable

_INPUTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, bool causal, float scale, bool lse_grad, str backend"
)
_FORWARD = _INPUTS + ") -> (Tensor, Tensor)"
_BACKWARD = _INPUTS + ", Tensor out, Tensor lse, Tensor dout, Tensor? dlse) -> (Tensor, Tensor, Tensor)"


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return torch.empty_like(q), q.new_empty(lse_shape, dtype=torch.float32)


def _fake_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, cu_q, cu_k, *output)
    ctx.set_materialize_grads(False)


def _gradient(
    backward: Callable[..., Any], ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
    lse_grad = ctx.rest[-2]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = backward(q, k, v, cu_q, cu_k, *ctx.rest, out, lse, dout, dlse if lse_grad else None)
    return dq, dk, dv, *(None,) * (2 + len(ctx.rest))


_call_backward = define("attention_backward", run.attention_backward, _BACKWARD, fake=_fake_backward)
# What calls the operator, its arguments in the order of its schema; and attention in eager calls, with the same.
call_forward = define(
    "attention_forward",
    run.attention_forward,
    _FORWARD,
    fake=_fake_forward,
    gradient=partial(_gradient, _call_backward),
    setup=_setup,
)
differentiable_attention = differentiable_eagerly(
    run.attention_forward, _setup, once_differentiable(partial(_gradient, run.attention_backward))
)
