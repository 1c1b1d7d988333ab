"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a GPU the first backend of `BACKENDS` that takes the problem without waiting for the device, with the config that its
own model puts first; on a CPU, or where nothing else runs, the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from expertile.device import Device
from expertile.ops.scaled_grouped_mm.backend import Backend
from expertile.ops.scaled_grouped_mm.backends import BACKENDS
from expertile.ops.scaled_grouped_mm.problem import ScaledProblem


@dataclass(frozen=True)
class Choice:
    """The backend and config to run, a sentence saying why, and why each earlier one was passed over."""

    backend: Backend
    config: Any
    why: str
    refused: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=4096)
def choose(problem: ScaledProblem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice:
    """The backend and config for a problem. ValueError with every backend's reason when none supports it."""
    refused: list[tuple[str, str]] = []
    waiting: list[Backend] = []
    for backend in backends:
        reason = backend.supports(problem, device)
        if reason is not None:
            refused.append((backend.name, reason))
        elif backend.reads_offs_on_host and problem.group_sizes is None:
            waiting.append(backend)
        else:
            return _choice(backend, problem, device, "the first that takes it", refused)
    if waiting:
        return _choice(waiting[0], problem, device, "no other takes it; it waits for the GPU to read offs", refused)
    raise ValueError("backend: none supports this problem (" + "; ".join(f"{b}: {r}" for b, r in refused) + ")")


def _choice(
    backend: Backend, problem: ScaledProblem, device: Device, why: str, refused: Sequence[tuple[str, str]]
) -> Choice:
    config = backend.configs(problem, device)[0]
    return Choice(backend, config, f"{backend.name}: {why}", tuple(refused))
