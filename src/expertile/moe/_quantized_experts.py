"""The expert MLPs with FP8 weights.

FP8 (e4m3, weights in blocks of 128×128): activations are quantised in blocks of 1×128, as DeepSeek-V3 does
(arXiv:2412.19437, 3.3.2), x once for each token and not for each of its rows,

    x8 = fp8(x)[rows]; pre = x8 @ gate_up8^T; h8 = fp8(f(pre)); y = h8 @ down8^T; combine

and the backward pass is that of `experts` in x's dtype, with the weights' values (values · scales): quantisation of the
activations is differentiated as if it did nothing. The weights themselves are data without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from expertile.formats.fp8 import Fp8Blocks, dequantize
from expertile.moe._base_products import BaseProducts
from expertile.moe._passes import gradients
from expertile.moe.expert_weights import Experts
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm import pointwise
from expertile.ops.gathered_mm.activation import activate, split
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.quantize.api import quantize_activations, quantize_swiglu
from expertile.ops.torch_op import graph_is_kept, once_differentiable

_T = torch.Tensor
_Maybe = torch.Tensor | None


def on_kernels_eagerly(pre: _T) -> bool:
    """Whether kernels may be launched on pre's rows: there are some, on a GPU, and nothing is traced."""
    return not torch.compiler.is_compiling() and (pre.is_cuda or triton.knobs.runtime.interpret) and bool(pre.shape[0])


def activated(pre: _T, offs: _T, activation: str, interleaved: bool) -> _T:
    """f(pre) [R, I] in pre's dtype, computed in float32."""
    if on_kernels_eagerly(pre):
        act = pre.new_empty((pre.shape[0], pre.shape[1] // 2))
        pointwise.gated_activation(pre, offs, act, activation, interleaved)
        return act
    gate, up = split(pre.float(), interleaved)
    return activate(gate, up, activation).to(pre.dtype)


def _forward(x: _T, topk_ids: _T, topk_weights: _T, experts: Experts) -> tuple[_T, _T, Permutation]:
    base, order = BaseProducts(experts.gate_up, experts.down), permutation(topk_ids, experts.shape[0])
    pre = base.up(x, order, experts.gate_up_bias)
    if experts.activation == "swiglu":
        act = quantize_swiglu(pre, interleaved=experts.interleaved)
    else:
        act = quantize_activations(activated(pre, order.offs, experts.activation, experts.interleaved))
    y = base.down_of_fp8(act, order, experts.down_bias, x.dtype)
    return combine(y, order.positions, topk_weights), pre, order


class _Fp8Mlp(torch.autograd.Function):
    """FP8 forward, backward in x's dtype; traced through by torch.compile. `weights`: values and scales of both."""

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
        *weights: _T,
    ) -> _T:
        gate_up, down = (Fp8Blocks(values, scales, (128, 128)) for values, scales in (weights[:2], weights[2:]))
        experts = Experts(gate_up, down, gate_up_bias, down_bias, activation, interleaved)
        out, pre, order = _forward(x, topk_ids, topk_weights, experts)
        ctx.form = (activation, interleaved)
        routing = (order.offs, order.rows, order.slots, order.positions)
        ctx.save_for_backward(x, topk_weights, down_bias, topk_ids, *weights, pre, *routing)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]
        x, topk_weights, down_bias, topk_ids, up8, up_scales, down8, down_scales, pre, *order = ctx.saved_tensors
        needs_x, needs_weights, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:4]
        needs = (needs_x, False, False, needs_weights, needs_up_bias, needs_down_bias)
        gate_up = dequantize(up8, up_scales, (128, 128), x.dtype)
        down = dequantize(down8, down_scales, (128, 128), x.dtype)
        routing = (topk_ids, topk_weights, pre, Permutation(*order))
        form = (down_bias, *ctx.form, needs, False, not graph_is_kept())
        grads = gradients(dy, x, gate_up, down, *routing, *form)
        dx, _, _, dweights, dgate_up_bias, ddown_bias = grads
        return (dx, dweights, dgate_up_bias, ddown_bias, *(None,) * 7)


def fp8_mlp(x: _T, topk_ids: _T, topk_weights: _T, experts: Experts) -> _T:
    """`moe_mlp` with Fp8Blocks of 128×128; operands as checked there."""
    gate_up, down, gate_up_bias, down_bias = experts.tensors
    weights = (gate_up.values, gate_up.scales, down.values, down.scales)
    return _Fp8Mlp.apply(x, topk_weights, gate_up_bias, down_bias, topk_ids, *experts.form[:2], *weights)
