"""The sum of the slices that a split K leaves: out[m, n] = Σ_s slices[s, m, n], always in the same order.

slices [S, M, N] float32, contiguous; rows past offs[-1] are left alone. Bytes: 4 S M N read, mostly from L2 where they
have just been written, and the output written. Queued as a programmatic dependent, it is in place when the last slice
is stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import MockTensor

from expertile.ops.launch import driver
from expertile.ops.launch.device import current_device
from expertile.ops.launch.versions import FP_FUSION

_BLOCK = 512
_PARAMETERS = 7  # of the kernel that are no compile-time constants


@triton.jit(do_not_specialize=["groups", "M", "N", "out_stride_m"], do_not_specialize_on_alignment=["offs_ptr"])
def _sum_kernel(
    slices_ptr, offs_ptr, out_ptr, groups, M, N, out_stride_m,
    SLICES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK columns of a row. N and out_stride_m are multiples of 4."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    chunks = tl.cdiv(N, BLOCK)
    row = tl.program_id(0) // chunks
    cols = (tl.program_id(0) - row * chunks) * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(offs_ptr + groups - 1):
        inside = cols < N
        start = tl.multiple_of(row.to(tl.int64) * N, 4)
        slice_size = tl.multiple_of(M.to(tl.int64) * N, 4)
        acc = tl.load(slices_ptr + start + cols, mask=inside, other=0.0)
        for s in tl.static_range(1, SLICES):
            acc += tl.load(slices_ptr + s * slice_size + start + cols, mask=inside, other=0.0)
        target = out_ptr + tl.multiple_of(row.to(tl.int64) * out_stride_m, 4)
        tl.store(target + cols, acc.to(out_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=64)
def _compile(slices: int, dtype: torch.dtype, device: int) -> driver.Compiled | None:
    """The kernel for that many slices and an output of `dtype`; `device` is the current one."""
    tensors = (MockTensor(torch.float32), MockTensor(torch.int32), MockTensor(dtype))
    return driver.prepare(_sum_kernel.run(*tensors, 2, 2, 2, 2, grid=(1,), warmup=True, **_options(slices, True)))


def _options(slices: int, dependent: bool) -> dict[str, Any]:
    options = {"SLICES": slices, "BLOCK": _BLOCK, "DEPENDENT": dependent, "num_warps": 4, **FP_FUSION}
    return {**options, "launch_pdl": True} if dependent else options


def launch(slices: torch.Tensor, offs: torch.Tensor, out: torch.Tensor) -> None:
    """Queue the sum of `slices` [S, M, N] into `out` [M, N] (rows contiguous, its base and row stride multiples of 16
    bytes) on the current stream."""
    count, m, n = slices.shape
    programs = m * triton.cdiv(n, _BLOCK)
    numbers = (offs.shape[0], m, n, out.stride(0))
    device = out.get_device()
    if device >= 0 and not driver.hooked():
        with current_device(out.device):
            kernel = _compile(count, out.dtype, device)
        if kernel is not None:
            constants = (None,) * (len(_sum_kernel.arg_names) - _PARAMETERS)
            pointers = (slices.data_ptr(), offs.data_ptr(), out.data_ptr())
            kernel(device, programs, (), (*pointers, *numbers, *constants))
            return
    dependent = not triton.knobs.runtime.interpret
    with current_device(out.device):
        _sum_kernel[(programs,)](slices, offs, out, *numbers, **_options(count, dependent))
