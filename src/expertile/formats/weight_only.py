"""The formats of weights in few bits, by name. A new one is a class, here in `AnyQuantizedWeight` and `WEIGHTS`."""

from __future__ import annotations

import torch

from expertile.formats.int4.weight import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight

AnyQuantizedWeight = Int4Weight | Mxfp4Weight
WEIGHTS: dict[str, type[AnyQuantizedWeight]] = {w.format: w for w in (Int4Weight, Mxfp4Weight)}
NAMES = " or ".join(w.__name__ for w in WEIGHTS.values())


def weight_of(
    format: str, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, k: int
) -> AnyQuantizedWeight:
    """The weight [G, N, K] of that format with these tensors."""
    return WEIGHTS[format].of_tensors(packed, scales, zeros, group_size, k)
