"""expertile::attention_forward and _backward as torch operators: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expertile.ops.torch_op import differentiable, differentiable_once

_INPUTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, bool causal, float scale, bool lse_grad, str backend"
)
_FORWARD = _INPUTS + ") -> (Tensor, Tensor)"
_BACKWARD = _INPUTS + ", Tensor out, Tensor lse, Tensor dout, Tensor? dlse) -> (Tensor, Tensor, Tensor)"


def install(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Register the operators, with `forward(*inputs)` and `backward(*inputs, out, lse, dout, dlse)` as kernels; returns
    what calls the first."""
    forward_op = torch.library.custom_op("expertile::attention_forward", forward, mutates_args=(), schema=_FORWARD)
    backward_op = torch.library.custom_op("expertile::attention_backward", backward, mutates_args=(), schema=_BACKWARD)
    forward_op.register_fake(_fake_forward)
    backward_op.register_fake(_fake_backward)

    call_backward = differentiable_once(backward_op)

    def gradient(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
        lse_grad = ctx.rest[-2]
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = call_backward(q, k, v, cu_q, cu_k, *ctx.rest, out, lse, dout, dlse if lse_grad else None)
        return dq, dk, dv, *(None,) * (2 + len(ctx.rest))

    return differentiable(forward_op, gradient, _setup)


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
