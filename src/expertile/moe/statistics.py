"""How evenly tokens are spread over experts."""

from dataclasses import dataclass

import torch

from expertile.moe.permute import permutation
from expertile.ops.checks import came


@dataclass(frozen=True)
class ExpertStatistics:
    """Scalars (0-dimensional float32 tensors on the counts' device, so that the host does not wait for a GPU):

    Attributes:
        gini: 0 when all experts have the same rows, 1 - 1/E when one has all. Half the mean absolute difference of two
            experts over the mean: sum_i (2 i - E - 1) n_(i) / (E * sum n), with n_(1) <= … <= n_(E).
        cv: coefficient of variation, standard deviation of the population over the mean.
        empty_share: share of experts without rows.
        max_share: share of all rows that the largest expert has.

    All are 0 for no rows at all, but empty_share, which is 1.
    """

    gini: torch.Tensor
    cv: torch.Tensor
    empty_share: torch.Tensor
    max_share: torch.Tensor


def tokens_per_expert(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int32: how many slots of topk_ids [T, k] name each expert; deterministic, nothing waits for the GPU."""
    offs = permutation(topk_ids, num_experts).offs
    return torch.diff(offs, prepend=offs.new_zeros(1))


def expert_statistics(counts: torch.Tensor) -> ExpertStatistics:
    """Statistics of `counts` [E], integers: the rows of each expert (see `tokens_per_expert`)."""
    whole = isinstance(counts, torch.Tensor) and not counts.is_floating_point() and not counts.is_complex()
    if not whole or counts.dim() != 1 or counts.shape[0] == 0:
        raise ValueError(f"counts: expected shape [E], integers, got {came(counts)}")
    experts = counts.shape[0]
    sizes = counts.double().sort().values
    total = sizes.sum()
    some = total.clamp(min=1.0)  # numerators are 0 where the total is
    weights = 2.0 * torch.arange(1, experts + 1, dtype=torch.float64, device=counts.device) - experts - 1.0
    gini = (weights * sizes).sum() / (experts * some)
    cv = sizes.std(correction=0) * experts / some
    return ExpertStatistics(gini.float(), cv.float(), (sizes == 0).float().mean(), (sizes[-1] / some).float())
