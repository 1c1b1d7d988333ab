"""The operator under `route`, with its gradient, by the kernels or in plain torch; `router` has the formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from expertile.moe._route_kernels import route_backward_kernel, route_kernel
from expertile.ops.launch.device import on_kernels, supports_pdl, wide
from expertile.ops.launch.kernels import launch
from expertile.ops.torch_op import define, differentiable_eagerly, traced
from expertile.ragged import power_of_two

MOST_EXPERTS = 1024  # of the kernels
_NOTHING = -(2**31)
_TINY = 1e-20
_PLACES = 2048  # places (tokens * experts) of one program: 16 a thread

# What the operators take beside tensors: top_k, columns, sigmoid, softmax_of_chosen, normalize, scale, groups,
# top_groups (0: all), by_two, batch_invariant.
Plan = tuple[int, int, bool, bool, bool, float, int, int, bool, bool]


Selected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # weights, ids, scores


def _block_t(tokens: int, places: int, batch_invariant: bool) -> int:
    """Tokens of a program. Batch-invariant, always as many: how threads share a row, and sum it, depends on it."""
    most = min(64, max(1, _PLACES // places))
    return most if batch_invariant else min(power_of_two(tokens), most)


def _select_on_device(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: Plan) -> Selected:
    top_k, columns, sigmoid, softmax_of_chosen, normalize, scale, groups, top_groups, by_two, invariant = plan
    tokens, experts = logits.shape
    ids = torch.empty((tokens, columns), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, columns), dtype=torch.float32, device=logits.device)
    scores = torch.empty((tokens if want_scores else 0, experts), dtype=torch.float32, device=logits.device)
    groups_p2 = power_of_two(groups)
    size_p2 = max(32 // groups_p2, power_of_two(experts // groups))
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
            power_of_two(columns),
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


def _raw(x: torch.Tensor, ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Weights of the chosen before normalisation, of float32 logits."""
    top_k, _, sigmoid, softmax_of_chosen, *_ = plan
    if sigmoid or not softmax_of_chosen:
        return _scores(x, sigmoid).gather(1, ids)
    chosen = x.gather(1, ids)
    powers = torch.exp(chosen - chosen[:, :top_k].amax(1, keepdim=True))
    return powers / powers[:, :top_k].sum(1, keepdim=True)


def _select_in_torch(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: Plan) -> Selected:
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
    top_k, columns, sigmoid, softmax_of_chosen, normalize, scale, *_ = plan
    tokens, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    dlogits = torch.empty((tokens, experts), dtype=logits.dtype, device=logits.device)
    experts_p2 = max(32, power_of_two(experts))
    block_t = _block_t(tokens, experts_p2, plan[-1])
    grads = (None if g is None else g.contiguous() for g in (dweights, dscores))
    launch(
        route_backward_kernel,
        -(-tokens // block_t),
        (logits, ids, *grads, dlogits),
        (tokens, logits.stride(0), experts, float(scale)),
        (top_k, columns, power_of_two(columns), sigmoid, softmax_of_chosen, normalize, experts_p2, block_t),
        num_warps=4,
    )
    return dlogits


def _backward_in_torch(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor | None, dscores: torch.Tensor | None, plan: Plan
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


_PLAN = (
    "int top_k, int columns, bool sigmoid, bool softmax_of_chosen, bool normalize, float scale, int groups, "
    "int top_groups, bool by_two, bool batch_invariant"
)


def _kernel(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, *plan: Any) -> Selected:
    return _select(logits, bias, want_scores, plan)  # type: ignore[arg-type]


def _fake(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, *plan: Any) -> Selected:
    shape = (logits.shape[0], plan[1])
    scores = (logits.shape[0] if want_scores else 0, logits.shape[1])
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(scores, dtype=dtype),
    )


def _backward_kernel(logits: torch.Tensor, ids: torch.Tensor, dweights: Any, dscores: Any, *plan: Any) -> torch.Tensor:
    return select_backward(logits, ids, dweights, dscores, plan)  # type: ignore[arg-type]


_call_backward = define(
    "moe_select_backward",
    _backward_kernel,
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
    """`backward(logits, ids, dweights, dscores, *plan)`, where one of the two gradients is there."""
    wanted = dweights is not None or dscores is not None
    dlogits = backward(*ctx.saved_tensors, dweights, dscores, *ctx.plan) if wanted else None
    return (dlogits, *(None,) * (2 + len(ctx.plan)))


# What calls the operator; and eager calls, with the same kernels.
_call = define(
    "moe_select",
    _kernel,
    f"(Tensor logits, Tensor? bias, bool want_scores, {_PLAN}) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    gradient=partial(_gradient, _call_backward),
    setup=_setup,
)
_differentiable_select = differentiable_eagerly(
    _kernel,
    _setup,
    partial(_gradient, _backward_kernel),
    partial(
        _gradient,
        lambda logits, ids, dweights, dscores, *plan: _backward_in_torch(logits, ids, dweights, dscores, plan),
    ),
)


def select(logits: torch.Tensor, bias: torch.Tensor | None, want_scores: bool, plan: Plan) -> Selected:
    """(weights, ids, scores or none) of each token before anything is dropped; differentiable in the logits."""
    if traced(logits):
        return _call(logits, bias, want_scores, *plan)  # type: ignore[no-any-return]
    if logits.requires_grad and torch.is_grad_enabled():
        return _differentiable_select(logits, bias, want_scores, *plan)  # type: ignore[no-any-return]
    return _select(logits, bias, want_scores, plan)
