"""Forward and backward pass of the expert MLPs with dense weights, on checked operands; nothing is differentiated."""

from typing import Any

import torch

from expertile.moe import _few
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm.api import gated_backward_mm, gathered_gated_mm, gathered_wgrad
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.gathered_mm.pointwise import ordered
from expertile.ops.gathered_mm.run import copies_rows
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.autograd import bias_gradient, by_columns

_T = torch.Tensor
_Maybe = torch.Tensor | None
# (x, gate_up, down, topk_weights, gate_up_bias, down_bias): what can be differentiated, in the operators' order.
Operands = tuple[_T, _T, _T, _T, _Maybe, _Maybe]
Form = tuple[str, bool, bool]  # activation, interleaved, batch_invariant


def products(
    x: _T, weights: tuple[_T, _T, _Maybe, _Maybe], rows: _T, offs: _T, form: Form, save_pre: bool
) -> tuple[_T, _Maybe]:
    """(y [R, H], pre [R, 2I] if `save_pre`) of the rows that `rows` and `offs` name; weights: gate_up, down and their
    biases."""
    gate_up, down, gate_up_bias, down_bias = weights
    w = gate_up.transpose(1, 2)
    act, pre = gathered_gated_mm(x, w, rows, offs, bias=gate_up_bias, save_pre=save_pre, **_named(form))
    return grouped_mm(act, down.transpose(1, 2), offs=offs, bias=down_bias, batch_invariant=form[2]), pre


def _named(form: Form) -> dict[str, Any]:
    """As arguments of the gathered products."""
    return dict(zip(("activation", "interleaved", "batch_invariant"), form, strict=True))


def forward(operands: Operands, topk_ids: _T, form: Form, save_pre: bool) -> tuple[_T, _Maybe, Permutation | None]:
    """(out [T, H], pre [R, 2I] if `save_pre`, the order if there is one: with `save_pre` there is); operands as checked
    by `moe_mlp`, nothing differentiated."""
    x, gate_up, down, topk_weights, gate_up_bias, down_bias = operands
    activation, interleaved, invariant = form
    few = not save_pre and not invariant  # whose sums have another order
    if few and _few.serves(x, topk_ids, gate_up, down, gate_up_bias, down_bias):
        out = _few.mlp(x, gate_up, down, topk_ids, topk_weights, gate_up_bias, down_bias, activation, interleaved)
        return out, None, None
    order = permutation(topk_ids, gate_up.shape[0])
    y, pre = products(x, (gate_up, down, gate_up_bias, down_bias), order.rows, order.offs, form, save_pre)
    return combine(y, order.positions, topk_weights), pre, order


def activation_gradients(
    dy: _T, down: _T, order: Permutation, weights: _T, pre: _T, form: Form, of_down: bool, overwrite_pre: bool
) -> tuple[tuple[_T, _Maybe], _T, _T, _T]:
    """((dy, rows), dpre, act_w, the routing weights' gradients) of `gated_backward_mm`. `of_down`: `down` has a
    gradient, of dy and the rows that come back: none where dy comes back in expert order.

    Where the gradient of `down` copies dy into that order anyway, the product before it is faster on the copy. Where it
    gathers (`cuda_wgrad`), no copy is faster, and 2 R H bytes less (docs/notes/grouped_mm.md, "Gathered products")."""
    rows: _Maybe = order.rows
    if of_down and copies_rows(dy, order.rows, down.shape[2], order.offs):
        dy, rows = ordered(dy, order.rows, order.offs), None
    operands = (dy, down.transpose(1, 2), rows, order.slots, weights, pre, order.offs)
    return (dy, rows), *gated_backward_mm(*operands, overwrite_pre=overwrite_pre, **_named(form))


def gradients(
    dy: _T, saved: tuple[Any, ...], form: Form, needs: tuple[bool, ...], overwrite_pre: bool = False
) -> tuple[_Maybe, ...]:
    """Gradients of the operands, None where `needs` says so. `saved`: all of them but gate_up_bias, topk_ids, pre and
    the order. `overwrite_pre`: pre is not needed again, and its memory is used.

    In this order each intermediate result is gone before the largest ones are made: see `moe.experts`."""
    x, gate_up, down, topk_weights, down_bias, topk_ids, pre, *routing = saved
    order, invariant = Permutation(*routing), form[2]
    # out.sum().backward() hands over an expanded scalar: strides of 0, which no copy engine takes.
    dy = dy.contiguous().to(x.dtype)
    offs, rows = order.offs, order.rows
    dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
    of_dy, dpre, act_w, dweights = activation_gradients(
        dy, down, order, topk_weights, pre, form, needs[2], overwrite_pre
    )
    if needs[2]:
        ddown = weight_gradient(down, of_dy, (act_w, None), offs)
    del act_w, of_dy
    if needs[0]:
        dx = combine(grouped_mm(dpre, gate_up, offs=offs, batch_invariant=invariant), order.positions)
    if needs[1]:
        dgate_up = weight_gradient(gate_up, (dpre, None), (x, rows), offs)
    if needs[4]:
        dgate_up_bias = bias_gradient(grouped_mm, dpre, offs, x)
    if needs[5]:
        ddown_bias = weighted_sums(dy, topk_weights, order)
    if needs[3] and down_bias is not None:
        dweights = dweights + bias_products(dy, down_bias, topk_ids, order, invariant)
    return dx, dgate_up, ddown, dweights if needs[3] else None, dgate_up_bias, ddown_bias


def weight_gradient(weight: _T, of_out: tuple[_T, _Maybe], of_in: tuple[_T, _Maybe], offs: _T) -> _T:
    """The gradient of `weight` [E, N, K], stored as that is, from gradients [·, N] of the product's result and its
    operand [·, K]; beside each the rows that gather it, or None: it is in expert order."""
    transposed = by_columns(weight)
    (first, first_rows), (second, rows) = (of_in, of_out) if transposed else (of_out, of_in)
    gather_b = rows is not None
    grad = gathered_wgrad(first, rows if gather_b else first_rows, second, offs, gather_b=gather_b)
    return grad.transpose(1, 2) if transposed else grad


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
