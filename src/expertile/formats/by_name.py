"""Formats of expert weights by the names that users give: "mxfp4", "int4" and "fp8"."""

from __future__ import annotations

from typing import Any

import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4.weight import GROUP_SIZES, Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight

FORMATS = ("mxfp4", "int4", "fp8")


def quantize(w: torch.Tensor, format: str) -> Any:
    """`w` [G, N, K] as an Mxfp4Weight, an Int4Weight or Fp8Blocks of 128×128, rounded to nearest.

    INT4 has no zero points, and the largest of the groups of 128, 64 and 32 that divides K. ValueError for another
    format, or a K that it does not take.
    """
    if format == "mxfp4":
        return Mxfp4Weight.quantize(w)
    if format == "int4":
        group = next((size for size in sorted(GROUP_SIZES, reverse=True) if w.shape[-1] % size == 0), min(GROUP_SIZES))
        return Int4Weight.quantize(w, group)
    if format == "fp8":
        return Fp8Blocks.quantize(w, (128, 128))
    raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
