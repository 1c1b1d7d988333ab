"""What a backend of `int4_grouped_mm` is: one frozen value that says what it can do, with which configs, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertile.device import Device
from expertile.formats.int4.weight import Int4Weight
from expertile.ops.int4_grouped_mm.problem import Int4Problem


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `Int4Problem.of`."""

    a: torch.Tensor
    w: Int4Weight
    offs: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Backend:
    """One way to compute a product with 4-bit weights; fields and rules as in `expertile.ops.grouped_mm.backend`."""

    name: str
    summary: str
    supports: Callable[[Int4Problem, Device], str | None]
    configs: Callable[[Int4Problem, Device], tuple[Any, ...]]
    run: Callable[[Int4Problem, Operands, Any, torch.Tensor | None], torch.Tensor]
    reads_offs_on_host: bool = False
    peer: bool = False


def new_out(problem: Int4Problem, operands: Operands, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, or an uninitialised tensor for the result."""
    if out is not None:
        return out
    return operands.a.new_empty(problem.out_shape, dtype=problem.out_dtype)
