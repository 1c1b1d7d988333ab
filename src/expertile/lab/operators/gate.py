"""The gate of operators with any number of outputs: each is held against the reference, twice.

rel_error = ||out - ref||_F / ||ref||_F, and max_error = max |out - ref| / max |ref|; of several outputs, or several
calls, the worst counts. Between the two calls memory of the outputs' sizes is filled with NaN and given back, so that
an element which nobody writes is likely to show; a rival that adds to what it left behind shows for certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from expertile.lab.operators.base import OpWorkload, Rival
from expertile.lab.race.gate import Gate

_PART = 1 << 25  # elements compared in one step


def judge(
    rival: Rival,
    workload: OpWorkload,
    inputs: tuple[Tensor, ...],
    reference: Sequence[Tensor],
    tolerance: tuple[float, float],
) -> Gate:
    """Judge `rival` on `inputs`; its exceptions pass through. One that changes the inputs is wrong."""
    before = [_fingerprint(x) for x in inputs]
    with torch.enable_grad():
        call = rival.bind(workload, inputs)
    with torch.no_grad():
        outputs = call()
        first = compare(outputs, reference, tolerance)
        if not first.ok:
            return first
        poison = [torch.full_like(x, math.nan) for x in outputs if x.is_floating_point()]
        del outputs, poison
        second = compare(call(), reference, tolerance)
    if not second.ok:
        return Gate(False, second.rel_error, second.max_error, f"called again: {second.reason}")
    if [_fingerprint(x) for x in inputs] != before:
        return Gate(False, second.rel_error, second.max_error, "changes its inputs")
    return Gate(True, max(first.rel_error, second.rel_error), max(first.max_error, second.max_error))


def compare(outputs: Sequence[Tensor], reference: Sequence[Tensor], tolerance: tuple[float, float]) -> Gate:
    """Hold each of `outputs` against the reference of the same shape; NaN or infinity never passes.

    `tolerance` is what `rel_error` and `max_error` may be at most.
    """
    if not isinstance(outputs, tuple | list) or not all(isinstance(x, Tensor) for x in outputs):
        return _bad(f"result: expected a tuple of tensors, got {type(outputs).__name__}")
    if len(outputs) != len(reference):
        return _bad(f"result: expected {len(reference)} tensors, got {len(outputs)}")
    rel = worst = 0.0
    for index, (out, ref) in enumerate(zip(outputs, reference, strict=True)):
        where = f"output {index}: " if len(reference) > 1 else ""
        if out.shape != ref.shape:
            return _bad(f"{where}expected shape {list(ref.shape)}, got {list(out.shape)}")
        bad, own_rel, own_worst = _errors(out, ref)
        if bad:
            return _bad(f"{where}{bad} of {out.numel()} elements are NaN, infinite or were never written")
        rel, worst = max(rel, own_rel), max(worst, own_worst)
        for error, allowed, what in zip(
            (own_rel, own_worst), tolerance, ("relative error", "largest error of an element"), strict=True
        ):
            if not error <= allowed:
                return Gate(False, rel, worst, f"{where}{what} {error:.2e}, allowed {allowed:.2e}")
    return Gate(True, rel, worst)


def _errors(out: Tensor, ref: Tensor) -> tuple[int, float, float]:
    """(elements that are not finite, relative Frobenius error, largest error over the largest entry)."""
    out, ref = out.reshape(-1), ref.reshape(-1)
    err2, ref2, largest, scale = (torch.zeros((), dtype=torch.float64, device=ref.device) for _ in range(4))
    bad = torch.zeros((), dtype=torch.int64, device=ref.device)
    for start in range(0, ref.numel(), _PART):
        want = ref[start : start + _PART]
        got = out[start : start + _PART].to(want.dtype)
        bad += (~torch.isfinite(got)).sum()
        diff = (got - want).abs_()
        err2 += diff.square().sum(dtype=torch.float64)
        ref2 += want.square().sum(dtype=torch.float64)
        largest = torch.maximum(largest, diff.max().double())
        scale = torch.maximum(scale, want.abs().max().double())
    return int(bad), _ratio(math.sqrt(err2.item()), math.sqrt(ref2.item())), _ratio(largest.item(), scale.item())


def _ratio(error: float, size: float) -> float:
    """Where all must be zero, nothing but zero is right."""
    return error / size if size else (math.inf if error else 0.0)


def _bad(reason: str) -> Gate:
    return Gate(False, math.inf, math.inf, reason)


def _fingerprint(x: Tensor) -> tuple[float, float]:
    """Two sums that hardly any overwriting leaves alike."""
    if x.is_floating_point() and x.element_size() > 1:
        with torch.no_grad():
            return float(x.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(x, dtype=torch.float64))
    flat = x.reshape(-1).view(torch.uint8) if x.element_size() == 1 else x.reshape(-1)
    total = squares = 0.0
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART].double()
        total, squares = total + float(part.sum()), squares + float(part.square().sum())
    return total, squares
