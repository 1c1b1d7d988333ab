"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a CPU the reference. On a GPU the first backend, in the order that `ORDER` gives for the mean number of rows of an
expert, that takes the problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from expertile.device import Device
from expertile.ops._select import NOT_INVARIANT, invariantly
from expertile.ops.gathered_mm.backend import Backend
from expertile.ops.gathered_mm.backends import BACKENDS
from expertile.ops.gathered_mm.problem import GatherProblem, Product

# (mean rows of an expert up to, backends in order): with few rows a launch costs as much as a kernel runs, and one
# kernel that gathers for itself beats three; with many, the fastest products of the machine do, even on copied rows.
ORDER: tuple[tuple[float, tuple[str, ...]], ...] = (
    (32, ("gluon_gather", "triton_gather", "composed")),
    (math.inf, ("gluon_gather", "composed", "triton_gather")),
)
LAST = "reference"

# Taken only when asked for by name: on an H200 gluon_gather's weight gradient makes 392 TFLOP/s where copying the rows
# into order and multiplying the copy makes 587 (128 experts of 2048 rows, 2048 x 4096).
BY_NAME_ONLY: frozenset[tuple[str, Product]] = frozenset({("gluon_gather", Product.WGRAD)})


@dataclass(frozen=True)
class Choice:
    """The backend and config to run, a sentence saying why, and why each earlier one was passed over."""

    backend: Backend
    config: Any
    why: str
    refused: tuple[tuple[str, str], ...] = ()


def refusal(backend: Backend, problem: GatherProblem, device: Device, batch_invariant: bool) -> str | None:
    """Why the backend cannot take the problem, None if it can; made by `invariantly` where batch_invariant says so."""
    reason = backend.refuses(problem, device)
    if reason is None and batch_invariant and not backend.configs(problem, device):
        return NOT_INVARIANT
    return reason


@lru_cache(maxsize=4096)
def choose(
    problem: GatherProblem, device: Device, backends: Sequence[Backend] = BACKENDS, batch_invariant: bool = False
) -> Choice:
    """The backend and config for a problem. ValueError with every backend's reason when none takes it. Batch-invariant,
    numbers of rows have no say in the backend."""
    known = {backend.name: invariantly(backend) if batch_invariant else backend for backend in backends}
    names: tuple[str, ...] = (LAST,)
    if device.kind == "cuda":
        rows = math.inf if batch_invariant else problem.mean_group
        names = (*next(order for most, order in ORDER if rows <= most), LAST)
    refused: list[tuple[str, str]] = []
    for name in names:
        backend = known.get(name)
        reason = "is not there" if backend is None else refusal(backend, problem, device, batch_invariant)
        if reason is None and (name, problem.product) in BY_NAME_ONLY:
            reason = "slower than composed, so only when asked for by name"
        if backend is None or reason is not None:
            refused.append((name, str(reason)))
            continue
        what = f"the first of {', '.join(names)} that takes it" if device.kind == "cuda" else "what runs on a CPU"
        return Choice(backend, backend.configs(problem, device)[0], f"{name}: {what}", tuple(refused))
    raise ValueError("backend: none takes this problem (" + "; ".join(f"{b}: {r}" for b, r in refused) + ")")
