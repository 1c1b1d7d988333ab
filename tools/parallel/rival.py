"""Expert parallelism as one writes it with torch alone: the rival that is timed beside ours.

    counts     all-to-all of each expert's rows; the host reads their sums
    dispatch   all-to-all of rows of x, one for each slot, sorted by expert
    experts    rows into expert order, F.grouped_mm, silu(gate) · up, F.grouped_mm, and back into the order of arrival
    combine    all-to-all of rows of y, then the weighted sum of a token's k rows

Gathers have backward passes that gather as well (autograd's would add by atomics). The elementwise parts come as they
are, or each compiled by torch.compile for its shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators._moe_rivals import Permuted

Lengths = list[int]


def gated(pre: Tensor) -> Tensor:
    """[R, 2I] -> [R, I]."""
    gate, up = pre.chunk(2, -1)
    return F.silu(gate) * up


def _rows(rows: Tensor, at: Tensor) -> Tensor:
    """rows[at], [T, k, H]."""
    return rows.index_select(0, at.flatten()).unflatten(0, at.shape)


def summed(rows: Tensor, at: Tensor) -> Tensor:
    """out[t] = Σ_j rows[at[t, j]]; rows [R, H], at [T, k]."""
    return _rows(rows, at).sum(1)


def weighted_sum(rows: Tensor, at: Tensor, weights: Tensor) -> Tensor:
    """out[t] = Σ_j weights[t, j] · rows[at[t, j]]."""
    return (_rows(rows, at) * weights.to(rows.dtype)[..., None]).sum(1)


def weighted_spread(grad: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    """The gradient of rows: weights[r] · grad[tokens[r]]; weights [R]."""
    return grad.index_select(0, tokens) * weights.to(grad.dtype)[:, None]


def products(grad: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """The gradient of weights: <grad[t], rows[at[t, j]]>, [T, k] float32."""
    return (_rows(rows, at) * grad[:, None]).sum(-1, dtype=torch.float32)


@dataclass(frozen=True)
class Parts:
    """The elementwise parts."""

    gated: Callable[[Tensor], Tensor] = gated
    summed: Callable[[Tensor, Tensor], Tensor] = summed
    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum
    weighted_spread: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_spread
    products: Callable[[Tensor, Tensor, Tensor], Tensor] = products

    def compiled(self, x: Tensor, ids: Tensor, weights: Tensor) -> "Parts":
        """Each by torch.compile, for these tokens. All but `gated`, whose rows are not known yet, are compiled now:
        before any rank waits for another, and not on autograd's thread."""
        parts = Parts(**{f.name: torch.compile(getattr(self, f.name), dynamic=False) for f in fields(self)})
        with torch.no_grad():
            rows, at = x.new_zeros((ids.numel(), x.shape[1])), torch.zeros_like(ids, dtype=torch.int64)
            parts.summed(rows, at)
            parts.weighted_sum(rows, at, weights)
            parts.weighted_spread(x, at.flatten(), weights.flatten())
            parts.products(x, rows, at)
        return parts


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, coming: Lengths, leaving: Lengths) -> Tensor:  # type: ignore[override]
        ctx.lengths = coming, leaving
        return _exchange(rows, coming, leaving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        coming, leaving = ctx.lengths
        return _exchange(grad.contiguous(), leaving, coming), None, None


def _exchange(rows: Tensor, coming: Lengths, leaving: Lengths) -> Tensor:
    out = rows.new_empty((sum(coming), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, coming, leaving)
    return out


class _Spread(torch.autograd.Function):
    """Each token's row for each of its slots; at [T, k]: where they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, at: Tensor, parts: Parts) -> Tensor:  # type: ignore[override]
        ctx.parts = parts
        ctx.save_for_backward(at)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (at,) = ctx.saved_tensors
        return ctx.parts.summed(grad, at), None, None, None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, weights: Tensor, at: Tensor, order: Tensor, parts: Parts
    ) -> Tensor:
        ctx.parts = parts
        ctx.save_for_backward(rows, weights, at, order)
        return parts.weighted_sum(rows.detach(), at, weights.detach())  # else compiled once more, for gradients

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, weights, at, order = (t.detach() for t in ctx.saved_tensors)
        drows = ctx.parts.weighted_spread(grad, order // at.shape[1], weights.flatten()[order])
        return drows, ctx.parts.products(grad, rows, at), None, None, None


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, experts: int, parts: Parts) -> Tensor:
    """out [T, H] of this rank of the default group. Each has its tokens x [T, H], ids and weights [T, k], and an equal
    share of the `experts`: gate_up [E/W, 2I, H], down [E/W, H, I]. No slot may be dropped."""
    local, top_k = gate_up.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    at = _inverse(order).view(ids.shape)
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    leaving, coming = torch.stack([counts, theirs]).view(2, -1, local).sum(2).tolist()

    arrived = _AllToAll.apply(_Spread.apply(x, order // top_k, at, parts), coming, leaving)
    expert = torch.arange(experts, device=x.device, dtype=torch.int32) % local
    by_expert = expert.repeat_interleave(theirs, output_size=sum(coming)).argsort(stable=True)
    back = _inverse(by_expert)
    offs = theirs.view(-1, local).sum(0).cumsum(0, dtype=torch.int32)
    act = parts.gated(F.grouped_mm(Permuted.apply(arrived, by_expert, back), gate_up.transpose(-2, -1), offs=offs))
    y = F.grouped_mm(act, down.transpose(-2, -1), offs=offs)
    returned = _AllToAll.apply(Permuted.apply(y, back, by_expert), leaving, coming)
    return _Combined.apply(returned, weights, at, order, parts)
