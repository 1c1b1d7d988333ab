"""The Triton kernels of `low_rank.api`, which has their formulas. float32 inside, rounded once.

Each is a stream of wide rows [R, N] past factors of RANK columns, 16 or a few times that, which stay in L2. So memory
limits them: time ≥ bytes / bandwidth. Rows lie in expert order; a program has rows of one expert, which it finds from
`offs` as the persistent products do. Row and column sums are made by one program each, in a fixed order.
"""

import triton
import triton.language as tl

from expertile.ops.gathered_mm.activation_kernel import activate, activate_backward
from expertile.ops.gathered_mm.pointwise import Shape, load_pre, store_pre
from expertile.ops.grouped_mm.persistent import group_of_tile, group_range, tile_ends
from expertile.ops.launch.shape import constants


@triton.jit
def _rows_of_tile(offs_ptr, groups, tile, BLOCK: tl.constexpr, GROUPS_P2: tl.constexpr):
    """(expert, rows [BLOCK], which of them are there); no row is there for a tile past the last."""
    ends = tile_ends(offs_ptr, groups, 1, BLOCK, GROUPS_P2)
    group, first = group_of_tile(tile, ends, GROUPS_P2)
    there = group < groups
    group = tl.where(there, group, 0)
    start, end = group_range(offs_ptr, group)
    row = start + (tile - first) * BLOCK + tl.arange(0, BLOCK)
    return group.to(tl.int64), row, (row < end) & there


