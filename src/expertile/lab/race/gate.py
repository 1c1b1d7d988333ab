"""The gate: whoever computes something else has no time.

A result is compared with a product in higher precision (float32, float64 for float32 inputs, TF32 off) on
random inputs. The output is filled with NaN before, so that an element nobody wrote fails, and what lies past
offs[-1] must still be NaN afterwards. Two figures decide:

rel_error = ||out - ref||_F / ||ref||_F finds a systematic fault (a wrong accumulator, a swapped group);
max_error = max |out - ref| / (|ref| + rms(ref of the group)) finds a single wrong element among millions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.problem import Layout, Problem

# Largest relative error of one rounding to nearest (unit roundoff): 2^-(significand bits).
_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_PART_ELEMENTS = 1 << 25  # 128 MB of float32: what one step of the comparison holds a few times over
_FLOPS = {"cuda": 2e13, "cpu": 2e11}  # above that, rows are sampled: below a second on either


@dataclass(frozen=True)
class Limits:
    """The largest relative Frobenius error and the largest error of an element that still count as right."""

    rel_error: float
    max_error: float


@dataclass(frozen=True)
class Gate:
    """Verdict on one result. `checked` is the share of elements compared; all are checked for being
    written.
    """

    ok: bool
    rel_error: float
    max_error: float
    reason: str = ""
    checked: float = 1.0


# One block of the result: where it lies in out, and what it must be.
Part = tuple[tuple[Any, ...], torch.Tensor]


def limits(dtype_key: str, out_dtype: torch.dtype, k: int) -> Limits:
    """What a right kernel may differ by: inputs of `dtype_key` (a key of `Device.peak_flops`), sums of `k`
    products.

    rel_error is the sum of
    - rounding the result: at most u = 2^-8 (bf16), 2^-11 (fp16), 2^-24 (fp32) of each element. On random data
    it is
      0.42 u, which leaves room for one more rounding of partial sums (split K);
    - float32 accumulation: 4 sqrt(k) 2^-24 for a random walk of roundings, and for tensor cores, which
    truncate once
      per 16 products towards zero, another k/8 2^-24;
    - TF32 inputs: 2^-9, two operands cut to 11 bits each, twice over.
    max_error is 8 times that: a partial sum that is rounded once more may be several times as large as the
    result. Raises ValueError for a dtype without a stated limit.
    """
    if dtype_key not in ("fp32", "tf32", "fp16", "bf16"):
        raise ValueError(f"dtype_key: expected fp32, tf32, fp16 or bf16, got {dtype_key!r}")
    if out_dtype not in _ROUNDOFF:
        raise ValueError(f"out_dtype: expected one of {', '.join(map(str, _ROUNDOFF))}, got {out_dtype}")
    accumulation = 4.0 * math.sqrt(max(k, 1)) * 2.0**-24
    if dtype_key != "fp32":
        accumulation += k / 8 * 2.0**-24
    rel = _ROUNDOFF[out_dtype] + accumulation + (2.0**-9 if dtype_key == "tf32" else 0.0)
    return Limits(rel, 8.0 * rel)


def check(out: torch.Tensor, reference: torch.Tensor, dtype_key: str, k: int) -> Gate:
    """Compare `out` with `reference` of the same shape (float32 or float64), block by block of rows.

    `dtype_key` and `k` as in `limits`. NaN or infinity in `out` never passes.
    """
    if out.shape != reference.shape:
        return Gate(False, math.inf, math.inf, f"shape: expected {list(reference.shape)}, got {list(out.shape)}")
    if out.dim() < 2:
        out, reference = out.reshape(1, -1), reference.reshape(1, -1)
    parts: list[Part] = []
    for index in _leading(tuple(out.shape[:-2])):
        rows = max(1, _PART_ELEMENTS // max(out.shape[-1], 1))
        for start in range(0, out.shape[-2], rows):
            where: tuple[Any, ...] = (*index, slice(start, min(start + rows, out.shape[-2])))
            parts.append((where, reference[where]))
    return check_parts(out, parts, limits(dtype_key, out.dtype, k))


def check_parts(out: torch.Tensor, parts: Iterable[Part], limit: Limits) -> Gate:
    """Compare `out[where]` with what it must be, for every (where, reference) in `parts`."""
    device = out.device
    err2, ref2, largest = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
    bad = torch.zeros((), dtype=torch.int64, device=device)
    for where, ref in parts:
        got = out[where].to(ref.dtype)
        if not got.numel():
            continue
        bad += (~torch.isfinite(got)).sum()
        diff = (got - ref).abs_()
        part_ref2 = ref.square().sum(dtype=torch.float64)
        err2 += diff.square().sum(dtype=torch.float64)
        ref2 += part_ref2
        scale = ref.abs() + (part_ref2 / ref.numel()).sqrt().to(ref.dtype)
        # Where a whole block must be zero, nothing but zero is right.
        relative = torch.where(scale > 0, diff / scale, torch.where(diff > 0, math.inf, 0.0))
        largest = torch.maximum(largest, relative.nan_to_num(nan=math.inf, posinf=math.inf).max().double())
    if bad.item():
        return Gate(False, math.inf, math.inf, f"{int(bad)} elements are NaN, infinite or were never written")
    rel = math.sqrt(err2.item() / ref2.item()) if ref2.item() else (math.inf if err2.item() else 0.0)
    worst = largest.item()
    if not rel <= limit.rel_error:
        return Gate(False, rel, worst, f"relative error {rel:.2e}, allowed {limit.rel_error:.2e}")
    if not worst <= limit.max_error:
        return Gate(False, rel, worst, f"largest error of an element {worst:.2e}, allowed {limit.max_error:.2e}")
    return Gate(True, rel, worst)


@dataclass(frozen=True)
class Reference:
    """What a problem's result must be, held once or (where it is large) computed anew for each comparison."""

    parts: Callable[[], Iterable[Part]]
    limit: Limits
    checked: float


