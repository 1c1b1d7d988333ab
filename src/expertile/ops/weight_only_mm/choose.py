"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a GPU the first backend of `BACKENDS` that takes the problem without waiting for the device, with the config that its
own model puts first; unless groups have so many rows that dequantising first costs less than unpacking for every tile
of rows (`DEQUANT_FROM_ROWS`). On a CPU the loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from expertile.device import Device
from expertile.ops.backend import Choice, Estimate, first_able
from expertile.ops.weight_only_mm.backend import Backend
from expertile.ops.weight_only_mm.backends import BACKENDS, by_name
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem

# Mean rows per group from which `dequant` beats a backend. Dequantising moves 4.5 bytes a value whatever the rows
# (1.1 ps at 4.2 TB/s), and a row costs 2 FLOP a value. On an H200 (preset int4-models) gluon_int4 stays ahead of it up
# to the 2048 rows measured, triton_int4 up to 512.
DEQUANT_FROM_ROWS: Mapping[str, float] = MappingProxyType({"triton_int4": 768.0})


@lru_cache(maxsize=4096)
def choose(problem: WeightOnlyProblem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice[Backend]:
    """The backend and config for a problem. ValueError with every backend's reason when none supports it."""
    # A CPU dequantises an expert at a time, into float32, rather than all of them.
    asked = backends if device.kind == "cuda" else (by_name("loop"),)
    choice = first_able(problem, device, asked, "the first that takes it")
    name, rows, dense = choice.backend.name, problem.mean_group, by_name("dequant")
    limit = DEQUANT_FROM_ROWS.get(name, math.inf)
    if rows < limit or dense.supports(problem, device) is not None:
        return choice
    slower = Estimate(name, None, f"groups of {rows:.0f} rows: from {limit:.0f} on dequant is faster")
    why = f"dequant: {rows:.0f} rows per group pay for dequantised weights"
    return Choice(dense, dense.configs(problem, device)[0], why, (*choice.estimates, slower))
