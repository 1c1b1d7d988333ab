"""Host side of rows that pass through a ring in shared memory: which tensors, TMA descriptors, the launch.

A launch is prepared once for its shape and dtype, the kernel compiled once for its config and dtype; after that a call
costs a look-up and the driver's launch (see grouped_mm/backends/_launch.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from expertile.ops._rows import capability, machine
from expertile.ops._rows_ring_choose import CHUNK_BYTES, RingConfig, choose
from expertile.ops._rows_ring_softmax import softmax_ring_kernel
from expertile.ops._rows_ring_softmax_backward import softmax_backward_ring_kernel
from expertile.ops.grouped_mm.backends import _launch
from expertile.ops.grouped_mm.backends._persistent import current_device


def config_for(out: torch.Tensor, *inputs: torch.Tensor) -> RingConfig | None:
    """The config for rows [R, C] of `inputs` and of `out`, which is contiguous; None where the ring does not take them.

    It takes rows on compute capability 9.0, long and no multiple of 16 bytes, at least one for each SM, of tensors
    that are contiguous, start at multiples of 16 bytes and have one dtype."""
    rows, cols = inputs[0].shape
    found = choose(cols, out.element_size(), len(inputs))
    if found is None or not out.is_cuda:
        return None
    index = out.get_device()
    if capability(index) != (9, 0) or rows < machine(index).sm_count or out.data_ptr() % 16:
        return None
    alike = all(x.dtype == out.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in inputs)
    return found if alike else None


def described(x: Any, chunks: int, config: RingConfig) -> TensorDescriptor:
    """The first `chunks` chunks of a contiguous tensor, or of anything with its dtype."""
    chunk = CHUNK_BYTES // x.dtype.itemsize
    layout = NVMMASharedLayout(0, x.dtype.itemsize * 8, 2)
    return TensorDescriptor(x, [chunks, chunk], [chunk, 1], [config.box, chunk], layout)


def _whole_chunks(rows: int, cols: int, itemsize: int) -> int:
    return rows * cols * itemsize // CHUNK_BYTES


def options(config: RingConfig, tensors: int) -> dict[str, int]:
    """Compile-time constants and launch options."""
    start, consumer, loader = config.registers
    return {
        "GROUP": config.group, "BOX": config.box, "SLOTS": config.slots(tensors), "CONSUMERS": config.consumers,
        "REGISTERS": consumer, "LOADER_REGISTERS": loader, "num_warps": config.num_warps, "maxnreg": start,
    }  # fmt: skip


@lru_cache(maxsize=256)
def _compiled(kernel: Any, tensors: int, config: RingConfig, dtype: torch.dtype, device: int) -> Any:
    """`kernel` for any rows, which it does not specialise on, loaded on GPU number `device`; None where Triton has to
    launch it."""
    fake = MockTensor(dtype)
    arguments = (*[described(fake, 64, config)] * tensors, *[fake] * (tensors + 1), 2, 2, 2)
    with torch.cuda.device(device):
        return _launch.prepare(kernel.run(*arguments, grid=(1,), warmup=True, **options(config, tensors)))


@dataclass(frozen=True, eq=False)
class _Ready:
    kernel: _launch.Compiled
    tensor: tuple[_launch.Tensor, ...]
    rest: tuple[Any, ...]


@lru_cache(maxsize=1024)
def _ready(
    kernel: Any, tensors: int, config: RingConfig, dtype: torch.dtype, rows: int, cols: int, device: int
) -> _Ready | None:
    compiled = _compiled(kernel, tensors, config, dtype, device)
    if compiled is None:
        return None
    chunks, chunk = _whole_chunks(rows, cols, dtype.itemsize), CHUNK_BYTES // dtype.itemsize
    constants = (None,) * (len(kernel.arg_names) - 2 * tensors - 4)
    seen = tuple(compiled.tensor(i, [chunks, chunk], [chunk, 1]) for i in range(tensors))
    return _Ready(compiled, seen, (rows, cols, chunks, *constants))


def _run(kernel: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, config: RingConfig, programs: int) -> None:
    rows, cols = out.shape
    device = out.get_device()
    ready = None
    if device >= 0 and not _launch.hooked():
        ready = _ready(kernel, len(inputs), config, out.dtype, rows, cols, device)
    count = min(rows, programs * config.programs_per_sm)
    if ready is None:
        chunks = _whole_chunks(rows, cols, out.element_size())
        descriptors = [described(x, chunks, config) for x in inputs]
        with current_device(out.device):
            kernel[(count,)](*descriptors, *inputs, out, rows, cols, chunks, **options(config, len(inputs)))
        return
    addresses = [x.data_ptr() for x in inputs]
    ready.kernel(device, count, zip(ready.tensor, addresses, strict=True), (*addresses, out.data_ptr(), *ready.rest))


def softmax(x: torch.Tensor, y: torch.Tensor, sm_count: int, config: RingConfig) -> None:
    """y = softmax of the rows of x [R, C]; both contiguous, of one dtype, from multiples of 16 bytes on."""
    _run(softmax_ring_kernel, (x,), y, config, sm_count)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sm_count: int, config: RingConfig) -> None:
    """dx from dy and y [R, C]; all contiguous, of one dtype, from multiples of 16 bytes on."""
    _run(softmax_backward_ring_kernel, (dy, y), dx, config, sm_count)
