"""What the kernels for sm_90a that gather can take."""

from dataclasses import replace

import torch

from expertile.device import Device
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.hopper.limits import other_architecture


def unfit(p: GatherProblem, device: Device) -> str | None:
    """Why none of them can compute `p` on `device`, whatever its product; or None."""
    if reason := other_architecture(device):
        return reason
    if p.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 and float16, not {p.dtype}"
    if not (p.a_aligned and p.b_aligned):
        return "16-byte copies need base addresses that are multiples of 16 bytes"
    return None


def second_pair(p: GatherProblem, rank: int) -> GatherProblem:
    """`p` with `rank` summands: the product of a second pair of operands, whose b is laid out as that of `p`, without
    gaps."""
    strides = (p.n * rank, 1, rank) if p.b_strides[1] == 1 else (p.n * rank, p.n, 1)
    return replace(p, k=rank, b_strides=strides)


def refusal(p: GatherProblem, device: Device) -> str | None:
    """Why neither of those that gather rows of a can compute `p` on `device`, or None."""
    if p.product is Product.WGRAD:
        return "computes no weight gradients"
    if reason := unfit(p, device):
        return reason
    if p.k == 0 or p.k % 8:
        return f"16-byte copies need K to be a positive multiple of 8, not {p.k}"
    if p.a_strides[1] != 1 or p.a_strides[0] % 8 or p.a_strides[0] <= 0:
        return f"16-byte copies need rows of a that are contiguous and 16-byte aligned, got strides {p.a_strides}"
    k_major = p.b_strides[1] == 1
    if not k_major and p.b_strides[2] != 1:
        return f"b has no dimension of stride 1 that TMA could read (strides {p.b_strides})"
    if any(s % 8 or s <= 0 for i, s in enumerate(p.b_strides) if i != (1 if k_major else 2)):
        return f"TMA needs strides that are positive multiples of 16 bytes; b has {p.b_strides} elements"
    if p.intermediate % 8:
        return f"stores 16 bytes at a time: rows of the result of {p.intermediate} x {p.dtype.itemsize} are no multiple"
    return None
