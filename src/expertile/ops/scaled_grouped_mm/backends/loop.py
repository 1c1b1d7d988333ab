"""Dequantise and multiply: one float32 product per group. What any device can do, and what CPUs use.

    out[rows of g] = â[rows of g] @ b̂[g] (+ bias[g])        RAGGED_M
    out[g]         = â[:, columns of g] @ b̂[rows of g]      RAGGED_K

Only one group's operands are dequantised at a time. Bytes moved: those of the FP8 operands once, and their float32
copies written and read. What limits it: float32 products and G launches, one after another; the host must know the
group sizes.
"""

import torch

from expertile.formats.fp8 import dequantize
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import new_out
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.scaled_grouped_mm.problem import BLOCK, Backend, Operands, Recipe, ScaledProblem


def _of_group(
    problem: ScaledProblem, operands: Operands, group: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(â, b̂) of one group in float32, the ragged dimension running from `start` to `end`."""
    a, b, scale_a, scale_b = operands.a, operands.b, operands.scale_a, operands.scale_b
    if problem.layout is Layout.RAGGED_M:
        rows, right = a[start:end], b[group]
        if problem.recipe is Recipe.ROW:
            return rows.float() * scale_a[start:end, None], right.float() * scale_b[group]
        height = BLOCK if problem.recipe is Recipe.BLOCK else 1
        right = dequantize(right.t(), scale_b[group], (height, BLOCK)).t()
        return dequantize(rows, scale_a[start:end], (1, BLOCK)), right
    left, right = a[:, start:end], b[start:end]
    if problem.recipe is Recipe.ROW:
        scale_a, scale_b = scale_a.view(-1, problem.m), scale_b.view(-1, problem.n)
        return left.float() * scale_a[group, :, None], right.float() * scale_b[group]
    blocks = slice(start // BLOCK, -(-end // BLOCK))
    right = dequantize(right.t(), scale_b[:, blocks], (1, BLOCK)).t()
    return dequantize(left, scale_a[:, blocks], (1, BLOCK)), right


def _run(problem: ScaledProblem, operands: Operands, config: NoConfig, out: torch.Tensor | None) -> torch.Tensor:
    out = new_out(problem, operands, out)
    end = 0
    for g, size in enumerate(problem.sizes(operands.offs)):
        start, end = end, end + size
        target = out[start:end] if problem.layout is Layout.RAGGED_M else out[g]
        if target.numel() == 0:
            continue
        left, right = _of_group(problem, operands, g, start, end)
        product = left @ right
        target.copy_(product if operands.bias is None else product + operands.bias[g])
    return out


BACKEND = Backend(name="loop", summary="dequantised, one float32 product per group", run=_run, reads_offs_on_host=True)
