"""Device code of the backward in plain Triton (sm_80+): row statistics, dK and dV, dQ; no atomics.

    P = exp(scale · S − LSE),  dP = dO Vᵀ,  dS = P · (dP − delta),  delta = rowsum(dO · O) − dLSE
    dV = Pᵀ dO,  dK = scale · dSᵀ Q,  dQ = scale · dS K

One kernel holds a block of keys and goes over the queries of all query heads that share the key head. Another holds a
block of queries and goes over the keys. Both compute S and dP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from expertile.ops.attention.backends._triton_forward import Keys, _load, _queries, _seen, _sequence, _store, _tile


@triton.jit
def _padded_start(q_start, batch, PACKED: tl.constexpr, STAT_PAD: tl.constexpr):
    """Where a sequence's statistics start: each sequence's rows are padded to multiples of STAT_PAD."""
    if PACKED:
        return (q_start + batch * STAT_PAD) // STAT_PAD * STAT_PAD
    else:
        return 0


@triton.jit
def statistics_kernel(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    nlse_ptr,
    ndelta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    o_strides,
    do_strides,
    lse_strides,
    stat_strides,
    H,
    LQ,
    inv_scale,
    D: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    STAT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """-LSE / scale (minus infinity where there is no such row, or it sees no key) and -delta, in padded rows.

    BLOCK_M divides STAT_PAD. Grid: (padded rows of the longest sequence / BLOCK_M, batch * H).
    """
    batch = tl.program_id(1) // H
    head = tl.program_id(1) % H
    q_start, q_len, _k_start, _k_len = _sequence(cu_q_ptr, cu_k_ptr, batch, LQ, LQ, PACKED)
    m = tl.program_id(0) * BLOCK_M
    if m < (q_len + STAT_PAD - 1) // STAT_PAD * STAT_PAD:
        rows = m + tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        start = tl.full((), 0, tl.int32) + q_start
        o_tile = _tile(o_ptr, batch, head, start, o_strides)
        o = _load(o_tile, rows, o_strides[2], dims, q_len, D, D == BLOCK_D, True)
        do_tile = _tile(do_ptr, batch, head, start, do_strides)
        do = _load(do_tile, rows, do_strides[2], dims, q_len, D, D == BLOCK_D, True)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        at = batch.to(tl.int64) * lse_strides[0] + head * lse_strides[1] + q_start + rows
        lse = tl.load(lse_ptr + at, mask=rows < q_len, other=float("inf"))
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + at, mask=rows < q_len, other=0.0)
        # exp(S + -LSE) is then 0 for a row without keys, as it is for one that does not exist.
        nlse = tl.where(lse == float("-inf"), float("-inf"), -lse * inv_scale)
        at = batch.to(tl.int64) * stat_strides[0] + head * stat_strides[1]
        at += _padded_start(q_start, batch, PACKED, STAT_PAD) + rows
        tl.store(nlse_ptr + at, nlse)
        tl.store(ndelta_ptr + at, -delta)


class _Queries(NamedTuple):
    """The queries of a head: pointers to its first row, strides of rows, and how many there are."""

    q_ptr: Any
    do_ptr: Any
    nlse_ptr: Any
    ndelta_ptr: Any
    q_stride: Any
    do_stride: Any
    length: Any


@triton.jit
def _over_queries(
    sums, k, v, of, first, last, keys, dims, scale_log2, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """dK and dV from queries [first, last), blocks of which start at multiples of BLOCK_M. keys: their numbers, and by
    how much those that a query sees are ahead of its own."""
    dk, dv = sums
    cols, shift = keys
    EVEN_D: tl.constexpr = dims.shape[0] == D
    for m in range(first, last, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M)
        q = _load(of.q_ptr, rows, of.q_stride, dims, of.length, D, EVEN_D, True)
        do = _load(of.do_ptr, rows, of.do_stride, dims, of.length, D, EVEN_D, True)
        nlse = tl.load(of.nlse_ptr + rows)
        ndelta = tl.load(of.ndelta_ptr + rows)
        s = tl.dot(k, q.T)
        if MASKED:
            s = tl.where(cols[:, None] <= rows[None, :] + shift, s, float("-inf"))
        weights = tl.exp2(s * scale_log2 + (nlse * scale_log2)[None, :])
        dv = tl.dot(weights.to(do.dtype), do, dv)
        ds = weights * (tl.dot(v, do.T) + ndelta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dk_ptr,
    dv_ptr,
    nlse_ptr,
    ndelta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dk_strides,
    dv_strides,
    stat_strides,
    HKV,
    GROUP,
    LQ,
    LK,
    scale,
    scale_log2,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    STAT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (blocks of keys, batch * HKV). With a causal mask the first keys, which most queries see, come first."""
    EVEN_D: tl.constexpr = D == BLOCK_D
    batch = tl.program_id(1) // HKV
    kv_head = tl.program_id(1) % HKV
    q_start, q_len, k_start, k_len = _sequence(cu_q_ptr, cu_k_ptr, batch, LQ, LK, PACKED)
    n = tl.program_id(0) * BLOCK_N
    if n < k_len:
        cols = n + tl.arange(0, BLOCK_N)
        dims = tl.arange(0, BLOCK_D)
        zero = tl.full((), 0, tl.int32)
        k_tile = _tile(k_ptr, batch, kv_head, zero + k_start, k_strides)
        v_tile = _tile(v_ptr, batch, kv_head, zero + k_start, v_strides)
        k = _load(k_tile, cols, k_strides[2], dims, k_len, D, EVEN_D, True)
        v = _load(v_tile, cols, v_strides[2], dims, k_len, D, EVEN_D, True)
        sums = (tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_D), tl.float32))
        shift = k_len - q_len
        keys = (cols, shift)
        first = zero
        full = zero
        if CAUSAL:
            # Key j is seen by the queries from j - shift on.
            first = tl.maximum(n - shift, 0) // BLOCK_M * BLOCK_M
            full = (tl.maximum(n + BLOCK_N - 1 - shift, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        for g in range(GROUP):
            head = kv_head * GROUP + g
            q_tile = _tile(q_ptr, batch, head, zero + q_start, q_strides)
            do_tile = _tile(do_ptr, batch, head, zero + q_start, do_strides)
            at = batch.to(tl.int64) * stat_strides[0] + head * stat_strides[1]
            at += _padded_start(q_start, batch, PACKED, STAT_PAD)
            queries = _Queries(q_tile, do_tile, nlse_ptr + at, ndelta_ptr + at, q_strides[2], do_strides[2], q_len)
            if CAUSAL:
                last = tl.minimum(full, q_len)
                sums = _over_queries(sums, k, v, queries, first, last, keys, dims, scale_log2, True, D, BLOCK_M)
            sums = _over_queries(sums, k, v, queries, full, q_len, keys, dims, scale_log2, False, D, BLOCK_M)
        dk, dv = sums
        dk_tile = _tile(dk_ptr, batch, kv_head, zero + k_start, dk_strides)
        dv_tile = _tile(dv_ptr, batch, kv_head, zero + k_start, dv_strides)
        _store(dk_tile, cols, dk_strides[2], dims, k_len, dk * scale, D, EVEN_D)
        _store(dv_tile, cols, dv_strides[2], dims, k_len, dv, D, EVEN_D)


@triton.jit
def _over_keys(
    dq, rows, of, first, last, last_key, dims, scale_log2, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dQ of `rows`, (Q, dO, -LSE, -delta), from keys [first, last)."""
    q, do, nlse, ndelta = rows
    EVEN_D: tl.constexpr = dims.shape[0] == D
    for n in range(first, last, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        k = _load(of.k_ptr, cols, of.k_stride, dims, of.length, D, EVEN_D, MASKED)
        v = _load(of.v_ptr, cols, of.v_stride, dims, of.length, D, EVEN_D, MASKED)
        s = tl.dot(q, k.T)
        if MASKED:
            s = tl.where(cols[None, :] <= last_key[:, None], s, float("-inf"))
        weights = tl.exp2(s * scale_log2 + nlse[:, None])
        ds = weights * (tl.dot(do, v.T) + ndelta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dq_ptr,
    nlse_ptr,
    ndelta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dq_strides,
    stat_strides,
    H,
    GROUP,
    LQ,
    LK,
    scale,
    scale_log2,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    STAT_PAD: tl.constexpr,
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
        zero = tl.full((), 0, tl.int32)
        q_tile = _tile(q_ptr, batch, head, zero + q_start, q_strides)
        do_tile = _tile(do_ptr, batch, head, zero + q_start, do_strides)
        k_tile = _tile(k_ptr, batch, head // GROUP, zero + k_start, k_strides)
        v_tile = _tile(v_ptr, batch, head // GROUP, zero + k_start, v_strides)
        q = _load(q_tile, rows, q_strides[2], dims, q_len, D, D == BLOCK_D, True)
        do = _load(do_tile, rows, do_strides[2], dims, q_len, D, D == BLOCK_D, True)
        at = batch.to(tl.int64) * stat_strides[0] + head * stat_strides[1]
        at += _padded_start(q_start, batch, PACKED, STAT_PAD) + rows
        nlse = tl.load(nlse_ptr + at) * scale_log2
        ndelta = tl.load(ndelta_ptr + at)
        full, end, last_key = _seen(m, rows, q_len, k_len, CAUSAL, BLOCK_N)
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        keys = Keys(k_tile, v_tile, k_strides[2], v_strides[2], k_len)
        held = (q, do, nlse, ndelta)
        dq = _over_keys(dq, held, keys, 0, full, last_key, dims, scale_log2, False, D, BLOCK_N)
        dq = _over_keys(dq, held, keys, full, end, last_key, dims, scale_log2, True, D, BLOCK_N)
        dq_tile = _tile(dq_ptr, batch, head, zero + q_start, dq_strides)
        _store(dq_tile, rows, dq_strides[2], dims, q_len, dq * scale, D, D == BLOCK_D)
