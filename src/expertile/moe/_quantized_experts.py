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
from expertile.moe._passes import gradients
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm import pointwise
from expertile.ops.gathered_mm.activation import activate, split
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.quantize.api import quantize_activations, quantize_swiglu
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ops.torch_op import once_differentiable

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


def _fp8_forward(
    x: _T,
    gate_up: _T,
    gate_up_scales: _T,
    down: _T,
    down_scales: _T,
    topk_ids: _T,
    topk_weights: _T,
    activation: str,
    interleaved: bool,
    gate_up_bias: _Maybe,
    down_bias: _Maybe,
) -> tuple[_T, _T, Permutation]:
    order = permutation(topk_ids, gate_up.shape[0])
    x8 = quantize_activations(x)
    rows8 = x8.values.view(torch.uint8).index_select(0, order.rows).view(torch.float8_e4m3fn)
    pre = scaled_grouped_mm(
        rows8,
        gate_up.transpose(1, 2),
        x8.scales.t().index_select(1, order.rows).t(),  # scales of a tile's rows side by side
        gate_up_scales,
        offs=order.offs,
        bias=gate_up_bias,
        out_dtype=x.dtype,
    )
    if activation == "swiglu":
        act = quantize_swiglu(pre, interleaved=interleaved)
    else:
        act = quantize_activations(activated(pre, order.offs, activation, interleaved))
    y = scaled_grouped_mm(
        act.values, down.transpose(1, 2), act.scales, down_scales, offs=order.offs, bias=down_bias, out_dtype=x.dtype
    )
    return combine(y, order.positions, topk_weights), pre, order


class _Fp8Mlp(torch.autograd.Function):
    """FP8 forward, backward in x's dtype; traced through by torch.compile."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: _T,
        topk_weights: _T,
        gate_up_bias: _Maybe,
        down_bias: _Maybe,
        topk_ids: _T,
        gate_up: _T,
        gate_up_scales: _T,
        down: _T,
        down_scales: _T,
        activation: str,
        interleaved: bool,
    ) -> _T:
        out, pre, order = _fp8_forward(
            x,
            gate_up,
            gate_up_scales,
            down,
            down_scales,
            topk_ids,
            topk_weights,
            activation,
            interleaved,
            gate_up_bias,
            down_bias,
        )
        ctx.activation, ctx.interleaved = activation, interleaved
        ctx.save_for_backward(
            x,
            topk_weights,
            down_bias,
            topk_ids,
            gate_up,
            gate_up_scales,
            down,
            down_scales,
            pre,
            order.offs,
            order.rows,
            order.slots,
            order.positions,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]

        x, topk_weights, down_bias, topk_ids, up8, up_scales, down8, down_scales, pre, *order = ctx.saved_tensors
        needs_x, needs_weights, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:4]
        dx, _, _, dweights, dgate_up_bias, ddown_bias = gradients(
            dy,
            x,
            dequantize(up8, up_scales, (128, 128), x.dtype),
            dequantize(down8, down_scales, (128, 128), x.dtype),
            topk_ids,
            topk_weights,
            pre,
            Permutation(*order),
            down_bias,
            ctx.activation,
            ctx.interleaved,
            (needs_x, False, False, needs_weights, needs_up_bias, needs_down_bias),
        )
        return (dx, dweights, dgate_up_bias, ddown_bias, *(None,) * 7)


def fp8_mlp(
    x: _T,
    gate_up: Fp8Blocks,
    down: Fp8Blocks,
    topk_ids: _T,
    topk_weights: _T,
    activation: str,
    interleaved: bool,
    gate_up_bias: _Maybe,
    down_bias: _Maybe,
) -> _T:
    """`moe_mlp` with Fp8Blocks of 128×128; operands as checked there."""
    return _Fp8Mlp.apply(
        x,
        topk_weights,
        gate_up_bias,
        down_bias,
        topk_ids,
        gate_up.values,
        gate_up.scales,
        down.values,
        down.scales,
        activation,
        interleaved,
    )
