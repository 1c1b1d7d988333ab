"""What a backend of `scaled_grouped_mm` is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertile.ops import backend
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


Run = Callable[[ScaledProblem, Operands, Any, torch.Tensor | None], torch.Tensor]  # as of a backend of `grouped_mm`
Backend = backend.Backend[ScaledProblem, Run]
