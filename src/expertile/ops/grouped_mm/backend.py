"""What a backend is: one frozen value that says what it can do, with which configs, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.problem import Layout, Problem


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `Problem.from_tensors`."""

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class NoConfig:
    """The config of a backend that has nothing to configure."""


def never(problem: Problem, device: Device) -> tuple[Any, ...]:
    """The batch-invariant configs of a backend that has none."""
    return ()


def rows_are_tokens(problem: Problem) -> bool:
    """Whether a row of `a` and its row of the result are one token's, so that batch invariance means something."""
    return problem.layout in (Layout.RAGGED_M, Layout.BATCHED)


@dataclass(frozen=True)
class Backend:
    """One way to compute a grouped product.

    `supports(problem, device)` is pure: the reason why not, or None. `configs(problem, device)` lists the configs
    worth trying, the default first. `run(problem, operands, config, out)` computes into `out` (or a new tensor of
    `problem.out_shape`, dtype `problem.out_dtype`) and returns it; rows past offs[-1] are left alone.
    """

    name: str
    summary: str
    supports: Callable[[Problem, Device], str | None]
    configs: Callable[[Problem, Device], tuple[Any, ...]]
    run: Callable[[Problem, Operands, Any, torch.Tensor | None], torch.Tensor]
    # Needs the group sizes on the host: synchronises, and cannot be captured in a CUDA graph, unless
    # `problem.group_sizes` is known.
    reads_offs_on_host: bool = False
    # Somebody else's kernel, measured as a rival and used when it is the fastest.
    peer: bool = False
    # The configs, the default first, with which a row of the result has the same bits in every problem that differs
    # from this one in numbers of rows alone, whichever of these configs each problem takes.
    invariant: Callable[[Problem, Device], tuple[Any, ...]] = never


def new_out(problem: Problem, operands: Operands, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, or an uninitialised tensor for the result."""
    if out is not None:
        return out
    return torch.empty(problem.out_shape, dtype=problem.out_dtype, device=operands.a.device)


def config_dict(config: Any) -> dict[str, Any]:
    """A config as it stands in a record."""
    return asdict(config)
