"""What TMA and the Hopper kernels can take."""

from __future__ import annotations

import torch


def storable(out: torch.Tensor) -> bool:
    """Whether TMA can write `out` in place."""
    *pitches, contiguous = out.stride()
    itemsize = out.element_size()
    for pitch in pitches:
        if pitch <= 0 or pitch * itemsize % 16:
            return False
    return contiguous == 1 and out.data_ptr() % 16 == 0
