"""What TMA and the Hopper kernels can take."""

from __future__ import annotations

import torch

from expertile.device import Device

MAX_ROWS = 0x40000000  # as in triton.tools.ragged_tma: a row number no tensor reaches


def storable(out: torch.Tensor) -> bool:
    """Whether TMA can write `out` in place."""
    *pitches, contiguous = out.stride()
    itemsize = out.element_size()
    for pitch in pitches:
        if pitch <= 0 or pitch * itemsize % 16:
            return False
    return contiguous == 1 and out.data_ptr() % 16 == 0


def wide_tiles_pay(device: Device) -> bool:
    """Whether bytes read from L2 cost enough that the widest tile wins products that others win on an H200: on an H100
    (docs/notes/grouped_mm.md, "An H100 at its limit")."""
    return device.memory_bps is not None and device.memory_bps < 4e12
