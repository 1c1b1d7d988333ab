"""scaled_grouped_mm: tensors -> ScaledProblem (checked once) -> choose -> backend.run; and expertile::scaled_grouped_mm
as a torch operator: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops import backend
from expertile.ops.backend import AUTO, Choice, Request, by_backend, first_able, planner
from expertile.ops.backend import device_of as _device
from expertile.ops.grouped_mm.problem import described
from expertile.ops.scaled_grouped_mm.backends import BACKENDS, by_name, cuda_fp8
from expertile.ops.scaled_grouped_mm.problem import Backend, Operands, ScaledProblem
from expertile.ops.torch_op import define


@lru_cache(maxsize=4096)
def choose(problem: ScaledProblem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice[Backend]:
    """The backend, its config and a sentence why. On a GPU the first backend that takes the problem without waiting for
    the device, with the config that its own model puts first; `cuda_fp8` says itself where `gluon_fp8` wins. On a CPU,
    or where nothing else runs, the loop. ValueError with every backend's reason when none supports the problem."""

    def unwanted(backend: Backend) -> str | None:
        beaten = backend is cuda_fp8.BACKEND and any(b.name == "gluon_fp8" for b in backends)
        return cuda_fp8.slower(problem, device) if beaten else None

    return first_able(problem, device, backends, "the first that takes it", unwanted)


def select(problem: ScaledProblem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    return backend.select(problem, device, request, by_name, choose)


_planned = planner(ScaledProblem.of_descriptions, select)


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    request: Request = AUTO,
    check: bool = False,
) -> torch.Tensor:
    if request.config is None and not check and (offs is None or offs.is_cuda):
        fields = (*map(described, (a, b, scale_a, scale_b, offs, bias)), out_dtype)
        problem, chosen, config = _planned(fields, a.device, request)
    else:  # values are to be looked at, or the caller names a config
        problem = ScaledProblem.of(a, b, scale_a, scale_b, offs, bias, out_dtype, check)
        chosen, config = select(problem, _device(a.device.type, a.device.index), request)
    assert offs is not None
    offs = offs if offs.is_contiguous() else offs.contiguous()
    return chosen.run(problem, Operands(a, b, scale_a, scale_b, offs, bias), config, None)


def _fake(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, offs: Any, *rest: Any) -> torch.Tensor:
    _bias, out_dtype, _backend = rest
    m, n = a.shape[0], b.shape[-1]
    if b.dim() == 3:
        return a.new_empty((m, n), dtype=out_dtype)
    if offs is None:
        raise ValueError("offs: expected an int32 tensor for a 2-D by 2-D product, got None")
    return a.new_empty((offs.shape[0], m, n), dtype=out_dtype)


# What calls the operator, its arguments in the order of its schema.
operator = define(
    "scaled_grouped_mm",
    by_backend(forward),
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? offs, Tensor? bias, ScalarType out_dtype, "
    "str backend) -> Tensor",
    fake=_fake,
)
