"""sdpa_cudnn and sdpa_fa2: the kernels behind torch.nn.functional.scaled_dot_product_attention, called by themselves so
that LSE comes out and the backward may be another's.

cuDNN builds a plan for every new shape at its first call, which takes far longer than the call. Its backward, and
FlashAttention 2's, add to dQ atomically: the bits of dQ differ from run to run. FlashAttention 2 aligns causal masks at
the bottom right, as this package does; SDPA's `is_causal` aligns them at the top left, so where lengths differ torch's
front end refuses FlashAttention 2, and cuDNN is not used here.
"""

import math

import torch

from expertile.device import Device
from expertile.ops.attention.backend import Backend, Direction, Operands, Saved
from expertile.ops.attention.problem import Problem
from expertile.ops.backend import NoConfig, one_config


def _common(p: Problem, device: Device) -> str | None:
    if p.device_type != "cuda" or not device.at_least(8):
        return "needs a CUDA GPU of compute capability 8.0 or later"
    return p.not_in_words


def _backward_refusal(p: Problem) -> str | None:
    if p.deterministic:
        return "adds to dQ atomically, and torch.use_deterministic_algorithms is on"
    return "takes no gradient of LSE" if p.lse_grad else None


def _cudnn_supports(problem: Problem, device: Device) -> str | None:
    p = problem
    if p.packed:
        return "is used for sequences of one length only"
    if p.head_dim > 128:
        return f"takes head dimensions to 128, not {p.head_dim}"
    if p.causal and p.q_len != p.k_len:
        return "aligns causal masks at the top left, which differs where lengths do"
    if p.q_len < 2 or p.k_len < 2:
        return "takes lengths of 2 and more"
    return _common(p, device)


def _fa2_supports(problem: Problem, device: Device) -> str | None:
    if problem.packed and 0 in (problem.q_len, problem.k_len):
        return "takes sequences with rows"
    return _common(problem, device)


def _like(x: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """`x` with the strides that a new tensor like `model` has, which every backend's results have."""
    # On the meta device, since memory that is only asked for its strides counts at the peak too.
    if x.stride() == torch.empty_like(model, device="meta").stride():
        return x
    return torch.empty_like(model).copy_(x)


def _cudnn_forward(problem: Problem, operands: Operands, config: NoConfig) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        operands.q, operands.k, operands.v, None, True, 0.0, problem.causal, False, scale=problem.scale
    )
    return _like(out, operands.q), lse.reshape(problem.batch, problem.heads, problem.q_len)


def _cudnn_backward(
    problem: Problem, operands: Operands, saved: Saved, config: NoConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p, q = problem, operands.q
    given = (saved.dout, q, operands.k, operands.v, saved.out, saved.lse.contiguous().unsqueeze(-1))
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *given, unused, unused, None, None, None, p.q_len, p.k_len, 0.0, p.causal, scale=p.scale
    )
    return _like(dq, q), _like(dk, operands.k), _like(dv, operands.v)


def _rows_first(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """[B, L, H, D], as FlashAttention 2 takes dense tensors."""
    return x if packed else x.transpose(1, 2)


def _fa2_forward(problem: Problem, operands: Operands, config: NoConfig) -> tuple[torch.Tensor, torch.Tensor]:
    p = problem
    q, k, v = (_rows_first(x, p.packed) for x in (operands.q, operands.k, operands.v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, operands.cu_seqlens_q, operands.cu_seqlens_k, p.q_len, p.k_len, 0.0, p.causal, False, scale=p.scale
    )
    return _like(_rows_first(out, p.packed), operands.q), _without_keys(p, lse)


def _without_keys(problem: Problem, lse: torch.Tensor) -> torch.Tensor:
    """LSE with minus infinity in rows that see no key, where FlashAttention 2 writes plus infinity.

    Nothing is done where every row sees one. Of packed sequences only the GPU knows: one more pass over LSE.
    """
    p = problem
    if p.packed:
        return torch.nan_to_num_(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf)
    if p.causal and p.q_len > p.k_len:
        lse[..., : p.q_len - p.k_len] = -math.inf
    return lse


def _fa2_backward(
    problem: Problem, operands: Operands, saved: Saved, config: NoConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = problem
    q, k, v, dout, out = (_rows_first(x, p.packed) for x in (operands.q, operands.k, operands.v, saved.dout, saved.out))
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    given = (dout, q, k, v, out, saved.lse, operands.cu_seqlens_q, operands.cu_seqlens_k)
    grads = torch.ops.aten._flash_attention_backward(
        *given, p.q_len, p.k_len, 0.0, p.causal, state, unused, scale=p.scale
    )
    models = (operands.q, operands.k, operands.v)
    dq, dk, dv = (_like(_rows_first(g, p.packed), m) for g, m in zip(grads, models, strict=True))
    return dq, dk, dv


CUDNN = Backend(
    name="sdpa_cudnn",
    summary="cuDNN's fused attention, as torch's SDPA calls it",
    forward=Direction(_cudnn_supports, one_config, _cudnn_forward),
    backward=Direction(
        lambda p, device: _backward_refusal(p) or _cudnn_supports(p, device), one_config, _cudnn_backward
    ),
    peer=True,
)
FA2 = Backend(
    name="sdpa_fa2",
    summary="FlashAttention 2, as torch's SDPA calls it; packed sequences too",
    forward=Direction(_fa2_supports, one_config, _fa2_forward),
    backward=Direction(lambda p, device: _backward_refusal(p) or _fa2_supports(p, device), one_config, _fa2_backward),
    peer=True,
)
