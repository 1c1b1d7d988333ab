"""attention without autograd: tensors -> Problem (checked once) -> choose -> backend, forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.attention.backend import Backend, Operands, Saved, new_lse
from expertile.ops.attention.backends import by_name
from expertile.ops.attention.choose import choose
from expertile.ops.attention.problem import Problem
from expertile.ops.backend import device_of as _device


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
