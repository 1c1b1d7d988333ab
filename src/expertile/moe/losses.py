"""Auxiliary losses of a router, in plain torch: differentiable, compiled along with whatever is around them."""

import torch

from expertile.moe.permute import check_ids
from expertile.moe.statistics import tokens_per_expert
from expertile.ops.checks import came


def load_balancing_loss(scores: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """E * sum over experts e of f_e * P_e: Switch Transformer's loss (Fedus, Zoph, Shazeer, arXiv:2101.03961, eq. 4)
    for top-k, as Mixtral's implementation in transformers has it (`load_balancing_loss_func`).

        f_e = (slots that go to e) / T,  sums to k        no gradient
        P_e = mean of scores[:, e]                        carries the gradient

    Its value is k for scores and tokens spread evenly, up to k * E at worst; Switch's own for k = 1. Slots that are
    dropped (id = num_experts) do not count.

    Args:
        scores: [T, E] float32, probabilities. Sigmoid scores are to be divided by their sum first (DeepSeek-V3,
            arXiv:2412.19437, eq. 18).
        topk_ids: [T, k] int32 or int64.
        num_experts: E.

    Returns:
        A scalar, float32; 0 without tokens.

    Raises:
        ValueError: scores that are not [T, E].
    """
    check_ids(topk_ids, num_experts)
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != (topk_ids.shape[0], num_experts):
        raise ValueError(f"scores: expected shape [{topk_ids.shape[0]}, {num_experts}], got {came(scores)}")
    tokens = max(scores.shape[0], 1)
    fractions = tokens_per_expert(topk_ids, num_experts).float() / tokens
    return num_experts * torch.dot(fractions, scores.float().sum(0) / tokens)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of logsumexp(logits)²: ST-MoE's router z-loss (Zoph et al., arXiv:2202.08906, eq. 5), which
    keeps logits small.

    logits [T, E], any floating dtype, computed in float32. Returns a scalar; 0 without tokens.
    """
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        raise ValueError(f"logits: expected shape [T, E], got {came(logits)}")
    return torch.logsumexp(logits.float(), 1).square().sum() / max(logits.shape[0], 1)
