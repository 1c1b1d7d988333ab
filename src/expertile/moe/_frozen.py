"""The expert MLPs with frozen weights: FP8, INT4 or MXFP4, or of any kind under adapters of low rank (`lora`).

    pre = x[rows] @ gate_up^T; act = f(pre); y = act @ down^T; combine

The weights are data without gradients. Those of x, of the routing weights, biases and adapters come from what is kept:
pre, the routing, x where gate_up has an adapter, and u and v [R, r] beside them.

    up       u = s x[rows] @ A^T, pre = x[rows] @ W^T (+ bias)                   shrink, the base's product
    act      act = f(pre + u @ B^T), v = s act @ A2^T                            activated: pre is kept as it is
    down     y = act @ W2^T (+ bias) + v @ B2^T                                  the base's product, expand
    dact     dv = s dy[rows] @ B2, da = dy[rows] @ W2                            shrink, the base's product
    dpre     f' of da + dv @ A2, the routing weights' gradient, du = s dpre @ B  backward
    dx       dpre @ W + du @ A, each token's rows summed                         the base's product, expand, combine
    dA, dB   sums over each expert's rows: dA = du^T x[rows], dB = dpre^T u, …     outer

FP8 (Fp8Blocks of 128×128, `Mxfp4Fp8Weight`): activations are quantised in blocks of 1×128, as DeepSeek-V3 does
(arXiv:2412.19437, 3.3.2), x once for each token, and act. Beside 4-bit weights x, and act where no kernel rounds it as
it makes it, have one scale for each row. The backward pass runs in x's dtype with the weights' values: quantisation of
the activations is differentiated as if it did nothing. Beside other weights in 4 bits activations stay in x's dtype.

Adapters on dense weights on sm_90: the products with u, v, dv and du are more steps of K of the base's products
(`ops/low_rank/joined.py`), which keep their fused epilogues; pre comes with its delta. On other weights and GPUs pre
leaves the base's product without its activation epilogue and is kept without its delta, which `backward` adds again.
docs/notes/moe.md ("Adapters") counts the elements.
"""

from typing import Any

import torch

from expertile.moe._base_products import BaseProducts
from expertile.moe._passes import bias_products, weighted_sums
from expertile.moe.expert_weights import Experts
from expertile.moe.lora import Lora
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.autograd import bias_gradient
from expertile.ops.grouped_mm.backend import Pair
from expertile.ops.low_rank import api as low_rank
from expertile.ops.low_rank.api import Form
from expertile.ops.torch_op import graph_is_kept, once_differentiable

_T = torch.Tensor
_Maybe = torch.Tensor | None
# (x, topk_weights, gate_up_bias, down_bias, and factors of the adapters: A, B of gate_up's, A2, B2 of down's, or None):
# what can be differentiated.
_Operands = tuple[_T, _T, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe]


def _forward(
    base: BaseProducts, operands: _Operands, topk_ids: _T, form: Form, scales: tuple[float, float]
) -> tuple[_T, _T, bool, _Maybe, _Maybe, Permutation]:
    """(out [T, H], pre [R, 2I], whether pre has its adapter's delta, u, v, order)."""
    x, topk_weights, gate_up_bias, down_bias, a1, b1, a2, b2 = operands
    order = permutation(topk_ids, base.experts)
    u = None if a1 is None else low_rank.shrink(x, order.rows, a1.transpose(1, 2), order.offs, scales[0])
    both = base.gated_up(x, order, gate_up_bias, form, _pair(u, b1))
    if both is None:
        pre = base.up(x, order, gate_up_bias)
        act, v = base.activated(pre, u, b1, a2, order, form, scales[1])
    else:
        act, pre = both
        v = None if a2 is None else low_rank.shrink(act, None, a2.transpose(1, 2), order.offs, scales[1])
    y = base.down_of(act, order, down_bias, x.dtype, _pair(v, b2))
    return combine(y, order.positions, topk_weights), pre, both is not None or u is None, u, v, order


