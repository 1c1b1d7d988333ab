"""The definition of right: one float32 (or float64) product per group, in a loop."""

import torch
from torch import Tensor

from expertile.ops.grouped_mm.problem import tf32_allowed
from expertile.ragged import sizes_from_offs


def reference(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The grouped product of `a` and `b` accumulated and returned in `dtype`; shapes as in `Problem`.

    Rows (RAGGED_M) or columns (RAGGED_N) past offs[-1] are NaN, so that no comparison takes them for results.
    TF32 is off while it runs. Reads `offs` on the host.
    """
    if not tf32_allowed():
        return _loop(a, b, offs, bias, dtype)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        return _loop(a, b, offs, bias, dtype)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "tf32"


def _loop(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    def product(x: Tensor, y: Tensor, group: int) -> Tensor:
        out = x.to(dtype) @ y.to(dtype)
        return out if bias is None else out + bias[group].to(dtype)

    if offs is None:
        return torch.stack([product(x, y, g) for g, (x, y) in enumerate(zip(a, b, strict=True))])
    sizes = sizes_from_offs(offs)
    ends = offs.tolist()
    spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([product(a[:, s], b[s], g) for g, s in enumerate(spans)])
    shape = (a.shape[-2], b.shape[-1])
    out = torch.full(shape, float("nan"), dtype=dtype, device=a.device)
    for g, s in enumerate(spans):
        if a.dim() == 2:
            out[s] = product(a[s], b[g], g)
        else:
            out[:, s] = product(a[g], b[:, s], g)
    return out
