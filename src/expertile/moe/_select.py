"""The operator under `route`, with its gradient, by the kernels or in plain torch; `router` has the formulas."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from expertile.moe._route_kernels import Shape, route_backward_kernel, route_kernel
from expertile.ops.launch.device import on_kernels, supports_pdl, wide, wide_dtype
from expertile.ops.launch.kernels import launch
from expertile.ops.torch_op import define, differentiable_eagerly, traced
from expertile.ragged import power_of_two

MOST_EXPERTS = 1024  # of the kernels
_NOTHING = -(2**31)
_TINY = 1e-20
_PLACES = 2048  # places (tokens * experts) of one program: 16 a thread


class Plan(NamedTuple):
    """What the operators take beside tensors; `RouterConfig` has the meanings. top_groups: 0 for all."""

    top_k: int
    columns: int
    sigmoid: bool
    softmax_of_chosen: bool
    normalize: bool
    scale: float
    groups: int
    top_groups: int
    by_two: bool
    batch_invariant: bool

    @property
    def shape(self) -> Shape:
        """Of the kernels."""
        chosen = (self.top_k, self.columns, power_of_two(self.columns))
        return Shape(*chosen, self.sigmoid, self.softmax_of_chosen, self.normalize)


Selected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # weights, ids, scores


class _Places(NamedTuple):
    """How experts lie in a program's row: groups and the experts of each, both filled up to powers of two."""

    shape: Shape
    groups_p2: int
    size: int
    size_p2: int


