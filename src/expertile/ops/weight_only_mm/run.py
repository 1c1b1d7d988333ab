"""weight_only_mm without autograd: tensors -> WeightOnlyProblem (checked once) -> choose -> backend.run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.formats.quantized import QuantizedWeight
from expertile.ops import backend
from expertile.ops.backend import AUTO, Request
from expertile.ops.backend import device_of as _device
from expertile.ops.grouped_mm.problem import described
from expertile.ops.weight_only_mm.backend import Backend, Operands
from expertile.ops.weight_only_mm.backends import by_name
from expertile.ops.weight_only_mm.choose import choose
from expertile.ops.weight_only_mm.problem import DescribedWeight, WeightOnlyProblem


def select(problem: WeightOnlyProblem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    return backend.select(problem, device, request, by_name, choose)


def forward(
    a: torch.Tensor,
    w: QuantizedWeight,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    request: Request = AUTO,
    scale_a: torch.Tensor | None = None,
) -> torch.Tensor:
    if request.config is None and (offs is None or offs.is_cuda):
        fields = described(a), DescribedWeight.of(w), described(offs), described(bias)
        problem, chosen, config = _planned(*fields, out_dtype, a.device, request, described(scale_a))
    else:  # the values of offs are part of the problem, or somebody tries a config
        problem = WeightOnlyProblem.of(a, w, offs, bias, out_dtype, scale_a=scale_a)
        chosen, config = select(problem, _device(a.device.type, a.device.index), request)
    assert offs is not None
    offs = offs if offs.is_contiguous() else offs.contiguous()
    return chosen.run(problem, Operands(a, w, offs, bias, scale_a), config, None)


@lru_cache(maxsize=4096)
def _planned(
    a: tuple[Any, ...],
    w: DescribedWeight,
    offs: tuple[Any, ...] | None,
    bias: tuple[Any, ...] | None,
    out_dtype: torch.dtype | None,
    device: torch.device,
    request: Request,
    scale_a: tuple[Any, ...] | None = None,
) -> tuple[WeightOnlyProblem, Backend, Any]:
    """Problem, backend and config for tensors that are `described` so, whatever their values."""
    problem = WeightOnlyProblem.of_descriptions(a, w, offs, bias, out_dtype, scale_a)
    return problem, *select(problem, _device(device.type, device.index), request)
