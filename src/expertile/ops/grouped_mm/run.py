"""grouped_mm without autograd: tensors -> Problem -> choose (both once for shapes seen before) -> backend.run.

With backend="measure" the first call with a problem races the candidates (`ops.measure`) in place of choosing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops import backend
from expertile.ops.backend import AUTO, Request
from expertile.ops.backend import device_of as _device
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.backends import by_name
from expertile.ops.grouped_mm.choose import choose, choose_invariant, promising, rounded
from expertile.ops.grouped_mm.problem import Problem, described, in_standard_form, tf32_allowed
from expertile.ops.measure import MEASURE, winner


def select(problem: Problem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    # Working configs out takes longer than a call: they are kept for rounded problems.
    return backend.select(
        problem, device, request, by_name, choose_invariant if request.batch_invariant else choose, rounded
    )


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    request: Request = AUTO,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    if measures := request.backend == MEASURE:
        if request.config is not None or request.batch_invariant:
            raise ValueError(
                "config, batch_invariant: expected None and False with backend='measure', got other values"
            )
        request = AUTO
    if request.batch_invariant:
        a = in_standard_form(a)
    if request.config is None and (offs is None or getattr(offs, "is_cuda", False)):
        problem, chosen, config = _planned(
            described(a),
            described(b),
            described(offs),
            None if bias is None else described(bias),
            out_dtype,
            a.dtype is torch.float32 and tf32_allowed(),
            a.device,
            request,
        )
    else:  # the values of offs are part of the problem, or the caller names a config
        problem = Problem.from_tensors(a, b, offs, bias, out_dtype)
        chosen, config = select(problem, _device(a.device.type, a.device.index), request)
    if out is not None and (tuple(out.shape) != tuple(problem.out_shape) or out.device != a.device):
        expected = f"{list(problem.out_shape)} on {a.device}"
        raise ValueError(f"out: expected {expected}, got {list(out.shape)} on {out.device}")
    if offs is not None and not offs.is_contiguous():
        offs = offs.contiguous()
    operands = Operands(a, b, offs, bias)
    if measures and a.is_cuda:
        device = _device(a.device.type, a.device.index)
        fastest = winner(
            ("grouped_mm", rounded(problem), device),
            lambda: promising(problem, device),
            lambda rival: rival.backend.run(problem, operands, rival.config, None),
        )
        chosen, config = fastest.backend, fastest.config
    if accumulate and out is not None:
        if chosen.add is None:
            return out.add_(chosen.run(problem, operands, config, None))
        return chosen.add(problem, operands, config, out)
    return chosen.run(problem, operands, config, out)


@lru_cache(maxsize=4096)
def _planned(
    a: tuple[Any, ...] | None,
    b: tuple[Any, ...] | None,
    offs: tuple[Any, ...] | None,
    bias: tuple[Any, ...] | None,
    out_dtype: torch.dtype | None,
    allow_tf32: bool,
    device: torch.device,
    request: Request,
) -> tuple[Problem, Backend, Any]:
    """Problem, backend and config for tensors that are `described` so, whatever their values."""
    problem = Problem.from_descriptions(a, b, offs, bias, out_dtype, allow_tf32)
    return problem, *select(problem, _device(device.type, device.index), request)
