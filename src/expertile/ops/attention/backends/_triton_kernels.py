"""Device code of attention in plain Triton (sm_80+), pointers and masks: forward; row statistics, dK and dV, dQ.

    P = exp(scale · S − LSE),  dP = dO Vᵀ,  dS = P · (dP − delta),  delta = rowsum(dO · O) − dLSE
    dV = Pᵀ dO,  dK = scale · dSᵀ Q,  dQ = scale · dS K

The forward has one program for a block of queries. Of the backward, one kernel holds a block of keys and goes over the
queries of all query heads that share the key head; another holds a block of queries and goes over the keys. Both
compute S and dP, and nothing is added atomically.

Strides are (batch, head, row); those of row statistics (batch, head).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from expertile.ops.launch.shape import constants


class Shape(NamedTuple):
    """What a kernel is compiled for: heads of D columns, in BLOCK_D; blocks of BLOCK_M queries and BLOCK_N keys. Each
    sequence's rows of statistics are padded to multiples of STAT_PAD."""

    D: int
    CAUSAL: bool
    PACKED: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    STAT_PAD: int


@triton.jit
def _sequence(cu_q_ptr, cu_k_ptr, batch, LQ, LK, s):
    """(first query row, queries, first key row, keys) of a sequence; rows are those of packed tensors."""
    if s.PACKED:
        q_start = tl.load(cu_q_ptr + batch)
        k_start = tl.load(cu_k_ptr + batch)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_start
        k_len = tl.load(cu_k_ptr + batch + 1) - k_start
        return q_start, q_len, k_start, k_len
    else:
        return 0, LQ, 0, LK


@triton.jit
def _tile(ptr, batch, head, start, strides):
    """(address of row `start` of a head, which may lie more than 2^31 elements in; stride of its rows)"""
    row = tl.full((), 0, tl.int32) + start
    at = ptr + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    return at, strides[2]


@triton.jit
def _load(tile, rows, dims, length, s, MASKED: tl.constexpr):
    """[rows, D] of a `_tile` with zeros past `length`, where rows may lie there (MASKED), and past D."""
    EVEN_D: tl.constexpr = s.D == s.BLOCK_D
    at = tile[0] + rows[:, None] * tile[1] + dims[None, :]
    if MASKED and EVEN_D:
        return tl.load(at, mask=rows[:, None] < length, other=0.0)
    elif MASKED:
        return tl.load(at, mask=(rows[:, None] < length) & (dims[None, :] < s.D), other=0.0)
    elif EVEN_D:
        return tl.load(at)
    else:
        return tl.load(at, mask=dims[None, :] < s.D, other=0.0)


