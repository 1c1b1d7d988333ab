"""PyTorch's own `torch.nn.functional.scaled_grouped_mm`, for row-wise scales.

    out[rows of g] = (a[rows of g] ∘ scale_a[rows]) @ (b[g] ∘ scale_b[g])       RAGGED_M
    out[g]         = (a[:, columns of g] @ b[rows of g]) ∘ scale_a[g] ⊗ scale_b[g]   RAGGED_K

A CUTLASS kernel that reads `offs` on the device; on sm_90 it knows row-wise scales only (ATen/native/cuda/
GroupedBlas.cpp and ScaledGroupMM.cu). What it refuses, and `supports` with it: bias, any output but bfloat16, K and N
that are no multiples of 16, K that is not contiguous in both operands, strides and bases that are no multiples of 16
bytes. In ragged K it wants the start of each group on a multiple of 16 bytes and checks it by device-side asserts,
which lose the CUDA context; so such a problem is refused unless the host knows its sizes.

The tensor cores' partial sums are promoted to float32 (`use_fast_accum=False`). There is no `out=`: with `out` given
the result is copied there.
"""

import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import copy_used, new_out
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.scaled_grouped_mm.problem import Backend, Operands, Recipe, ScaledProblem

_MAX_GROUPS = 1023  # "Can't process more than 1024 groups": one thread per group in one block


def supports(problem: ScaledProblem, device: Device) -> str | None:
    """PyTorch's conditions, those of its device-side asserts included."""
    p = problem
    if device.kind != "cuda" or device.capability != (9, 0):
        return "PyTorch's kernel for row-wise scales needs compute capability 9.0"
    if p.recipe is not Recipe.ROW:
        return f"knows row-wise scales only, not one for each {'128x128' if p.recipe is Recipe.BLOCK else '1x128'}"
    if p.has_bias:
        return "no bias"
    if p.out_dtype is not torch.bfloat16:
        return f"writes bfloat16 only, not {p.out_dtype}"
    if p.k == 0 or p.k % 16 or p.n % 16:
        return f"K and N must be multiples of 16, got {p.k} and {p.n}"
    if p.groups > _MAX_GROUPS:
        return f"at most {_MAX_GROUPS} groups, got {p.groups}"
    if not (p.a_aligned and p.b_aligned):
        return "base addresses must be multiples of 16 bytes"
    if p.a_strides[-1] != 1 or p.b_strides[-2] != 1:
        return f"K must be contiguous in both operands, got strides {p.a_strides} and {p.b_strides}"
    pitches = (p.a_strides[0], p.b_strides[-1], *p.b_strides[:-2])
    if any(s <= 1 or s % 16 for s in pitches):
        return f"strides must be multiples of 16 bytes, got {p.a_strides} and {p.b_strides}"
    if any(s != 1 for s in (p.scale_a_strides[-1], p.scale_b_strides[-1])):
        return "scales must be contiguous"
    if p.layout is Layout.RAGGED_K and (p.group_sizes is None or any(s % 16 or s == 0 for s in p.group_sizes)):
        return "group sizes must be known multiples of 16, and not 0, where K is ragged"
    return None


def run(problem: ScaledProblem, operands: Operands, config: NoConfig, out: torch.Tensor | None) -> torch.Tensor:
    """Queue PyTorch's kernel; rows past the last group hold whatever the allocator returned unless `out` is given."""
    if 0 in (problem.m, problem.n, problem.groups):
        return new_out(problem, operands, out)
    from torch.nn.functional import ScalingType, scaled_grouped_mm  # type: ignore[attr-defined]

    result = scaled_grouped_mm(
        operands.a,
        operands.b,
        operands.scale_a,
        ScalingType.RowWise,
        operands.scale_b,
        ScalingType.RowWise,
        offs=operands.offs,
        output_dtype=problem.out_dtype,
    )
    return result if out is None else copy_used(problem, operands, result, out)


BACKEND = Backend(
    name="torch_scaled",
    summary="torch.nn.functional.scaled_grouped_mm, row-wise scales",
    supports=supports,
    run=run,
    peer=True,
)
