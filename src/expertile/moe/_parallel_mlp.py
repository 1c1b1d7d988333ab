"""One call of expert parallelism with its gradients: dispatch, experts, combine; and each of them backwards."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from expertile.moe._passes import activation_gradients, bias_products, products, weight_gradient, weighted_sums
from expertile.moe.dispatch import Incoming, own_slots, starts
from expertile.moe.exchange import Exchange, Step
from expertile.moe.expert_weights import Experts
from expertile.moe.experts import experts_mlp
from expertile.moe.permute import Permutation
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.autograd import bias_gradient
from expertile.ops.torch_op import graph_is_kept, once_differentiable


def _rows_of_experts(
    experts: Experts, x: Tensor, arrived: Incoming, start: int, end: int, first: int, last: int, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """(y [R, H], pre-activation [R, 2I]) of expert rows start … end - 1, those of experts first … last - 1."""
    if first == last:  # none here: the rows are unused room
        pre = x.new_zeros((end - start, experts.shape[1])) if save_pre else None
        return x.new_zeros((end - start, x.shape[1])), pre
    rows, offs = _run_of(arrived.order.rows, start, end), _run_of(arrived.order.offs, first, last)
    if not isinstance(experts.gate_up, Tensor):
        return _quantized(experts, x.index_select(0, rows), arrived, start, end), None
    if start:  # copied: kernels are compiled for 16-byte aligned pointers
        rows, offs = rows.clone(), offs - start
    experts = experts.map(lambda t: _run_of(t, first, last))
    return products(x, experts.tensors, rows, offs, experts.form, save_pre)


def _quantized(experts: Experts, rows: Tensor, arrived: Incoming, start: int, end: int) -> Tensor:
    """The same for quantised weights: rows [R, H] as tokens with one expert each, and weight 1."""
    slots, offs = arrived.order.slots[start:end], arrived.order.offs
    there = torch.arange(start, end, device=rows.device)[: slots.shape[0]] < offs[-1]
    ids = torch.where(there, arrived.ids.flatten()[slots], offs.shape[0])[:, None]
    return experts_mlp(experts, rows, ids, torch.ones_like(ids, dtype=torch.float32))


def _run_of(x: Tensor, start: int, end: int) -> Tensor:
    """x[start:end]; x itself, which costs the host nothing, where that is all of it."""
    return x if start == 0 and end == x.shape[0] else x[start:end]


def _forward(
    exchange: Exchange,
    experts: Experts,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    ordered: bool,
    save_pre: bool,
) -> tuple[Tensor, Step, Tensor, Tensor | None]:
    """(out [T, H], plan, rows received [N, H], their experts' pre-activation [R, 2I])."""
    step, dispatched = exchange.step(x, topk_ids, topk_weights)
    splits, sent, arrived = step.splits, step.sent, step.arrived
    back = exchange.start("combine", x, splits.slots_from if ordered else splits.rows_to)
    ys, pres = [], []
    at = starts(splits.slots_to)
    for chunk, (first, last) in enumerate(pairwise(exchange.placement.chunk_bounds(exchange.members.rank))):
        received = exchange.arrive(dispatched, chunk)
        y, pre = _rows_of_experts(experts, received, arrived, at[chunk], at[chunk + 1], first, last, save_pre)
        pres.append(pre)
        if ordered:
            y = y.index_select(0, _run_of(arrived.return_rows, at[chunk], at[chunk + 1]))
            exchange.post(back, chunk, y, splits.slots_from, splits.slots_to)
        else:
            ys.append(y)
    if not ordered:
        sums = combine(_joined(ys), arrived.order.positions, arrived.weights)
        exchange.post_all(back, sums, splits.rows_to, splits.rows_from)
    pre = _joined(pres) if save_pre else None  # while the last rows are on their way
    positions, weights = (sent.returned_at, topk_weights) if ordered else (sent.sent_at, None)
    if sent.lost is not None:
        lost = sent.lost[:, None]
        positions = torch.where(lost, 0, positions)
        weights = torch.where(
            lost, torch.nan, torch.ones_like(positions, dtype=torch.float32) if weights is None else weights
        )
    return combine(exchange.arrive(back), positions, weights), step, dispatched.buffer, pre


def _joined(parts: list[Any]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def parallel_mlp(
    exchange: Exchange, experts: Experts, ordered: bool, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """out [T, H]; operands as checked by `ExpertParallel.mlp`, T at least 1. Differentiated where that is asked for."""
    differentiable = (x, topk_weights, *experts.tensors)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in differentiable):
        return _ParallelMLP.apply(exchange, ordered, experts.form, topk_ids, *differentiable)
    return _forward(exchange, experts, x, topk_ids, topk_weights, ordered, False)[0]


class _ParallelMLP(torch.autograd.Function):
    """What is kept: the rows received [N, H], the pre-activation [R, 2I], the plan."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        exchange: Exchange,
        ordered: bool,
        form: tuple[str, bool, bool],
        topk_ids: Tensor,
        x: Tensor,
        topk_weights: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        experts = Experts.of(weights, form)
        out, step, received, pre = _forward(exchange, experts, x, topk_ids, topk_weights, ordered, True)
        ctx.exchange, ctx.step, ctx.form = exchange, step, form
        ctx.save_for_backward(received, pre, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        received, pre, *weights = ctx.saved_tensors
        experts = Experts.of(weights, ctx.form)
        overwrite_pre = not graph_is_kept()
        needs = ctx.needs_input_grad[4:]
        return (None,) * 4 + _backward(ctx.exchange, experts, ctx.step, received, pre, grad, needs, overwrite_pre)


def _backward(
    exchange: Exchange,
    experts: Experts,
    step: Step,
    received: Tensor,
    pre: Tensor,
    grad: Tensor,
    needs: tuple[bool, ...],
    overwrite_pre: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, topk_weights, gate_up, down, gate_up_bias, down_bias; of the last four those that are needed.
    `overwrite_pre`: pre is not needed again, and its memory is used.

    Those of x and topk_weights travel always: whether another rank needs them is not known here.
    """
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    splits, sent, arrived = step.splits, step.sent, step.arrived
    grad = grad.to(received.dtype).index_select(0, _run_of(sent.tokens, 0, step.rows))
    dy = exchange.arrive(exchange.send("dispatch of gradients", grad, splits.rows_from, splits.rows_to))
    count = pre.shape[0]
    rows, slots, offs = arrived.order.rows[:count], arrived.order.slots[:count], arrived.order.offs
    order = Permutation(offs, rows, slots, arrived.order.positions)
    how = (experts.form, needs[3], overwrite_pre)
    of_dy, dpre, act_w, dslots = activation_gradients(dy, down, order, arrived.weights, pre, *how)
    if experts.down_bias is not None:
        dslots = dslots + bias_products(dy, experts.down_bias, arrived.ids, arrived.order, experts.batch_invariant)
    what = "combine of gradients"
    slots_coming = exchange.send(what, dslots, splits.rows_to, splits.rows_from)
    dx_rows = grouped_mm(dpre, gate_up, offs=offs, batch_invariant=experts.batch_invariant)
    sums = combine(dx_rows, arrived.order.positions)
    del dx_rows
    rows_coming = exchange.send(what, sums, splits.rows_to, splits.rows_from)
    # The weights' gradients are computed while those of the tokens travel.
    ddown = weight_gradient(down, of_dy, (act_w, None), offs) if needs[3] else None
    del of_dy, act_w
    dgate_up = weight_gradient(gate_up, (dpre, None), (received, rows), offs) if needs[2] else None
    dgate_up_bias = None
    if experts.gate_up_bias is not None and needs[4]:
        dgate_up_bias = bias_gradient(grouped_mm, dpre, offs, experts.gate_up_bias)
    ddown_bias = weighted_sums(dy, arrived.weights, arrived.order) if needs[5] else None
    dx = combine(exchange.arrive(rows_coming), sent.sent_at)
    dweights = own_slots(exchange.arrive(slots_coming), sent)
    return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias
