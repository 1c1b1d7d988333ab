"""route: which experts each token goes to, and with what weights.

    scores  s = softmax(logits) over the experts, or sigmoid(logits)
    choice  c = s + bias; the top_k largest c of the token, ties to the lower expert. With groups, only among the
            experts of the top_groups best groups (by the sum of their two largest c, or by their largest).
    weights w = s of the chosen ("softmax_then_topk"), or the softmax of the chosen logits ("topk_then_softmax");
            divided by the sum of the chosen if `normalize`; times `scale`

| model                        | score   | order              | normalize | scale | groups         | bias |
|------------------------------|---------|--------------------|-----------|-------|----------------|------|
| Switch (arXiv:2101.03961)    | softmax | softmax_then_topk  | no        | 1     |                |      |
| Mixtral (arXiv:2401.04088)   | softmax | topk_then_softmax  |           | 1     |                |      |
| Qwen3-MoE (arXiv:2505.09388) | softmax | softmax_then_topk  | yes       | 1     |                |      |
| gpt-oss                      | softmax | topk_then_softmax  |           | 1     |                |      |
| DeepSeek-V2 (2405.04434)     | softmax | softmax_then_topk  | no        | 16    | 3 of 8, "max"  |      |
| DeepSeek-V3 (2412.19437)     | sigmoid | softmax_then_topk  | yes       | 2.5   | 4 of 8, "top2" | yes  |

The bias takes part in the choice alone (DeepSeek-V3's correction, eq. 16) and has no gradient. Without bias and groups
the choice is made among the logits themselves, which order the experts as the scores do.

One kernel reads the logits once and writes ids, weights and, if wanted, scores: T * E * (itemsize + 4) bytes; backward
T * E * 2 * itemsize. Up to 1024 experts lie in one program's registers; beyond, and on a CPU, plain torch does it.

With a capacity factor (GShard, arXiv:2006.16668) or token rounding (`rounding`), slots are dropped: their id becomes
`num_experts` and their weight 0. The remaining weights stay as they are.
"""

from dataclasses import dataclass
from numbers import Integral

import torch

