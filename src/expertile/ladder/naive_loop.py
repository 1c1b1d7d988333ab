"""Rung 1, the naive loop: what one writes first, and report 000's baseline. One launch per group, each filling the chip
by itself or not at all; the host must know the group sizes; the result is written, read and written again."""

import torch

from expertile.ladder._common import takes
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out
from expertile.ops.grouped_mm.problem import Problem


def _run(problem: Problem, operands: Operands, config: NoConfig, out: torch.Tensor | None) -> torch.Tensor:
    out = new_out(problem, operands, out)
    sizes = problem.sizes(operands.offs)
    products, start = [], 0
    for g, size in enumerate(sizes):
        products.append(operands.a[start : start + size] @ operands.b[g])
        start += size
    if start:
        torch.cat(products, out=out[:start])
    return out


BACKEND = Backend(
    name="1_naive_loop",
    summary="one torch.matmul per group, results concatenated",
    supports=lambda problem, device: takes(problem),
    run=_run,
    reads_offs_on_host=True,
)
