"""Host side of the `gluon_hopper` backend: TMA descriptors of rows of heads, and launch options of its kernels."""

from __future__ import annotations

from typing import Any

from expertile.device import Device
from expertile.ops.attention.problem import Problem
from expertile.ops.launch.blocks import Blocks
from expertile.ops.launch.versions import FP_FUSION

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


def registers(consumers: int) -> dict[str, Any]:
    """Launch options that divide the register file: 65536, by warps in fours, producer warp included.

    The first consumer gets what the others and the producer leave: as many as they.
    """
    warps = -(-(4 * consumers + 1) // 4) * 4
    each = 65536 // (warps * 32) // 8 * 8
    consumer, producer = (240, 24) if consumers == 2 else (160, 32)
    return {"num_warps": 4, "maxnreg": each, "CONSUMER_REGS": consumer, "PRODUCER_REGS": producer, **FP_FUSION}


def heads_in_l2(p: Problem, rows: int, tensors: int, share: float, device: Device) -> int:
    """How many heads' rows of `tensors` tensors fit in a share of L2: their tiles are worked on together."""
    nbytes = max(1, rows * p.head_dim * p.dtype.itemsize * tensors)
    return max(1, int(share * device.l2_bytes / nbytes))
