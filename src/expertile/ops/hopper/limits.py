"""What TMA and the Hopper kernels can take."""

from typing import Any

import torch

from expertile.device import Device

MAX_ROWS = 0x40000000  # as in triton.tools.ragged_tma: a row number no tensor reaches


def other_architecture(device: Device) -> str | None:
    """Why a kernel written for sm_90a does not run on `device`, or None."""
    if device.kind != "cuda" or device.capability != (9, 0):
        return "needs compute capability 9.0 (H100, H200): it is written for that architecture's wgmma instructions"
    return None


def refusal(p: Any, device: Device, most_groups: int = 2048, most_rows: int = MAX_ROWS) -> str | None:
    """Why a kernel whose operands and result TMA moves can't compute the grouped product `p` on `device`, as far as all
    of them are alike in that; or None."""
    if reason := other_architecture(device):
        return reason
    if p.ragged_total > most_rows:
        return f"at most {most_rows} rows (the ragged descriptors' limit), not {p.ragged_total}"
    if p.groups > most_groups:
        return f"at most {most_groups} groups (their prefix sum is kept in registers), not {p.groups}"
    if not (p.a_aligned and p.b_aligned):
        return "TMA needs base addresses that are multiples of 16 bytes"
    if (p.n * p.out_dtype.itemsize) % 16:
        return f"TMA needs rows of the output that are multiples of 16 bytes, not {p.n} x {p.out_dtype.itemsize}"
    return None


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
