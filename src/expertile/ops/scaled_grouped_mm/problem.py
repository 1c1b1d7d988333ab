"""ScaledProblem: the shapes, scales and strides of one grouped FP8 product, validated once, with no tensor inside;
and what a backend of the operator is given.

Two layouts; every group g computes with dequantised operands, x̂ = values · scale:

| layout   | a           | b           | out        |                                                         |
|----------|-------------|-------------|------------|---------------------------------------------------------|
| RAGGED_M | [M_tot, K]  | [G, K, N]   | [M_tot, N] | out[rows of g] = â[rows of g] @ b̂[g]                    |
| RAGGED_K | [M, K_tot]  | [K_tot, N]  | [G, M, N]  | out[g] = â[:, columns of g] @ b̂[rows of g]              |

and three recipes of scales, float32, told apart by their shapes (KB = ceil(K / 128), NB = ceil(N / 128)):

| recipe | one scale for                               | RAGGED_M: scale_a, scale_b  | RAGGED_K: scale_a, scale_b |
|--------|---------------------------------------------|-----------------------------|----------------------------|
| BLOCK  | 1×128 of a's row, 128×128 of the weights    | [M_tot, KB], [G, NB, KB]    | –                          |
| VECTOR | 1×128 of a's row, 1×128 of a column of b    | [M_tot, KB], [G, N, KB]     | [M, KB], [N, KB]           |
| ROW    | a whole row of a, a whole column of b       | [M_tot], [G, N]             | [G·M], [G·N]               |

ROW is torch's `scaled_grouped_mm` with ScalingType.RowWise. RAGGED_K (wgrad: K counts tokens) with VECTOR scales wants
every group to begin on a multiple of 128, so that no block of scales lies in two groups: `Fp8Blocks.quantize_tokens`
writes such operands, zeros behind each group, together with their `offs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from expertile.ops import backend
from expertile.ops.checks import check_like
from expertile.ops.grouped_mm.problem import (
    Description,
    Layout,
    Problem,
    check_bias,
    check_offs_values,
    described,
    descriptions,
    groups_of,
)
from expertile.ragged import sizes_from_offs
from expertile.roofline import Work

BLOCK = 128  # elements along K that share a scale, and columns of the weights that do
# Up to so many, kernels start while the one before them ends (`wants_pdl`): 2.5 % faster from 2e10 on, and no faster
# with 3e11 (H200, 2026-11-26).
PDL_FLOPS = 1.5e11
DTYPE = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Recipe(StrEnum):
    """What shares a scale; see the table above."""

    BLOCK = "block"
    VECTOR = "vector"
    ROW = "row"


@dataclass(frozen=True)
class ScaledProblem(Problem):
    """A `Problem` with float8_e4m3fn operands and their scales; strides of the scales in elements."""

    recipe: Recipe = Recipe.BLOCK
    scale_a_strides: tuple[int, ...] = ()
    scale_b_strides: tuple[int, ...] = ()

    @property
    def k_blocks(self) -> int:
        return -(-self.k // BLOCK)

    @property
    def n_blocks(self) -> int:
        return -(-self.n // BLOCK)

    def work(self, group_sizes: Sequence[int] | None = None) -> Work:
        """As for `Problem`, and four bytes for every scale of a row or group in use."""
        sizes = group_sizes if group_sizes is not None else self.group_sizes
        total = self.ragged_total if sizes is None else sum(sizes)
        used = self.groups if sizes is None else sum(s > 0 for s in sizes)
        m, n, kb = self.m, self.n, self.k_blocks
        if self.layout is Layout.RAGGED_K:
            scales = self.groups * (m + n) if self.recipe is Recipe.ROW else -(-total // BLOCK) * (m + n)
        elif self.recipe is Recipe.ROW:
            scales = total + used * n
        else:
            scales = total * kb + used * kb * (self.n_blocks if self.recipe is Recipe.BLOCK else n)
        return super().work(group_sizes) + Work(0.0, 4.0 * scales)

    @staticmethod
    def of(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        check: bool = False,
    ) -> "ScaledProblem":
        """Validate the operands of `scaled_grouped_mm` and describe them.

        Raises ValueError naming the argument, what was expected and what came. Values of `offs` and of the scales are
        read (which synchronises with a GPU) only with `check=True`; those of `offs` also when it is on the CPU anyway.
        """
        operands = (described(a), described(b), described(scale_a), described(scale_b))
        problem = ScaledProblem.of_descriptions(*operands, described(offs), described(bias), out_dtype)
        assert offs is not None
        if not check and offs.device.type != "cpu":
            return problem
        sizes = sizes_from_offs(offs)
        check_offs_values(sizes, problem.ragged_total)
        if problem.layout is Layout.RAGGED_K and problem.recipe is not Recipe.ROW:
            _check_aligned(sizes)
        if check:
            _check_finite(problem, scale_a, scale_b, sum(sizes))
        return replace(problem, group_sizes=sizes)

    @staticmethod
    def of_descriptions(
        a_fields: tuple[Any, ...] | None,
        b_fields: tuple[Any, ...] | None,
        scale_a_fields: tuple[Any, ...] | None,
        scale_b_fields: tuple[Any, ...] | None,
        offs_fields: tuple[Any, ...] | None,
        bias_fields: tuple[Any, ...] | None,
        out_dtype: torch.dtype,
    ) -> "ScaledProblem":
        """`of` what is `described`, and so without values."""
        a, b, scale_a, scale_b = descriptions(a_fields, b_fields, scale_a_fields, scale_b_fields)
        offs, bias = descriptions(offs_fields, bias_fields)
        assert a and b and scale_a and scale_b
        layout = {(2, 3): Layout.RAGGED_M, (2, 2): Layout.RAGGED_K}.get((len(a.shape), len(b.shape)))
        if layout is None:
            raise ValueError(
                "a, b: expected a [M, K] with b [G, K, N] (ragged rows) or b [K, N] (ragged K), got "
                f"a {list(a.shape)} and b {list(b.shape)}"
            )
        for name, x in (("a", a), ("b", b)):
            if x.dtype is not DTYPE:
                raise ValueError(f"{name}: expected dtype {DTYPE}, got {x.dtype}")
        if out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype: expected {' or '.join(map(str, OUT_DTYPES))}, got {out_dtype}")
        for name, x in (("b", b), ("scale_a", scale_a), ("scale_b", scale_b)):
            check_like(name, x, a, "a", "device")
        (m, k), n = a.shape, b.shape[-1]
        if b.shape[-2] != k:
            raise ValueError(f"b: expected {k} rows (a's last dimension), got {b.shape[-2]} in shape {list(b.shape)}")
        groups = groups_of(layout, a, b, offs)
        if bias is not None:
            check_bias(layout, bias, groups, n, a)
        recipe = _recipe(layout, groups, m, n, k, scale_a, scale_b)
        memory = (a.strides, b.strides, a.aligned, b.aligned, bias is not None, a.device.type)
        scales = (recipe, scale_a.strides, scale_b.strides)
        return ScaledProblem(layout, groups, m, n, k, DTYPE, out_dtype, *memory, None, False, *scales)


def _recipe(layout: Layout, groups: int, m: int, n: int, k: int, scale_a: Description, scale_b: Description) -> Recipe:
    """The recipe that the scales' shapes spell."""
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype is not torch.float32:
            raise ValueError(f"{name}: expected dtype torch.float32, got {scale.dtype}")
    kb, nb = -(-k // BLOCK), -(-n // BLOCK)
    if layout is Layout.RAGGED_M:
        shapes = {
            Recipe.BLOCK: ((m, kb), (groups, nb, kb)),
            Recipe.VECTOR: ((m, kb), (groups, n, kb)),
            Recipe.ROW: ((m,), (groups, n)),
        }
    else:
        shapes = {Recipe.VECTOR: ((m, kb), (n, kb)), Recipe.ROW: ((groups * m,), (groups * n,))}
    got = (tuple(scale_a.shape), tuple(scale_b.shape))
    for recipe, shape in shapes.items():
        if shape == got:
            return recipe
    # Name the argument that fits no recipe, or scale_b where only the pair does not fit.
    wrong = "scale_a" if all(got[0] != s[0] for s in shapes.values()) else "scale_b"
    known = ", ".join(f"{list(s[0])} and {list(s[1])} ({r.value})" for r, s in shapes.items())
    raise ValueError(f"{wrong}: expected scale_a and scale_b of shapes {known}, got {list(got[0])} and {list(got[1])}")


def _check_aligned(sizes: Sequence[int]) -> None:
    end = 0
    for g, size in enumerate(sizes):
        end += size
        if end % BLOCK:
            raise ValueError(
                f"offs: expected multiples of {BLOCK} where K is ragged (a block of scales belongs to one group; "
                f"Fp8Blocks.quantize_tokens aligns them), got the end {end} at group {g}"
            )


def _check_finite(problem: ScaledProblem, scale_a: torch.Tensor, scale_b: torch.Tensor, used: int) -> None:
    """Scales behind the last group may be anything."""
    if problem.layout is Layout.RAGGED_M:
        scale_a = scale_a[:used]
    elif problem.recipe is not Recipe.ROW:
        scale_a, scale_b = scale_a[:, : used // BLOCK], scale_b[:, : used // BLOCK]
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        bad = int((~torch.isfinite(scale)).sum())
        if bad:
            raise ValueError(f"{name}: expected finite scales, got {bad} that are NaN or infinite")


class Operands(NamedTuple):
    """The tensors of one call, as validated by `ScaledProblem.of`."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    offs: torch.Tensor
    bias: torch.Tensor | None = None


Run = Callable[[ScaledProblem, Operands, Any, torch.Tensor | None], torch.Tensor]  # as of a backend of `grouped_mm`
Backend = backend.Backend[ScaledProblem, Run]
