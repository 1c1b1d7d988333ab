"""Host side of the norm kernels: outputs, configs, launches. Tensors are 2-D rows with unit stride."""

from functools import lru_cache
from math import gcd
from typing import Any

import torch

from expertile.ops.launch.device import Machine, machine
from expertile.ops.launch.kernels import launch, met, plan
from expertile.ops.launch.launch import Launch, Pointer
from expertile.ops.rows import choose
from expertile.ops.rows.config import RowConfig, as_rows, unit, vector
from expertile.ops.rows.norm_backward_kernels import (
    norm_backward_kernel,
    norm_backward_streamed_kernel,
    norm_columns_kernel,
    sum_partials_kernel,
)
from expertile.ops.rows.norm_kernels import norm_kernel, norm_streamed_kernel
from expertile.ragged import power_of_two

Optional = torch.Tensor | None


def forward(
    x: torch.Tensor,
    residual: Optional,
    weight: Optional,
    bias: Optional,
    eps: float,
    centered: bool,
    stats: bool,
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, Optional, Optional, Optional]:
    """(y, x + residual or None, mean or None, rstd or None); the statistics [...] float32 only if asked for, the mean
    only if centered. `y` has the dtype of x, the sum that of the residual."""
    cols = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats and centered else None
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats else None
    if x.numel() == 0:
        return y, total, mean, rstd
    x_rows = as_rows(x)
    rows, x_stride = x_rows.shape[0], x_rows.stride(0)
    residual_rows = None if residual is None else as_rows(residual)
    residual_stride = 0 if residual_rows is None else residual_rows.stride(0)
    cut = vector(y, *((x_rows,) if residual_rows is None else (x_rows, residual_rows)))
    tensors, index = (x_rows, residual_rows, weight, bias, y, total, mean, rstd), x.get_device()
    addresses, pointers = met(tensors)
    here = machine(index)
    made = _launch(rows, cols, x_stride, residual_stride, float(eps), pointers, index, here, cut, centered, config)
    made.run(index, (), tensors, addresses)
    return y, total, mean, rstd


