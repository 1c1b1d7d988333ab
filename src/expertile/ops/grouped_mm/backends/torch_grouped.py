"""PyTorch's own `torch.nn.functional.grouped_mm`.

    out[rows of g] = a[rows of g] @ b[g]          and the same for the other three layouts

On sm_90 and sm_100 bfloat16 runs in one CUTLASS kernel that reads `offs` on the device. Everything else takes PyTorch's
fallback: `offs` is copied to the host and `torch.mm` is called once per group. So it synchronises and cannot be
captured in a CUDA graph, even where the caller knows the group sizes.

What it refuses, and `supports` with it (torch 2.11 and 2.13: ATen/native/GroupedMMUtils.h for all devices,
ATen/native/cuda/GroupMMCommon.cuh for the kernel): bias, an out_dtype that differs from the operands', a leading
stride that is no multiple of 16 bytes, on CUDA a base address that is none either. The kernel further wants the start
of each group on a multiple of 16 bytes wherever groups follow one another along a contiguous dimension, and no empty
group in ragged K unless a is column-major and b row-major; it checks this with device-side asserts, which lose the
CUDA context, so such a problem is refused unless the host knows that its sizes are harmless.

PyTorch has no `out=` for it: with `out` given the result is copied there, and a fair measurement gives none. It pads
the rows of its result to 16 bytes. Rows past the last group hold whatever the allocator returned.
"""

import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig, Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, copy_used, new_out
from expertile.ops.grouped_mm.problem import Layout, Problem

# What torch.nn.functional.grouped_mm calls, kept as it was at import: were that function
# replaced by ours, it would call itself here.
_GROUPED_MM = torch._grouped_mm

_MAX_KERNEL_GROUPS = 1023  # "Can't process more than 1024 groups", GroupMM.cu: one thread per group in one block


def uses_kernel(problem: Problem, device: Device) -> bool:
    """Whether PyTorch takes its grouped kernel rather than its loop."""
    return problem.dtype is torch.bfloat16 and device.capability is not None and device.capability[0] in (9, 10)


def _column_major(rows: int, strides: tuple[int, ...]) -> bool:
    """PyTorch's test, in its order: a matrix that is both counts as column-major."""
    return strides[-2] == 1 and strides[-1] >= max(1, rows)


def _stride_reason(name: str, rows: int, cols: int, strides: tuple[int, ...], itemsize: int) -> str | None:
    """Why PyTorch would refuse an operand of that shape and strides, or None."""
    if _column_major(rows, strides):
        leading = strides[-1]
    elif strides[-1] == 1 and strides[-2] >= max(1, cols):
        leading = strides[-2]
    else:
        return f"{name}: rows or columns must be contiguous and not overlap, got strides {strides}"
    if leading * itemsize % 16:
        return f"{name}: strides must be multiples of 16 bytes, got {leading * itemsize} bytes"
    return None


def _kernel_reason(problem: Problem) -> str | None:
    """Why the CUTLASS kernel would fail where PyTorch's checks on the host pass, or None."""
    if problem.groups > _MAX_KERNEL_GROUPS:
        return f"at most {_MAX_KERNEL_GROUPS} groups, got {problem.groups}"
    per_16_bytes = 16 // problem.dtype.itemsize
    for name, strides in (("a", problem.a_strides), ("b", problem.b_strides)):
        if len(strides) == 3 and problem.groups > 1 and strides[0] % per_16_bytes:
            return f"{name}: the stride between groups must be a multiple of 16 bytes, got {strides[0]} elements"
    a_columns = _column_major(problem.k if problem.layout is Layout.RAGGED_N else problem.m, problem.a_strides)
    b_columns = _column_major(problem.k, problem.b_strides)
    sizes = problem.group_sizes
    aligned = {
        Layout.RAGGED_M: a_columns,
        Layout.RAGGED_K: not a_columns or b_columns,
        Layout.RAGGED_N: True,  # groups of the result lie side by side in its rows
        Layout.BATCHED: False,
    }[problem.layout]
    if aligned and (sizes is None or any(s % per_16_bytes for s in sizes[:-1])):
        return f"group sizes must be known multiples of {per_16_bytes} in this memory layout, got {_some(sizes)}"
    if aligned and problem.layout is Layout.RAGGED_K and (sizes is None or 0 in sizes):
        return f"empty groups only with a column-major and b row-major, got {_some(sizes)}"
    return None


def _some(sizes: tuple[int, ...] | None) -> str:
    if sizes is None:
        return "sizes that only the device knows"
    return ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")


def _supports(problem: Problem, device: Device) -> str | None:
    if problem.dtype is torch.float64:
        return "dtype must be bfloat16, float16 or float32, got torch.float64"
    if problem.has_bias:
        return "no bias"
    if problem.out_dtype is not problem.dtype:
        return f"out_dtype must be the operands' {problem.dtype}, got {problem.out_dtype}"
    if problem.k == 0 and problem.layout is not Layout.RAGGED_K:
        return "k must be at least 1"
    itemsize = problem.dtype.itemsize
    for name, rows, cols, strides in (
        ("a", problem.m, problem.k, problem.a_strides),
        ("b", problem.k, problem.n, problem.b_strides),
    ):
        if reason := _stride_reason(name, rows, cols, strides, itemsize):
            return reason
    if device.kind != "cuda":
        return None
    if not device.at_least(8):
        return f"needs sm_80 or later, got {device.name}"
    if not problem.a_aligned or not problem.b_aligned:
        return f"{'b' if problem.a_aligned else 'a'}: base address must be a multiple of 16 bytes"
    return _kernel_reason(problem) if uses_kernel(problem, device) else None


def _run(problem: Problem, operands: Operands, config: NoConfig, out: torch.Tensor | None) -> torch.Tensor:
    if 0 in (problem.m, problem.n, problem.groups):
        return new_out(problem, operands, out)
    if problem.k == 0:  # ragged K with no rows at all: a null matrix, which TMA cannot describe
        return new_out(problem, operands, out).zero_()
    result = _GROUPED_MM(operands.a, operands.b, offs=operands.offs)
    return result if out is None else copy_used(problem, operands, result, out)


BACKEND = Backend(
    name="torch_grouped",
    summary="torch.nn.functional.grouped_mm",
    supports=_supports,
    run=_run,
    peer=True,
    copies_offs=lambda problem, device: not uses_kernel(problem, device),  # ATen GroupedMMUtils.h
    speed=Speed(0.62, 0.65, 7.5e-6, stores=0.575),
    cpu_place=lambda problem: 2,
)
