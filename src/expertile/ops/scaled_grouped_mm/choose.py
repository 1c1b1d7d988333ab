"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a GPU the first backend of `BACKENDS` that takes the problem without waiting for the device, with the config that its
own model puts first; on a CPU, or where nothing else runs, the loop. `cuda_fp8` runs by its name alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from expertile.device import Device
from expertile.ops.backend import Choice, first_able
from expertile.ops.scaled_grouped_mm.backend import Backend
from expertile.ops.scaled_grouped_mm.backends import BACKENDS, cuda_fp8
from expertile.ops.scaled_grouped_mm.problem import ScaledProblem


def _unwanted(backend: Backend) -> str | None:
    slower = "runs by its name alone: 0.93 of gluon_fp8's speed in the record of fp8-large"
    return slower if backend is cuda_fp8.BACKEND else None


@lru_cache(maxsize=4096)
def choose(problem: ScaledProblem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice[Backend]:
    """The backend and config for a problem. ValueError with every backend's reason when none supports it."""
    return first_able(problem, device, backends, "the first that takes it", _unwanted)
