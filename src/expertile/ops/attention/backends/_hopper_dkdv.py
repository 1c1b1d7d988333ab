"""Device code of the `gluon_hopper` backend: dK and dV.

Consumers hold keys and values and go over the queries that see them; see `_hopper_backward` for the formulas. Sᵀ and
dPᵀ are computed, so that Pᵀ and dSᵀ are the left operands of dV = Pᵀ dO and dK = dSᵀ Q as they are.
"""
# ruff: noqa: SIM102  (compile-time conditions stand alone)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from expertile.ops.attention.backends._hopper_tiles import (
    accumulator,
    as_left,
    laps_end,
    lengths,
    load_held,
    load_stage,
    locate,
    padded_start,
    query_blocks,
    store_rows,
)


@gluon.jit
def dkdv_producer(p):
    step = 0
    tile = 0
    for t in range(gl.program_id(0), laps_end(p), gl.num_programs(0)):
        batch, kv_head, n = locate(p, t, p.LK, p.H // p.GROUP, p.HELD, False)
        q_start, q_len, k_start, k_len = lengths(p, batch)
        if n < k_len:
            load_held(p, batch, kv_head, k_start, k_len, n, tile)
            first, _full, end = query_blocks(p, n, q_len, k_len)
            for g in range(p.GROUP):
                head = kv_head * p.GROUP + g
                stats = batch * p.stat_stride_b + head * p.stat_stride_h + padded_start(p, q_start, batch)
                for j in range(first, end):
                    load_stage(p, batch, head, kv_head, q_start, q_len, j * p.BLOCK, stats, step, True)
                    step += 1
            tile += 1


@gluon.jit
def _registers(x):
    """`x` with registers of its own for each element: equal ones would else be copied apart amid a wgmma."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _queue_dkdv(p, k, v, step, keys, m, masked, s_layout: gl.constexpr):
    """Queue Sᵀ and dPᵀ of held K and V with the queries [m, m + BLOCK) in stage `step`.

    The accumulators start at the queries' -LSE / scale and -delta, which so cost no registers later on, and Sᵀ at minus
    infinity where query m + column does not see a key.
    """
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    zeros = gl.zeros((p.ROWS, p.BLOCK), gl.float32, s_layout)
    mbarrier.wait(p.a_full.index(i), phase)
    mbarrier.wait(p.b_full.index(i), phase)
    lse = zeros + gl.expand_dims(p.lse_smem.index(i).load(gl.SliceLayout(0, s_layout)), 0)
    if p.CAUSAL:
        if masked:
            last_key = m + gl.arange(0, p.BLOCK, layout=gl.SliceLayout(0, s_layout))
            lse = gl.where(gl.expand_dims(keys, 1) <= gl.expand_dims(last_key, 0), lse, float("-inf"))
    delta = zeros + gl.expand_dims(p.delta_smem.index(i).load(gl.SliceLayout(0, s_layout)), 0)
    lse = _registers(lse)
    delta = _registers(delta)
    s = warpgroup_mma(k, p.a_smem.index(i).reshape([p.BLOCK, p.D]).permute((1, 0)), lse, is_async=True)
    dp = warpgroup_mma(v, p.b_smem.index(i).reshape([p.BLOCK, p.D]).permute((1, 0)), delta, is_async=True)
    return s, dp


@gluon.jit
def _dkdv_block(p, k, v, s, dp, dk, dv, keys, j, j_next, full, step, AHEAD: gl.constexpr):
    """dK and dV of block j of the queries, which is in stage `step`. `keys`: the first query that sees each key.

    With AHEAD, S and dP of this stage are on their way already. Those of the next stage are sent before this one's
    products are waited for. That takes registers for both; without, dP runs beside the exponentials of S.
    """
    s_layout: gl.constexpr = accumulator(p.BLOCK)
    i = step % p.STAGES
    q = p.a_smem.index(i).reshape([p.BLOCK, p.D])
    do = p.b_smem.index(i).reshape([p.BLOCK, p.D])
    if p.AHEAD:
        s, dp = warpgroup_mma_wait(0, (s, dp))
    else:
        s, dp = _queue_dkdv(p, k, v, step, keys, j * p.BLOCK, j < full, s_layout)
        s = warpgroup_mma_wait(1, (s,))
    probs = gl.exp2(s * p.scale_log2)
    dv = warpgroup_mma(as_left(p, probs, accumulator(p.D)), do, dv, is_async=True)
    if not p.AHEAD:
        dp = warpgroup_mma_wait(1, (dp,))
    dk = warpgroup_mma(as_left(p, probs * dp, accumulator(p.D)), q, dk, is_async=True)
    if AHEAD:
        s, dp = _queue_dkdv(p, k, v, step + 1, keys, j_next * p.BLOCK, j_next < full, s_layout)
        dk, dv = warpgroup_mma_wait(2, (dk, dv))
    else:
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
    mbarrier.arrive(p.a_empty.index(i), count=1)
    mbarrier.arrive(p.b_empty.index(i), count=1)
    return s, dp, dk, dv


@gluon.jit
def dkdv_consumer(p, CONSUMER: gl.constexpr):
    s_layout: gl.constexpr = accumulator(p.BLOCK)
    d_layout: gl.constexpr = accumulator(p.D)
    step = 0
    tile = 0
    for t in range(gl.program_id(0), laps_end(p), gl.num_programs(0)):
        batch, kv_head, n = locate(p, t, p.LK, p.H // p.GROUP, p.HELD, False)
        _q_start, q_len, k_start, k_len = lengths(p, batch)
        if n < k_len:
            first, full, end = query_blocks(p, n, q_len, k_len)
            keys = n + CONSUMER * p.ROWS - (k_len - q_len) + gl.arange(0, p.ROWS, layout=gl.SliceLayout(1, s_layout))
            at = tile % p.SLOTS * p.CONSUMERS + CONSUMER
            mbarrier.wait(p.held_full.index(at), (tile // p.SLOTS) & 1)
            k = p.x_smem.index(at).reshape([p.ROWS, p.D])
            v = p.y_smem.index(at).reshape([p.ROWS, p.D])
            dk = gl.zeros((p.ROWS, p.D), gl.float32, d_layout)
            dv = gl.zeros((p.ROWS, p.D), gl.float32, d_layout)
            count = p.GROUP * (end - first)
            j = first + 0
            if p.AHEAD:
                if count > 0:
                    s, dp = _queue_dkdv(p, k, v, step, keys, j * p.BLOCK, j < full, s_layout)
                    for _b in range(count - 1):
                        j_next = gl.where(j + 1 == end, first, j + 1)
                        s, dp, dk, dv = _dkdv_block(p, k, v, s, dp, dk, dv, keys, j, j_next, full, step, True)
                        step += 1
                        j = j_next + 0
                    _s, _dp, dk, dv = _dkdv_block(p, k, v, s, dp, dk, dv, keys, j, j, full, step, False)
                    step += 1
            else:
                for _b in range(count):
                    _s, _dp, dk, dv = _dkdv_block(p, k, v, None, None, dk, dv, keys, j, j, full, step, False)
                    step += 1
                    j = gl.where(j + 1 == end, first, j + 1)
            p.x_smem.index(at).reshape([p.ROWS, p.D]).store((dk * p.scale).to(p.a_desc.dtype))
            p.y_smem.index(at).reshape([p.ROWS, p.D]).store(dv.to(p.a_desc.dtype))
            fence_async_shared()
            row = n + CONSUMER * p.ROWS
            store_rows(p.dx_desc, batch, kv_head, k_start, k_len, row, p.x_smem.index(at), p.VARLEN)
            store_rows(p.dy_desc, batch, kv_head, k_start, k_len, row, p.y_smem.index(at), p.VARLEN)
            tma.store_wait(0)
            mbarrier.arrive(p.held_empty.index(at), count=1)
            tile += 1
