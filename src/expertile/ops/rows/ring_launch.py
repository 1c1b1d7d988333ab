"""Host side of rows that pass through a ring in shared memory: which tensors, TMA descriptors, the launch.

A launch is planned once for its shape and dtype, the kernel compiled once for its config and dtype; after that a call
costs two look-ups and the driver's launch (see launch/launch.py)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.ops.launch.blocks import Blocks
from expertile.ops.launch.device import capability, machine
from expertile.ops.launch.launch import Launch
from expertile.ops.launch.versions import FP_FUSION
from expertile.ops.rows.ring_choose import CHUNK_BYTES, RingConfig, choose
from expertile.ops.rows.ring_softmax import softmax_ring_kernel
from expertile.ops.rows.ring_softmax_backward import softmax_backward_ring_kernel


def config_for(out: torch.Tensor, *inputs: torch.Tensor) -> RingConfig | None:
    """The config for rows [R, C] of `inputs` and of `out`, which is contiguous; None where the ring does not take them.

    It takes long rows that are no multiple of 16 bytes, at least one for each SM, on compute capability 9.0. Tensors
    are contiguous, start at multiples of 16 bytes and have one dtype."""
    rows, cols = inputs[0].shape
    found = choose(cols, out.element_size(), len(inputs))
    if found is None or not out.is_cuda:
        return None
    index = out.get_device()
    if capability(index) != (9, 0) or rows < machine(index).sm_count or out.data_ptr() % 16:
        return None
    alike = all(x.dtype == out.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in inputs)
    return found if alike else None


def options(config: RingConfig, tensors: int) -> dict[str, Any]:
    """Compile-time constants and launch options."""
    start, consumer, loader = config.registers
    return {
        "GROUP": config.group,
        "BOX": config.box,
        "SLOTS": config.slots(tensors),
        "CONSUMERS": config.consumers,
        "REGISTERS": consumer,
        "LOADER_REGISTERS": loader,
        "num_warps": config.num_warps,
        "maxnreg": start,
        **FP_FUSION,
    }


@lru_cache(maxsize=1024)
def plan(
    kernel: Any, tensors: int, config: RingConfig, dtype: torch.dtype, rows: int, cols: int, sm_count: int
) -> Launch:
    """The launch of `kernel` for so many inputs [rows, cols] of which TMA sees the whole chunks."""
    chunk = CHUNK_BYTES // dtype.itemsize
    chunks = rows * cols // chunk
    seen = Blocks((chunks, chunk), (chunk, 1), (config.box, chunk), plain=True)
    return Launch(
        kernel,
        (seen,) * tensors,
        (dtype,) * tensors,
        (dtype,) * (tensors + 1),
        (rows, cols, chunks),
        tuple(options(config, tensors).items()),
        min(rows, sm_count * config.programs_per_sm),
    )


def _run(kernel: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, config: RingConfig, sm_count: int) -> None:
    launch = plan(kernel, len(inputs), config, out.dtype, *out.shape, sm_count)
    launch.run(out.get_device(), inputs, (*inputs, out))


def softmax(x: torch.Tensor, y: torch.Tensor, sm_count: int, config: RingConfig) -> None:
    """y = softmax of the rows of x [R, C]; both contiguous, of one dtype, from multiples of 16 bytes on."""
    _run(softmax_ring_kernel, (x,), y, config, sm_count)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sm_count: int, config: RingConfig) -> None:
    """dx from dy and y [R, C]; all contiguous, of one dtype, from multiples of 16 bytes on."""
    _run(softmax_backward_ring_kernel, (dy, y), dx, config, sm_count)
