"""expertile::weight_only_mm as a torch operator: what torch.compile, FakeTensor and opcheck see; and its gradients.

The weights are not trainable. da[rows of g] = dout[rows of g] @ ŵ[g] is a grouped product with the weights dequantised
to a's dtype, a range of K after the other: as many of its columns as take `_RANGE_BYTES` for all experts.
"""

from __future__ import annotations

from typing import Any

import torch

from expertile.formats.quantized import QuantizedWeight
from expertile.formats.weight_only import weight_of
from expertile.ops.backend import Request
from expertile.ops.grouped_mm.autograd import bias_gradient
from expertile.ops.grouped_mm.op import operator as grouped_operator
from expertile.ops.grouped_mm.tail import zero_tail
from expertile.ops.torch_op import define, differentiable_eagerly
from expertile.ops.weight_only_mm import dequantize, run

_RANGE_BYTES = 2**28


def _kernel(
    a: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    format: str,
    group_size: int,
    k: int,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    backend: str,
) -> torch.Tensor:
    w = weight_of(format, packed, scales, zeros, group_size, k)
    return run.forward(a, w, offs=offs, bias=bias, out_dtype=out_dtype, request=Request(backend))


def _fake(a: torch.Tensor, packed: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, out_dtype, _backend = rest
    return a.new_empty((a.shape[0], packed.shape[1]), dtype=a.dtype if out_dtype is None else out_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, packed, scales, zeros, format, group_size, k, offs, bias, *_ = inputs
    ctx.save_for_backward(packed, scales, zeros, offs, bias)
    ctx.kind, ctx.dtype = (format, group_size, k), a.dtype


def ranges(rows: int, k: int, itemsize: int) -> list[tuple[int, int]]:
    """The ranges of K, (first, last), in which `rows` rows of weights are dequantised."""
    width = max(1, _RANGE_BYTES // max(1, rows * itemsize * dequantize.RANGES)) * dequantize.RANGES
    return [(first, min(first + width, k)) for first in range(0, k, width)]


def activation_gradient(grad: torch.Tensor, w: QuantizedWeight, offs: torch.Tensor) -> torch.Tensor:
    """grad[rows of g] @ ŵ[g], [M, K] in grad's dtype, with zeros past offs[-1]. Not differentiable.

    The weights are dequantised a range of K after the other.
    """
    g, n, k = w.shape
    fields = (w.packed, w.scales, w.zeros, w.format, w.group_size, k)
    parts = []
    for first, last in ranges(g * n, k, grad.dtype.itemsize):
        dense = torch.ops.expertile.weight_only_dequantize(*fields, grad.dtype, first, last)
        parts.append(_product(grad, dense, offs=offs, out_dtype=grad.dtype))
        del dense  # its memory is the next range's
    return zero_tail(parts[0] if len(parts) == 1 else torch.cat(parts, 1), offs, dim=0)


def _gradients(ctx: Any, grad: torch.Tensor, needs_a: bool, needs_bias: bool) -> tuple[Any, Any]:
    packed, scales, zeros, offs, bias = ctx.saved_tensors
    # out.sum().backward() hands over an expanded scalar: strides of 0, which no copy engine takes.
    grad = grad if 0 not in grad.stride() or grad.numel() == 0 else grad.contiguous()
    grad = grad.to(ctx.dtype)
    da = dbias = None
    if needs_a:
        format, group_size, k = ctx.kind
        da = activation_gradient(grad, weight_of(format, packed, scales, zeros, group_size, k), offs)
    if needs_bias:
        dbias = bias_gradient(_product, grad, offs, bias)
    return da, dbias


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    da, dbias = _gradients(ctx, grad, ctx.needs_input_grad[0], ctx.needs_input_grad[8])
    return da, *(None,) * 7, dbias, None, None


def _setup_eager(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, w, offs, bias, _, _ = inputs
    ctx.save_for_backward(w.packed, w.scales, w.zeros, offs, bias)
    ctx.kind, ctx.dtype = (w.format, w.group_size, w.shape[2]), a.dtype


def _backward_eager(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    da, dbias = _gradients(ctx, grad, ctx.needs_input_grad[0], ctx.needs_input_grad[3])
    return da, None, None, dbias, None, None


def _product(
    x: torch.Tensor, y: torch.Tensor, *, offs: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return grouped_operator(x, y, offs, None, out_dtype, "auto", False)


# What calls the operator, its arguments in the order of its schema; and `run.forward` in eager calls.
operator = define("weight_only_mm", _kernel, fake=_fake, gradient=_backward, setup=_setup)
differentiable_mm = differentiable_eagerly(run.forward, _setup_eager, _backward_eager)
