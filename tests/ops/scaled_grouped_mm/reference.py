"""The definition of right: one float32 (or float64) product of dequantised operands per group, in a loop."""

import torch

from expertile.formats.fp8 import dequantize
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.scaled_grouped_mm.problem import BLOCK, Operands, Recipe, ScaledProblem
from expertile.ragged import sizes_from_offs
from tests.ops.grouped_mm.reference import reference as grouped_reference


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The scaled grouped product accumulated and returned in `dtype`; shapes as in `ScaledProblem`.

    Rows past offs[-1] are NaN, so that no comparison takes them for results. Reads `offs` on the host.
    """
    problem = ScaledProblem.of(a, b, scale_a, scale_b, offs, bias)
    assert offs is not None
    operands = Operands(a, b, scale_a, scale_b, offs, bias)
    if problem.layout is Layout.RAGGED_K and problem.recipe is Recipe.ROW:
        # Every group has scales of its own for the same rows and columns: they go onto the products.
        plain = grouped_reference(a.to(dtype), b.to(dtype), offs, None, dtype)
        rows, cols = scale_a.view(-1, problem.m, 1), scale_b.view(-1, 1, problem.n)
        return plain * rows.to(dtype) * cols.to(dtype)
    used = sum(sizes_from_offs(offs))
    left = dequantize_a(problem, operands, dtype)
    if problem.layout is Layout.RAGGED_K:
        # 0 · NaN behind the groups would be NaN.
        left, right = left[:, :used], dequantize_b(problem, operands, dtype)[:used]
        return grouped_reference(left, right, offs, bias, dtype)
    return grouped_reference(left, dequantize_b(problem, operands, dtype), offs, bias, dtype)


def dequantize_a(problem: ScaledProblem, operands: Operands, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """a with its scales multiplied in, [M, K]; not for ROW scales of a ragged K, which differ from group to group."""
    if problem.recipe is Recipe.ROW:
        return operands.a.to(dtype) * operands.scale_a.to(dtype)[:, None]
    return dequantize(operands.a, operands.scale_a, (1, BLOCK), dtype)


def dequantize_b(problem: ScaledProblem, operands: Operands, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """b with its scales multiplied in, in b's shape."""
    b, scale = operands.b, operands.scale_b
    if problem.recipe is Recipe.ROW:
        return b.to(dtype) * scale.to(dtype).unsqueeze(-2)
    height = BLOCK if problem.recipe is Recipe.BLOCK else 1
    return dequantize(b.transpose(-2, -1), scale, (height, BLOCK), dtype).transpose(-2, -1)
