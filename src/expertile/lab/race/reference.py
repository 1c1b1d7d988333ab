"""What a grouped product must be, in higher precision, block by block.

Products are computed in float32 (float64 for float32 inputs, TF32 off). One that would take too long is compared on
randomly chosen rows of every group.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from expertile.lab.race.gate import PART_ELEMENTS, Limits, full_precision, limits
from expertile.lab.race.operator import Blocks, Part
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.problem import Layout, Problem

_FLOPS = {"cuda": 2e13, "cpu": 2e11}  # above that, rows are sampled: below a second on either


def reference_for(
    problem: Problem, operands: Operands, sizes: Sequence[int], hold_bytes: float = 0.0, seed: int = 0
) -> Blocks:
    """What `operands` give; kept in memory when it takes at most `hold_bytes`. `sizes` are the group sizes along the
    ragged dimension, `seed` draws the rows that are compared. What lies past offs[-1] must be left alone."""
    share = min(1.0, _FLOPS[problem.device_type] / max(problem.work(sizes).flops, 1.0))
    wide = torch.float64 if problem.dtype is torch.float32 else torch.float32

    def compute() -> Iterator[Part]:
        return _parts(problem, operands, sizes, wide, share, seed)

    def split(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _split(out, problem.layout, sum(sizes))

    if math.prod(problem.out_shape) * share * wide.itemsize <= hold_bytes:
        held = tuple(compute())
        return Blocks(problem.out_shape, problem.out_dtype, lambda: held, split, share)
    return Blocks(problem.out_shape, problem.out_dtype, compute, split, share)


def limits_of(problem: Problem, sizes: Sequence[int]) -> Limits:
    """What a right result of `problem` may differ by."""
    summands = max(sizes, default=0) if problem.layout is Layout.RAGGED_K else problem.k
    return limits(problem.dtype_key, problem.out_dtype, summands)


def _split(out: torch.Tensor, layout: Layout, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the groups cover, what lies past them)."""
    if layout is Layout.RAGGED_M:
        return out[:end], out[end:]
    if layout is Layout.RAGGED_N:
        return out[:, :end], out[:, end:]
    return out, out[:0]


def _parts(
    problem: Problem, operands: Operands, sizes: Sequence[int], wide: torch.dtype, share: float, seed: int
) -> Iterator[Part]:
    generator = torch.Generator().manual_seed(seed)
    with full_precision():
        for index, a, b, bias in products(problem.layout, operands, sizes):
            b_wide = b.to(wide)
            step = max(1, PART_ELEMENTS // max(a.shape[1], b.shape[1], 1))
            for rows in _row_blocks(a.shape[0], step, share, generator):
                picked: Any = rows if isinstance(rows, slice) else rows.to(a.device)
                ref = a[picked].to(wide) @ b_wide
                if bias is not None:
                    ref += bias.to(wide)
                yield _shift(index, picked), ref


def products(
    layout: Layout, operands: Operands, sizes: Sequence[int]
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """(where in out, a of the group [r, k], b of the group [k, n], bias [n]) for every group with a result."""
    a, b, bias = operands.a, operands.b, operands.bias
    end = 0
    for g, size in enumerate(sizes):
        start, end = end, end + size
        own = None if bias is None else bias[g]
        if layout is Layout.BATCHED:
            yield (g,), a[g], b[g], own
        elif layout is Layout.RAGGED_K:
            yield (g,), a[:, start:end], b[start:end], own
        elif size and layout is Layout.RAGGED_M:
            yield (slice(start, end),), a[start:end], b[g], own
        elif size:
            yield (slice(None), slice(start, end)), a[g], b[:, start:end], own


def _row_blocks(count: int, step: int, share: float, generator: torch.Generator) -> Iterator[slice | torch.Tensor]:
    """All rows in blocks of `step`, or a random share of them (at least 16)."""
    if share >= 1.0 or count <= 16:
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))
        return
    picked = torch.randperm(count, generator=generator)[: max(16, math.ceil(count * share))].sort().values
    yield from picked.split(step)


def _shift(index: tuple[Any, ...], rows: slice | torch.Tensor) -> tuple[Any, ...]:
    """The block `rows` of the result at `index`, as an index into the whole."""
    if isinstance(index[0], int):
        return (index[0], rows)
    base = index[0].start or 0
    moved = slice(base + rows.start, base + rows.stop) if isinstance(rows, slice) else base + rows
    return (moved, *index[1:])