from expertile.moe._select import MOST_EXPERTS, Plan, select
from expertile.moe._select import select_backward as select_backward
from expertile.moe.rounding import MODES, round_groups
from expertile.ops.checks import came, check_flags, check_integer, check_number
from expertile.ops.launch.device import FORMULA_DTYPES


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen; `expertile.moe.router` has the formulas.

    Attributes:
        num_experts: E.
        top_k: k.
        score: "softmax" or "sigmoid".
        order: "softmax_then_topk" or "topk_then_softmax"; the same thing for sigmoid scores, which know no other
            experts.
        normalize: divide the weights by their sum over the token's k experts.
        scale: a factor on the weights.
        num_groups: the experts are this many runs of equal length.
        top_groups: a token's experts come from this many of the groups.
        group_score: "top2", the sum of a group's two best experts, or "max", its best.
        capacity_factor: an expert takes at most ceil(capacity_factor * T * k / E) slots; the lowest weights are
            dropped.
        rounding: None, "down", "up", "nearest" or "adaptive": the rows of each expert become multiples of `tile`, with
            all but "down" as far as there are candidates: an expert that has too few takes them all, and its last tile
            stays partly empty. See `rounding`. All but "down" add tokens: topk_ids has `candidates` columns more,
            dropped unless taken.
        tile: rows of a tile of the grouped products.
        candidates: next-best experts of each token that may take it. An expert has about T * candidates / num_experts
            of them, and needs up to tile - 1.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    order: str = "softmax_then_topk"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None
    group_score: str = "top2"
    capacity_factor: float | None = None
    rounding: str | None = None
    tile: int = 128
    candidates: int = 1

    def __post_init__(self) -> None:
        for name, least in (("num_experts", 1), ("tile", 1), ("candidates", 0)):
            check_integer(name, getattr(self, name), least)
        check_number("scale", self.scale)
        check_flags(normalize=self.normalize)
        _require(
            isinstance(self.top_k, Integral) and 1 <= self.top_k <= self.num_experts,
            "top_k",
            f"1 … {self.num_experts}, the experts there are",
            self.top_k,
        )
        _require(self.score in ("softmax", "sigmoid"), "score", "softmax or sigmoid", self.score)
        orders = ("softmax_then_topk", "topk_then_softmax")
        _require(self.order in orders, "order", " or ".join(orders), self.order)
        _require(self.group_score in ("top2", "max"), "group_score", "top2 or max", self.group_score)
        _require(
            (self.num_groups is None) == (self.top_groups is None),
            "num_groups, top_groups",
            "both or neither",
            (self.num_groups, self.top_groups),
        )
        if self.num_groups is not None and self.top_groups is not None:
            for name in ("num_groups", "top_groups"):
                check_integer(name, getattr(self, name), 1)
            divides = self.num_experts % self.num_groups == 0
            _require(divides, "num_groups", f"a divisor of {self.num_experts}", self.num_groups)
            size = self.num_experts // self.num_groups
            _require(self.top_groups <= self.num_groups, "top_groups", f"1 … {self.num_groups}", self.top_groups)
            within = self.top_groups * size
            _require(self.top_k <= within, "top_k", f"at most {within}, the experts of top_groups groups", self.top_k)
            _require(size > 1 or self.group_score == "max", "group_score", "max for groups of 1 expert", "top2")
        if (capacity := self.capacity_factor) is not None:
            check_number("capacity_factor", capacity)
            _require(capacity > 0, "capacity_factor", "a positive number or None", capacity)
        _require(self.rounding is None or self.rounding in MODES, "rounding", f"None or one of {MODES}", self.rounding)

    @property
    def columns(self) -> int:
        """Columns of topk_ids: top_k, and candidates where rounding may add tokens."""
        if self.rounding in (None, "down"):
            return self.top_k
        most = self.num_experts
        if self.num_groups is not None and self.top_groups is not None:
            most = self.top_groups * (self.num_experts // self.num_groups)
        return min(self.top_k + self.candidates, most)


def _require(right: bool, name: str, expected: str, got: object) -> None:
    if not right:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


@dataclass(frozen=True)
class Routing:
    """Where each token goes.

    Attributes:
        topk_ids: [T, k] int32, best first; num_experts = dropped.
        topk_weights: [T, k] float32; 0 for dropped slots.
        scores: [T, E] float32 for the auxiliary losses, or None.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scores: torch.Tensor | None

    def __repr__(self) -> str:
        tokens, columns = self.topk_ids.shape
        scores = "no scores" if self.scores is None else f"{self.scores.shape[1]} scores"
        return f"Routing({tokens} tokens, {columns} experts each, {scores}, device={self.topk_ids.device})"


def plan_of(config: RouterConfig, batch_invariant: bool = False) -> Plan:
    groups, top_groups = config.num_groups or 1, config.top_groups or 0
    return Plan(
        config.top_k,
        config.columns,
        sigmoid=config.score == "sigmoid",
        softmax_of_chosen=config.order == "topk_then_softmax",
        normalize=config.normalize,
        scale=config.scale,
        groups=groups,
        top_groups=top_groups,
        by_two=bool(top_groups) and config.group_score == "top2",
        batch_invariant=batch_invariant,
    )


def require_independent(config: RouterConfig) -> None:
    """ValueError where a token's experts depend on the other tokens."""
    for name in ("capacity_factor", "rounding"):
        if (value := getattr(config, name)) is not None:
            raise ValueError(f"batch_invariant: expected {name} None, as it drops slots by other tokens, got {value!r}")


def route(
    logits: torch.Tensor,
    config: RouterConfig,
    *,
    bias: torch.Tensor | None = None,
    want_scores: bool = True,
    batch_invariant: bool = False,
) -> Routing:
    """Choose each token's experts, on the device and without waiting for it.

    Args:
        logits: [T, E], float32, bfloat16 or float16; computed with in float32. Or
            float64, as are the weights and scores then.
        config: how; its num_experts is E.
        bias: [E], floating point: added to the scores for the choice alone. No gradient.
        want_scores: whether the scores are wanted too; they are 4 * T * E bytes to write.
        batch_invariant: a token's results, bit by bit, depend on its logits alone. Without capacity and rounding, which
            compare tokens; on a GPU with at most 1024 experts.

    Returns:
        Routing, differentiable in the logits through weights and scores. Equal logits give equal results, and ties go
        to the lower expert.

    Raises:
        ValueError: logits or bias of another shape or dtype, a config of another class; batch_invariant where that is
            not possible.
    """
    if not isinstance(config, RouterConfig):
        raise ValueError(f"config: expected a RouterConfig, got {type(config).__name__}")
    if batch_invariant:
        require_independent(config)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(f"logits: expected a torch.Tensor, got {type(logits).__name__}")
    if logits.dim() != 2 or logits.shape[1] != config.num_experts or logits.dtype not in FORMULA_DTYPES:
        raise ValueError(
            f"logits: expected shape [T, {config.num_experts}], float32, bfloat16, float16 or float64, "
            f"got {list(logits.shape)} {logits.dtype}"
        )
    if bias is not None and not (
        isinstance(bias, torch.Tensor)
        and bias.dim() == 1
        and bias.shape[0] == config.num_experts
        and bias.is_floating_point()
        and bias.device == logits.device
    ):
        wanted = f"[{config.num_experts}], floating point, on {logits.device}"
        raise ValueError(f"bias: expected shape {wanted}, got {came(bias)}")
    if batch_invariant and logits.is_cuda and config.num_experts > MOST_EXPERTS:
        raise ValueError(f"batch_invariant: expected at most {MOST_EXPERTS} experts, got {config.num_experts}")
    plan = plan_of(config, batch_invariant)
    bias = None if bias is None else bias.detach()
    weights, ids, scores = select(logits, bias, want_scores, plan)
    if config.capacity_factor is not None or config.rounding is not None:
        ids = round_groups(
            ids,
            weights.detach().float(),
            config.num_experts,
            top_k=config.top_k,
            tile=config.tile,
            mode=config.rounding,
            capacity_factor=config.capacity_factor,
        )
        weights = torch.where(ids < config.num_experts, weights, 0.0)
    return Routing(ids, weights, scores if want_scores else None)
