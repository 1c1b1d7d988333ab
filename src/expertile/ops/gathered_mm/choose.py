"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a CPU the reference. On a GPU the first backend, in the order that `ORDER` gives for the mean number of rows of an
expert, that takes the problem. Before the others: of a gated backward with few rows `composed`, with many
`cuda_gather`, of a weight gradient that gathers many `cuda_wgrad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from expertile.device import Device
from expertile.ops.backend import Choice, first_able, invariantly
from expertile.ops.gathered_mm.backend import Backend
from expertile.ops.gathered_mm.backends import BACKENDS
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.hopper.limits import wide_tiles_pay

# (mean rows of an expert up to, backends in order): with few rows a launch costs as much as a kernel runs, and one
# kernel that gathers for itself beats three; with many, the fastest products of the machine do, even on copied rows.
ORDER: tuple[tuple[float, tuple[str, ...]], ...] = (
    (32, ("gluon_gather", "triton_gather", "composed")),
    (math.inf, ("gluon_gather", "composed", "triton_gather")),
)
LAST = "reference"

# BACKWARD with more rows than the first line of `ORDER` and up to these: composed first. A fused epilogue takes as long
# for the rows that fill up a tile as for others, the pointwise kernel has nothing to do for them (H200, 256 rows of
# 2880 x 2880: 1.28 ms against 1.34 to 1.50, and with its copy 1.36 against 1.70; 2048 rows of 4096 x 1024: 4.07
# against 3.95). The copy of rows pays from this many columns on.
COMPOSED_BACKWARD_ROWS = 400
COMPOSED_BACKWARD_COLUMNS = 1536

# With more rows than that cuda_gather takes a backward pass that gathers (H100, 2026-11-25, ms beside gluon_gather:
# 2048 rows of 4096 x 1024 3.6 against 5.0, of 2048 x 768 1.7 against 2.5; 1536 of 1536 x 256 0.44 against 0.63). And an
# up-projection where wide tiles pay: 4096 x 2 x 1024 in 6.4 against 6.9 (in an earlier trial 6.65 and 6.60), 2048 x 2 x
# 768 in 2.6 against 2.9, 768 x 2 x 1024 in 0.43 against 0.48.

# A weight gradient that gathers, cuda_wgrad against composed (H100, 2026-11-25). 128 experts of 2048 rows: 4096 x 1024
# in 3.5 ms against 4.5, 2048 x 4096 in 7.0 against 7.3. Of 1536 rows: 1536 x 256 in 0.33 against 0.76, 512 x 1536 in
# 0.55 against 0.88. Of 256 rows, where tiles of 2880 columns have some to spare: 1.43 against 1.39, 2.70 against 2.53.
WGRAD_ROWS, WGRAD_COLUMNS = 400, 128


@lru_cache(maxsize=4096)
def choose(
    problem: GatherProblem, device: Device, backends: Sequence[Backend] = BACKENDS, batch_invariant: bool = False
) -> Choice[Backend]:
    """The backend and config for a problem. ValueError with every backend's reason when none takes it. Batch-invariant,
    numbers of rows have no say in the backend."""
    names: tuple[str, ...] = (LAST,)
    why = "what runs on a CPU"
    if device.kind == "cuda":
        rows = math.inf if batch_invariant else problem.mean_group
        order = next(order for most, order in ORDER if rows <= most)
        if _composed_backward(problem, rows):
            order = ("composed", *(name for name in order if name != "composed"))
        elif _gathering_wgrad(problem):
            order = ("cuda_wgrad", *order)
        elif _wide_tiles(problem, rows, device):
            order = ("cuda_gather", *order)
        names = (*order, LAST)
        why = f"the first of {', '.join(names)} that takes it"
    known = {backend.name: invariantly(backend) if batch_invariant else backend for backend in backends}
    asked = [known[name] for name in names if name in known]

    return first_able(problem, device, asked, why, verb="takes")


def _composed_backward(problem: GatherProblem, rows: float) -> bool:
    """Whether product and pointwise kernel beat the fused backward of the activation."""
    p = problem
    if p.product is not Product.BACKWARD or not ORDER[0][0] < rows <= COMPOSED_BACKWARD_ROWS:
        return False
    return not p.gathered or p.intermediate >= COMPOSED_BACKWARD_COLUMNS


def _wide_tiles(problem: GatherProblem, rows: float, device: Device) -> bool:
    """Whether `cuda_gather`, whose epilogue works beside the next tile's products, is faster than `gluon_gather`."""
    p = problem
    if rows <= COMPOSED_BACKWARD_ROWS:
        return False
    gated = p.product is Product.GATED and wide_tiles_pay(device)
    return gated or p.product is Product.BACKWARD


def _gathering_wgrad(problem: GatherProblem) -> bool:
    """Whether a weight gradient that gathers fills its tiles."""
    p = problem
    if p.product is not Product.WGRAD or not p.gathered:
        return False
    return p.mean_group >= WGRAD_ROWS and (p.m if p.gathered == "b" else p.n) >= WGRAD_COLUMNS
