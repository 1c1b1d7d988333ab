"""The router's product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from expertile.moe import _few
from expertile.ops.grouped_mm.api import grouped_mm


def router_logits(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """logits [T, E] = x [T, H] @ router [E, H]^T (+ bias [E]), in x's dtype: what `route` chooses from.

    `torch.nn.functional.linear`, gradients included; without them, for few tokens on a GPU, a kernel that takes half of
    its time there (H200, one token of Qwen3-30B-A3B, with the choice: 3.6 µs against 7.3). Raises what `linear` does.

    `batch_invariant`: a token's logits do not depend on its batch; a grouped product of one group, as `grouped_mm` has
    it, and its errors.
    """
    if batch_invariant:
        return _invariant(x, router, bias, None)
    if _few.reads_router(x, router, bias):
        return _few.logits(x, router, bias)
    return F.linear(x, router, bias)


def invariant_logits_in(
    dtype: torch.dtype, x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Batch-invariant logits in `dtype`. 16-bit x and router stay what they are if it is float32: their products are
    exact in float32, where they are summed."""
    if not (dtype is torch.float32 and x.dtype is router.dtype and x.dtype in (torch.bfloat16, torch.float16)):
        x, router = x.to(dtype), router.to(dtype)
    return _invariant(x, router, None if bias is None else bias.to(dtype), dtype)


def _invariant(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    bias = None if bias is None else bias[None]
    return grouped_mm(x[None], router.t()[None], bias=bias, out_dtype=dtype, batch_invariant=True)[0]
