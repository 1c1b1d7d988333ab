"""What a backend of `weight_only_mm` is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertile.formats.quantized import QuantizedWeight
from expertile.ops import backend
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `WeightOnlyProblem.of`."""

    a: torch.Tensor
    w: QuantizedWeight
    offs: torch.Tensor
    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None


Run = Callable[[WeightOnlyProblem, Operands, Any, torch.Tensor | None], torch.Tensor]  # as of a backend of `grouped_mm`
Backend = backend.Backend[WeightOnlyProblem, Run]
