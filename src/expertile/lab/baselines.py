"""Two deliberately wrong rivals that stand in every run as speed of light.

`dense`: the same rows against one weight: the same FLOPs without any raggedness, through `torch.mm`. Where
compute limits, a grouped product can hope for this. `copy`: as many bytes moved as the product must read and
write. Where memory limits, it can hope for that. Each is checked against what it claims to compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from expertile.lab.gate import Gate, gate_run, reference_for
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.roofline import Work

Run = Callable[[torch.Tensor | None], torch.Tensor]  # out or None -> result


@dataclass(frozen=True)
class Baseline:
    """`work(problem, sizes)` is what it really does; `prepare(problem, sizes, operands)` makes everything
    ready and returns the function to time; `verify` judges its result. `sizes` are the group sizes of the
    ragged dimension.
    """

    name: str
    summary: str
    work: Callable[[Problem, Sequence[int]], Work]
    prepare: Callable[[Problem, Sequence[int], Operands], Run]
    verify: Callable[[Problem, Sequence[int], Operands], Gate]


def _dense_operands(problem: Problem, sizes: Sequence[int], operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [rows, summands], w [summands, columns]) with the FLOPs of the grouped product."""
    a, b, total = operands.a, operands.b, sum(sizes)
    if problem.layout is Layout.RAGGED_M:
        return a[:total], b[0]
    if problem.layout is Layout.RAGGED_N:
        return a[0], b[:, :total]
    if problem.layout is Layout.RAGGED_K:
        return a[:, :total], b[:total]
    return a.reshape(-1, a.shape[-1]), b[0]


def _dense_prepare(problem: Problem, sizes: Sequence[int], operands: Operands) -> Run:
    x, w = _dense_operands(problem, sizes, operands)
    return lambda out: torch.mm(x, w) if out is None else torch.mm(x, w, out=out)


def _dense_work(problem: Problem, sizes: Sequence[int]) -> Work:
    g, m, n, k, total = problem.groups, problem.m, problem.n, problem.k, sum(sizes)
    rows, columns, summands = {
        Layout.RAGGED_M: (total, n, k),
        Layout.RAGGED_N: (m, total, k),
        Layout.RAGGED_K: (m, n, total),
        Layout.BATCHED: (g * m, n, k),
    }[problem.layout]
    moved = rows * summands + summands * columns + rows * columns
    return Work(2.0 * rows * columns * summands, float(moved * problem.dtype.itemsize))


def _dense_verify(problem: Problem, sizes: Sequence[int], operands: Operands) -> Gate:
    x, w = _dense_operands(problem, sizes, operands)
    single = replace(
        problem, layout=Layout.RAGGED_M, groups=1, m=x.shape[0], n=w.shape[1], k=x.shape[1],
        out_dtype=problem.dtype, has_bias=False, group_sizes=(x.shape[0],),
    )  # fmt: skip
    reference = reference_for(single, Operands(x, w[None]), (x.shape[0],))
    run = _dense_prepare(problem, sizes, operands)
    return gate_run(run, single, (x.shape[0],), reference, operands.a.device)


def copy_work(nbytes: float, dtype: torch.dtype) -> Work:
    """What copying `nbytes` bytes (read and written together) in whole elements of `dtype` really moves."""
    return Work(0.0, 2.0 * _copy_elements(nbytes, dtype) * dtype.itemsize)


def copy_run(nbytes: float, dtype: torch.dtype, device: torch.device) -> Run:
    """A copy that reads and writes `nbytes` bytes together, into `out` or fresh memory."""
    source = torch.empty(_copy_elements(nbytes, dtype), dtype=dtype, device=device).normal_()

    def run(out: torch.Tensor | None) -> torch.Tensor:
        return (torch.empty_like(source) if out is None else out).copy_(source)

    return run


def copy_gate(run: Run) -> Gate:
    """Whether `run` copies: into fresh memory and over NaN alike."""
    first = run(None)
    second = run(torch.full_like(first, math.nan))
    same = torch.equal(first, second)
    return Gate(same, 0.0 if same else math.inf, 0.0 if same else math.inf, "" if same else "two copies differ")


def _copy_elements(nbytes: float, dtype: torch.dtype) -> int:
    return math.ceil(nbytes / 2 / dtype.itemsize)


def _copy_prepare(problem: Problem, sizes: Sequence[int], operands: Operands) -> Run:
    return copy_run(problem.work(sizes).nbytes, problem.dtype, operands.a.device)


def _copy_work(problem: Problem, sizes: Sequence[int]) -> Work:
    return copy_work(problem.work(sizes).nbytes, problem.dtype)


def _copy_verify(problem: Problem, sizes: Sequence[int], operands: Operands) -> Gate:
    return copy_gate(_copy_prepare(problem, sizes, operands))


DENSE = Baseline("dense", "the same rows against one weight (torch.mm)", _dense_work, _dense_prepare, _dense_verify)
COPY = Baseline("copy", "the same bytes, only moved", _copy_work, _copy_prepare, _copy_verify)
BASELINES = (DENSE, COPY)
