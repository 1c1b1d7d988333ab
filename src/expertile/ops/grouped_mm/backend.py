"""What a backend of `grouped_mm` is given, and gives."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from expertile.ops import backend
from expertile.ops.grouped_mm.problem import Layout, Problem


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `Problem.from_tensors`."""

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor | None = None
    bias: torch.Tensor | None = None


# A second pair of operands, u [M, r] and b [G, r, N], whose product is added to a's and b's.
Pair = tuple[torch.Tensor, torch.Tensor]


def rows_are_tokens(problem: Problem) -> bool:
    """Whether a row of `a` and its row of the result are one token's, so that batch invariance means something."""
    return problem.layout in (Layout.RAGGED_M, Layout.BATCHED)


# `run(problem, operands, config, out)` computes into `out` (or a new tensor of `problem.out_shape`, dtype
# `problem.out_dtype`) and returns it; rows past offs[-1] are left alone.
Run = Callable[[Problem, Operands, Any, torch.Tensor | None], torch.Tensor]
Backend = backend.Backend[Problem, Run]


def new_out(problem: Problem, operands: Any, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, or an uninitialised tensor for the result."""
    return operands.a.new_empty(problem.out_shape, dtype=problem.out_dtype) if out is None else out


def copy_used(problem: Problem, operands: Any, result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = result, except past the last group, where out is left alone; reads offs on the device."""
    if problem.layout in (Layout.RAGGED_K, Layout.BATCHED):
        return out.copy_(result)
    dim = 0 if problem.layout is Layout.RAGGED_M else 1
    inside = torch.arange(out.shape[dim], device=out.device) < operands.offs[-1]
    return torch.where(inside.unsqueeze(1 - dim), result, out, out=out)


def config_dict(config: Any) -> dict[str, Any]:
    """A config as it stands in a record."""
    return asdict(config)
