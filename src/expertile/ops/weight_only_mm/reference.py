"""The definition of right: one float32 (or float64) product of dequantised weights per group, in a loop."""

from __future__ import annotations

import torch

from expertile.formats.quantized import QuantizedWeight
from expertile.ops.grouped_mm.reference import reference as grouped_reference


def reference(
    a: torch.Tensor,
    w: QuantizedWeight,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """a [M, K] · ŵᵀ accumulated and returned in `dtype`, with ŵ = `w.dequantize()` exact in float32.

    Rows past offs[-1] are NaN, so that nobody compares them by accident. Reads `offs` on the host.
    """
    return grouped_reference(a, w.dequantize(torch.float32).transpose(-2, -1), offs, bias, dtype)
