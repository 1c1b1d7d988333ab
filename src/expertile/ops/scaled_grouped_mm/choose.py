"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a GPU the first backend of `BACKENDS` that takes the problem without waiting for the device, with the config that its
own model puts first; on a CPU, or where nothing else runs, the loop. `cuda_fp8` says itself where `gluon_fp8` wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from expertile.device import Device
from expertile.ops.backend import Choice, first_able
from expertile.ops.scaled_grouped_mm.backend import Backend
from expertile.ops.scaled_grouped_mm.backends import BACKENDS, cuda_fp8
from expertile.ops.scaled_grouped_mm.problem import ScaledProblem


@lru_cache(maxsize=4096)
def choose(problem: ScaledProblem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice[Backend]:
    """The backend and config for a problem. ValueError with every backend's reason when none supports it."""

    def unwanted(backend: Backend) -> str | None:
        beaten = backend is cuda_fp8.BACKEND and any(b.name == "gluon_fp8" for b in backends)
        return cuda_fp8.slower(problem, device) if beaten else None

    return first_able(problem, device, backends, "the first that takes it", unwanted)
