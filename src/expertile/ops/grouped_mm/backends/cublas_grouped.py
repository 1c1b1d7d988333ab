"""cuBLAS's grouped product, `cublasGemmGroupedBatchedEx`, through nvmath-python's bindings.

    out[rows of g] = a[rows of g] @ b[g]          and the same for the other three layouts, one call for all groups

cuBLAS is column-major, so each group asks for outᵀ = bᵀ aᵀ: its "A" is our b, its "B" our a, its m our n. It reads
sizes, leading dimensions and transposes of every group from host memory, so the host must know the group sizes. The
addresses of the matrices it reads from device memory (cuBLAS documentation, cublasGemmGroupedBatchedEx). Empty groups
are left out of the call. Products accumulate in float32; float32 operands use TF32 where the problem allows it.

For each set of sizes the offsets of the matrices are copied to the device once, and for each tensor the addresses are
made from them there and kept: a repeated call launches nothing but the product. After one eager call with the same
sizes it can be captured in a CUDA graph; a tensor first seen during capture costs one tiny kernel in the graph, so a
fair measurement passes an `out` that it has used before.

Bytes moved: the algorithmic minimum. What limits it: cuBLAS picks its kernel from the host's arrays on every call, and
its grouped kernels reach less of the tensor cores than its plain ones.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import util
from typing import Any

import numpy as np
import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig, Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out
from expertile.ops.grouped_mm.problem import Layout, Problem

find_spec = cache(util.find_spec)  # looks on the disk, and `supports` is asked for every new problem

# cudaDataType_t (library_types.h); cublasOperation_t and cublasComputeType_t (cublas_api.h).
_CUDA_R = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_OP_N, _OP_T = 0, 1
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77

# What PyTorch gives its own handles on Hopper (ATen/cuda/CublasHandlePool.cpp).
_WORKSPACE_BYTES = 32 << 20

# ---- what is asked of cuBLAS: pure arithmetic on sizes and strides ----


def _operand(rows: int, cols: int, row_stride: int, col_stride: int) -> tuple[int, int] | None:
    """(operation, leading dimension) of a matrix [rows, cols] whose transpose cuBLAS shall multiply.

    Contiguous rows, read by columns, are that transpose already: _OP_N. None if neither rows nor columns are
    contiguous, or if they overlap.
    """
    if (col_stride == 1 or cols <= 1) and (row_stride >= cols or rows <= 1):
        return _OP_N, max(row_stride if rows > 1 else cols, 1)
    if (row_stride == 1 or rows <= 1) and (col_stride >= rows or cols <= 1):
        return _OP_T, max(col_stride if cols > 1 else rows, 1)
    return None


def _operands_2d(problem: Problem) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """`_operand` of a and of b."""
    p = problem
    return _operand(p.m, p.k, *p.a_strides[-2:]), _operand(p.k, p.n, *p.b_strides[-2:])


@dataclass(frozen=True)
class _Extents:
    """Of every group: rows, columns and summands, and where a, b and out begin, in elements. int64 [G]."""

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    a: np.ndarray
    b: np.ndarray
    out: np.ndarray

    @property
    def live(self) -> np.ndarray:
        return (self.m > 0) & (self.n > 0) & (self.k > 0)


def _extents(problem: Problem, sizes: tuple[int, ...], out_strides: tuple[int, ...]) -> _Extents:
    p, a, b, o = problem, problem.a_strides, problem.b_strides, out_strides
    group = np.arange(p.groups, dtype=np.int64)
    m, n, k = (np.full(p.groups, x, dtype=np.int64) for x in (p.m, p.n, p.k))
    if p.layout is Layout.BATCHED:
        return _Extents(m, n, k, group * a[0], group * b[0], group * o[0])
    size = np.array(sizes, dtype=np.int64)
    start = np.cumsum(size) - size
    if p.layout is Layout.RAGGED_M:
        return _Extents(size, n, k, start * a[0], group * b[0], start * o[0])
    if p.layout is Layout.RAGGED_N:
        return _Extents(m, size, k, group * a[0], start * b[1], start * o[1])
    return _Extents(m, n, size, start * a[1], start * b[0], group * o[0])


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[1], 1) if len(shape) == 2 else (shape[1] * shape[2], shape[2], 1)


def _alignment_reason(problem: Problem) -> str | None:
    """Why the address of some matrix breaks cuBLAS's rule, or None.

    With 16-bit operands or TF32, addresses must be multiples of 16 bytes if k * itemsize is, and of 4 bytes if that is
    a multiple of 4. Sizes that the host does not know are taken to be the worst: one row.
    """
    if problem.dtype is torch.float32 and not problem.allow_tf32:
        return None
    known = problem.group_sizes is not None or problem.layout is Layout.BATCHED
    sizes = problem.group_sizes if problem.group_sizes is not None else (1,) * problem.groups
    at = _extents(problem, sizes, _contiguous_strides(problem.out_shape))
    itemsize = problem.dtype.itemsize
    k_bytes = at.k * itemsize
    needed = np.where(k_bytes % 16 == 0, 16, np.where(k_bytes % 4 == 0, 4, itemsize))
    if not known and problem.layout is Layout.RAGGED_K:
        needed[:] = 16
    live = at.live if known else np.ones(problem.groups, dtype=bool)
    for name, offsets, aligned in (
        ("a", at.a, problem.a_aligned),
        ("b", at.b, problem.b_aligned),
        ("out", at.out, True),
    ):
        alignment = np.gcd(offsets * itemsize, 16 if aligned else itemsize)
        bad = np.flatnonzero(live & (alignment % needed != 0))
        if bad.size:
            group = bad[0]
            return f"{name}: group {group} must begin on a multiple of {needed[group]} bytes" + (
                "" if known else " whatever the group sizes, which only the device knows"
            )
    return None


def _supports(problem: Problem, device: Device) -> str | None:
    if find_spec("nvmath") is None:
        return "needs nvmath-python (pip install nvmath-python)"
    if device.kind != "cuda":
        return f"needs a CUDA GPU, got {device.name}"
    if problem.dtype is torch.bfloat16 and not device.at_least(8):
        return f"bfloat16 needs sm_80 or later, got {device.name}"
    if problem.dtype is torch.float64:
        return "float64 runs in torch's own products"
    if problem.has_bias:
        return "no bias"
    if problem.out_dtype is not problem.dtype:
        return f"out_dtype must be the operands' {problem.dtype}, got {problem.out_dtype}"
    for name, strides, operand in zip("ab", (problem.a_strides, problem.b_strides), _operands_2d(problem), strict=True):
        if operand is None:
            return f"{name}: rows or columns must be contiguous and not overlap, got strides {strides}"
    return _alignment_reason(problem)


@dataclass(frozen=True)
class _Plan:
    """The arguments of one call but for the addresses. `host` [9, P] int32: transa, transb, m, n, k, lda, ldb, ldc and
    group_size (all 1) of the P groups that are not empty; `scales` [2, P] float32: alpha = 1, beta = 0; `offsets`
    [3, P] int64 on the device: bytes from the bases of b, a and out; `empty`: groups that have no summands."""

    host: np.ndarray
    scales: np.ndarray
    offsets: torch.Tensor
    empty: tuple[int, ...]


@lru_cache(maxsize=512)
def _plan(problem: Problem, sizes: tuple[int, ...], out_strides: tuple[int, ...], device: torch.device) -> _Plan:
    a, b = _operands_2d(problem)
    assert a is not None and b is not None
    at = _extents(problem, sizes, out_strides)
    live = at.live
    m, n, k = at.m[live], at.n[live], at.k[live]
    one = np.ones_like(m)
    rows = (b[0] * one, a[0] * one, n, m, k, b[1] * one, a[1] * one, max(out_strides[-2], 1) * one, one)
    offsets = np.stack((at.b[live], at.a[live], at.out[live])) * problem.dtype.itemsize
    return _Plan(
        np.stack(rows).astype(np.int32),
        np.repeat(np.array([[1.0], [0.0]], dtype=np.float32), m.size, axis=1),
        torch.from_numpy(offsets).to(device),
        tuple(np.flatnonzero((at.k == 0) & (at.m > 0) & (at.n > 0)).tolist()),
    )


# ---- addresses on the device ----


class _Addresses:
    """Addresses [P] int64 on the device of the groups of one tensor, by plan, operand and base: the last `capacity`,
    and for good those that a CUDA graph reads. They are numbers only, so they stay right for whatever tensor lies at
    that base."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.recent: OrderedDict[tuple[int, int, int], tuple[_Plan, torch.Tensor, Any, Any]] = OrderedDict()
        self.captured: list[tuple[_Plan, torch.Tensor]] = []

    def of(self, plan: _Plan, operand: int, base: int) -> torch.Tensor:
        """base + plan.offsets[operand]."""
        on_gpu = plan.offsets.is_cuda
        stream = torch.cuda.current_stream(plan.offsets.device) if on_gpu else None
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        key = (id(plan), operand, base)
        entry = self.recent.get(key)
        if entry is None:
            addresses = plan.offsets[operand] + base
            if not capturing:
                event = stream.record_event() if stream is not None else None
                self.recent[key] = (plan, addresses, stream, event)
                if len(self.recent) > self.capacity:
                    self.recent.popitem(last=False)
        else:
            self.recent.move_to_end(key)
            _, addresses, made_on, event = entry
            # A capture begins with a synchronisation, so there the event has passed.
            if stream is not None and stream != made_on and not capturing:
                stream.wait_event(event)
        if capturing:
            self.captured.append((plan, addresses))
        return addresses


