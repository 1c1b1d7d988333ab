"""A split K on the host, and the sum of the slices that it leaves: out[m, n] = Σ_s slices[s, m, n], always in the same
order.

slices [S, M, N] float32, contiguous; rows past offs[-1] are left alone. Bytes: 4 S M N read, mostly from L2 where they
have just been written, and the output written. Queued as a programmatic dependent, it is in place when the last slice
is stored.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertile.device import Device
from expertile.ops.launch.launch import Launch

_BLOCK = 512


@triton.jit(do_not_specialize=["groups", "M", "N", "out_stride_m"], do_not_specialize_on_alignment=["offs_ptr"])
def _sum_kernel(
    slices_ptr,
    offs_ptr,
    out_ptr,
    groups,
    M,
    N,
    out_stride_m,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
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


@lru_cache(maxsize=1024)
def _launch(slices: int, groups: int, m: int, n: int, out_stride_m: int, dtype: torch.dtype) -> Launch:
    """The launch for [slices, m, n] and an output of `dtype` whose rows are `out_stride_m` elements apart."""
    dependent = not triton.knobs.runtime.interpret
    options = {"SLICES": slices, "BLOCK": _BLOCK, "DEPENDENT": dependent, "num_warps": 4}
    if dependent:
        options["launch_pdl"] = True
    pointers = (torch.float32, torch.int32, dtype)
    numbers = (groups, m, n, out_stride_m)
    return Launch(_sum_kernel, (), (), pointers, numbers, options, m * triton.cdiv(n, _BLOCK))


def run(slices: torch.Tensor, offs: torch.Tensor, out: torch.Tensor) -> None:
    """Queue the sum of `slices` [S, M, N] into `out` [M, N] (rows contiguous, its base and row stride multiples of 16
    bytes) on the current stream."""
    launch = _launch(slices.shape[0], offs.shape[0], *slices.shape[1:], out.stride(0), out.dtype)
    launch.run(out.get_device(), (), (slices, offs, out))


def queue(prepared: Callable[..., tuple[Launch, int, Any, Any]], p: Any, operands: Any, config: Any, out: Any) -> None:
    """Queue the kernel of a product `p`, and after a split K the sum of its slices, on the current stream of `out`'s
    device. `prepared(p, operands, config, target)`: the launch that writes `target`, which is `out` or the partial sums
    [split_k, M, N], and what it runs with: the device, the tensors of its descriptors, and those of its pointers."""
    target = out
    if config.split_k > 1:
        target = out.new_empty((config.split_k, p.m, p.n), dtype=torch.float32)
    launch, device, tensors, pointers = prepared(p, operands, config, target)
    launch.run(device, tensors, pointers)
    if config.split_k > 1:
        run(target, operands.offs, out)


def fitted(config: Any, problem: Any, device: Device) -> Any:
    """`config` with fewer stages where 4-byte results or scales leave no room for as many."""
    while config.num_stages > 2 and config.smem_bytes(problem) > device.smem_bytes:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


SPLITS = (1, 2, 3, 4, 6, 8)
_FITTED = ("split_k", "num_stages", "store_parts")


def best_splits(ordered: Iterable[Any]) -> tuple[Any, ...]:
    """Of configs that differ in nothing but `split_k`, and what is fitted to it, the first."""
    best: dict[Any, Any] = {}
    for config in ordered:
        best.setdefault(tuple(value for name, value in vars(config).items() if name not in _FITTED), config)
    return tuple(best.values())
