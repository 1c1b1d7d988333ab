"""What `gluon_int4` and `gluon_w4a8` share on the host: what they refuse, and a call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.tail import filled
from expertile.ops.hopper import limits, reduce
from expertile.ops.launch.launch import Launch
from expertile.ops.weight_only_mm.problem import Operands, Run, WeightOnlyProblem

_MAX_GROUPS = 512


def refusal(p: WeightOnlyProblem, device: Device) -> str | None:
    """The reason why neither kernel can compute `p` on `device`, or None. Slices of a split K share the descriptors'
    rows."""
    reason = limits.refusal(p, device, _MAX_GROUPS, limits.MAX_ROWS // 8)
    if reason is None and (p.a_strides[1] != 1 or p.a_strides[0] <= 0 or p.a_strides[0] * p.dtype.itemsize % 16):
        return f"TMA needs a with a contiguous K and rows that are multiples of 16 bytes apart (strides {p.a_strides})"
    return reason


def runner(prepared: Callable[..., tuple[Launch, int, Any, Any]]) -> Run:
    """`run` of the backend whose launches `prepared` gives (`reduce.queue`)."""

    def run(problem: WeightOnlyProblem, operands: Operands, config: Any, out: torch.Tensor | None) -> torch.Tensor:
        """Compute into `out` (rows past offs[-1] are left alone) or a new tensor; queues one kernel, or two for a split
        K, and waits for nothing."""
        return filled(problem, operands, out, partial(reduce.queue, prepared, problem, operands, config))

    return run
