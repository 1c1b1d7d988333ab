"""Device code of the `gluon_hopper` backend: dQ.

Consumers hold queries and their dO and go over the keys that they see; see `_hopper_backward` for the formulas.
"""

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
    key_blocks,
    laps_end,
    lengths,
    load_held,
    load_stage,
    locate,
    padded_start,
    store_rows,
)


@gluon.jit
def dq_producer(p):
    step = 0
    tile = 0
    for t in range(gl.program_id(0), laps_end(p), gl.num_programs(0)):
        batch, head, m = locate(p, t, p.LQ, p.H, p.HELD, True)
        q_start, q_len, k_start, k_len = lengths(p, batch)
        if m < q_len:
            load_held(p, batch, head, q_start, q_len, m, tile)
            blocks, _full = key_blocks(p, m, p.HELD, p.BLOCK, q_len, k_len)
            for j in range(blocks):
                n = (blocks - 1 - j) * p.BLOCK
                load_stage(p, batch, head, head // p.GROUP, k_start, k_len, n, 0, step, False)
                step += 1
            tile += 1


@gluon.jit
def _queue_dq(p, q, do, step, s_layout: gl.constexpr):
    """Queue S and dP of held Q and dO with the keys in stage `step`."""
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    zeros = gl.zeros((p.ROWS, p.BLOCK), gl.float32, s_layout)
    mbarrier.wait(p.a_full.index(i), phase)
    k = p.a_smem.index(i).reshape([p.BLOCK, p.D]).permute((1, 0))
    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    mbarrier.wait(p.b_full.index(i), phase)
    v = p.b_smem.index(i).reshape([p.BLOCK, p.D]).permute((1, 0))
    dp = warpgroup_mma(do, v, zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _dq_block(p, q, do, s, dp, dq, lse, delta, n, masked, last_key, step, AHEAD: gl.constexpr):
    """dQ of the keys [n, n + BLOCK) in stage `step`, as `_dkdv_block` does it."""
    s_layout: gl.constexpr = accumulator(p.BLOCK)
    i = step % p.STAGES
    k = p.a_smem.index(i).reshape([p.BLOCK, p.D])
    if p.AHEAD:
        s, dp = warpgroup_mma_wait(0, (s, dp))
        mbarrier.arrive(p.b_empty.index(i), count=1)
    else:
        s, dp = _queue_dq(p, q, do, step, s_layout)
        s = warpgroup_mma_wait(1, (s,))
    if masked:
        cols = n + gl.arange(0, p.BLOCK, layout=gl.SliceLayout(0, s_layout))
        s = gl.where(gl.expand_dims(cols, 0) <= gl.expand_dims(last_key, 1), s, float("-inf"))
    probs = gl.exp2(s * p.scale_log2 + gl.expand_dims(lse, 1))
    if not p.AHEAD:
        dp = warpgroup_mma_wait(0, (dp,))
        mbarrier.arrive(p.b_empty.index(i), count=1)
    dq = warpgroup_mma(as_left(p, probs * (dp + gl.expand_dims(delta, 1)), accumulator(p.D)), k, dq, is_async=True)
    if AHEAD:
        s, dp = _queue_dq(p, q, do, step + 1, s_layout)
        dq = warpgroup_mma_wait(2, (dq,))
    else:
        dq = warpgroup_mma_wait(0, (dq,))
    mbarrier.arrive(p.a_empty.index(i), count=1)
    return s, dp, dq


@gluon.jit
def dq_consumer(p, CONSUMER: gl.constexpr):
    s_layout: gl.constexpr = accumulator(p.BLOCK)
    d_layout: gl.constexpr = accumulator(p.D)
    step = 0
    tile = 0
    for t in range(gl.program_id(0), laps_end(p), gl.num_programs(0)):
        batch, head, m = locate(p, t, p.LQ, p.H, p.HELD, True)
        q_start, q_len, _k_start, k_len = lengths(p, batch)
        if m < q_len:
            blocks, full = key_blocks(p, m, p.HELD, p.BLOCK, q_len, k_len)
            rows = m + CONSUMER * p.ROWS + gl.arange(0, p.ROWS, layout=gl.SliceLayout(1, s_layout))
            last_key = gl.full((p.ROWS,), 0, gl.int32, gl.SliceLayout(1, s_layout)) + (k_len - 1)
            if p.CAUSAL:
                last_key = gl.minimum(last_key, rows + (k_len - q_len))
            stats = batch * p.stat_stride_b + head * p.stat_stride_h + padded_start(p, q_start, batch) + rows
            lse = gl.load(p.lse_ptr + stats) * p.scale_log2
            delta = gl.load(p.delta_ptr + stats)
            at = tile % p.SLOTS * p.CONSUMERS + CONSUMER
            mbarrier.wait(p.held_full.index(at), (tile // p.SLOTS) & 1)
            q = p.x_smem.index(at).reshape([p.ROWS, p.D])
            do = p.y_smem.index(at).reshape([p.ROWS, p.D])
            dq = gl.zeros((p.ROWS, p.D), gl.float32, d_layout)
            if p.AHEAD:
                s, dp = _queue_dq(p, q, do, step, s_layout)
                for b in range(1, blocks):
                    n = (blocks - b) * p.BLOCK
                    masked = blocks - b >= full
                    s, dp, dq = _dq_block(p, q, do, s, dp, dq, lse, delta, n, masked, last_key, step, True)
                    step += 1
                _s, _dp, dq = _dq_block(p, q, do, s, dp, dq, lse, delta, 0, full == 0, last_key, step, False)
                step += 1
            else:
                for b in range(1, blocks + 1):
                    n = (blocks - b) * p.BLOCK
                    masked = blocks - b >= full
                    _s, _dp, dq = _dq_block(p, q, do, None, None, dq, lse, delta, n, masked, last_key, step, False)
                    step += 1
            p.x_smem.index(at).reshape([p.ROWS, p.D]).store((dq * p.scale).to(p.a_desc.dtype))
            fence_async_shared()
            store_rows(p.dx_desc, batch, head, q_start, q_len, m + CONSUMER * p.ROWS, p.x_smem.index(at), p.VARLEN)
            tma.store_wait(0)
            mbarrier.arrive(p.held_empty.index(at), count=1)
            tile += 1
