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

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from expertile.moe._route_kernels import route_backward_kernel, route_kernel
from expertile.moe.rounding import MODES, round_groups
from expertile.ops.launch.device import FORMULA_DTYPES, on_kernels, supports_pdl, wide
from expertile.ops.launch.kernels import launch
from expertile.ops.torch_op import differentiable, differentiable_once, traced

MOST_EXPERTS = 1024  # of the kernels
_NOTHING = -(2**31)
_TINY = 1e-20
_PLACES = 2048  # places (tokens * experts) of one program: 16 a thread


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
        _require(self.num_experts >= 1, "num_experts", "at least 1", self.num_experts)
        _require(
            1 <= self.top_k <= self.num_experts, "top_k", f"1 … {self.num_experts}, the experts there are", self.top_k
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
            divides = self.num_groups >= 1 and self.num_experts % self.num_groups == 0
            _require(divides, "num_groups", f"a divisor of {self.num_experts}", self.num_groups)
            size = self.num_experts // self.num_groups
            _require(1 <= self.top_groups <= self.num_groups, "top_groups", f"1 … {self.num_groups}", self.top_groups)
            within = self.top_groups * size
            _require(self.top_k <= within, "top_k", f"at most {within}, the experts of top_groups groups", self.top_k)
            _require(size > 1 or self.group_score == "max", "group_score", "max for groups of 1 expert", "top2")
        capacity = self.capacity_factor
        _require(capacity is None or capacity > 0, "capacity_factor", "a positive number or None", capacity)
        _require(self.rounding is None or self.rounding in MODES, "rounding", f"None or one of {MODES}", self.rounding)
        _require(self.tile >= 1, "tile", "at least 1", self.tile)
        _require(self.candidates >= 0, "candidates", "at least 0", self.candidates)

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


# What the operators take beside tensors: top_k, columns, sigmoid, softmax_of_chosen, normalize, scale, groups,
# top_groups (0: all), by_two, batch_invariant.
_Plan = tuple[int, int, bool, bool, bool, float, int, int, bool, bool]


def plan_of(config: RouterConfig, batch_invariant: bool = False) -> _Plan:
    groups, top_groups = config.num_groups or 1, config.top_groups or 0
    return (
        config.top_k,
        config.columns,
        config.score == "sigmoid",
        config.order == "topk_then_softmax",
        config.normalize,
        config.scale,
        groups,
        top_groups,
        bool(top_groups) and config.group_score == "top2",
        batch_invariant,
    )


_Selected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # weights, ids, scores


def _block_t(tokens: int, places: int, batch_invariant: bool) -> int:
    """Tokens of a program. Batch-invariant, always as many: how threads share a row, and sum it, depends on it."""
    most = min(64, max(1, _PLACES // places))
    return most if batch_invariant else min(triton.next_power_of_2(tokens), most)


def _select_on_device(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: _Plan) -> _Selected:
    top_k, columns, sigmoid, softmax_of_chosen, normalize, scale, groups, top_groups, by_two, invariant = plan
    tokens, experts = logits.shape
    ids = torch.empty((tokens, columns), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, columns), dtype=torch.float32, device=logits.device)
    scores = torch.empty((tokens if want_scores else 0, experts), dtype=torch.float32, device=logits.device)
    groups_p2 = triton.next_power_of_2(groups)
    size_p2 = max(32 // groups_p2, triton.next_power_of_2(experts // groups))
    block_t = _block_t(tokens, groups_p2 * size_p2, invariant)
    pdl = supports_pdl(logits)
    launch(
        route_kernel,
        -(-tokens // block_t),
        (logits, None if bias is None else bias.contiguous(), ids, weights, scores if want_scores else None),
        (tokens, logits.stride(0), experts, experts // groups, float(scale)),
        (
            top_k,
            columns,
            triton.next_power_of_2(columns),
            sigmoid,
            softmax_of_chosen,
            normalize,
            groups_p2,
            size_p2,
            top_groups,
            by_two,
            logits.dtype is torch.bfloat16 and bias is None and not by_two,
            block_t,
            pdl,
        ),
        num_warps=4,
        pdl=pdl,
    )
    return weights, ids, scores


def _sortable(x: torch.Tensor) -> torch.Tensor:
    """int32 of the same order as x in float32: -0 is 0, and NaN above all; the kernel's `sortable`."""
    x = x.float()
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    return torch.where(x.isnan(), 0x7FC00000, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def _in_best_groups(choice: torch.Tensor, groups: int, top_groups: int, by_two: bool) -> torch.Tensor:
    """Mask [T, E] of the experts in the best groups of each token."""
    grouped = choice.unflatten(1, (groups, -1))
    order = torch.sort(_sortable(grouped), dim=2, descending=True, stable=True).indices
    best = grouped.gather(2, order[..., : 2 if by_two else 1]).sum(2)
    chosen = torch.sort(_sortable(best), dim=1, descending=True, stable=True).indices[:, :top_groups]
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return mask.repeat_interleave(grouped.shape[2], 1)


def _scores(x: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    return torch.sigmoid(x) if sigmoid else torch.softmax(x, 1)


def _raw(x: torch.Tensor, ids: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Weights of the chosen before normalisation, of float32 logits."""
    top_k, _, sigmoid, softmax_of_chosen, *_ = plan
    if sigmoid or not softmax_of_chosen:
        return _scores(x, sigmoid).gather(1, ids)
    chosen = x.gather(1, ids)
    powers = torch.exp(chosen - chosen[:, :top_k].amax(1, keepdim=True))
    return powers / powers[:, :top_k].sum(1, keepdim=True)


def _select_in_torch(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: _Plan) -> _Selected:
    top_k, columns, sigmoid, _, normalize, scale, groups, top_groups, by_two, invariant = plan
    if invariant and logits.shape[0] > 1:  # torch computes the last elements of a tensor with other instructions
        alone = [_select_in_torch(logits[t : t + 1].clone(), bias, want_scores, plan) for t in range(logits.shape[0])]
        weights, ids, scores = (torch.cat(parts) for parts in zip(*alone, strict=True))
        return weights, ids, scores
    x = wide(logits)
    scores = _scores(x, sigmoid)
    choice = x if bias is None and not by_two else scores if bias is None else scores + wide(bias)
    key = _sortable(choice)
    if top_groups:
        key = torch.where(_in_best_groups(choice, groups, top_groups, by_two), key, _NOTHING)
    ids = torch.sort(key, dim=1, descending=True, stable=True).indices[:, :columns]
    weights = _raw(x, ids, plan)
    if normalize:
        weights = weights / (weights[:, :top_k].sum(1, keepdim=True) + _TINY)
    return (weights * scale).contiguous(), ids.to(torch.int32), scores if want_scores else scores[:0].clone()


def _select(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: _Plan) -> _Selected:
    if logits.shape[0] and on_kernels(logits) and logits.shape[1] <= MOST_EXPERTS:
        return _select_on_device(logits if logits.stride(1) == 1 else logits.contiguous(), bias, want_scores, plan)
    return _select_in_torch(logits, bias, want_scores, plan)


def select_backward(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor | None, dscores: torch.Tensor | None, plan: _Plan
) -> torch.Tensor:
    """The gradient of the logits, in their dtype."""
    if logits.shape[0] == 0 or not (on_kernels(logits) and logits.shape[1] <= MOST_EXPERTS):
        return _backward_in_torch(logits, ids, dweights, dscores, plan)
    top_k, columns, sigmoid, softmax_of_chosen, normalize, scale, *_ = plan
    tokens, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    dlogits = torch.empty((tokens, experts), dtype=logits.dtype, device=logits.device)
    experts_p2 = max(32, triton.next_power_of_2(experts))
    block_t = _block_t(tokens, experts_p2, plan[-1])
    grads = (None if g is None else g.contiguous() for g in (dweights, dscores))
    launch(
        route_backward_kernel,
        -(-tokens // block_t),
        (logits, ids, *grads, dlogits),
        (tokens, logits.stride(0), experts, float(scale)),
        (top_k, columns, triton.next_power_of_2(columns), sigmoid, softmax_of_chosen, normalize, experts_p2, block_t),
        num_warps=4,
    )
    return dlogits


def _backward_in_torch(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor | None, dscores: torch.Tensor | None, plan: _Plan
) -> torch.Tensor:
    top_k, columns, sigmoid, softmax_of_chosen, normalize, scale, *_, invariant = plan
    if invariant and logits.shape[0] > 1:  # as in `_select_in_torch`
        alone = []
        for t in range(logits.shape[0]):
            dweight, dscore = (None if g is None else g[t : t + 1].clone() for g in (dweights, dscores))
            alone.append(_backward_in_torch(logits[t : t + 1].clone(), ids[t : t + 1], dweight, dscore, plan))
        return torch.cat(alone)
    x, index = wide(logits), ids.long()
    scores = _scores(x, sigmoid)
    dscores = torch.zeros_like(scores) if dscores is None else wide(dscores)
    dlogits = torch.zeros_like(scores)
    if dweights is not None:
        raw, grad = _raw(x, index, plan), wide(dweights) * scale
        counted = torch.arange(columns, device=x.device) < top_k
        if normalize:
            below = raw[:, :top_k].sum(1, keepdim=True) + _TINY
            grad = (grad - torch.where(counted, (grad * raw).sum(1, keepdim=True) / below, 0.0)) / below
        if softmax_of_chosen and not sigmoid:
            grad = raw * (grad - torch.where(counted, (grad * raw).sum(1, keepdim=True), 0.0))
            dlogits = dlogits.scatter(1, index, grad)
        else:
            dscores = dscores.scatter_add(1, index, grad)
    if sigmoid:
        return (dscores * scores * (1.0 - scores)).to(logits.dtype)
    return (dlogits + scores * (dscores - (dscores * scores).sum(1, keepdim=True))).to(logits.dtype)


class _Select(torch.autograd.Function):
    """Autograd for eager calls; compiled ones go through the operators below, with the same kernels."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: _Plan
    ) -> _Selected:
        weights, ids, scores = _select(logits, bias, want_scores, plan)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids, *(() if want_scores else (scores,)))
        ctx.save_for_backward(logits, ids)
        ctx.plan = plan
        return weights, ids, scores

    @staticmethod
    def backward(ctx: Any, dweights: Any, _: Any, dscores: Any) -> tuple[Any, ...]:  # type: ignore[override]
        logits, ids = ctx.saved_tensors
        if dweights is None and dscores is None:
            return None, None, None, None
        # create_graph=True: the gradients are differentiated in turn.
        backward = _backward_in_torch if torch.is_grad_enabled() else select_backward
        return backward(logits, ids, dweights, dscores, ctx.plan), None, None, None


_PLAN = (
    "int top_k, int columns, bool sigmoid, bool softmax_of_chosen, bool normalize, float scale, int groups, "
    "int top_groups, bool by_two, bool batch_invariant"
)


@torch.library.custom_op(
    "expertile::moe_select",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor? bias, bool want_scores, {_PLAN}) -> (Tensor, Tensor, Tensor)",
)
def _select_op(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, *plan: Any) -> _Selected:
    return _select(logits, bias, want_scores, plan)  # type: ignore[arg-type]


@_select_op.register_fake
def _(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, *plan: Any) -> _Selected:
    shape = (logits.shape[0], plan[1])
    scores = (logits.shape[0] if want_scores else 0, logits.shape[1])
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(scores, dtype=dtype),
    )


@torch.library.custom_op(
    "expertile::moe_select_backward",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor ids, Tensor? dweights, Tensor? dscores, {_PLAN}) -> Tensor",
)
def _select_backward_op(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor | None, dscores: torch.Tensor | None, *plan: Any
) -> torch.Tensor:
    return select_backward(logits, ids, dweights, dscores, plan)  # type: ignore[arg-type]


@_select_backward_op.register_fake
def _(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor | None, dscores: torch.Tensor | None, *plan: Any
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


_call_backward = differentiable_once(_select_backward_op)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: _Selected) -> None:
    logits, _, ctx.want_scores, *plan = inputs
    ctx.plan = tuple(plan)
    ctx.save_for_backward(logits, output[1])


def _gradient(ctx: Any, dweights: Any, _: Any, dscores: Any) -> tuple[Any, ...]:
    logits, ids = ctx.saved_tensors
    dscores = dscores if ctx.want_scores else None
    dlogits = _call_backward(logits, ids, dweights, dscores, *ctx.plan)
    return (dlogits, *(None,) * (2 + len(ctx.plan)))


_call = differentiable(_select_op, _gradient, _setup)


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
        ValueError: logits or bias of another shape or dtype; batch_invariant where that is not possible.
    """
    if batch_invariant:
        require_independent(config)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(f"logits: expected a torch.Tensor, got {type(logits).__name__}")
    if logits.dim() != 2 or logits.shape[1] != config.num_experts or logits.dtype not in FORMULA_DTYPES:
        raise ValueError(
            f"logits: expected shape [T, {config.num_experts}], float32, bfloat16, float16 or float64, "
            f"got {list(logits.shape)} {logits.dtype}"
        )
    if bias is not None and (list(bias.shape) != [config.num_experts] or not bias.is_floating_point()):
        raise ValueError(
            f"bias: expected shape [{config.num_experts}], floating point, got {list(bias.shape)} {bias.dtype}"
        )
    if batch_invariant and logits.is_cuda and config.num_experts > MOST_EXPERTS:
        raise ValueError(f"batch_invariant: expected at most {MOST_EXPERTS} experts, got {config.num_experts}")
    plan = plan_of(config, batch_invariant)
    bias = None if bias is None else bias.detach()
    if traced(logits):
        weights, ids, scores = _call(logits, bias, want_scores, *plan)
    elif logits.requires_grad and torch.is_grad_enabled():
        weights, ids, scores = _Select.apply(logits, bias, want_scores, plan)
    else:
        weights, ids, scores = _select(logits, bias, want_scores, plan)
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
