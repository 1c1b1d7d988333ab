"""The definition of right: one float32 (or float64) product of dequantised weights per group, in a loop."""

import torch

from expertile.formats.quantized import QuantizedWeight
from expertile.ops.weight_only_mm.problem import BLOCK
from tests.ops.grouped_mm.reference import reference as grouped_reference


def scaled(a: torch.Tensor, scale_a: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """a ∘ scale_a in `dtype`: scales [M, K/128] (rounded up) or [M]."""
    each = scale_a.to(dtype).repeat_interleave(BLOCK, -1)[:, : a.shape[1]] if scale_a.dim() == 2 else scale_a[:, None]
    return a.to(dtype) * each


def reference(
    a: torch.Tensor,
    w: QuantizedWeight,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    scale_a: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [M, K] · ŵᵀ accumulated and returned in `dtype`, with ŵ = `w.dequantize()` exact in float32.

    With `scale_a`, a is FP8 and multiplied by its scales first.

    Rows past offs[-1] are NaN, so that nobody compares them by accident. Reads `offs` on the host.
    """
    if scale_a is not None:
        a = scaled(a, scale_a, dtype)
    return grouped_reference(a, w.dequantize(torch.float32).transpose(-2, -1), offs, bias, dtype)
