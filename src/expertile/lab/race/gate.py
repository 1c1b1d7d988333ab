"""The gate: a backend that computes something else has no time.

Two calls on random inputs are compared with the reference in higher precision (TF32 off). Memory of the outputs' sizes
is filled with NaN in between, so that an element that is never written is likely to show. A rival that can write into a
given tensor gets one full of NaN, and what lies past offs[-1] must still be NaN afterwards.

rel_error = ||out - ref||_F / ||ref||_F finds a systematic fault, max_error a single wrong element: max |out - ref| /
max |ref|, or block by block |out - ref| / (|ref| + rms(ref of the block)). The worst output and call count.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertile.lab.race.operator import ROUNDOFF, TORCH_DTYPES, Blocks, Call, Part, Rival, Verdict, Workload

_ROUNDOFF = {TORCH_DTYPES[key]: roundoff for key, roundoff in ROUNDOFF.items()}
PART_ELEMENTS = 1 << 25  # 128 MB of float32: what one step of the comparison holds a few times over


class Limits(NamedTuple):
    """The largest relative Frobenius error and the largest error of an element that still count as right."""

    rel_error: float
    max_error: float


def limits(dtype_key: str, out_dtype: torch.dtype, k: int) -> Limits:
    """What a right kernel may differ by: inputs of `dtype_key` (a key of `Device.peak_flops`), sums of `k` products.

    rel_error is the sum of
    - rounding the result, at most u = 2^-8 (bf16), 2^-11 (fp16), 2^-24 (fp32) of each element. On random data it
      is 0.42 u, which leaves room for rounding partial sums (split K);
    - float32 accumulation: 4 sqrt(k) 2^-24 for a random walk of roundings, and for tensor cores, which truncate once
      per 16 products towards zero, another k/8 2^-24;
    - TF32 inputs: 2^-9, two operands cut to 11 bits each, twice over.
    max_error is 8 times that: a partial sum that is rounded once more may be several times as large as the result.
    ValueError for a dtype without a stated limit."""
    if dtype_key not in ("fp32", "tf32", "fp16", "bf16"):
        raise ValueError(f"dtype_key: expected fp32, tf32, fp16 or bf16, got {dtype_key!r}")
    if out_dtype not in _ROUNDOFF:
        raise ValueError(f"out_dtype: expected one of {', '.join(map(str, _ROUNDOFF))}, got {out_dtype}")
    accumulation = 4.0 * math.sqrt(max(k, 1)) * 2.0**-24
    if dtype_key != "fp32":
        accumulation += k / 8 * 2.0**-24
    rel = _ROUNDOFF[out_dtype] + accumulation + (2.0**-9 if dtype_key == "tf32" else 0.0)
    return Limits(rel, 8.0 * rel)


def check_parts(out: Tensor, parts: Iterable[Part], limit: tuple[float, float]) -> Verdict:
    """Compare `out[where]` with what it must be, for every (where, reference) in `parts`."""
    found = _errors(((out[where], ref) for where, ref in parts), out.device, by_block=True)
    if found.bad:
        return _wrong(f"{found.bad} elements are NaN, infinite or were never written")
    return _within(found.rel, found.worst, limit)


def compare(outputs: Sequence[Tensor], reference: Sequence[Tensor] | Blocks, tolerance: tuple[float, float]) -> Verdict:
    """Hold each of `outputs` against the reference of the same shape; NaN or infinity never passes. `tolerance` is what
    `rel_error` and `max_error` may be at most."""
    if not isinstance(outputs, tuple | list) or not all(isinstance(x, Tensor) for x in outputs):
        what = outputs[0] if isinstance(reference, Blocks) and isinstance(outputs, tuple) else outputs
        expected = "a tensor" if isinstance(reference, Blocks) else "a tuple of tensors"
        return _wrong(f"result: expected {expected}, got {type(what).__name__}")
    if isinstance(reference, Blocks):
        return _compare_blocks(outputs[0], reference, tolerance)
    if len(outputs) != len(reference):
        return _wrong(f"result: expected {len(reference)} tensors, got {len(outputs)}")
    rel = worst = 0.0
    for index, (out, ref) in enumerate(zip(outputs, reference, strict=True)):
        where = f"output {index}: " if len(reference) > 1 else ""
        if out.shape != ref.shape:
            return _wrong(f"{where}expected shape {list(ref.shape)}, got {list(out.shape)}")
        pieces = (x.reshape(-1).split(PART_ELEMENTS) for x in (out, ref))
        bad, own_rel, own_worst = _errors(zip(*pieces, strict=True), ref.device)
        if bad:
            return _wrong(f"{where}{bad} of {out.numel()} elements are NaN, infinite or were never written")
        rel, worst = max(rel, own_rel), max(worst, own_worst)
        own = _within(own_rel, own_worst, tolerance)
        if not own.ok:
            return Verdict(False, rel, worst, f"{where}{own.reason}")
    return Verdict(True, rel, worst)


def judge(
    rival: Rival,
    workload: Workload,
    inputs: tuple[Tensor, ...],
    reference: Sequence[Tensor] | Blocks,
    tolerance: tuple[float, float],
) -> Verdict:
    """Judge `rival` on `inputs`; its exceptions pass through. One that changes the inputs is wrong."""
    before = [_fingerprint(x) for x in inputs]
    with torch.enable_grad():
        call = rival.bind(workload, inputs)
        into = None if rival.bind_out is None else rival.bind_out(workload, inputs)
    found = judge_calls(call, reference, tolerance, into, inputs[0].device)
    if found.ok and [_fingerprint(x) for x in inputs] != before:
        return Verdict(False, found.rel_error, found.max_error, "changes its inputs", found.checked)
    return found


def judge_calls(
    call: Call,
    reference: Sequence[Tensor] | Blocks,
    tolerance: tuple[float, float],
    into: Callable[[Tensor], Any] | None = None,
    device: torch.device | None = None,
) -> Verdict:
    """Judge two calls: `call` twice, or `into` a tensor full of NaN on `device` and then `call`."""
    with torch.no_grad():
        if into is not None and isinstance(reference, Blocks):
            out = torch.full(reference.shape, math.nan, dtype=reference.dtype, device=device)
            into(out)
            first = _compare_blocks(out, reference, tolerance, left_alone=True)
            outputs: tuple[Tensor, ...] = (out,)
            del out
        else:
            outputs = call()
            first = compare(outputs, reference, tolerance)
        if not first.ok:
            return first
        # The allocator hands this memory to the next call that asks for as much: an unwritten element shows as NaN.
        poison = [torch.full_like(x, math.nan) for x in outputs if x.is_floating_point()]
        del outputs, poison
        second = compare(call(), reference, tolerance)
    if not second.ok:
        how = "called again" if into is None else "without out"
        return Verdict(False, second.rel_error, second.max_error, f"{how}: {second.reason}", second.checked)
    rel, worst = max(first.rel_error, second.rel_error), max(first.max_error, second.max_error)
    return Verdict(True, rel, worst, "", second.checked)


def _compare_blocks(out: Tensor, ref: Blocks, tolerance: tuple[float, float], left_alone: bool = False) -> Verdict:
    """`left_alone`: what a call must not write still has to be NaN."""
    if tuple(out.shape) != ref.shape or out.dtype != ref.dtype:
        return _wrong(f"result: expected {list(ref.shape)} {ref.dtype}, got {list(out.shape)} {out.dtype}")
    live, tail = ref.split(out)
    unwritten = sum(int((~torch.isfinite(block)).sum()) for block in _row_blocks(live))
    if unwritten:
        return _wrong(f"{unwritten} of {live.numel()} elements are NaN, infinite or were never written")
    touched = int((~torch.isnan(tail)).sum()) if left_alone and tail.numel() else 0
    if touched:
        return _wrong(f"{touched} elements past offs[-1] were overwritten")
    return replace(check_parts(out, ref.parts(), tolerance), checked=ref.checked)


def _row_blocks(x: Tensor) -> Iterator[Tensor]:
    """Slices of `x` along its first dimension, of a bounded number of elements."""
    rows = max(1, PART_ELEMENTS // max(math.prod(x.shape[1:]), 1))
    for start in range(0, x.shape[0], rows):
        yield x[start : start + rows]


class _Errors(NamedTuple):
    """Elements that are not finite, the relative Frobenius error, and the largest error of an element."""

    bad: int
    rel: float
    worst: float


def _errors(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device, by_block: bool = False) -> _Errors:
    """Of (result, reference), piece by piece. An element's error is relative to the largest entry of all references, or
    `by_block` to its own reference and the root mean square of the block."""
    err2, ref2, largest, scale = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(4))
    bad = torch.zeros((), dtype=torch.int64, device=device)
    for out, want in pairs:
        got = out.to(want.dtype)
        if not got.numel():
            continue
        bad += (~torch.isfinite(got)).sum()
        diff = (got - want).abs_()
        square = want.square().sum(dtype=torch.float64)
        err2 += diff.square().sum(dtype=torch.float64)
        ref2 += square
        if by_block:
            size = want.abs() + (square / want.numel()).sqrt().to(want.dtype)
            # Where a whole block must be zero, nothing but zero is right.
            diff = torch.where(size > 0, diff / size, torch.where(diff > 0, math.inf, 0.0))
            diff = diff.nan_to_num(nan=math.inf, posinf=math.inf)
        else:
            scale = torch.maximum(scale, want.abs().max().double())
        largest = torch.maximum(largest, diff.max().double())
    worst = largest.item() if by_block else _ratio(largest.item(), scale.item())
    return _Errors(int(bad), _ratio(math.sqrt(err2.item()), math.sqrt(ref2.item())), worst)


def _ratio(error: float, size: float) -> float:
    """Where all must be zero, nothing but zero is right."""
    return error / size if size else (math.inf if error else 0.0)


def _within(rel: float, worst: float, limit: tuple[float, float]) -> Verdict:
    names = ("relative error", "largest error of an element")
    for error, allowed, what in zip((rel, worst), limit, names, strict=True):
        if not error <= allowed:
            return Verdict(False, rel, worst, f"{what} {error:.2e}, allowed {allowed:.2e}")
    return Verdict(True, rel, worst)


def _wrong(reason: str) -> Verdict:
    return Verdict(False, math.inf, math.inf, reason)


def _fingerprint(x: Tensor) -> tuple[float, float]:
    """Two sums that hardly any overwriting leaves alike."""
    if x.is_floating_point() and x.element_size() > 1:
        with torch.no_grad():
            return float(x.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(x, dtype=torch.float64))
    flat = x.reshape(-1).view(torch.uint8) if x.element_size() == 1 else x.reshape(-1)
    total = squares = 0.0
    for start in range(0, flat.numel(), PART_ELEMENTS):
        part = flat[start : start + PART_ELEMENTS].double()
        total, squares = total + float(part.sum()), squares + float(part.square().sum())
    return total, squares


@contextmanager
def full_precision(precision: str = "highest") -> Iterator[None]:
    """float32 products without TF32 (or bfloat16 on a CPU) inside, whatever was set outside; or as `precision` says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
