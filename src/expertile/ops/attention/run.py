"""attention: tensors -> Problem (checked once) -> choose -> backend, forward and backward; expertile::attention_forward
and _backward as torch operators: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.attention.backend import Backend, Operands, Saved, new_lse
from expertile.ops.attention.backends import by_name
from expertile.ops.attention.choose import choose
from expertile.ops.attention.problem import Problem
from expertile.ops.backend import device_of as _device
from expertile.ops.torch_op import define, differentiable_eagerly, once_differentiable


def select(problem: Problem, device: Device, backend: str, backward: bool) -> tuple[Backend, Any]:
    """The backend and config for one direction. ValueError when the named backend cannot take it, with its reason.

    The backward of a backend that only has none for this problem is chosen as by "auto".
    """
    if backend != "auto":
        chosen = by_name(backend)
        direction = chosen.direction(backward)
        reason = direction.supports(problem, device)
        if reason is None:
            return chosen, direction.configs(problem, device)[0]
        if not backward:
            raise ValueError(f"backend: {backend} cannot take this problem: {reason}")
    choice = choose(problem, device, backward)
    return choice.backend, choice.config


def _on(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
    causal: bool,
    scale: float,
    lse_grad: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = Problem.from_tensors(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, lse_grad)
    if problem.empty:
        return torch.zeros_like(q), new_lse(problem, q).fill_(float("-inf"))
    chosen, config = select(problem, _device(q.device.type, q.device.index), backend, False)
    with _on(q):
        return chosen.forward.run(problem, Operands(q, k, v, cu_q, cu_k), config)


def attention_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v. `arguments`: those of `attention_forward`, then out, lse, dout, dlse or None."""
    q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, _, backend, out, lse, dout, dlse = arguments
    problem = Problem.from_tensors(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, dlse is not None)
    if problem.empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # out.sum().backward() hands over an expanded scalar: strides of 0, which no kernel takes.
    if dout.stride(-1) != 1 or 0 in dout.stride():
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    chosen, config = select(problem, _device(q.device.type, q.device.index), backend, True)
    with _on(q):
        return chosen.backward.run(
            problem, Operands(q, k, v, cu_q, cu_k), Saved(out, lse, dout.to(q.dtype), dlse), config
        )


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


_call_backward = define("attention_backward", attention_backward, _BACKWARD, fake=_fake_backward)
# What calls the operator, its arguments in the order of its schema; and attention in eager calls, with the same.
call_forward = define(
    "attention_forward",
    attention_forward,
    _FORWARD,
    fake=_fake_forward,
    gradient=partial(_gradient, _call_backward),
    setup=_setup,
)
differentiable_attention = differentiable_eagerly(
    attention_forward, _setup, once_differentiable(partial(_gradient, attention_backward))
)