def reference_for(
    problem: Problem, operands: Operands, sizes: Sequence[int], hold_bytes: float = 0.0, seed: int = 0
) -> Reference:
    """The reference of `operands`; kept in memory when it takes at most `hold_bytes`.

    `sizes` are the group sizes along the ragged dimension. Products that would take too long are compared on
    randomly chosen rows of every group (`Reference.checked` is their share).
    """
    work = problem.work(sizes)
    share = min(1.0, _FLOPS[problem.device_type] / max(work.flops, 1.0))
    summands = max(sizes, default=0) if problem.layout is Layout.RAGGED_K else problem.k
    limit = limits(problem.dtype_key, problem.out_dtype, summands)
    wide = torch.float64 if problem.dtype is torch.float32 else torch.float32

    def compute() -> Iterator[Part]:
        return _parts(problem, operands, sizes, wide, share, seed)

    if math.prod(problem.out_shape) * share * wide.itemsize <= hold_bytes:
        held = tuple(compute())
        return Reference(lambda: held, limit, share)
    return Reference(compute, limit, share)


def gate_run(
    run: Callable[[torch.Tensor | None], Any],
    problem: Problem,
    sizes: Sequence[int],
    reference: Reference,
    device: torch.device,
    collect: Callable[[Any], torch.Tensor] = lambda result: result,
) -> Gate:
    """Judge `run(out) -> result`, once into a poisoned `out` and once into a tensor of its own.

    `problem` and `sizes` describe the operands behind `run`; rows or columns past offs[-1] of a given `out`
    must be left alone. `collect` turns an own result into one tensor. Exceptions of `run` pass through.
    """
    poisoned = torch.full(problem.out_shape, math.nan, dtype=problem.out_dtype, device=device)
    run(poisoned)
    verdict = _judge(poisoned, problem, sizes, reference, tail_untouched=True)
    del poisoned
    if not verdict.ok:
        return verdict
    # The allocator hands this block to whoever next asks for as much: an unwritten element shows as NaN.
    torch.full(problem.out_shape, math.nan, dtype=problem.out_dtype, device=device)
    own = collect(run(None))
    second = _judge(own, problem, sizes, reference, tail_untouched=False)
    if not second.ok:
        return Gate(False, second.rel_error, second.max_error, f"without out: {second.reason}", second.checked)
    worse = max(verdict, second, key=lambda g: g.rel_error)
    return Gate(True, worse.rel_error, max(verdict.max_error, second.max_error), "", reference.checked)