class _FrozenMlp(torch.autograd.Function):
    """Traced through by torch.compile. `weights`: of the kinds that `BaseProducts.parts` has."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, topk_ids: _T, form: Form, scales: tuple[float, float], kinds: tuple[Any, ...], *tensors: Any
    ) -> _T:
        operands, weights = tensors[:8], tensors[8:]
        made = _forward(BaseProducts.of(kinds, weights), operands, topk_ids, form, scales)  # type: ignore[arg-type]
        out, pre, ctx.summed, u, v, order = made
        ctx.form, ctx.scales, ctx.kinds = form, scales, kinds
        routing = (order.offs, order.rows, order.slots, order.positions)
        x, *rest = operands
        kept_x = None if u is None else x
        ctx.save_for_backward(kept_x, *rest, topk_ids, pre, u, v, *routing, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]
        x, topk_weights, gate_up_bias, down_bias, a1, b1, a2, b2, topk_ids, pre, u, v, *rest = ctx.saved_tensors
        order, base = Permutation(*rest[:4]), BaseProducts.of(ctx.kinds, rest[4:])
        needs = ctx.needs_input_grad[4:]
        needs_x, needs_weights, needs_up_bias, needs_down_bias, *_ = needs
        offs, rows, weights = order.offs, order.rows, topk_weights.contiguous()
        dy = dy.contiguous().to(pre.dtype)
        dx = dweights = dgate_up_bias = ddown_bias = da1 = db1 = da2 = db2 = None
        if any((*needs[:3], *needs[4:8])):
            dv = None if b2 is None else low_rank.shrink(dy, rows, b2, offs, ctx.scales[1])
            scale, spare = ctx.scales[0], not graph_is_kept()
            made: Any = None
            if ctx.summed:
                made = base.gated_down_gradient(dy, order, weights, pre, ctx.form, spare, _pair(dv, a2))
            if made is None:
                how: Any = (order.slots, order.positions, weights, offs, ctx.form, scale, spare)
                made = low_rank.backward(base.down_gradient(dy, order), pre, u, b1, dv, a2, *how)
                dpre, act_w, dweights, du = made
            else:
                dpre, act_w, dweights = made
                du = None if b1 is None else low_rank.shrink(dpre, None, b1, offs, scale)
            del made
            if dv is not None:
                da2 = low_rank.outer(dv, act_w, None, offs)
                db2 = low_rank.outer(v, dy, rows, offs, weighted=(order.slots, weights), last=True)
            del act_w
            if du is not None:
                da1 = low_rank.outer(du, x, rows, offs)
                db1 = low_rank.outer(u, dpre, None, offs, last=True)
            if needs_up_bias:
                dgate_up_bias = bias_gradient(grouped_mm, dpre, offs, gate_up_bias)
            if needs_weights and down_bias is not None:
                dweights = dweights + bias_products(dy, down_bias, topk_ids, order)
            if needs_x:
                dx = combine(base.up_gradient(dpre, order, _pair(du, a1)), order.positions)
        if needs_down_bias:
            ddown_bias = weighted_sums(dy, topk_weights, order)
        grads = (dx, dweights if needs_weights else None, dgate_up_bias, ddown_bias, da1, db1, da2, db2)
        return *(None,) * 4, *grads, *(None,) * (len(rest) - 4)


def _pair(u: _Maybe, factor: _Maybe) -> Pair | None:
    return None if u is None or factor is None else (u, factor)


def frozen_mlp(x: _T, topk_ids: _T, topk_weights: _T, experts: Experts, lora: Lora | None) -> _T:
    """`moe_mlp` with quantised weights or with adapters; operands as checked there, x, dense weights and biases of one
    dtype."""
    count, _, _ = experts.shape
    adapters = (None, None) if lora is None else (lora.gate_up, lora.down)
    factors: list[_Maybe] = []
    for adapter in adapters:
        factors += [None, None] if adapter is None else adapter.factors(count, x.dtype)
    scales = tuple(0.0 if adapter is None else float(adapter.scale) for adapter in adapters)
    operands: Any = (x, topk_weights, experts.gate_up_bias, experts.down_bias, *factors)
    form = experts.form[:2]
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in operands):
        return _forward(BaseProducts(experts.gate_up, experts.down), operands, topk_ids, form, scales)[0]  # type: ignore[arg-type]
    kinds, weights = BaseProducts.parts(experts)
    return _FrozenMlp.apply(topk_ids, form, scales, kinds, *operands, *weights)
