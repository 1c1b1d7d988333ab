"""Softmax along a dimension, forward and backward, each element read once and written once.

    y[r, c] = exp(x[r, c] - max_c x[r]) / sum_c exp(x[r, c] - max_c x[r])
    dx[r, c] = y[r, c] * (dy[r, c] - sum_c dy[r, c] * y[r, c])

float32 inside, rounded once to the input's dtype. Bytes: forward 2 * R * C * itemsize, backward 3 * R * C * itemsize;
memory limits both. A row waits between its reductions and its store in the registers of one program or of a cluster of
up to 8 CTAs, or in shared memory if it starts anywhere in a 16-byte word (ring.py). Longer rows, and long ones on GPUs
without clusters, are read twice, the second time from L2 as far as it reaches.
"""

from functools import lru_cache, partial
from numbers import Integral
from typing import Any

import torch

from expertile.ops.launch.device import FORMULA_DTYPES, Machine, machine, on_kernels, wide
from expertile.ops.launch.kernels import met, plan
from expertile.ops.launch.launch import Launch, Pointer
from expertile.ops.rows import choose
from expertile.ops.rows import ring_launch as ring
from expertile.ops.rows.config import RowConfig, as_rows, check_configs, check_input, unit, vector
from expertile.ops.rows.softmax_kernels import (
    softmax_backward_kernel,
    softmax_backward_streamed_kernel,
    softmax_kernel,
    softmax_streamed_kernel,
)
from expertile.ops.torch_op import define, differentiable_eagerly, no_options, row_shardings, traced


def on_rows(inputs: tuple[torch.Tensor, ...], config: RowConfig | None = None) -> torch.Tensor:
    """Launch the kernel along the last dimension of (x,), or of (dy, y) the backward kernel; a fresh, contiguous result
    of the last one's shape and dtype."""
    out = torch.empty(inputs[-1].shape, dtype=inputs[-1].dtype, device=inputs[-1].device)
    if out.numel() == 0:
        return out
    inputs = tuple(map(as_rows, inputs))
    (rows, cols), index = inputs[-1].shape, out.get_device()
    if config is None and (passing := ring.config_for(out, *inputs)) is not None:
        ring.run(inputs, out.view(rows, cols), machine(index).sm_count, passing)
        return out
    tensors, strides = (*inputs, out), tuple(x.stride(0) for x in inputs)
    addresses, pointers = met(tensors)
    launch = _launch(rows, cols, strides, pointers, index, machine(index), vector(out, *inputs), config)
    launch.run(index, (), tensors, addresses)
    return out


@lru_cache(maxsize=4096)
def _launch(
    rows: int,
    cols: int,
    row_strides: tuple[int, ...],
    pointers: tuple[Pointer, ...],
    index: int,
    here: Machine,
    cut: int,
    config: RowConfig | None,
) -> Launch:
    """The launch for one input (softmax) or two (its backward pass), whose rows are `row_strides` elements apart, on
    GPU `index`, which is `here`. cut: elements of a word that rows are cut by."""
    backward, itemsize = len(row_strides) == 2, pointers[0].dtype.itemsize
    if config is None:
        chosen = choose.softmax_backward if backward else choose.forward
        config = chosen(rows, cols // cut * cut, itemsize, here)
    by = unit(cols, *row_strides)
    strides = (cols // by, *(s // by for s in row_strides))
    shape = config.shape(rows, cols, by, cut)
    if config.streamed:
        streamed = softmax_backward_streamed_kernel if backward else softmax_streamed_kernel
        return plan(streamed, rows, pointers, strides, (shape,), config.num_warps)
    kernel, count = softmax_backward_kernel if backward else softmax_kernel, config.resident_programs(rows, here, index)
    how = (config.num_warps, config.cluster, config.most_registers)
    return plan(kernel, count, pointers, (rows, *strides), (shape,), *how)


def _forward(x: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    if on_kernels(x):
        return on_rows((x,), config)
    return torch.softmax(wide(x), -1).to(x.dtype).contiguous()


def _formula(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient in plain torch, float32 inside, itself differentiable."""
    product = wide(dy) * wide(y)
    return (product - wide(y) * product.sum(-1, keepdim=True)).to(y.dtype)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """The gradient of x along the last dimension from y and its gradient, by the kernel or in plain torch."""
    return on_rows((dy, y), config) if on_kernels(y) else _formula(dy, y).contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Of the operator, and of eager calls, whose last input is the config of the backward pass."""
    ctx.save_for_backward(output)
    ctx.config = inputs[-1] if len(inputs) > 1 else None


_call_backward = define(
    "softmax_backward",
    softmax_backward,
    "(Tensor dy, Tensor y) -> Tensor",
    fake=lambda dy, y: y.new_empty(y.shape),
    sharding=partial(row_shardings, make=lambda placed, dy, y: ([placed], [placed, placed])),
)
_call_softmax = define(
    "softmax",
    _forward,
    "(Tensor x) -> Tensor",
    fake=lambda x: x.new_empty(x.shape),
    gradient=lambda ctx, dy: _call_backward(dy, ctx.saved_tensors[0]),
    setup=_setup,
    sharding=partial(row_shardings, make=lambda placed, x: ([placed], [placed])),
)
# Eager calls, with the same kernels; with create_graph=True the gradient is differentiated in turn.
_differentiable_softmax = differentiable_eagerly(
    lambda x, config, backward_config: _forward(x, config),
    _setup,
    lambda ctx, dy: (softmax_backward(dy, ctx.saved_tensors[0], ctx.config), None, None),
    lambda ctx, dy: (_formula(dy, ctx.saved_tensors[0]), None, None),
)


def softmax(
    x: torch.Tensor, dim: int = -1, *, config: RowConfig | None = None, backward_config: RowConfig | None = None
) -> torch.Tensor:
    """Softmax of x along `dim`; values and gradients as `torch.softmax`, NaN and infinities included.

    Args:
        x: [..., C], float32, bfloat16 or float16, or float64 (in plain torch); any strides (rows that are
            not contiguous are copied first).
        dim: the dimension that sums to one. Another than the last is moved there, which copies x once.
        config, backward_config: how rows are laid onto programs; chosen from the shape by default. Not under
            torch.compile.

    Returns:
        A fresh tensor of x's shape and dtype, computed in float32 and rounded once. On a GPU of compute capability
        8.0 or later by the kernels here; elsewhere in plain torch.

    Raises:
        ValueError: x is no tensor, has another dtype or no dimension; a dim that is no integer; a config under
            torch.compile.
        IndexError: x has no dimension `dim`.
    """
    check_input("x", x, FORMULA_DTYPES)
    last = x.dim() - 1
    check_configs(config=config, backward_config=backward_config)
    if dim != -1 and dim != last:
        if not isinstance(dim, Integral):
            raise ValueError(f"dim: expected an integer, got {dim!r}")
        moved = x.movedim(dim, -1)
        return softmax(moved, config=config, backward_config=backward_config).movedim(-1, dim)
    if traced(x):
        no_options(config=config, backward_config=backward_config)
        return _call_softmax(x)
    if x.requires_grad and torch.is_grad_enabled():
        return _differentiable_softmax(x, config, backward_config)
    return _forward(x, config)
