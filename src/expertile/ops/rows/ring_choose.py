"""Which rows of a softmax pass through a ring in shared memory (ring.py), and how: a pure function of the shape.

The ring is for rows that start anywhere in a 16-byte word. Others can be held in registers and copied ahead of time by
whole vectors (choose.py), which reads shared memory once and not twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