def _judge(
    out: torch.Tensor, problem: Problem, sizes: Sequence[int], reference: Reference, tail_untouched: bool
) -> Gate:
    if not isinstance(out, torch.Tensor):
        return Gate(False, math.inf, math.inf, f"result: expected a tensor, got {type(out).__name__}")
    if tuple(out.shape) != problem.out_shape or out.dtype != problem.out_dtype:
        return Gate(
            False, math.inf, math.inf,
            f"result: expected {list(problem.out_shape)} {problem.out_dtype}, got {list(out.shape)} {out.dtype}",
        )  # fmt: skip
    live, tail = _split(out, problem, sizes)
    unwritten = sum(int((~torch.isfinite(block)).sum()) for block in _blocks(live))
    if unwritten:
        reason = f"{unwritten} of {live.numel()} elements are NaN, infinite or were never written"
        return Gate(False, math.inf, math.inf, reason)
    if tail_untouched and tail.numel():
        touched = int((~torch.isnan(tail)).sum())
        if touched:
            return Gate(False, math.inf, math.inf, f"{touched} elements past offs[-1] were overwritten")
    verdict = check_parts(out, reference.parts(), reference.limit)
    return Gate(verdict.ok, verdict.rel_error, verdict.max_error, verdict.reason, reference.checked)


def _split(out: torch.Tensor, problem: Problem, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the groups cover, what lies past them)."""
    end = sum(sizes)
    if problem.layout is Layout.RAGGED_M:
        return out[:end], out[end:]
    if problem.layout is Layout.RAGGED_N:
        return out[:, :end], out[:, end:]
    return out, out[:0]


def _blocks(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Slices of `x` along its first dimension, of a bounded number of elements."""
    rows = max(1, _PART_ELEMENTS // max(math.prod(x.shape[1:]), 1))
    for start in range(0, x.shape[0], rows):
        yield x[start : start + rows]


def _parts(
    problem: Problem, operands: Operands, sizes: Sequence[int], wide: torch.dtype, share: float, seed: int
) -> Iterator[Part]:
    generator = torch.Generator().manual_seed(seed)
    with full_precision():
        for index, a, b, bias in _products(problem.layout, operands, sizes):
            b_wide = b.to(wide)
            step = max(1, _PART_ELEMENTS // max(a.shape[1], b.shape[1], 1))
            for rows in _row_blocks(a.shape[0], step, share, generator):
                picked: Any = rows if isinstance(rows, slice) else rows.to(a.device)
                ref = a[picked].to(wide) @ b_wide
                if bias is not None:
                    ref += bias.to(wide)
                yield _shift(index, picked), ref


def _products(
    layout: Layout, operands: Operands, sizes: Sequence[int]
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """(where in out, a of the group [r, k], b of the group [k, n], bias [n]) for every group with a
    result.
    """
    a, b, bias = operands.a, operands.b, operands.bias
    end = 0
    for g, size in enumerate(sizes):
        start, end = end, end + size
        own = None if bias is None else bias[g]
        if layout is Layout.BATCHED:
            yield (g,), a[g], b[g], own
        elif layout is Layout.RAGGED_K:
            yield (g,), a[:, start:end], b[start:end], own
        elif size and layout is Layout.RAGGED_M:
            yield (slice(start, end),), a[start:end], b[g], own
        elif size:
            yield (slice(None), slice(start, end)), a[g], b[:, start:end], own


def _row_blocks(count: int, step: int, share: float, generator: torch.Generator) -> Iterator[slice | torch.Tensor]:
    """All rows in blocks of `step`, or a random share of them (at least 16)."""
    if share >= 1.0 or count <= 16:
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))
        return
    picked = torch.randperm(count, generator=generator)[: max(16, math.ceil(count * share))].sort().values
    yield from picked.split(step)


def _shift(index: tuple[Any, ...], rows: slice | torch.Tensor) -> tuple[Any, ...]:
    """The block `rows` of the result at `index`, as an index into the whole."""
    if isinstance(index[0], int):
        return (index[0], rows)
    base = index[0].start or 0
    moved = slice(base + rows.start, base + rows.stop) if isinstance(rows, slice) else base + rows
    return (moved, *index[1:])


def _leading(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for i in range(shape[0]):
        for rest in _leading(shape[1:]):
            yield (i, *rest)


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 products without TF32 (or bfloat16 on a CPU) inside, whatever was set outside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
