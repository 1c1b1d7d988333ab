"""What expertile computes for definitions of flashinfer-bench: each function takes the definition's inputs by name.

MoE definitions store the first projection with the rows of `up` before those of `gate`, expertile the other way round.
With `gate_first` the weights have been rearranged before; without it, each call swaps the halves of the product.
"""

import torch
import torch.nn.functional as F

from expertile import grouped_mm, moe_mlp, quantize_swiglu, route, scaled_grouped_mm
from expertile.moe import RouterConfig, permutation
from expertile.ops.gathered_mm.combine import combine


def gemm(A: torch.Tensor, B: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """C [M, N] of A [M, K] and B [N, K], as a grouped product of one group."""
    return grouped_mm(A[None], B.t()[None], backend=backend)[0]


def batched_gemm(A: torch.Tensor, B: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """C [G, M, N] of A [G, M, K] and B [G, K, N]."""
    return grouped_mm(A, B, backend=backend)


def grouped_gemm(
    A: torch.Tensor, B: torch.Tensor, offs: torch.Tensor, *, stored: str = "nk", backend: str = "auto"
) -> torch.Tensor:
    """C [M, N] of A [M, K], its rows sorted by group, and B [G, N, K] ("nk") or [G, K, N] ("kn")."""
    return grouped_mm(A, B.transpose(1, 2) if stored == "nk" else B, offs=offs, backend=backend)


def moe_fp8(
    routing_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    routing_bias: torch.Tensor | None = None,
    local_expert_offset: int = 0,
    routed_scaling_factor: float = 1.0,
    *,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    gate_first: bool = False,
) -> torch.Tensor:
    """output [T, H] bfloat16 of this rank's experts; e4m3 operands, scales 1×128 [H/128, T] and 128×128. With a bias
    DeepSeek-V3's routing, without it the softmax over the chosen. SwiGLU's result is quantised again."""
    ids, weights = routed(routing_logits, routing_bias, routed_scaling_factor, top_k, groups, top_groups)
    order = permutation(ids - local_expert_offset, gemm1_weights.shape[0])
    pre = scaled_grouped_mm(
        hidden_states.view(torch.uint8).index_select(0, order.rows).view(hidden_states.dtype),
        gemm1_weights.transpose(1, 2),
        hidden_states_scale.t().index_select(0, order.rows),
        gemm1_weights_scale,
        offs=order.offs,
    )
    act = quantize_swiglu(pre if gate_first else swapped(pre, 1))
    down = gemm2_weights.transpose(1, 2)
    return combine(
        scaled_grouped_mm(act.values, down, act.scales, gemm2_weights_scale, offs=order.offs), order.positions, weights
    )


def routed(
    logits: torch.Tensor, bias: torch.Tensor | None, scale: float, top_k: int, groups: int = 1, top_groups: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32, weights float32) [T, top_k] among all experts of logits [T, E]."""
    config = RouterConfig(
        logits.shape[1],
        top_k,
        score="softmax" if bias is None else "sigmoid",
        order="topk_then_softmax" if bias is None else "softmax_then_topk",
        scale=scale,
        num_groups=groups if groups > 1 else None,
        top_groups=top_groups if groups > 1 else None,
    )
    found = route(logits, config, bias=bias, want_scores=False)
    return found.topk_ids, found.topk_weights


def moe_routed(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    gate_first: bool = False,
) -> torch.Tensor:
    """output [T, H] of tokens that were routed before, in 16 bits: w1 [E, 2I, H], w2 [E, H, I]."""
    if gate_first:
        return moe_mlp(hidden_states, w1, w2, topk_ids, topk_weights)
    order = permutation(topk_ids, w1.shape[0])
    pre = grouped_mm(hidden_states.index_select(0, order.rows), w1.transpose(1, 2), offs=order.offs)
    up, gate = pre.float().chunk(2, 1)
    act = (F.silu(gate) * up).to(pre.dtype)
    return combine(grouped_mm(act, w2.transpose(1, 2), offs=order.offs), order.positions, topk_weights)


def swapped(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x with its two halves along `dim` exchanged."""
    first, second = x.chunk(2, dim)
    return torch.cat((second, first), dim)
