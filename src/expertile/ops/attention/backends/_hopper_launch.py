"""Host side of the `gluon_hopper` backend: TMA descriptors of rows of heads, and launches of its three kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.attention.problem import Problem
from expertile.ops.grouped_mm.backends import _launch
from expertile.ops.grouped_mm.backends._gluon_launch import Blocks, compiled

_WRAP = 0x40000000


def rows_of_heads(p: Problem, strides: tuple[int, int, int], keys: bool, rows: int, dim: int) -> Blocks:
    """Boxes of `rows` rows of one head. Dense: coordinates (batch, head, row, 0).

    Packed: a window [first, end) of the rows that moves by coordinates alone, (_WRAP, end, _WRAP - (end - row), head,
    0) for row `row`; what lies past `end` is out of bounds. Two extra dimensions whose strides undo each other at 64
    bits do that (the scheme of triton.tools.ragged_tma).
    """
    batch, head, row = strides
    heads = p.kv_heads if keys else p.heads
    if p.packed:
        shape = (0x7FFF0000, 0x7FFF0000, _WRAP, heads, p.head_dim)
        return Blocks(shape, (2**34 - row, row, row, head, 1), (1, 1, rows, 1, dim))
    return Blocks((p.batch, heads, p.k_len if keys else p.q_len, p.head_dim), (batch, head, row, 1), (1, 1, rows, dim))


def flat(length: int, box: int) -> Blocks:
    """A contiguous array, `box` elements at a time."""
    return Blocks((length,), (1,), (box,))


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, descriptors of its first arguments, dtypes of its pointers, numbers, options."""

    kernel: Any
    tensors: tuple[Blocks, ...]
    tensor_dtypes: tuple[torch.dtype, ...]
    pointer_dtypes: tuple[torch.dtype, ...]
    numbers: tuple[int | float, ...]
    options: tuple[tuple[str, Any], ...]
    programs: int

    def arguments(self, tensors: tuple[torch.Tensor, ...], pointers: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """What Triton's own launcher takes."""
        return (*(b.of(t) for b, t in zip(self.tensors, tensors, strict=True)), *pointers, *self.numbers)


@dataclass(frozen=True, eq=False)
class _Ready:
    kernel: _launch.Compiled
    tensors: tuple[_launch.Tensor, ...]
    rest: tuple[Any, ...]


@lru_cache(maxsize=1024)
def _ready(launch: Launch, device: int) -> _Ready | None:
    # Integers and floats are not specialised on, so any serve to compile with.
    numbers = tuple(2 if isinstance(n, int) else 0.5 for n in launch.numbers)
    boxes = tuple(b.box for b in launch.tensors)
    dtypes = (*launch.tensor_dtypes, *launch.pointer_dtypes)
    kernel = compiled(launch.kernel, boxes, dtypes, numbers, launch.options, device)
    if kernel is None:
        return None
    tensors = tuple(kernel.tensor(i, list(b.shape), list(b.strides)) for i, b in enumerate(launch.tensors))
    known = len(launch.tensors) + len(launch.pointer_dtypes) + len(launch.numbers)
    return _Ready(kernel, tensors, (*launch.numbers, *(None,) * (len(launch.kernel.arg_names) - known)))


def run(launch: Launch, tensors: tuple[torch.Tensor, ...], pointers: tuple[torch.Tensor, ...]) -> None:
    """Queue the kernel on the current stream of its tensors' device."""
    device = tensors[0].get_device()
    ready = _ready(launch, device) if device >= 0 and not _launch.hooked() else None
    if ready is None:
        launch.kernel[(launch.programs,)](*launch.arguments(tensors, pointers), **dict(launch.options))
        return
    addressed = tuple((r, t.data_ptr()) for r, t in zip(ready.tensors, tensors, strict=True))
    ready.kernel(device, launch.programs, addressed, (*(t.data_ptr() for t in pointers), *ready.rest))


def registers(consumers: int) -> dict[str, int]:
    """Launch options that divide the register file: 65536, by warps in fours, producer warp included.

    The first consumer gets what the others and the producer leave: as many as they.
    """
    warps = -(-(4 * consumers + 1) // 4) * 4
    each = 65536 // (warps * 32) // 8 * 8
    return {"num_warps": 4, "maxnreg": each, "CONSUMER_REGS": 240 if consumers == 2 else 160, "PRODUCER_REGS": 24 if
            consumers == 2 else 32}  # fmt: skip


def heads_in_l2(p: Problem, rows: int, tensors: int, share: float, device: Device) -> int:
    """How many heads' rows of `tensors` tensors fit in a share of L2: their tiles are worked on together."""
    nbytes = max(1, rows * p.head_dim * p.dtype.itemsize * tensors)
    return max(1, int(share * device.l2_bytes / nbytes))
