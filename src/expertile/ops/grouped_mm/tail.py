"""What a result holds beside its products: zeros past offs[-1], zeros without a K, rows that are left alone. Reads offs
on the device only."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from expertile.ops.grouped_mm.backend import new_out
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.hopper.limits import storable
from expertile.ops.launch.kernels import launch
from expertile.ops.torch_op import batched


@triton.jit
def _zero_tail_kernel(x_ptr, offs_ptr, last_group, length, width, stride_ragged, stride_other, BLOCK: tl.constexpr):
    # One program per BLOCK x 64 patch of [ragged, other]; patches inside the groups leave at once.
    across = tl.cdiv(width, 64)
    end = tl.load(offs_ptr + last_group)
    row0 = tl.program_id(0) // across * BLOCK
    if row0 + BLOCK > end:
        rows = row0 + tl.arange(0, BLOCK)
        cols = tl.program_id(0) % across * 64 + tl.arange(0, 64)
        keep = ((rows >= end) & (rows < length))[:, None] & (cols < width)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_ragged + cols.to(tl.int64)[None, :] * stride_other
        tl.store(x_ptr + at, tl.zeros((BLOCK, 64), x_ptr.dtype.element_ty), mask=keep)


def zero_tail(x: torch.Tensor, offs: torch.Tensor, dim: int) -> torch.Tensor:
    """x [ragged, other] (dim 0) or [other, ragged] (dim 1) with everything past offs[-1] set to zero.

    A fresh tensor on a GPU is written in place, by one launch that touches the tail only. Where autograd or a
    compiler looks on, the same is said in differentiable operators. Neither synchronises.
    """
    on_kernels = x.is_cuda or triton.knobs.runtime.interpret
    if on_kernels and type(x) is torch.Tensor and not batched(x) and not torch.is_grad_enabled():
        length, width = x.shape[dim], x.shape[1 - dim]
        scalars = (offs.shape[0] - 1, length, width, x.stride(dim), x.stride(1 - dim))
        if patches := -(-length // 128) * -(-width // 64):
            launch(_zero_tail_kernel, patches, (x, offs), scalars, (128,), num_warps=4)
        return x
    if hasattr(offs, "placements"):  # a DTensor, which compares with DTensors alone
        inside = offs.new_ones(x.shape[dim]).cumsum(0) <= offs[-1]
    else:
        inside = torch.arange(x.shape[dim], device=x.device) < offs[-1]
    return torch.where(inside.unsqueeze(1 - dim), x, 0.0)


def filled(p: Problem, operands: Any, out: torch.Tensor | None, run: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """`out`, or a new tensor, with the result that `run(target)` writes by TMA: into out itself where TMA can, or into
    a copy, which carries the rows that are left alone. Nothing runs where nothing is multiplied."""
    target = new_out(p, operands, out)
    if out is not None and not storable(out):
        target = out.new_empty(out.shape).copy_(out)
    if p.groups and p.m and p.n:
        if p.k:
            run(target)
        else:
            zero_rows(p, operands, target)
    return target if out is None or out is target else out.copy_(target)


def zero_rows(p: Problem, operands: Any, out: torch.Tensor) -> torch.Tensor:
    """An empty K: zeros (or the bias) in every row of a group; on the device, like the kernel."""
    if p.layout is not Layout.RAGGED_M:
        out.zero_()
        if operands.bias is not None:
            out += operands.bias[:, None, :].to(out.dtype)
        return out
    assert operands.offs is not None
    rows = torch.arange(p.m, device=out.device)
    group = torch.searchsorted(operands.offs, rows, right=True)
    inside = (group < p.groups)[:, None]
    value = torch.zeros((), dtype=out.dtype, device=out.device)
    if operands.bias is not None:
        value = operands.bias[group.clamp(max=p.groups - 1)].to(out.dtype)
    return out.copy_(torch.where(inside, value, out))
