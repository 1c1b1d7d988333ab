"""grouped_mm without autograd: tensors -> Problem -> choose (both once for shapes seen before) -> backend.run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops._select import NOT_INVARIANT, invariantly, selected
from expertile.ops._select import device_of as _device
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.backends import by_name
from expertile.ops.grouped_mm.choose import choose, choose_invariant, rounded
from expertile.ops.grouped_mm.problem import Problem, described, in_standard_form, tf32_allowed


def select(
    problem: Problem, device: Device, backend: str, config: Any, batch_invariant: bool = False
) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    if batch_invariant:
        return _select_invariant(problem, device, backend, config)
    # Working configs out takes longer than a call: they are kept for rounded problems.
    return selected(
        backend, config, choose=lambda: choose(problem, device), by_name=by_name,
        refused=lambda b: b.supports(problem, device), default=lambda b: b.configs(rounded(problem), device)[0],
    )  # fmt: skip


def _select_invariant(problem: Problem, device: Device, backend: str, config: Any) -> tuple[Backend, Any]:
    """`select` among batch-invariant configs."""

    def refused(b: Backend) -> str | None:
        reason = b.supports(problem, device)
        if reason is None and not b.configs(rounded(problem), device):
            return NOT_INVARIANT
        return reason

    found = selected(
        backend, config, choose=lambda: choose_invariant(problem, device), by_name=lambda n: invariantly(by_name(n)),
        refused=refused, default=lambda b: b.configs(rounded(problem), device)[0],
    )  # fmt: skip
    if config is not None and config not in found[0].configs(problem, device):
        raise ValueError(f"config: expected one of {backend}'s batch-invariant configs, got {config!r}")
    return found


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    if batch_invariant:
        a = in_standard_form(a)
    if config is None and (offs is None or getattr(offs, "is_cuda", False)):
        problem, chosen, config = _planned(
            described(a), described(b), described(offs), described(bias), out_dtype,
            a.dtype is torch.float32 and tf32_allowed(), a.device, backend, batch_invariant,
        )  # fmt: skip
    else:  # the values of offs are part of the problem, or somebody tries a config
        problem = Problem.from_tensors(a, b, offs, bias, out_dtype)
        chosen, config = select(problem, _device(a.device.type, a.device.index), backend, config, batch_invariant)
    if offs is not None and not offs.is_contiguous():
        offs = offs.contiguous()
    return chosen.run(problem, Operands(a, b, offs, bias), config, None)


@lru_cache(maxsize=4096)
def _planned(
    a: tuple[Any, ...] | None, b: tuple[Any, ...] | None, offs: tuple[Any, ...] | None, bias: tuple[Any, ...] | None,
    out_dtype: torch.dtype | None, allow_tf32: bool, device: torch.device, backend: str, batch_invariant: bool,
) -> tuple[Problem, Backend, Any]:  # fmt: skip
    """Problem, backend and config for tensors that are `described` so, whatever their values."""
    problem = Problem.from_descriptions(a, b, offs, bias, out_dtype, allow_tf32)
    return problem, *select(problem, _device(device.type, device.index), backend, None, batch_invariant)