@lru_cache(maxsize=4096)
def _launch(
    rows: int,
    cols: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    pointers: tuple[Pointer | None, ...],
    index: int,
    here: Machine,
    cut: int,
    centered: bool,
    config: RowConfig | None,
) -> Launch:
    """The forward launch. pointers: of the kernel's tensors. cut: elements of a word that rows are cut by, if they can
    be."""
    x, residual, weight, bias, *_ = pointers
    assert x is not None
    itemsize = x.dtype.itemsize
    vectors, inputs = 1 if weight is None or bias is None else 2, 1 if residual is None else 2
    if config is None:
        if cut > 1:
            config = choose.cut_norm(rows, cols // cut * cut, itemsize, here, vectors, inputs)
        if config is None:
            cut = 1
            config = choose.forward(rows, cols, itemsize, here, vectors, inputs)
    by = unit(cols, x_stride, residual_stride)
    strides = (cols // by, x_stride // by, residual_stride // by)
    shape = config.shape(rows, cols, by, cut)
    if config.streamed:
        return plan(norm_streamed_kernel, rows, pointers, (*strides, eps), (centered, shape), config.num_warps)
    count = config.resident_programs(rows, here, index)
    held = config.block_rows * config.pieces(cols) * config.block_cols / (32 * config.num_warps)  # by one thread
    late = not config.programs_per_sm and held > 32
    if cut > 1 and config.programs_per_sm:
        # All tiles of a program are cut alike if it strides over a multiple of `cut` rows.
        alike = cut // gcd(cut, config.block_rows)
        count = count // alike * alike or count
        late = count % alike != 0 and count < config.tiles(rows)
    constants = (centered, _spread(config, itemsize), late, shape)
    how = (config.num_warps, config.cluster, config.most_registers)
    return plan(norm_kernel, count, pointers, (rows, *strides, eps), constants, *how)


def backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: Optional,
    rstd: torch.Tensor,
    dsum: Optional,
    sums: tuple[bool, bool],
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, Optional, Optional]:
    """(dh, dweight or None, dbias or None): gradients in the dtypes of h, weight and bias; `sums` says which of the
    last two are wanted. `mean` is None for RMS norm. `dsum` is added to dh."""
    cols = h.shape[-1]
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dweight = torch.empty_like(weight) if sums[0] and weight is not None else None
    dbias = torch.empty_like(bias) if sums[1] and bias is not None else None
    if h.numel() == 0:
        return dh, None if dweight is None else dweight.zero_(), None if dbias is None else dbias.zero_()
    dy_rows, h_rows = as_rows(dy), as_rows(h)
    dsum_rows = None if dsum is None else as_rows(dsum)
    rows = h_rows.shape[0]
    row_strides = (dy_rows.stride(0), h_rows.stride(0), 0 if dsum_rows is None else dsum_rows.stride(0))
    by = unit(cols, *row_strides)
    strides = (cols // by, *(s // by for s in row_strides))
    here = machine(h.get_device())
    tensors = (dy_rows, h_rows, weight, mean, rstd, dsum_rows, dh)
    centered = mean is not None
    wanted = (dweight is not None, dbias is not None)
    if config is None:
        config = choose.norm_backward(rows, cols, h.element_size(), here, sum(wanted))
    if config.streamed:
        shape = (centered, config.shape(rows, cols, by))
        launch(norm_backward_streamed_kernel, rows, tensors, strides, shape, num_warps=config.num_warps)
        partial = _sum_columns(dy_rows, h_rows, mean, rstd, strides[:3], by, wanted, here) if any(wanted) else None
    else:
        count = config.resident_programs(rows, here, h.get_device())
        partial = torch.empty((sum(wanted), count, cols), dtype=torch.float32, device=h.device)
        constants = (centered, *wanted, _spread(config, h.element_size()), config.shape(rows, cols, by))
        how: Any = dict(num_warps=config.num_warps, cluster=config.cluster, most_registers=config.most_registers)
        launch(norm_backward_kernel, count, (*tensors, partial), (rows, *strides), constants, **how)
    if partial is not None and any(wanted):
        _sum_partials(partial, dweight, dbias)
    return dh, dweight, dbias


def _spread(config: RowConfig, itemsize: int) -> bool:
    """Whether the warps of a program lie over several rows of its tile."""
    return config.block_rows > 1 and config.block_cols < 32 * config.num_warps * (16 // itemsize)


def _sum_columns(
    dy: torch.Tensor,
    h: torch.Tensor,
    mean: Optional,
    rstd: torch.Tensor,
    strides: tuple[int, ...],
    by: int,
    wanted: tuple[bool, bool],
    here: Machine,
) -> torch.Tensor:
    """Partial sums [wanted, splits, C] of dy * n and dy over the rows."""
    rows, cols = h.shape
    tiles = RowConfig(16, 256, 8, num_stages=2, streamed=True)
    blocks = -(-cols // tiles.block_cols)
    splits = max(1, min(tiles.tiles(rows), 4 * here.sm_count // blocks))
    partial = torch.empty((sum(wanted), splits, cols), dtype=torch.float32, device=h.device)
    tensors, scalars = (dy, h, mean, rstd, partial), (rows, splits, *strides)
    constants = (mean is not None, *wanted, tiles.shape(rows, cols, by))
    launch(norm_columns_kernel, blocks * splits, tensors, scalars, constants, num_warps=tiles.num_warps)
    return partial


def _sum_partials(partial: torch.Tensor, dweight: Optional, dbias: Optional) -> None:
    """dweight and dbias from partial sums, each column's in one program."""
    wanted, programs, cols = partial.shape
    block_cols = 16 if cols <= 2048 else 32 if cols <= 8192 else 64
    block_programs = min(4096 // block_cols, power_of_two(programs))
    tensors, scalars = (partial, dweight, dbias), (programs, cols)
    constants = (dweight is not None, dbias is not None, block_programs, block_cols)
    count, num_warps = wanted * -(-cols // block_cols), 8 if block_programs * block_cols >= 2048 else 1
    launch(sum_partials_kernel, count, tensors, scalars, constants, num_warps=num_warps)
