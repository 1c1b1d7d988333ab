"""Dequantise and multiply: one float32 product per group. What any device can do, and what CPUs use.

    out[rows of g] = a[rows of g] @ ŵ[g]ᵀ (+ bias[g]), FP8 activations times their scales

Only one group's weights are dequantised at a time. Bytes moved: the packed weights of groups with rows once, and their
float32 copies written and read. What limits it: float32 products and a few launches per group; the host must know the
group sizes.
"""

import torch

from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import new_out
from expertile.ops.weight_only_mm.problem import BLOCK, Backend, Operands, WeightOnlyProblem


def scaled(a: torch.Tensor, scale_a: torch.Tensor) -> torch.Tensor:
    """a ∘ scale_a in float32: scales [M, K/128] (rounded up) or [M]."""
    each = scale_a.repeat_interleave(BLOCK, -1)[:, : a.shape[1]] if scale_a.dim() == 2 else scale_a[:, None]
    return a.float() * each


def _run(problem: WeightOnlyProblem, operands: Operands, config: NoConfig, out: torch.Tensor | None) -> torch.Tensor:
    out = new_out(problem, operands, out)
    a, w, end = operands.a, operands.w, 0
    if operands.scale_a is not None:
        a = scaled(a, operands.scale_a)
    for g, size in enumerate(problem.sizes(operands.offs)):
        start, end = end, end + size
        if size == 0:
            continue
        one = w.part(g, g + 1)
        with torch.autocast(out.device.type, enabled=False):  # which would round float32 again
            product = a[start:end].float() @ one.dequantize(torch.float32)[0].t()
        out[start:end] = product if operands.bias is None else product + operands.bias[g]
    return out


BACKEND = Backend(name="loop", summary="dequantised, one float32 product per group", run=_run, reads_offs_on_host=True)
