"""attention: tensors -> Problem (checked once) -> choose -> backend, forward and backward; expertile::attention_forward
and _backward as torch operators: what torch.compile, FakeTensor and opcheck see."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.ops.attention.backend import Backend, Operands, Saved, new_lse
from expertile.ops.attention.backends import by_name
from expertile.ops.attention.choose import choose
from expertile.ops.attention.explain import Explanation, explain_problem
from expertile.ops.attention.problem import Problem
from expertile.ops.backend import device_of as _device
from expertile.ops.checks import check_number
from expertile.ops.launch.device import wide_dtype
from expertile.ops.torch_op import define, differentiable_eagerly, meta_alone, once_differentiable, traced


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(scale · q kᵀ) v, in memory linear in length; differentiable once (a second
    derivative raises).

    Args:
        q: [B, H, Lq, D], or packed [total_q, H, D]; any strides with a contiguous last dimension, D from 1 to 256.
            bfloat16 and float16 run in fused kernels; float32 and float64 by the definition, some rows at a time.
        k, v: [B, Hkv, Lk, D], or packed [total_k, Hkv, D]; H is a multiple of Hkv, and query head h reads key head
            h // (H // Hkv).
        causal: query i sees the keys j <= i + Lk - Lq only: the mask is aligned at the bottom right, as in
            FlashAttention since 2.1. SDPA's `is_causal` is aligned at the top left; for Lq = Lk they agree.
        scale: 1 / sqrt(D) by default.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 on q's device: where each packed sequence starts, and the total.
            Never read on the host of a GPU.
        max_seqlen_q, max_seqlen_k: the longest packed sequence, or anything above; needed with cu_seqlens.
        return_lse: also return the log-sum-exp of each row's scaled scores (natural logarithm), which is
            differentiable too.
        backend: "auto", or the name of a backend: `explain_attention` says which there are and what they can.

    Returns:
        out like q; with return_lse also LSE, [B, H, Lq] or [H, total_q], float32 (float64 of float64 inputs). Rows that
        see no key are zeros with an LSE of minus infinity, and have no gradient.

    NaN and infinity go where arithmetic takes them: NaN in a query or a key it sees makes the row NaN. A value that is
    NaN or infinite reaches the rows that see it, and may reach others that share a block of queries with those, as
    0 · NaN is NaN; never another sequence or head.

    The backward of our own kernels has no atomics, so it gives the same bits every time. cuDNN's and FlashAttention 2's
    do not; `torch.use_deterministic_algorithms(True)` keeps "auto" away from them.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (q, k, v))
    if scale is not None:
        check_number("scale", scale)
    if scale is not None and scale <= 0:
        # The kernels take the maximum of the scores before they scale them.
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    arguments: Any = (q, k, v, *lengths, causal, scale, return_lse, backend)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if traced(q, k, v):
        if meta_alone(q):  # no value to look at, but the shapes
            Problem.from_tensors(q, k, v, *lengths, causal, scale)
        out, lse = call_forward(*arguments)
    elif needs_grad:
        out, lse = differentiable_attention(*arguments)
    else:
        out, lse = attention_forward(*arguments)
    return (out, lse) if return_lse else out


def explain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Explanation:
    """Which backends `attention` would use for these operands, forward and backward, why, and what bounds it.

    Same errors as `attention`. Waits for nothing.
    """
    problem = Problem.from_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
    return explain_problem(problem, _device(q.device.type, q.device.index))


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


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


def attention_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, LSE). `arguments`: those of the operator, as `_INPUTS` lists them."""
    q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, lse_grad, backend = arguments
    problem = Problem.from_tensors(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, lse_grad)
    if problem.empty:
        return torch.zeros_like(q), new_lse(problem, q).fill_(float("-inf"))
    chosen, config = select(problem, _device(q.device.type, q.device.index), backend, False)
    with _on(q):
        return chosen.forward.run(problem, Operands(q, k, v, cu_q, cu_k), config)


def attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
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


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return torch.empty_like(q), q.new_empty(lse_shape, dtype=wide_dtype(q))


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, cu_q, cu_k, *output)
    ctx.set_materialize_grads(False)


def _gradient(backward: Callable[..., Any], ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
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
