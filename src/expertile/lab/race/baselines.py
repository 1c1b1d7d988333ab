"""Two deliberately wrong rivals that stand in every run as speed of light.

`dense`: the same rows against one weight: the same FLOPs without any raggedness, through `torch.mm`. Where
compute limits, a grouped product can hope for this. `copy`: as many bytes moved as the product must read and
write. Where memory limits, it can hope for that. Each is checked against what it claims to compute.

There are two ways to copy, since either alone may fall short of the memory: the driver's, which a CUDA graph holds as a
memcpy node (on an H200 at two thirds of the bandwidth for many sizes, docs/measuring.md), and an element-wise kernel.
Both are raced; the record of `copy` is that of the faster one, and its config says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from expertile.lab.race.gate import Gate, gate_run, reference_for
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.roofline import Work

Run = Callable[[torch.Tensor | None], torch.Tensor]  # out or None -> result


@dataclass(frozen=True)
class Baseline:
    """`work(problem, sizes)` is what it really does; `prepare(problem, sizes, operands)` makes everything
    ready and returns the function to time; `verify` judges its result. `sizes` are the group sizes of the
    ragged dimension. Baselines of one name are `way`s to do the same, of which a run records the fastest.
    """

    name: str
    summary: str
    work: Callable[[Problem, Sequence[int]], Work]
    prepare: Callable[[Problem, Sequence[int], Operands], Run]
    verify: Callable[[Problem, Sequence[int], Operands], Gate]
    way: str = ""

    @property
    def config(self) -> dict[str, str]:
        """What a record shows."""
        return {"way": self.way} if self.way else {}


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


@dataclass(frozen=True)
class Copy:
    """One way to copy: `move(source, out)` writes int32 `source` to `out` and returns it, each byte once."""

    way: str
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def run(self, nbytes: float, device: torch.device) -> Run:
        """A copy that reads and writes `nbytes` bytes together, into `out` or fresh memory."""
        source = _random_words(nbytes, device)
        return lambda out: self.move(source, torch.empty_like(source) if out is None else out)

    def gate(self, nbytes: float, device: torch.device) -> Gate:
        """Whether it copies, over other words than those to be copied."""
        source = _random_words(nbytes, device)
        same = torch.equal(self.move(source, source.bitwise_not()), source)
        error = 0.0 if same else math.inf
        return Gate(same, error, error, "" if same else "the copy differs from what was copied")


COPY = "copy"
# Words of 4 bytes whatever the dtype, so that the kernel's loads are 16 bytes wide in all of them.
COPIES = (
    Copy("memcpy", lambda source, out: out.copy_(source)),
    Copy("kernel", lambda source, out: torch.add(source, 0, out=out)),
)


def copy_work(nbytes: float) -> Work:
    """What copying `nbytes` bytes (read and written together) in whole words really moves."""
    return Work(0.0, 8.0 * _words(nbytes))


def _words(nbytes: float) -> int:
    return math.ceil(nbytes / 8)


def _random_words(nbytes: float, device: torch.device) -> torch.Tensor:
    """Half of `nbytes` bytes as int32: the bits of normal float32 numbers."""
    return torch.empty(_words(nbytes), device=device).normal_().view(torch.int32)


def _copy_work(problem: Problem, sizes: Sequence[int]) -> Work:
    return copy_work(problem.work(sizes).nbytes)


def _copy_baseline(copy: Copy) -> Baseline:
    def prepare(problem: Problem, sizes: Sequence[int], operands: Operands) -> Run:
        return copy.run(problem.work(sizes).nbytes, operands.a.device)

    def verify(problem: Problem, sizes: Sequence[int], operands: Operands) -> Gate:
        return copy.gate(problem.work(sizes).nbytes, operands.a.device)

    return Baseline(COPY, "the same bytes, only moved", _copy_work, prepare, verify, copy.way)


DENSE = Baseline("dense", "the same rows against one weight (torch.mm)", _dense_work, _dense_prepare, _dense_verify)
BASELINES = (DENSE, *map(_copy_baseline, COPIES))
BASELINE_NAMES = (DENSE.name, COPY)
