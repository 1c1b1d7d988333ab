"""What a backend of `scaled_grouped_mm` is: one frozen value that says what it can do, with which configs, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.scaled_grouped_mm.problem import ScaledProblem


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `ScaledProblem.of`."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    offs: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Backend:
    """One way to compute a scaled grouped product; fields and rules as in `expertile.ops.grouped_mm.backend`."""

    name: str
    summary: str
    supports: Callable[[ScaledProblem, Device], str | None]
    configs: Callable[[ScaledProblem, Device], tuple[Any, ...]]
    run: Callable[[ScaledProblem, Operands, Any, torch.Tensor | None], torch.Tensor]
    reads_offs_on_host: bool = False
    peer: bool = False


def new_out(problem: ScaledProblem, operands: Operands, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, or an uninitialised tensor for the result."""
    if out is not None:
        return out
    return torch.empty(problem.out_shape, dtype=problem.out_dtype, device=operands.a.device)
