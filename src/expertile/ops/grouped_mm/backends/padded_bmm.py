"""Every group padded to the longest, then one `torch.bmm`: a[g] [L, K] @ b[g] [K, N] with L = max group size.

When all groups are equally long nothing is padded: a and out are viewed as [G, L, K] and [G, L, N], and this is a
plain batched product, the strongest rival there is for that shape. Otherwise the rows are scattered into a padded
buffer and gathered from a padded result, and both copies belong to the time of this backend. Ragged N is ragged M of
the transposed product; ragged K pads with zeros, since padding is summed there.

Bytes moved, equal groups: the algorithmic minimum. Else, besides: rows x (2K + 2N) for scatter and gather, and
G x L instead of `rows` in the product, in FLOPs as well. What limits it: the longest group.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from expertile.device import Device
from expertile.ops.backend import NoConfig, Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out
from expertile.ops.grouped_mm.backends.loop import multiply
from expertile.ops.grouped_mm.model import group_sizes_or_even
from expertile.ops.grouped_mm.problem import Layout, Problem


def _padded_bytes(problem: Problem, sizes: tuple[int, ...]) -> int:
    """Bytes of the buffers that unequal groups of `sizes` need; 0 for equal groups."""
    if len(set(sizes)) <= 1:
        return 0
    rows = len(sizes) * max(sizes)
    isz, osz = problem.dtype.itemsize, problem.out_dtype.itemsize
    if problem.layout is Layout.RAGGED_K:
        return rows * (problem.m + problem.n) * isz
    inner, outer = problem.k, problem.n if problem.layout is Layout.RAGGED_M else problem.m
    return rows * (inner * isz + outer * osz)


def _supports(problem: Problem, device: Device) -> str | None:
    if problem.layout is Layout.BATCHED or problem.group_sizes is None:
        return None
    needed = _padded_bytes(problem, problem.group_sizes)
    if needed > device.memory_bytes / 2:
        return (
            f"padding every group to {max(problem.group_sizes)} rows takes {needed / 1e9:.0f} GB, more than half of "
            f"the {device.memory_bytes / 1e9:.0f} GB on {device.name}"
        )
    return None


def _padded_rows(offs: Tensor, used: int, longest: int) -> Tensor:
    """Index [used] of each row in the padded buffer [G * longest]: row r of group g goes to g * longest + r - start.

    Computed on the device from `offs`, so that it can be captured in a CUDA graph.
    """
    row = torch.arange(used, device=offs.device)
    group = torch.bucketize(row, offs, right=True)
    return torch.add(row - pad(offs, (1, 0))[group], group, alpha=longest)


def _ragged_rows(a: Tensor, b: Tensor, bias: Tensor | None, offs: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    """out [rows, N] = a [rows, K] @ b [G, K, N], group by group; rows past the last group are left alone."""
    used, longest, groups = sum(sizes), max(sizes, default=0), len(sizes)
    if used == 0:
        return
    if used == groups * longest:
        equal = (groups, longest)
        multiply(a[:used].unflatten(0, equal), b, bias, out[:used].unflatten(0, equal))
        return
    index = _padded_rows(offs, used, longest)
    # Rows of padding only make rows of the result that are never read, so on a GPU they keep whatever the buffer held.
    # On a CPU oneDNN's bf16 products read past the end of a row whose length is no multiple of 32, and carry a NaN of
    # the row behind it into the result (AMX, torch 2.13; oneDNN issue 5717, mended there since).
    new = a.new_empty if a.is_cuda else a.new_zeros
    a_padded = new(groups * longest, a.shape[1])
    a_padded.index_copy_(0, index, a[:used])
    out_padded = out.new_empty(groups, longest, out.shape[1])
    multiply(a_padded.unflatten(0, (groups, longest)), b, bias, out_padded)
    if out.is_contiguous():
        torch.index_select(out_padded.flatten(0, 1), 0, index, out=out[:used])
    else:
        out[:used] = out_padded.flatten(0, 1)[index]


def _ragged_sum(a: Tensor, b: Tensor, offs: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    """out [G, M, N] = a [M, rows] @ b [rows, N], summed over the rows of each group."""
    used, longest, groups = sum(sizes), max(sizes), len(sizes)
    if used == 0:
        out.zero_()
        return
    at, b, equal = a.T[:used], b[:used], (groups, longest)
    if used != groups * longest:
        index = _padded_rows(offs, used, longest)
        at = a.new_zeros(groups * longest, a.shape[0]).index_copy_(0, index, at)
        b = b.new_zeros(groups * longest, b.shape[1]).index_copy_(0, index, b)
    multiply(at.unflatten(0, equal).transpose(1, 2), b.unflatten(0, equal), None, out)


def _run(problem: Problem, operands: Operands, config: NoConfig, out: Tensor | None) -> Tensor:
    a, b, offs, bias = operands.a, operands.b, operands.offs, operands.bias
    out = new_out(problem, operands, out)
    if problem.layout is Layout.BATCHED:
        multiply(a, b, bias, out)
        return out
    assert offs is not None
    sizes = problem.sizes(offs)
    if problem.layout is Layout.RAGGED_M:
        _ragged_rows(a, b, bias, offs, sizes, out)
    elif problem.layout is Layout.RAGGED_N:
        _ragged_rows(b.T, a.transpose(1, 2), None, offs, sizes, out.T)
    else:
        _ragged_sum(a, b, offs, sizes, out)
    return out


# On a CPU copies into padded buffers pay from so many groups on, in 16 bits, while each group's copies have at most so
# many elements: oneDNN takes some 20 µs to start a product, memory about as long to copy them.
_CPU_GROUPS, _CPU_COPIED = 16, 36 * 1024


def _cpu_place(problem: Problem) -> int:
    """First on a CPU where one product of all groups saves starting many, else last."""
    p, first, last = problem, 1, 4
    if p.layout not in (Layout.RAGGED_M, Layout.RAGGED_K):
        return last  # batched products are one call anyway; a ragged N is written column by column, at a crawl
    sizes, short = group_sizes_or_even(p), p.dtype.itemsize == 2
    if len(set(sizes)) == 1:  # nothing is padded, nothing copied
        return first if short or len(sizes) >= 8 else last
    copied = max(sizes, default=0) * (p.k + p.n)
    worth = short and p.layout is Layout.RAGGED_M and len(sizes) >= _CPU_GROUPS and 0 not in sizes
    return first if worth and copied <= _CPU_COPIED else last


BACKEND = Backend(
    name="padded_bmm",
    summary="groups padded to the longest, one torch.bmm (no copy when all are equal)",
    supports=_supports,
    run=_run,
    reads_offs_on_host=True,
    speed=Speed(0.72, 0.9, 1e-6, pads=True),
    cpu_place=_cpu_place,
    cpu_why="one product of all groups, which hardly differ in length, saves starting many",
)