_ADDRESSES = _Addresses(capacity=1536)


# ---- the call ----


@lru_cache(maxsize=1)
def _bindings() -> Any:
    from nvmath.bindings import cublas

    return cublas


@lru_cache(maxsize=64)
def _handle(device_index: int, thread: int) -> int:
    """A cuBLAS handle, which belongs to one device and serves one thread at a time."""
    return _bindings().create()


def _addresses(plan: _Plan, operands: Operands, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Addresses of every group of b, a and out: cuBLAS's A, B and C."""
    bases = (operands.b.data_ptr(), operands.a.data_ptr(), out.data_ptr())
    return tuple(_ADDRESSES.of(plan, i, base) for i, base in enumerate(bases))


def _call(cublas: Any, handle: int, problem: Problem, plan: _Plan, addresses: tuple[torch.Tensor, ...]) -> None:
    """All groups in one launch. Arrays go as addresses: host memory from `plan`, device memory from `addresses`."""
    *shape, lda, ldb, ldc, ones = (row.ctypes.data for row in plan.host)
    alpha, beta = (row.ctypes.data for row in plan.scales)
    b, a, out = (row.data_ptr() for row in addresses)
    dtype = _CUDA_R[problem.dtype]
    compute = _COMPUTE_32F_FAST_TF32 if problem.dtype_key == "tf32" else _COMPUTE_32F
    operands = (b, dtype, lda, a, dtype, ldb, beta, out, dtype, ldc)
    cublas.gemm_grouped_batched_ex(handle, *shape, alpha, *operands, plan.host.shape[1], ones, compute)


def _launch(problem: Problem, plan: _Plan, operands: Operands, out: torch.Tensor) -> None:
    device = out.device
    with torch.cuda.device(device):
        cublas, handle = _bindings(), _handle(device.index, threading.get_ident())
        addresses = _addresses(plan, operands, out)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Setting the stream takes a workspace away, so in this order.
        cublas.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        cublas.set_workspace(handle, workspace.data_ptr(), _WORKSPACE_BYTES)
        _call(cublas, handle, problem, plan, addresses)


def _zero_used(problem: Problem, sizes: tuple[int, ...], out: torch.Tensor) -> None:
    """out = 0 for a product without summands, except past the last group."""
    if problem.layout is Layout.RAGGED_M:
        out[: sum(sizes)].zero_()
    elif problem.layout is Layout.RAGGED_N:
        out[:, : sum(sizes)].zero_()
    else:
        out.zero_()


def _run(problem: Problem, operands: Operands, config: NoConfig, out: torch.Tensor | None) -> torch.Tensor:
    out = new_out(problem, operands, out)
    if out.stride(-1) != 1:
        raise ValueError(f"out: expected contiguous rows, got strides {out.stride()}")
    sizes = problem.sizes(operands.offs)
    if problem.k == 0:
        _zero_used(problem, sizes, out)
        return out
    plan = _plan(problem, sizes, out.stride(), out.device)
    if problem.layout is Layout.RAGGED_K:
        for group in plan.empty:
            out[group].zero_()
    if plan.host.shape[1]:
        _launch(problem, plan, operands, out)
    return out


BACKEND = Backend(
    name="cublas_grouped",
    summary="cublasGemmGroupedBatchedEx through nvmath-python",
    supports=_supports,
    run=_run,
    reads_offs_on_host=True,
    peer=True,
    speed=Speed(0.275, 0.87, 1e-6, tile=(128, 256)),
)
