"""Forward and backward pass of the expert MLPs with dense weights, on checked operands; nothing is differentiated."""

from __future__ import annotations

import torch

from expertile.moe import _few
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm.api import gated_backward_mm, gathered_gated_mm, gathered_wgrad
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.gathered_mm.pointwise import ordered
from expertile.ops.grouped_mm.api import grouped_mm

_T = torch.Tensor
_Maybe = torch.Tensor | None


def forward(
    x: _T,
    gate_up: _T,
    down: _T,
    topk_ids: _T,
    topk_weights: _T,
    gate_up_bias: _Maybe,
    down_bias: _Maybe,
    activation: str,
    interleaved: bool,
    save_pre: bool,
    batch_invariant: bool,
) -> tuple[_T, _Maybe, Permutation | None]:
    """(out [T, H], pre [R, 2I] if `save_pre`, the order if there is one: with `save_pre` there is); operands as checked
    by `moe_mlp`, nothing differentiated."""
    few = not save_pre and not batch_invariant  # whose sums have another order
    if few and _few.serves(x, topk_ids, gate_up, down, gate_up_bias, down_bias):
        out = _few.mlp(x, gate_up, down, topk_ids, topk_weights, gate_up_bias, down_bias, activation, interleaved)
        return out, None, None
    order = permutation(topk_ids, gate_up.shape[0])
    act, pre = gathered_gated_mm(
        x,
        gate_up.transpose(1, 2),
        order.rows,
        order.offs,
        activation=activation,
        interleaved=interleaved,
        bias=gate_up_bias,
        save_pre=save_pre,
        batch_invariant=batch_invariant,
    )
    y = grouped_mm(act, down.transpose(1, 2), offs=order.offs, bias=down_bias, batch_invariant=batch_invariant)
    return combine(y, order.positions, topk_weights), pre, order


_Grads = tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe]


def gradients(
    dy: _T,
    x: _T,
    gate_up: _T,
    down: _T,
    topk_ids: _T,
    topk_weights: _T,
    pre: _T,
    order: Permutation,
    down_bias: _Maybe,
    activation: str,
    interleaved: bool,
    needs: tuple[bool, ...],
    batch_invariant: bool = False,
    overwrite_pre: bool = False,
) -> _Grads:
    """Gradients of x, gate_up, down, topk_weights, gate_up_bias, down_bias; None where `needs` says so.
    `overwrite_pre`: pre is not needed again, and its memory is used.

    In this order each intermediate result is gone before the largest ones are made: see `moe.experts`."""
    # out.sum().backward() hands over an expanded scalar: strides of 0, which no copy engine takes.
    dy = dy.contiguous().to(x.dtype)
    offs, rows = order.offs, order.rows
    # The gradient of `down` wants dy in order anyway, and the product before it is faster on rows in order (H200, copy
    # and both products: 8.2 against 9.1 ms at H 4096, I 1024, 2048 rows of an expert; 2.5 against 2.9 at 2880, 256).
    ordered_dy, dy_rows = (ordered(dy, rows, offs), None) if needs[2] else (dy, rows)
    dpre, act_w, dweights = gated_backward_mm(
        ordered_dy,
        down.transpose(1, 2),
        dy_rows,
        order.slots,
        topk_weights,
        pre,
        offs,
        activation=activation,
        interleaved=interleaved,
        overwrite_pre=overwrite_pre,
        batch_invariant=batch_invariant,
    )
    dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
    if needs[2]:
        ddown = gathered_wgrad(ordered_dy, None, act_w, offs)
    del act_w, ordered_dy
    if needs[0]:
        dx = combine(grouped_mm(dpre, gate_up, offs=offs, batch_invariant=batch_invariant), order.positions)
    if needs[1]:
        dgate_up = gathered_wgrad(dpre, rows, x, offs, gather_b=True)
    if needs[4]:
        dgate_up_bias = bias_sums(dpre, offs).to(x.dtype)
    if needs[5]:
        ddown_bias = weighted_sums(dy, topk_weights, order)
    if not needs[3]:
        return dx, dgate_up, ddown, None, dgate_up_bias, ddown_bias
    if down_bias is not None:
        dweights = dweights + bias_products(dy, down_bias, topk_ids, order, batch_invariant)
    return dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias


def bias_sums(dpre: _T, offs: _T) -> _T:
    """[E, 2I] float32: the sum of each expert's rows."""
    ones = torch.ones((dpre.shape[0], 8), dtype=dpre.dtype, device=dpre.device)
    return grouped_mm(ones.t(), dpre, offs=offs, out_dtype=torch.float32)[:, 0].contiguous()


def weighted_sums(dy: _T, topk_weights: _T, order: Permutation) -> _T:
    """[E, H]: the sum of w * dy[token] over the rows of each expert, as a wgrad with few columns."""
    weights = topk_weights.flatten()[order.slots.long()]
    high = weights.to(dy.dtype)
    # 8 columns, so that every stride is a multiple of 16 bytes; two of them hold a weight to twice dy's precision.
    columns = dy.new_zeros((weights.shape[0], 8))
    columns[:, 0], columns[:, 1] = high, (weights - high.float()).to(dy.dtype)
    sums = gathered_wgrad(columns, order.rows, dy, order.offs, gather_b=True)
    return (sums[:, 0].float() + sums[:, 1].float()).to(dy.dtype)


def bias_products(dy: _T, down_bias: _T, topk_ids: _T, order: Permutation, batch_invariant: bool = False) -> _T:
    """[T, k] float32: <dy[t], down_bias[e]> of each slot, what a routing weight gets from the bias."""
    products = grouped_mm(dy[None], down_bias.t()[None], out_dtype=torch.float32, batch_invariant=batch_invariant)[0]
    kept = order.positions >= 0
    return torch.where(kept, products.gather(1, torch.where(kept, topk_ids.long(), 0)), 0.0)
