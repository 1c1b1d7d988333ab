"""The router's product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from expertile.moe import _few


def router_logits(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """logits [T, E] = x [T, H] @ router [E, H]^T (+ bias [E]), in x's dtype: what `route` chooses from.

    `torch.nn.functional.linear`, gradients included; without them, for few tokens on a GPU, a kernel that takes half of
    its time there (H200, one token of Qwen3-30B-A3B, with the choice: 3.6 µs against 7.3). Raises what `linear` does.
    """
    if _few.reads_router(x, router, bias):
        return _few.logits(x, router, bias)
    return F.linear(x, router, bias)
