"""Device code of the `triton` backend, forward: one program for a block of queries, pointers and masks (sm_80+)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def _sequence(cu_q_ptr, cu_k_ptr, batch, LQ, LK, PACKED: tl.constexpr):
    """(first query row, queries, first key row, keys) of a sequence; rows are those of packed tensors."""
    if PACKED:
        q_start = tl.load(cu_q_ptr + batch)
        k_start = tl.load(cu_k_ptr + batch)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_start
        k_len = tl.load(cu_k_ptr + batch + 1) - k_start
        return q_start, q_len, k_start, k_len
    else:
        return 0, LQ, 0, LK


@triton.jit
def _tile(ptr, batch, head, row, strides):
    """Address of (batch, head, row); it may lie more than 2^31 elements in."""
    return ptr + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]


@triton.jit
def _load(ptr, rows, stride, dims, length, D: tl.constexpr, EVEN_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, D] with zeros past `length`, where rows may lie there (MASKED), and past D."""
    at = ptr + rows[:, None] * stride + dims[None, :]
    if MASKED and EVEN_D:
        return tl.load(at, mask=rows[:, None] < length, other=0.0)
    elif MASKED:
        return tl.load(at, mask=(rows[:, None] < length) & (dims[None, :] < D), other=0.0)
    elif EVEN_D:
        return tl.load(at)
    else:
        return tl.load(at, mask=dims[None, :] < D, other=0.0)


@triton.jit
def _store(ptr, rows, stride, dims, length, value, D: tl.constexpr, EVEN_D: tl.constexpr):
    mask = rows[:, None] < length
    if not EVEN_D:
        mask = mask & (dims[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + dims[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _queries(heads, CAUSAL: tl.constexpr):
    """(block of queries, batch, head) of a program. With a causal mask the last queries, which see most keys, come
    first."""
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    return block, tl.program_id(1) // heads, tl.program_id(1) % heads


@triton.jit
def _seen(m, rows, q_len, k_len, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that the queries `rows`, from m on, see: (end of the blocks without a mask, end, each row's last)."""
    end = k_len
    full = k_len
    last_key = tl.full((rows.shape[0],), 0, tl.int32) + k_len - 1
    if CAUSAL:
        # Query i sees the keys up to i + k_len - q_len.
        end = tl.maximum(tl.minimum(end, m + rows.shape[0] + k_len - q_len), 0)
        full = tl.minimum(full, tl.maximum(m + 1 + k_len - q_len, 0))
        last_key = tl.minimum(last_key, rows + k_len - q_len)
    return full // BLOCK_N * BLOCK_N, end, last_key


class Keys(NamedTuple):
    """The keys and values of a head: pointers to its first row, strides of rows, and how many there are."""

    k_ptr: Any
    v_ptr: Any
    k_stride: Any
    v_stride: Any
    length: Any


@triton.jit
def _over_keys(
    sums, q, of, first, last, last_key, dims, scale_log2, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One more stretch of keys, [first, last), for a block of queries."""
    acc, row_max, row_sum = sums
    EVEN_D: tl.constexpr = dims.shape[0] == D
    for n in range(first, last, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        k = _load(of.k_ptr, cols, of.k_stride, dims, of.length, D, EVEN_D, MASKED)
        s = tl.dot(q, k.T)
        if MASKED:
            s = tl.where(cols[None, :] <= last_key[:, None], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        # A row without any key so far: its weights are exp2(-inf) = 0, not NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
        factor = tl.exp2(row_max * scale_log2 - shift)
        weights = tl.exp2(s * scale_log2 - shift[:, None])
        row_sum = row_sum * factor + tl.sum(weights, 1)
        v = _load(of.v_ptr, cols, of.v_stride, dims, of.length, D, EVEN_D, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    lse_strides,
    H,
    GROUP,
    LQ,
    LK,
    scale_log2,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (blocks of queries, batch * H)."""
    block, batch, head = _queries(H, CAUSAL)
    q_start, q_len, k_start, k_len = _sequence(cu_q_ptr, cu_k_ptr, batch, LQ, LK, PACKED)
    m = block * BLOCK_M
    if m < q_len:
        rows = m + tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        start = tl.full((), 0, tl.int32)
        q_tile = _tile(q_ptr, batch, head, start + q_start, q_strides)
        k_tile = _tile(k_ptr, batch, head // GROUP, start + k_start, k_strides)
        v_tile = _tile(v_ptr, batch, head // GROUP, start + k_start, v_strides)
        o_tile = _tile(o_ptr, batch, head, start + q_start, o_strides)
        q = _load(q_tile, rows, q_strides[2], dims, q_len, D, D == BLOCK_D, True)
        full, end, last_key = _seen(m, rows, q_len, k_len, CAUSAL, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = (acc, row_max, tl.zeros((BLOCK_M,), tl.float32))
        keys = Keys(k_tile, v_tile, k_strides[2], v_strides[2], k_len)
        sums = _over_keys(sums, q, keys, 0, full, last_key, dims, scale_log2, False, D, BLOCK_N)
        acc, row_max, row_sum = _over_keys(sums, q, keys, full, end, last_key, dims, scale_log2, True, D, BLOCK_N)
        # Rows that see no key: zeros, and minus infinity for the log-sum-exp.
        empty = row_sum == 0.0
        acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, row_sum)[:, None])
        lse = (row_max * scale_log2 + tl.log2(row_sum)) * 0.6931471805599453
        _store(o_tile, rows, o_strides[2], dims, q_len, acc, D, D == BLOCK_D)
        at = lse_ptr + batch.to(tl.int64) * lse_strides[0] + head * lse_strides[1] + q_start + rows
        tl.store(at, tl.where(empty, float("-inf"), lse), mask=rows < q_len)
