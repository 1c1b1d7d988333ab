"""The Mixture-of-Experts layer: router, permutation, expert MLPs, losses, statistics, token rounding.

Composed of `expertile.ops`; knows no backend by name.
"""

from typing import TYPE_CHECKING, Any

from expertile.moe.experts import moe_mlp
from expertile.moe.layer import MoE
from expertile.moe.logits import router_logits, router_logits_and_x
from expertile.moe.losses import load_balancing_loss, z_loss
from expertile.moe.permute import Permutation, permutation
from expertile.moe.rounding import RoundingEffect, round_groups, rounding_effect
from expertile.moe.router import RouterConfig, Routing, route
from expertile.moe.statistics import ExpertStatistics, expert_statistics, tokens_per_expert

if TYPE_CHECKING:
    from expertile.moe.parallel import ExpertParallel, ParallelConfig
    from expertile.moe.parallel_layer import ExpertParallelMoE

__all__ = [
    "ExpertParallel",
    "ExpertParallelMoE",
    "ExpertStatistics",
    "MoE",
    "ParallelConfig",
    "Permutation",
    "RoundingEffect",
    "RouterConfig",
    "Routing",
    "expert_statistics",
    "load_balancing_loss",
    "moe_mlp",
    "permutation",
    "round_groups",
    "rounding_effect",
    "route",
    "router_logits",
    "router_logits_and_x",
    "tokens_per_expert",
    "z_loss",
]


def __getattr__(name: str) -> Any:
    # When first asked for: DTensors take torch the better part of a second to import.
    if name in ("ExpertParallel", "ParallelConfig"):
        from expertile.moe import parallel

        return getattr(parallel, name)
    if name == "ExpertParallelMoE":
        from expertile.moe.parallel_layer import ExpertParallelMoE

        return ExpertParallelMoE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