@lru_cache(maxsize=256)
def _places(plan: Plan, experts: int) -> _Places:
    groups_p2, size = power_of_two(plan.groups), experts // plan.groups
    return _Places(plan.shape, groups_p2, size, max(32 // groups_p2, power_of_two(size)))


def _block_t(tokens: int, places: int, batch_invariant: bool) -> int:
    """Tokens of a program. Batch-invariant, always as many: how threads share a row, and sum it, depends on it."""
    most = min(64, max(1, _PLACES // places))
    return most if batch_invariant else min(power_of_two(tokens), most)


def _select_on_device(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: Plan) -> Selected:
    tokens, experts = logits.shape
    ids = torch.empty((tokens, plan.columns), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, plan.columns), dtype=torch.float32, device=logits.device)
    scores = torch.empty((tokens if want_scores else 0, experts), dtype=torch.float32, device=logits.device)
    shape, groups_p2, size, size_p2 = _places(plan, experts)
    block_t = _block_t(tokens, groups_p2 * size_p2, plan.batch_invariant)
    packed, pdl = logits.dtype is torch.bfloat16 and bias is None and not plan.by_two, supports_pdl(logits)
    tensors = (logits, None if bias is None else bias.contiguous(), ids, weights, scores if want_scores else None)
    scalars = (tokens, logits.stride(0), experts, size, float(plan.scale))
    constants = (shape, groups_p2, size_p2, plan.top_groups, plan.by_two, packed, block_t, pdl)
    warps = 4 if groups_p2 * size_p2 < 256 else 2  # 256 experts: 7.5 us in place of 10.7 (H200, 8192 tokens, top-8)
    launch(route_kernel, -(-tokens // block_t), tensors, scalars, constants, num_warps=warps, pdl=pdl)
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


def _raw(x: torch.Tensor, ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Weights of the chosen before normalisation, of float32 logits."""
    if plan.sigmoid or not plan.softmax_of_chosen:
        return _scores(x, plan.sigmoid).gather(1, ids)
    chosen = x.gather(1, ids)
    powers = torch.exp(chosen - chosen[:, : plan.top_k].amax(1, keepdim=True))
    return powers / powers[:, : plan.top_k].sum(1, keepdim=True)


def _select_in_torch(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: Plan) -> Selected:
    if plan.batch_invariant and logits.shape[0] > 1:  # torch has other instructions for a tensor's last elements
        alone = [_select_in_torch(logits[t : t + 1].clone(), bias, want_scores, plan) for t in range(logits.shape[0])]
        weights, ids, scores = (torch.cat(parts) for parts in zip(*alone, strict=True))
        return weights, ids, scores
    x = wide(logits)
    scores = _scores(x, plan.sigmoid)
    choice = x if bias is None and not plan.by_two else scores if bias is None else scores + wide(bias)
    key = _sortable(choice)
    if plan.top_groups:
        key = torch.where(_in_best_groups(choice, plan.groups, plan.top_groups, plan.by_two), key, _NOTHING)
    ids = torch.sort(key, dim=1, descending=True, stable=True).indices[:, : plan.columns]
    weights = _raw(x, ids, plan)
    if plan.normalize:
        weights = weights / (weights[:, : plan.top_k].sum(1, keepdim=True) + _TINY)
    return (weights * plan.scale).contiguous(), ids.to(torch.int32), scores if want_scores else scores[:0].clone()


def _select(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: Plan) -> Selected:
    if logits.shape[0] and on_kernels(logits) and logits.shape[1] <= MOST_EXPERTS:
        return _select_on_device(logits if logits.stride(1) == 1 else logits.contiguous(), bias, want_scores, plan)
    return _select_in_torch(logits, bias, want_scores, plan)


def select_backward(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor | None, dscores: torch.Tensor | None, plan: Plan
) -> torch.Tensor:
    """The gradient of the logits, in their dtype."""
    if logits.shape[0] == 0 or not (on_kernels(logits) and logits.shape[1] <= MOST_EXPERTS):
        return _backward_in_torch(logits, ids, dweights, dscores, plan)
    tokens, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    dlogits = torch.empty((tokens, experts), dtype=logits.dtype, device=logits.device)
    experts_p2 = power_of_two(experts, 32)
    block_t = _block_t(tokens, experts_p2, plan.batch_invariant)
    grads = (None if g is None else g.contiguous() for g in (dweights, dscores))
    tensors, scalars = (logits, ids, *grads, dlogits), (tokens, logits.stride(0), experts, float(plan.scale))
    constants = (plan.shape, experts_p2, block_t)
    launch(route_backward_kernel, -(-tokens // block_t), tensors, scalars, constants, num_warps=4)
    return dlogits


def _backward_in_torch(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor | None, dscores: torch.Tensor | None, plan: Plan
) -> torch.Tensor:
    if plan.batch_invariant and logits.shape[0] > 1:  # as in `_select_in_torch`
        alone = []
        for t in range(logits.shape[0]):
            dweight, dscore = (None if g is None else g[t : t + 1].clone() for g in (dweights, dscores))
            alone.append(_backward_in_torch(logits[t : t + 1].clone(), ids[t : t + 1], dweight, dscore, plan))
        return torch.cat(alone)
    x, index = wide(logits), ids.long()
    scores = _scores(x, plan.sigmoid)
    dscores = torch.zeros_like(scores) if dscores is None else wide(dscores)
    dlogits = torch.zeros_like(scores)
    if dweights is not None:
        raw, grad = _raw(x, index, plan), wide(dweights) * plan.scale
        counted = torch.arange(plan.columns, device=x.device) < plan.top_k
        if plan.normalize:
            below = raw[:, : plan.top_k].sum(1, keepdim=True) + _TINY
            grad = (grad - torch.where(counted, (grad * raw).sum(1, keepdim=True) / below, 0.0)) / below
        if plan.softmax_of_chosen and not plan.sigmoid:
            grad = raw * (grad - torch.where(counted, (grad * raw).sum(1, keepdim=True), 0.0))
            dlogits = dlogits.scatter(1, index, grad)
        else:
            dscores = dscores.scatter_add(1, index, grad)
    if plan.sigmoid:
        return (dscores * scores * (1.0 - scores)).to(logits.dtype)
    return (dlogits + scores * (dscores - (dscores * scores).sum(1, keepdim=True))).to(logits.dtype)


_PLAN = (
    "int top_k, int columns, bool sigmoid, bool softmax_of_chosen, bool normalize, float scale, int groups, "
    "int top_groups, bool by_two, bool batch_invariant"
)


def _kernel(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, *plan: Any) -> Selected:
    return _select(logits, bias, want_scores, Plan(*plan))


def _fake(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, *plan: Any) -> Selected:
    (tokens, experts), new = logits.shape, partial(logits.new_empty, dtype=wide_dtype(logits))
    weights, scores = new((tokens, plan[1])), new((tokens if want_scores else 0, experts))
    return weights, logits.new_empty(weights.shape, dtype=torch.int32), scores


_call_backward = define(
    "moe_select_backward",
    lambda logits, ids, dweights, dscores, *plan: select_backward(logits, ids, dweights, dscores, Plan(*plan)),
    f"(Tensor logits, Tensor ids, Tensor? dweights, Tensor? dscores, {_PLAN}) -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Selected) -> None:
    logits, _, want_scores, *ctx.plan = inputs
    _, ids, scores = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(ids, *(() if want_scores else (scores,)))
    ctx.save_for_backward(logits, ids)


def _gradient(backward: Callable[..., Any], ctx: Any, dweights: Any, _: Any, dscores: Any) -> tuple[Any, ...]:
    """`backward(logits, ids, dweights, dscores, plan)`, where one of the two gradients is there."""
    wanted = dweights is not None or dscores is not None
    dlogits = backward(*ctx.saved_tensors, dweights, dscores, Plan(*ctx.plan)) if wanted else None
    return (dlogits, *(None,) * (2 + len(ctx.plan)))


# What calls the operator; and eager calls, with the same kernels.
_call = define(
    "moe_select",
    _kernel,
    f"(Tensor logits, Tensor? bias, bool want_scores, {_PLAN}) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    gradient=partial(_gradient, lambda *given: _call_backward(*given[:-1], *given[-1])),
    setup=_setup,
)
_differentiable_select = differentiable_eagerly(
    _kernel, _setup, partial(_gradient, select_backward), partial(_gradient, _backward_in_torch)
)


def select(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: Plan) -> Selected:
    """(weights, ids, scores or none) of each token before anything is dropped; differentiable in the logits."""
    if traced(logits):
        return _call(logits, bias, want_scores, *plan)  # type: ignore[no-any-return]
    if logits.requires_grad and torch.is_grad_enabled():
        return _differentiable_select(logits, bias, want_scores, *plan)  # type: ignore[no-any-return]
    return _select(logits, bias, want_scores, plan)
