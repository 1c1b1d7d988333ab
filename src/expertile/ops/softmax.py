"""Softmax along a dimension, forward and backward, each element read once and written once.

    y[r, c] = exp(x[r, c] - max_c x[r]) / sum_c exp(x[r, c] - max_c x[r])
    dx[r, c] = y[r, c] * (dy[r, c] - sum_c dy[r, c] * y[r, c])

float32 inside, rounded once to the input's dtype. Bytes: forward 2 * R * C * itemsize, backward 3 * R * C * itemsize,
against some 5 FLOPs and one exponential per element, so memory limits it: time >= bytes / bandwidth. The row waits on
the chip between its two reductions and its store: in the registers of one program, or, from some 16 K elements on, of
a cluster of up to 8 CTAs that exchange their maximum and sum through distributed shared memory. Longer rows, and long
ones on GPUs without clusters, are read twice, the second time from L2 as far as it reaches: up to 3 * R * C * itemsize.
"""

from __future__ import annotations

from typing import Any

import torch

from expertile.ops import _rows_choose as choose
from expertile.ops._rows import PLAIN, RowConfig, as_rows, check_input, machine, on_kernels, unit, vector
from expertile.ops._rows_launch import launch, programs
from expertile.ops._rows_softmax import (
    softmax_backward_kernel,
    softmax_backward_streamed_kernel,
    softmax_kernel,
    softmax_streamed_kernel,
)


def softmax_rows(x: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """Launch the forward kernel along the last dimension of x; a fresh, contiguous result of x's shape."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    x_rows = as_rows(x)
    rows, cols = x_rows.shape
    here = machine(x.get_device())
    cut = vector(y, x_rows)
    if config is None:
        config = choose.forward(rows, cols // cut * cut, x.element_size(), here)
    stride = x_rows.stride(0)
    by = unit(cols, stride)
    strides = (cols // by, stride // by)
    if config.streamed:
        launch(softmax_streamed_kernel, rows, (x_rows, y), strides, (by, config.block_cols), num_warps=config.num_warps)
        return y
    launch(
        softmax_kernel, programs(config, rows, here, x.get_device()), (x_rows, y), (rows, *strides),
        (by, *_constants(config, rows, cols, cut)), num_warps=config.num_warps, cluster=config.cluster,
        most_registers=config.most_registers,
    )  # fmt: skip
    return y


def softmax_backward_rows(dy: torch.Tensor, y: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """Launch the backward kernel along the last dimension; a fresh, contiguous gradient of y's shape."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel() == 0:
        return dx
    dy_rows, y_rows = as_rows(dy), as_rows(y)
    rows, cols = y_rows.shape
    here = machine(y.get_device())
    cut = vector(dx, dy_rows, y_rows)
    if config is None:
        config = choose.softmax_backward(rows, cols // cut * cut, y.element_size(), here)
    dy_stride, y_stride = dy_rows.stride(0), y_rows.stride(0)
    by = unit(cols, dy_stride, y_stride)
    strides = (cols // by, dy_stride // by, y_stride // by)
    tensors = (dy_rows, y_rows, dx)
    if config.streamed:
        launch(
            softmax_backward_streamed_kernel, rows, tensors, strides, (by, config.block_cols),
            num_warps=config.num_warps,
        )  # fmt: skip
        return dx
    launch(
        softmax_backward_kernel, programs(config, rows, here, y.get_device()), tensors, (rows, *strides),
        (by, *_constants(config, rows, cols, cut)), num_warps=config.num_warps, cluster=config.cluster,
        most_registers=config.most_registers,
    )  # fmt: skip
    return dx


def _constants(config: RowConfig, rows: int, cols: int, cut: int) -> tuple[Any, ...]:
    """The kernels' compile-time constants after UNIT."""
    pieces = config.pieces(cols // cut * cut)
    return (
        config.block_rows, config.block_cols, pieces, config.cluster, rows % config.block_rows == 0,
        cut == 1 and cols == config.cluster * pieces * config.block_cols, config.programs_per_sm > 0,
        config.num_stages, cut,
    )  # fmt: skip


def _forward(x: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    if on_kernels(x):
        return softmax_rows(x, config)
    return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype).contiguous()


def _formula(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient in plain torch, float32 inside, itself differentiable."""
    product = dy.float() * y.float()
    return (product - y.float() * product.sum(-1, keepdim=True)).to(y.dtype)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """The gradient of x along the last dimension from y and its gradient, by the kernel or in plain torch."""
    return softmax_backward_rows(dy, y, config) if on_kernels(y) else _formula(dy, y).contiguous()


class _Softmax(torch.autograd.Function):
    """Autograd for eager calls; compiled ones go through the operators below, with the same kernels."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, config: RowConfig | None, backward_config: RowConfig | None
    ) -> torch.Tensor:
        y = _forward(x, config)
        ctx.save_for_backward(y)
        ctx.config = backward_config
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated in turn
            return _formula(dy, y), None, None
        return softmax_backward(dy, y, ctx.config), None, None


@torch.library.custom_op("expertile::softmax", mutates_args=())
def _softmax_op(x: torch.Tensor) -> torch.Tensor:
    return _forward(x)


@_softmax_op.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("expertile::softmax_backward", mutates_args=())
def _softmax_backward_op(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return softmax_backward(dy, y)


@_softmax_backward_op.register_fake
def _(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.new_empty(y.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _gradient(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    return torch.ops.expertile.softmax_backward(dy, ctx.saved_tensors[0])


_softmax_op.register_autograd(_gradient, setup_context=_setup)


def softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    config: RowConfig | None = None,
    backward_config: RowConfig | None = None,
) -> torch.Tensor:
    """Softmax of x along `dim`; values and gradients as `torch.softmax`, NaN and infinities included.

    Args:
        x: [..., C], float32, bfloat16 or float16; any strides (rows that are not contiguous are copied first).
        dim: the dimension that sums to one. Another than the last is moved there, which copies x once.
        config, backward_config: how rows are laid onto programs; chosen from the shape by default. Not under
            torch.compile.

    Returns:
        A fresh tensor of x's shape and dtype, computed in float32 and rounded once. On a GPU of compute capability
        8.0 or later by the kernels here; elsewhere in plain torch.

    Raises:
        ValueError: x is no tensor, has another dtype or no dimension; a config under torch.compile.
        IndexError: x has no dimension `dim`.
    """
    check_input("x", x)
    last = x.dim() - 1
    if dim != -1 and dim != last:
        moved = x.movedim(dim, -1)
        return softmax(moved, config=config, backward_config=backward_config).movedim(-1, dim)
    if torch.compiler.is_compiling() or type(x) not in PLAIN:
        if config is not None or backward_config is not None:
            raise ValueError("config, backward_config: expected None under torch.compile, got a config")
        return torch.ops.expertile.softmax(x)
    if x.requires_grad and torch.is_grad_enabled():
        return _Softmax.apply(x, config, backward_config)
    return _forward(x, config)
