"""The expert MLPs with weights in 4 bits, Int4Weight or Mxfp4Weight; activations stay in x's dtype.

    pre = x[rows] @ gate_up^T; act = f(pre); y = act @ down^T; combine

`weight_only_mm` reads a quarter of the bytes. The weights are data without gradients; those of x, of the routing
weights and of the biases come from pre and the routing alone:

    a       dy[rows] @ down                      a range of I after the other, as many weights dequantised at a time
    dpre    f'(pre) * w a, and dw = <a, f(pre)>  one kernel
    dx      dpre @ gate_up, then each token's rows summed
"""

from __future__ import annotations

from typing import Any

import torch

from expertile.moe._base_products import BaseProducts
from expertile.moe._passes import bias_products, bias_sums, weighted_sums
from expertile.moe._quantized_experts import activated, on_kernels_eagerly
from expertile.moe.expert_weights import Experts, autocasts
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm import pointwise
from expertile.ops.gathered_mm.activation import activate_backward, join, split
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.torch_op import once_differentiable

_T = torch.Tensor
_Maybe = torch.Tensor | None


def _forward(x: _T, topk_ids: _T, topk_weights: _T, experts: Experts) -> tuple[_T, _T, Permutation]:
    base, order = BaseProducts(experts.gate_up, experts.down), permutation(topk_ids, experts.shape[0])
    pre = base.up(x, order, experts.gate_up_bias)
    act = activated(pre, order.offs, experts.activation, experts.interleaved)
    return combine(base.down_of(act, order, experts.down_bias), order.positions, topk_weights), pre, order


def _activation_backward(
    a: _T, pre: _T, order: Permutation, topk_weights: _T, activation: str, interleaved: bool
) -> tuple[_T, _T]:
    """(dpre [R, 2I], dweights [T, k]) from a [R, I], which is overwritten."""
    if on_kernels_eagerly(pre):
        dpre, dweights = torch.empty_like(pre), torch.zeros_like(topk_weights)
        pointwise.gated_backward(
            a, pre, order.slots, topk_weights, order.offs, dpre, a, dweights, activation, interleaved
        )
        return dpre, dweights
    gate, up = split(pre.float(), interleaved)
    weighted = a.float() * topk_weights.flatten()[order.slots.long()][:, None]
    act, dgate, dup = activate_backward(gate, up, weighted, activation)
    products, kept = (a.float() * act).sum(1), order.positions >= 0
    dweights = torch.where(kept, products[torch.where(kept, order.positions, 0).long()], 0.0)
    return join(dgate, dup, interleaved).to(pre.dtype), dweights


class _WeightOnlyMlp(torch.autograd.Function):
    """Traced through by torch.compile. `kinds`: of gate_up and of down, as `BaseProducts.parts` has them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: _T,
        topk_weights: _T,
        gate_up_bias: _Maybe,
        down_bias: _Maybe,
        topk_ids: _T,
        activation: str,
        interleaved: bool,
        kinds: tuple[Any, ...],
        *tensors: _Maybe,
    ) -> _T:
        base = BaseProducts.of(kinds, tensors)
        experts = Experts(base.gate_up, base.down, gate_up_bias, down_bias, activation, interleaved)
        out, pre, order = _forward(x, topk_ids, topk_weights, experts)
        ctx.form, ctx.kinds = (activation, interleaved), kinds
        routing = (order.offs, order.rows, order.slots, order.positions)
        ctx.save_for_backward(topk_weights, gate_up_bias, down_bias, topk_ids, pre, *routing, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]
        topk_weights, gate_up_bias, down_bias, topk_ids, pre, *rest = ctx.saved_tensors
        order = Permutation(*rest[:4])
        base = BaseProducts.of(ctx.kinds, rest[4:])
        needs_x, needs_weights, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:4]
        dy = dy.contiguous().to(pre.dtype)
        dx = dweights = dgate_up_bias = ddown_bias = None
        if needs_x or needs_weights or needs_up_bias:
            a = base.down_gradient(dy, order)
            dpre, dweights = _activation_backward(a, pre, order, topk_weights, *ctx.form)
            if needs_x:
                dx = combine(base.up_gradient(dpre, order), order.positions)
            if needs_up_bias:
                dgate_up_bias = bias_sums(dpre, order.offs).to(gate_up_bias.dtype)
            if needs_weights and down_bias is not None:
                dweights = dweights + bias_products(dy, down_bias, topk_ids, order)
        if needs_down_bias:
            ddown_bias = weighted_sums(dy, topk_weights, order)
        return dx, dweights if needs_weights else None, dgate_up_bias, ddown_bias, *(None,) * (len(rest))


def weight_only_mlp(x: _T, topk_ids: _T, topk_weights: _T, experts: Experts) -> _T:
    """`moe_mlp` with two weights in 4 bits; operands as checked there."""
    biases = experts.tensors[2:]
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (x, topk_weights, *biases)):
        return _forward(x, topk_ids, topk_weights, experts)[0]
    if autocasts(x):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    kinds, tensors = BaseProducts.parts(experts)
    return _WeightOnlyMlp.apply(x, topk_weights, *biases, topk_ids, *experts.form[:2], kinds, *tensors)
