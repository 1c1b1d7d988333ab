"""scaled_grouped_mm: tensors -> ScaledProblem (checked once) -> choose -> backend.run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops import backend
from expertile.ops.backend import AUTO, Request
from expertile.ops.backend import device_of as _device
from expertile.ops.grouped_mm.problem import described
from expertile.ops.scaled_grouped_mm.backend import Backend, Operands
from expertile.ops.scaled_grouped_mm.backends import by_name
from expertile.ops.scaled_grouped_mm.choose import choose
from expertile.ops.scaled_grouped_mm.problem import ScaledProblem


def select(problem: ScaledProblem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    return backend.select(problem, device, request, by_name, choose)


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    request: Request = AUTO,
    check: bool = False,
) -> torch.Tensor:
    if request.config is None and not check and (offs is None or offs.is_cuda):
        problem, chosen, config = _planned(
            described(a),
            described(b),
            described(scale_a),
            described(scale_b),
            described(offs),
            described(bias),
            out_dtype,
            a.device,
            request,
        )
    else:  # values are to be looked at, or the caller names a config
        problem = ScaledProblem.of(a, b, scale_a, scale_b, offs, bias, out_dtype, check)
        chosen, config = select(problem, _device(a.device.type, a.device.index), request)
    assert offs is not None
    offs = offs if offs.is_contiguous() else offs.contiguous()
    return chosen.run(problem, Operands(a, b, scale_a, scale_b, offs, bias), config, None)


@lru_cache(maxsize=4096)
def _planned(
    a: tuple[Any, ...],
    b: tuple[Any, ...],
    scale_a: tuple[Any, ...],
    scale_b: tuple[Any, ...],
    offs: tuple[Any, ...] | None,
    bias: tuple[Any, ...] | None,
    out_dtype: torch.dtype,
    device: torch.device,
    request: Request,
) -> tuple[ScaledProblem, Backend, Any]:
    """Problem, backend and config for tensors that are `described` so, whatever their values."""
    problem = ScaledProblem.of_descriptions(a, b, scale_a, scale_b, offs, bias, out_dtype)
    return problem, *select(problem, _device(device.type, device.index), request)
