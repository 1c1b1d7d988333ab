"""Host side of rows that pass through a ring in shared memory (ring.py): which rows and how, descriptors, the launch.

The ring is for rows that start anywhere in a 16-byte word: others are better held in registers (choose.py)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from expertile.ops.launch.blocks import Blocks
from expertile.ops.launch.device import capability, machine
from expertile.ops.launch.launch import Launch
from expertile.ops.rows.ring import RingShape
from expertile.ops.rows.ring_softmax import softmax_backward_ring_kernel, softmax_ring_kernel

KERNELS = {1: softmax_ring_kernel, 2: softmax_backward_ring_kernel}  # by the number of their inputs
# Bytes of a chunk: what a warp moves at once.
CHUNK_BYTES = 512
# Shared memory of an SM of compute capability 9.0, and what a program takes besides its slots: 1 KB of the driver's,
# barriers, sums.
_SHARED = 233472
_BESIDES = 1024 + 2048
_REGISTERS = 65536


@dataclass(frozen=True)
class RingConfig:
    """How rows pass through shared memory.

    num_warps: warps of a consumer; a group is at least a chunk for each.
    group: chunks of a slot.
    box: chunks of one copy, a divisor of `group`.
    programs_per_sm: programs that stay on an SM.
    consumers: 1 or 2 that take a program's rows in turn.
    """

    num_warps: int = 16
    group: int = 16
    box: int = 4
    programs_per_sm: int = 1
    consumers: int = 1

    def slots(self, tensors: int = 1) -> int:
        """Slots of `tensors` groups each."""
        room = _SHARED // self.programs_per_sm - _BESIDES
        return room // (self.group * CHUNK_BYTES * tensors + 16)

    def groups(self, cols: int, itemsize: int) -> int:
        """Most groups that a row lies in."""
        chunk = CHUNK_BYTES // itemsize
        return -(-(cols + chunk - 1) // (self.group * chunk))

    def fits(self, cols: int, itemsize: int, tensors: int = 1) -> bool:
        """Whether a row waits in the ring as a whole."""
        return self.groups(cols, itemsize) <= self.slots(tensors) and cols * itemsize > 2 * self.group * CHUNK_BYTES

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread at the start, then of the consumers and of the loading warp, which counts as four."""
        warps = self.num_warps * self.consumers + 4
        start = min(168, _REGISTERS // (32 * warps * self.programs_per_sm) // 8 * 8)
        loader = 32 if start > 32 else start
        return start, min(240, (start * warps - loader * 4) // (warps - 4) // 8 * 8), loader


# (columns from, to, config), the first that fits; measured on an H200, see docs/notes/rows.md. Just above 16384 a
# cluster's slices are whole powers of two, and float32 rows are half as many elements.
_LONGEST = 1 << 20
_TABLE: dict[tuple[int, int], tuple[tuple[int, int, RingConfig], ...]] = {
    (1, 2): (
        (8193, 16383, RingConfig(4, 8, 8, 4)),
        (18432, 36864, RingConfig(8, 16, 8, 1, 2)),
        (36865, _LONGEST, RingConfig(8, 32, 8, 1, 2)),
    ),
    (1, 4): ((32769, _LONGEST, RingConfig(8, 16, 8, 1, 2)),),
    (2, 2): ((18432, _LONGEST, RingConfig(4, 8, 8, 2, 2)), (18432, _LONGEST, RingConfig(8, 16, 8, 1, 2))),
    (2, 4): (),
}


@lru_cache(maxsize=1024)
def choose(cols: int, itemsize: int, tensors: int) -> RingConfig | None:
    """For rows of `cols` of 1 tensor (softmax) or 2 (its backward pass); None where the ring is not for them."""
    if cols * itemsize % 16 == 0:
        return None
    table = _TABLE[tensors, itemsize]
    fitting = (c for least, most, c in table if least <= cols <= most and c.fits(cols, itemsize, tensors))
    return next(fitting, None)


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


def options(config: RingConfig, tensors: int, itemsize: int) -> dict[str, Any]:
    """Compile-time constants and launch options."""
    start, consumer, loader = config.registers
    groups = (config.group, config.box, CHUNK_BYTES // itemsize, config.slots(tensors))
    return {
        "SHAPE": RingShape(tensors, config.consumers, *groups),
        "REGISTERS": (consumer, loader),
        "num_warps": config.num_warps,
        "maxnreg": start,
    }


@lru_cache(maxsize=1024)
def plan(
    kernel: Any, tensors: int, config: RingConfig, dtype: torch.dtype, rows: int, cols: int, sm_count: int
) -> Launch:
    """The launch of `kernel` for so many inputs [rows, cols] of which TMA sees the whole chunks."""
    chunk = CHUNK_BYTES // dtype.itemsize
    chunks = rows * cols // chunk
    seen = Blocks((chunks, chunk), (chunk, 1), (config.box, chunk), plain=True)
    how, programs = options(config, tensors, dtype.itemsize), min(rows, sm_count * config.programs_per_sm)
    operands = ((seen,) * tensors, (dtype,) * tensors, (dtype,) * (tensors + 1))
    return Launch(kernel, *operands, (rows, cols, chunks), how, programs)


def run(inputs: tuple[torch.Tensor, ...], out: torch.Tensor, sm_count: int, config: RingConfig) -> None:
    """out [R, C] = softmax of the rows of one input; or of two, (dy, y), its gradient. All are contiguous and of one
    dtype, and start at multiples of 16 bytes."""
    launch = plan(KERNELS[len(inputs)], len(inputs), config, out.dtype, *out.shape, sm_count)
    launch.run(out.get_device(), inputs, (*inputs, out))
