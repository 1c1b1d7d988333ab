"""What `gluon_int4` and `gluon_w4a8` share on the host: what they refuse, a call, and how K is split."""

from collections.abc import Callable, Iterable
from dataclasses import replace
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
    """`run` of the backend whose `prepared(problem, operands, config, target)` gives the launch that writes `target`,
    the output or the partial sums [split_k, M, N] of a split K, and what it runs with: the device, the tensors of its
    descriptors, and those of its pointers."""

    def run(problem: WeightOnlyProblem, operands: Operands, config: Any, out: torch.Tensor | None) -> torch.Tensor:
        """Compute into `out` (rows past offs[-1] are left alone) or a new tensor; queues one kernel, or two for a split
        K, and waits for nothing."""
        p = problem

        def queue(target: torch.Tensor) -> None:
            parts = target
            if config.split_k > 1:
                parts = target.new_empty((config.split_k, p.m, p.n), dtype=torch.float32)
            launch, device, tensors, pointers = prepared(p, operands, config, parts)
            launch.run(device, tensors, pointers)
            if config.split_k > 1:
                reduce.run(parts, operands.offs, target)

        return filled(p, operands, out, queue)

    return run


SPLITS = (1, 2, 3, 4, 6, 8)


def best_splits(ordered: Iterable[Any]) -> tuple[Any, ...]:
    """Of configs that differ in nothing but `split_k`, and what is fitted to it, the first."""
    best: dict[Any, Any] = {}
    for config in ordered:
        best.setdefault(replace(config, split_k=1, num_stages=0, store_parts=2), config)
    return tuple(best.values())