@triton.jit
def _store(tile, rows, dims, length, value, s):
    ptr, stride = tile
    mask = rows[:, None] < length
    if s.D != s.BLOCK_D:
        mask = mask & (dims[None, :] < s.D)
    tl.store(ptr + rows[:, None] * stride + dims[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _block_of_queries(heads, s):
    """(block of queries, batch, head) of a program. With a causal mask the last queries, which see most keys, come
    first."""
    block = tl.program_id(0)
    if s.CAUSAL:
        block = tl.num_programs(0) - 1 - block
    return block, tl.program_id(1) // heads, tl.program_id(1) % heads


@triton.jit
def _seen(m, rows, q_len, k_len, s):
    """Keys that the queries `rows`, from m on, see: (end of the blocks without a mask, end, each row's last)."""
    end = k_len
    full = k_len
    last_key = tl.full((rows.shape[0],), 0, tl.int32) + k_len - 1
    if s.CAUSAL:
        # Query i sees the keys up to i + k_len - q_len.
        end = tl.maximum(tl.minimum(end, m + rows.shape[0] + k_len - q_len), 0)
        full = tl.minimum(full, tl.maximum(m + 1 + k_len - q_len, 0))
        last_key = tl.minimum(last_key, rows + k_len - q_len)
    return full // s.BLOCK_N * s.BLOCK_N, end, last_key


class _Keys(NamedTuple):
    """The keys and values of a head, each a `_tile`, and how many there are."""

    k: Any
    v: Any
    length: Any


@triton.jit
def _weigh_keys(sums, q, of, first, last, last_key, dims, scale_log2, s, MASKED: tl.constexpr):
    """(weighted values, maximum, sum of weights) of a block of queries, with the keys [first, last) as well."""
    acc, row_max, row_sum = sums
    for n in range(first, last, s.BLOCK_N):
        cols = n + tl.arange(0, s.BLOCK_N)
        k = _load(of.k, cols, dims, of.length, s, MASKED)
        scores = tl.dot(q, k.T)
        if MASKED:
            scores = tl.where(cols[None, :] <= last_key[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row without any key so far: its weights are exp2(-inf) = 0, not NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
        factor = tl.exp2(row_max * scale_log2 - shift)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        row_sum = row_sum * factor + tl.sum(weights, 1)
        v = _load(of.v, cols, dims, of.length, s, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(tensors, cu_ptrs, strides, H, GROUP, LQ, LK, scale_log2, SHAPE: tl.constexpr):
    """O and LSE. tensors: q, k, v, o, lse. Grid: (blocks of queries, batch * H)."""
    s: tl.constexpr = constants(Shape, SHAPE)
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr = tensors
    q_strides, k_strides, v_strides, o_strides, lse_strides = strides
    block, batch, head = _block_of_queries(H, s)
    q_start, q_len, k_start, k_len = _sequence(cu_ptrs[0], cu_ptrs[1], batch, LQ, LK, s)
    m = block * s.BLOCK_M
    if m < q_len:
        rows = m + tl.arange(0, s.BLOCK_M)
        dims = tl.arange(0, s.BLOCK_D)
        q_tile = _tile(q_ptr, batch, head, q_start, q_strides)
        k_tile = _tile(k_ptr, batch, head // GROUP, k_start, k_strides)
        v_tile = _tile(v_ptr, batch, head // GROUP, k_start, v_strides)
        o_tile = _tile(o_ptr, batch, head, q_start, o_strides)
        q = _load(q_tile, rows, dims, q_len, s, True)
        full, end, last_key = _seen(m, rows, q_len, k_len, s)
        acc = tl.zeros((s.BLOCK_M, s.BLOCK_D), tl.float32)
        row_max = tl.full((s.BLOCK_M,), float("-inf"), tl.float32)
        sums = (acc, row_max, tl.zeros((s.BLOCK_M,), tl.float32))
        keys = _Keys(k_tile, v_tile, k_len)
        sums = _weigh_keys(sums, q, keys, 0, full, last_key, dims, scale_log2, s, False)
        acc, row_max, row_sum = _weigh_keys(sums, q, keys, full, end, last_key, dims, scale_log2, s, True)
        # Rows that see no key: zeros, and minus infinity for the log-sum-exp.
        empty = row_sum == 0.0
        acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, row_sum)[:, None])
        lse = (row_max * scale_log2 + tl.log2(row_sum)) * 0.6931471805599453
        _store(o_tile, rows, dims, q_len, acc, s)
        at = lse_ptr + batch.to(tl.int64) * lse_strides[0] + head * lse_strides[1] + q_start + rows
        tl.store(at, tl.where(empty, float("-inf"), lse), mask=rows < q_len)


@triton.jit
def _padded_start(q_start, batch, s):
    """Where a sequence's statistics start."""
    return (q_start + batch * s.STAT_PAD) // s.STAT_PAD * s.STAT_PAD if s.PACKED else 0


@triton.jit
def statistics_kernel(tensors, cu_ptrs, strides, H, LQ, inv_scale, SHAPE: tl.constexpr):
    """-LSE / scale (minus infinity where there is no such row, or it sees no key) and -delta, in padded rows.

    tensors: o, do, lse, dlse (or None), nlse, ndelta. BLOCK_M divides STAT_PAD. Grid: (padded rows of the longest
    sequence / BLOCK_M, batch * H)."""
    s: tl.constexpr = constants(Shape, SHAPE)
    o_ptr, do_ptr, lse_ptr, dlse_ptr, nlse_ptr, ndelta_ptr = tensors
    o_strides, do_strides, lse_strides, stat_strides = strides
    batch = tl.program_id(1) // H
    head = tl.program_id(1) % H
    q_start, q_len, _k_start, _k_len = _sequence(cu_ptrs[0], cu_ptrs[1], batch, LQ, LQ, s)
    m = tl.program_id(0) * s.BLOCK_M
    if m < (q_len + s.STAT_PAD - 1) // s.STAT_PAD * s.STAT_PAD:
        rows = m + tl.arange(0, s.BLOCK_M)
        dims = tl.arange(0, s.BLOCK_D)
        o = _load(_tile(o_ptr, batch, head, q_start, o_strides), rows, dims, q_len, s, True)
        do = _load(_tile(do_ptr, batch, head, q_start, do_strides), rows, dims, q_len, s, True)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        at = batch.to(tl.int64) * lse_strides[0] + head * lse_strides[1] + q_start + rows
        lse = tl.load(lse_ptr + at, mask=rows < q_len, other=float("inf"))
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + at, mask=rows < q_len, other=0.0)
        # exp(S + -LSE) is then 0 for a row without keys, as it is for one that does not exist.
        nlse = tl.where(lse == float("-inf"), float("-inf"), -lse * inv_scale)
        at = batch.to(tl.int64) * stat_strides[0] + head * stat_strides[1]
        at += _padded_start(q_start, batch, s) + rows
        tl.store(nlse_ptr + at, nlse)
        tl.store(ndelta_ptr + at, -delta)


class _Queries(NamedTuple):
    """The queries of a head: Q and dO, each a `_tile`, pointers to their statistics, and how many there are."""

    q: Any
    do: Any
    nlse_ptr: Any
    ndelta_ptr: Any
    length: Any


@triton.jit
def _over_queries(sums, k, v, of, first, last, keys, dims, scale_log2, s, MASKED: tl.constexpr):
    """dK and dV from queries [first, last), blocks of which start at multiples of BLOCK_M. keys: their numbers, and by
    how much those that a query sees are ahead of its own."""
    dk, dv = sums
    cols, shift = keys
    for m in range(first, last, s.BLOCK_M):
        rows = m + tl.arange(0, s.BLOCK_M)
        q = _load(of.q, rows, dims, of.length, s, True)
        do = _load(of.do, rows, dims, of.length, s, True)
        nlse = tl.load(of.nlse_ptr + rows)
        ndelta = tl.load(of.ndelta_ptr + rows)
        scores = tl.dot(k, q.T)
        if MASKED:
            scores = tl.where(cols[:, None] <= rows[None, :] + shift, scores, float("-inf"))
        weights = tl.exp2(scores * scale_log2 + (nlse * scale_log2)[None, :])
        dv = tl.dot(weights.to(do.dtype), do, dv)
        ds = weights * (tl.dot(v, do.T) + ndelta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(tensors, cu_ptrs, strides, HKV, GROUP, LQ, LK, scale, scale_log2, SHAPE: tl.constexpr):
    """dK and dV. tensors: q, k, v, do, dk, dv, nlse, ndelta. Grid: (blocks of keys, batch * HKV). With a causal mask
    the first keys, which most queries see, come first."""
    s: tl.constexpr = constants(Shape, SHAPE)
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, nlse_ptr, ndelta_ptr = tensors
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, stat_strides = strides
    batch = tl.program_id(1) // HKV
    kv_head = tl.program_id(1) % HKV
    q_start, q_len, k_start, k_len = _sequence(cu_ptrs[0], cu_ptrs[1], batch, LQ, LK, s)
    n = tl.program_id(0) * s.BLOCK_N
    if n < k_len:
        cols = n + tl.arange(0, s.BLOCK_N)
        dims = tl.arange(0, s.BLOCK_D)
        k_tile = _tile(k_ptr, batch, kv_head, k_start, k_strides)
        v_tile = _tile(v_ptr, batch, kv_head, k_start, v_strides)
        k = _load(k_tile, cols, dims, k_len, s, True)
        v = _load(v_tile, cols, dims, k_len, s, True)
        sums = (tl.zeros((s.BLOCK_N, s.BLOCK_D), tl.float32), tl.zeros((s.BLOCK_N, s.BLOCK_D), tl.float32))
        shift = k_len - q_len
        keys = (cols, shift)
        first = tl.full((), 0, tl.int32)
        full = first
        if s.CAUSAL:
            # Key j is seen by the queries from j - shift on.
            first = tl.maximum(n - shift, 0) // s.BLOCK_M * s.BLOCK_M
            full = (tl.maximum(n + s.BLOCK_N - 1 - shift, 0) + s.BLOCK_M - 1) // s.BLOCK_M * s.BLOCK_M
        for g in range(GROUP):
            head = kv_head * GROUP + g
            q_tile = _tile(q_ptr, batch, head, q_start, q_strides)
            do_tile = _tile(do_ptr, batch, head, q_start, do_strides)
            at = batch.to(tl.int64) * stat_strides[0] + head * stat_strides[1]
            at += _padded_start(q_start, batch, s)
            queries = _Queries(q_tile, do_tile, nlse_ptr + at, ndelta_ptr + at, q_len)
            if s.CAUSAL:
                last = tl.minimum(full, q_len)
                sums = _over_queries(sums, k, v, queries, first, last, keys, dims, scale_log2, s, True)
            sums = _over_queries(sums, k, v, queries, full, q_len, keys, dims, scale_log2, s, False)
        dk, dv = sums
        dk_tile = _tile(dk_ptr, batch, kv_head, k_start, dk_strides)
        dv_tile = _tile(dv_ptr, batch, kv_head, k_start, dv_strides)
        _store(dk_tile, cols, dims, k_len, dk * scale, s)
        _store(dv_tile, cols, dims, k_len, dv, s)


@triton.jit
def _over_keys(dq, rows, of, first, last, last_key, dims, scale_log2, s, MASKED: tl.constexpr):
    """dQ of `rows`, (Q, dO, -LSE, -delta), from keys [first, last)."""
    q, do, nlse, ndelta = rows
    for n in range(first, last, s.BLOCK_N):
        cols = n + tl.arange(0, s.BLOCK_N)
        k = _load(of.k, cols, dims, of.length, s, MASKED)
        v = _load(of.v, cols, dims, of.length, s, MASKED)
        scores = tl.dot(q, k.T)
        if MASKED:
            scores = tl.where(cols[None, :] <= last_key[:, None], scores, float("-inf"))
        weights = tl.exp2(scores * scale_log2 + nlse[:, None])
        ds = weights * (tl.dot(do, v.T) + ndelta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def dq_kernel(tensors, cu_ptrs, strides, H, GROUP, LQ, LK, scale, scale_log2, SHAPE: tl.constexpr):
    """dQ. tensors: q, k, v, do, dq, nlse, ndelta. Grid: (blocks of queries, batch * H)."""
    s: tl.constexpr = constants(Shape, SHAPE)
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, nlse_ptr, ndelta_ptr = tensors
    q_strides, k_strides, v_strides, do_strides, dq_strides, stat_strides = strides
    block, batch, head = _block_of_queries(H, s)
    q_start, q_len, k_start, k_len = _sequence(cu_ptrs[0], cu_ptrs[1], batch, LQ, LK, s)
    m = block * s.BLOCK_M
    if m < q_len:
        rows = m + tl.arange(0, s.BLOCK_M)
        dims = tl.arange(0, s.BLOCK_D)
        q_tile = _tile(q_ptr, batch, head, q_start, q_strides)
        do_tile = _tile(do_ptr, batch, head, q_start, do_strides)
        k_tile = _tile(k_ptr, batch, head // GROUP, k_start, k_strides)
        v_tile = _tile(v_ptr, batch, head // GROUP, k_start, v_strides)
        q = _load(q_tile, rows, dims, q_len, s, True)
        do = _load(do_tile, rows, dims, q_len, s, True)
        at = batch.to(tl.int64) * stat_strides[0] + head * stat_strides[1]
        at += _padded_start(q_start, batch, s) + rows
        nlse = tl.load(nlse_ptr + at) * scale_log2
        ndelta = tl.load(ndelta_ptr + at)
        full, end, last_key = _seen(m, rows, q_len, k_len, s)
        dq = tl.zeros((s.BLOCK_M, s.BLOCK_D), tl.float32)
        keys = _Keys(k_tile, v_tile, k_len)
        held = (q, do, nlse, ndelta)
        dq = _over_keys(dq, held, keys, 0, full, last_key, dims, scale_log2, s, False)
        dq = _over_keys(dq, held, keys, full, end, last_key, dims, scale_log2, s, True)
        _store(_tile(dq_ptr, batch, head, q_start, dq_strides), rows, dims, q_len, dq * scale, s)
