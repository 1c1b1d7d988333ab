"""attention: the public call. Tensors -> Problem (checked once) -> choose -> backend, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from expertile.ops.attention.explain import Explanation, explain_problem
from expertile.ops.attention.problem import Problem
from expertile.ops.attention.run import attention_forward, call_forward, differentiable_attention
from expertile.ops.backend import device_of as _device
from expertile.ops.torch_op import traced


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
        out like q; with return_lse also LSE, float32 [B, H, Lq] or [H, total_q]. Rows that see no key are zeros with an
        LSE of minus infinity, and have no gradient.

    NaN and infinity go where arithmetic takes them: NaN in a query or a key it sees makes the row NaN. A value that is
    NaN or infinite reaches the rows that see it, and may reach others that share a block of queries with those, as
    0 · NaN is NaN; never another sequence or head.

    The backward of our own kernels has no atomics, so it gives the same bits every time. cuDNN's and FlashAttention 2's
    do not; `torch.use_deterministic_algorithms(True)` keeps "auto" away from them.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (q, k, v))
    if scale is not None and scale <= 0:
        # The kernels take the maximum of the scores before they scale them.
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    arguments: Any = (q, k, v, *lengths, causal, scale, return_lse, backend)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if traced(q):
        out, lse = call_forward(*arguments)
    elif needs_grad:
        out, lse = differentiable_attention(*arguments)
    else:
        out, lse = attention_forward(*arguments)
    return (out, lse) if return_lse else out


def explain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Explanation:
    """Which backends `attention` would use for these operands, forward and backward, why, and what bounds it.

    Same errors as `attention`. Waits for nothing.
    """
    problem = Problem.from_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
    return explain_problem(problem, _device(q.device.type, q.device.index))