@triton.jit
def shrink_kernel(
    tensors, scalars, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS_P2: tl.constexpr
):
    x_ptr, rows_ptr, b_ptr, offs_ptr, out_ptr = tensors
    groups, K, x_stride, scale, b_stride_g, b_stride_k, b_stride_r = scalars
    group, row, used = _rows_of_tile(offs_ptr, groups, tl.program_id(0), BLOCK_M, GROUPS_P2)
    source = row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row, mask=used, other=0).to(tl.int64)
    rank = tl.arange(0, RANK)
    sums = tl.zeros((BLOCK_M, RANK), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + source[:, None] * x_stride + k[None, :], mask=used[:, None] & (k < K)[None, :], other=0.0)
        at = group * b_stride_g + k[:, None].to(tl.int64) * b_stride_k + rank[None, :].to(tl.int64) * b_stride_r
        b = tl.load(b_ptr + at, mask=(k < K)[:, None], other=0.0)
        sums = tl.dot(x, b, sums, input_precision="ieee")
    at = row.to(tl.int64)[:, None] * RANK + rank[None, :]
    tl.store(out_ptr + at, (sums * scale).to(out_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit
def _delta(u, b_ptr, at, start, I, half: tl.constexpr, s):
    """(u @ b^T for columns from `start` on of gate (half 0) or up (half 1), that part of b as [RANK, BLOCK_COLS])."""
    col = start + tl.arange(0, s.BLOCK_COLS)
    place = 2 * col + half if s.INTERLEAVED else col + half * I
    rank = tl.arange(0, s.RANK)
    where = at + place[None, :].to(tl.int64) * s.RANK + rank[:, None]
    b = tl.load(b_ptr + where, mask=(col < I)[None, :], other=0.0)
    return tl.dot(u, b, input_precision="ieee"), b


@triton.jit
def _rows_of(ptr, row, used, RANK: tl.constexpr):
    at = row.to(tl.int64)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    return tl.load(ptr + at, mask=used[:, None], other=0.0)


@triton.jit
def activate_kernel(tensors, scalars, SHAPE: tl.constexpr):
    """act and v = scale act @ a^T. u, b None: nothing is added to pre. a, v None: no v."""
    s: tl.constexpr = constants(Shape, SHAPE)
    pre_ptr, u_ptr, b_ptr, a_ptr, offs_ptr, act_ptr, v_ptr = tensors
    groups, I, scale = scalars
    group, row, used = _rows_of_tile(offs_ptr, groups, tl.program_id(0), s.BLOCK_ROWS, s.GROUPS_P2)
    at = row.to(tl.int64)[:, None] * I
    if u_ptr is not None:
        u = _rows_of(u_ptr, row, used, s.RANK)
    sums = tl.zeros((s.BLOCK_ROWS, s.NEXT_RANK), tl.float32)
    for start in range(0, I, s.BLOCK_COLS):
        col = start + tl.arange(0, s.BLOCK_COLS)
        gate, up = load_pre(pre_ptr, at, start, used[:, None], I, s.INTERLEAVED, s.BLOCK_COLS, s.EVEN)
        if u_ptr is not None:
            more, _ = _delta(u, b_ptr, group * 2 * I * s.RANK, start, I, 0, s)
            gate += more
            more, _ = _delta(u, b_ptr, group * 2 * I * s.RANK, start, I, 1, s)
            up += more
        act = activate(gate, up, s.ACTIVATION).to(act_ptr.dtype.element_ty)
        tl.store(act_ptr + at + col[None, :], act, mask=used[:, None] & (col < I)[None, :])
        if v_ptr is not None:
            rank = tl.arange(0, s.NEXT_RANK)
            where = (group * s.NEXT_RANK + rank[None, :]) * I + col[:, None]
            a = tl.load(a_ptr + where, mask=(col < I)[:, None], other=0.0)
            sums = tl.dot(act.to(a_ptr.dtype.element_ty), a, sums, input_precision="ieee")
    if v_ptr is not None:
        where = row.to(tl.int64)[:, None] * s.NEXT_RANK + tl.arange(0, s.NEXT_RANK)[None, :]
        tl.store(v_ptr + where, (sums * scale).to(v_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit
def backward_kernel(tensors, scalars, SHAPE: tl.constexpr):
    """grad [R, I] may be act_w, and pre may be dpre. u, b, du None: without the adapter of pre; v, a None: without that
    of act."""
    s: tl.constexpr = constants(Shape, SHAPE)
    grad_ptr, pre_ptr, u_ptr, b_ptr, v_ptr, a_ptr, slots_ptr, weights_ptr, offs_ptr = tensors[:9]
    dpre_ptr, act_w_ptr, dweights_ptr, du_ptr = tensors[9:]
    groups, I, scale = scalars
    group, row, used = _rows_of_tile(offs_ptr, groups, tl.program_id(0), s.BLOCK_ROWS, s.GROUPS_P2)
    at = row.to(tl.int64)[:, None] * I
    slot = tl.load(slots_ptr + row, mask=used, other=0)
    weight = tl.load(weights_ptr + slot, mask=used, other=0.0)[:, None]
    if u_ptr is not None:
        u = _rows_of(u_ptr, row, used, s.RANK)
    if v_ptr is not None:
        v = _rows_of(v_ptr, row, used, s.NEXT_RANK)
    du = tl.zeros((s.BLOCK_ROWS, s.RANK), tl.float32)
    total = tl.zeros((s.BLOCK_ROWS,), tl.float32)
    for start in range(0, I, s.BLOCK_COLS):
        col = start + tl.arange(0, s.BLOCK_COLS)
        inside = used[:, None] & (col < I)[None, :]
        grad = tl.load(grad_ptr + at + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if v_ptr is not None:
            rank = tl.arange(0, s.NEXT_RANK)
            where = (group * s.NEXT_RANK + rank[:, None]) * I + col[None, :]
            grad = tl.dot(v, tl.load(a_ptr + where, mask=(col < I)[None, :], other=0.0), grad, input_precision="ieee")
        gate, up = load_pre(pre_ptr, at, start, used[:, None], I, s.INTERLEAVED, s.BLOCK_COLS, s.EVEN)
        if u_ptr is not None:
            more, b_gate = _delta(u, b_ptr, group * 2 * I * s.RANK, start, I, 0, s)
            gate += more
            more, b_up = _delta(u, b_ptr, group * 2 * I * s.RANK, start, I, 1, s)
            up += more
        value, d_gate, d_up = activate_backward(gate, up, grad * weight, s.ACTIVATION)
        total += tl.sum(grad * value, 1)
        # grad may be act_w and pre may be dpre, and another thread may store an element than loads it.
        tl.debug_barrier()
        tl.store(act_w_ptr + at + col[None, :], (value * weight).to(act_w_ptr.dtype.element_ty), mask=inside)
        store_pre(dpre_ptr, at, start, used[:, None], I, d_gate, d_up, s.INTERLEAVED, s.BLOCK_COLS, s.EVEN)
        if u_ptr is not None:
            du = tl.dot(d_gate.to(b_gate.dtype), tl.trans(b_gate), du, input_precision="ieee")
            du = tl.dot(d_up.to(b_up.dtype), tl.trans(b_up), du, input_precision="ieee")
    tl.store(dweights_ptr + slot, total, mask=used)
    if u_ptr is not None:
        where = row.to(tl.int64)[:, None] * s.RANK + tl.arange(0, s.RANK)[None, :]
        tl.store(du_ptr + where, (du * scale).to(du_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit
def expand_kernel(
    tensors, scalars, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS_P2: tl.constexpr
):
    """y += u @ b^T, in place."""
    y_ptr, u_ptr, b_ptr, offs_ptr = tensors
    groups, N, b_stride_g, b_stride_n, b_stride_r = scalars
    chunks = tl.cdiv(N, BLOCK_N)
    group, row, used = _rows_of_tile(offs_ptr, groups, tl.program_id(0) // chunks, BLOCK_M, GROUPS_P2)
    col = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    u = _rows_of(u_ptr, row, used, RANK)
    rank = tl.arange(0, RANK)[:, None].to(tl.int64)
    where = group * b_stride_g + rank * b_stride_r + col[None, :].to(tl.int64) * b_stride_n
    b = tl.load(b_ptr + where, mask=(col < N)[None, :], other=0.0)
    at = row.to(tl.int64)[:, None] * N + col[None, :]
    inside = used[:, None] & (col < N)[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.dot(u, b, y, input_precision="ieee")
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def turn_kernel(tensors, scalars, RANK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    """to[g, n, r] = from[g, n, r], or 0 from rank `from_ranks` on: each read and written along its own contiguous
    dimension, by way of shared memory."""
    from_ptr, to_ptr = tensors
    groups, N, from_ranks, to_ranks = scalars[:4]
    from_stride_g, from_stride_n, from_stride_r, to_stride_g, to_stride_n, to_stride_r = scalars[4:]
    chunks = tl.cdiv(groups, BLOCK_G)
    g = tl.program_id(0) % chunks * BLOCK_G + tl.arange(0, BLOCK_G)[:, None, None]
    n = (tl.program_id(0) // chunks * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    r = tl.arange(0, RANK)[None, None, :]
    there = (g < groups) & (n < N)
    at = g.to(tl.int64) * from_stride_g + n.to(tl.int64) * from_stride_n + r * from_stride_r
    x = tl.load(from_ptr + at, mask=there & (r < from_ranks), other=0.0)
    at = g.to(tl.int64) * to_stride_g + n.to(tl.int64) * to_stride_n + r * to_stride_r
    tl.store(to_ptr + at, x.to(to_ptr.dtype.element_ty), mask=there & (r < to_ranks))


@triton.jit
def outer_kernel(tensors, scalars, RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A program sums some columns of x over all rows of an expert. weights None: ones; rows None: x's own."""
    u_ptr, slots_ptr, weights_ptr, x_ptr, rows_ptr, offs_ptr, out_ptr = tensors
    N, x_stride, out_stride_g, out_stride_n, out_stride_r = scalars
    chunks = tl.cdiv(N, BLOCK_N)
    group = (tl.program_id(0) // chunks).to(tl.int64)
    col = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = group_range(offs_ptr, group)
    rank = tl.arange(0, RANK)
    sums = tl.zeros((RANK, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        used = row < end
        u = tl.load(u_ptr + row.to(tl.int64)[None, :] * RANK + rank[:, None], mask=used[None, :], other=0.0)
        if weights_ptr is not None:
            slot = tl.load(slots_ptr + row, mask=used, other=0)
            weight = tl.load(weights_ptr + slot, mask=used, other=0.0)
            u = (u.to(tl.float32) * weight[None, :]).to(u.dtype)
        source = row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row, mask=used, other=0).to(tl.int64)
        inside = used[:, None] & (col < N)[None, :]
        x = tl.load(x_ptr + source[:, None] * x_stride + col[None, :], mask=inside, other=0.0)
        sums = tl.dot(u, x, sums, input_precision="ieee")
    where = group * out_stride_g + rank[:, None].to(tl.int64) * out_stride_r + col[None, :].to(tl.int64) * out_stride_n
    tl.store(out_ptr + where, sums.to(out_ptr.dtype.element_ty), mask=(col < N)[None, :])
