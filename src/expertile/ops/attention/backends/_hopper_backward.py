"""Device code of the `gluon_hopper` backend, backward: the kernel whose consumers make dQ, or dK and dV.

    P = exp(scale · S − LSE),  dP = dO Vᵀ,  dS = P · (dP − delta),  delta = rowsum(dO · O)
    dV = Pᵀ dO,  dK = scale · dSᵀ Q,  dQ = scale · dS K

For dK and dV consumers hold keys and values and go over all queries that see them, of all query heads that share the
key head. Sᵀ and dPᵀ are computed, so that Pᵀ and dSᵀ are the left operands of dV = Pᵀ dO and dK = dSᵀ Q as they are.
For dQ consumers hold queries and their dO and go over the keys that they see. S and dP are computed in both: seven
products instead of the five that one kernel with atomic additions to dQ needs, and every run gives the same bits.

The tensor cores leave P and dS, or their transposes, in the registers in which the next product takes its left operand.
A consumer never waits for its last product before it queues the next block's first.
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

from expertile.ops.attention.backends import _hopper_tiles as tiling
from expertile.ops.attention.backends._hopper_pass import Backward, as_left, load_held, load_stage, padded_start
from expertile.ops.hopper.prologue import make_barriers, slots, specialise


@gluon.jit
def _query_blocks(p, n, q_len, k_len):
    """(first, first without a mask, end) of the blocks of queries that see keys [n, n + p.HELD)."""
    end = (q_len + p.BLOCK - 1) // p.BLOCK
    if p.CAUSAL:
        # Key j is seen by the queries from j - (k_len - q_len) on.
        first = gl.minimum(gl.maximum(n - (k_len - q_len), 0) // p.BLOCK, end)
        seen = gl.maximum(n + p.HELD - 1 - (k_len - q_len), 0)
        return first, gl.minimum(gl.maximum((seen + p.BLOCK - 1) // p.BLOCK, first), end), end
    else:
        return 0, 0, end


@gluon.jit
def _dkdv_producer(p):
    step = 0
    tile = 0
    for t in range(gl.program_id(0), tiling.laps_end(p), gl.num_programs(0)):
        batch, kv_head, n = tiling.locate(p, t, p.LK, p.H // p.GROUP, p.HELD, False)
        q_start, q_len, k_start, k_len = tiling.lengths(p, batch)
        if n < k_len:
            load_held(p, batch, kv_head, k_start, k_len, n, tile)
            first, _full, end = _query_blocks(p, n, q_len, k_len)
            for g in range(p.GROUP):
                head = kv_head * p.GROUP + g
                stats = batch * p.stat_stride_b + head * p.stat_stride_h + padded_start(p, q_start, batch)
                for j in range(first, end):
                    load_stage(p, batch, head, q_start, q_len, j * p.BLOCK, stats, step, True)
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
    s_layout: gl.constexpr = tiling.accumulator(p.BLOCK)
    i = step % p.STAGES
    q = p.a_smem.index(i).reshape([p.BLOCK, p.D])
    do = p.b_smem.index(i).reshape([p.BLOCK, p.D])
    if p.AHEAD:
        s, dp = warpgroup_mma_wait(0, (s, dp))
    else:
        s, dp = _queue_dkdv(p, k, v, step, keys, j * p.BLOCK, j < full, s_layout)
        s = warpgroup_mma_wait(1, (s,))
    probs = gl.exp2(s * p.scale_log2)
    dv = warpgroup_mma(as_left(p, probs), do, dv, is_async=True)
    if not p.AHEAD:
        dp = warpgroup_mma_wait(1, (dp,))
    dk = warpgroup_mma(as_left(p, probs * dp), q, dk, is_async=True)
    if AHEAD:
        s, dp = _queue_dkdv(p, k, v, step + 1, keys, j_next * p.BLOCK, j_next < full, s_layout)
        dk, dv = warpgroup_mma_wait(2, (dk, dv))
    else:
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
    mbarrier.arrive(p.a_empty.index(i), count=1)
    mbarrier.arrive(p.b_empty.index(i), count=1)
    return s, dp, dk, dv


@gluon.jit
def _dkdv_consumer(p, CONSUMER: gl.constexpr):
    s_layout: gl.constexpr = tiling.accumulator(p.BLOCK)
    d_layout: gl.constexpr = tiling.accumulator(p.D)
    step = 0
    tile = 0
    for t in range(gl.program_id(0), tiling.laps_end(p), gl.num_programs(0)):
        batch, kv_head, n = tiling.locate(p, t, p.LK, p.H // p.GROUP, p.HELD, False)
        _q_start, q_len, k_start, k_len = tiling.lengths(p, batch)
        if n < k_len:
            first, full, end = _query_blocks(p, n, q_len, k_len)
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
            tiling.store_rows(p.dx_desc, batch, kv_head, k_start, k_len, row, p.x_smem.index(at), p.VARLEN)
            tiling.store_rows(p.dy_desc, batch, kv_head, k_start, k_len, row, p.y_smem.index(at), p.VARLEN)
            tma.store_wait(0)
            mbarrier.arrive(p.held_empty.index(at), count=1)
            tile += 1


@gluon.jit
def _dq_producer(p):
    step = 0
    tile = 0
    for t in range(gl.program_id(0), tiling.laps_end(p), gl.num_programs(0)):
        batch, head, m = tiling.locate(p, t, p.LQ, p.H, p.HELD, True)
        q_start, q_len, k_start, k_len = tiling.lengths(p, batch)
        if m < q_len:
            load_held(p, batch, head, q_start, q_len, m, tile)
            blocks, _full = tiling.key_blocks(p, m, p.HELD, p.BLOCK, q_len, k_len)
            for j in range(blocks):
                n = (blocks - 1 - j) * p.BLOCK
                load_stage(p, batch, head // p.GROUP, k_start, k_len, n, 0, step, False)
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
    s_layout: gl.constexpr = tiling.accumulator(p.BLOCK)
    i = step % p.STAGES
    k = p.a_smem.index(i).reshape([p.BLOCK, p.D])
    if p.AHEAD:
        s, dp = warpgroup_mma_wait(0, (s, dp))
        mbarrier.arrive(p.b_empty.index(i), count=1)
    else:
        s, dp = _queue_dq(p, q, do, step, s_layout)
        s = warpgroup_mma_wait(1, (s,))
    if masked:
        s = tiling.mask_keys(s, n, last_key, s_layout)
    probs = gl.exp2(s * p.scale_log2 + gl.expand_dims(lse, 1))
    if not p.AHEAD:
        dp = warpgroup_mma_wait(0, (dp,))
        mbarrier.arrive(p.b_empty.index(i), count=1)
    dq = warpgroup_mma(as_left(p, probs * (dp + gl.expand_dims(delta, 1))), k, dq, is_async=True)
    if AHEAD:
        s, dp = _queue_dq(p, q, do, step + 1, s_layout)
        dq = warpgroup_mma_wait(2, (dq,))
    else:
        dq = warpgroup_mma_wait(0, (dq,))
    mbarrier.arrive(p.a_empty.index(i), count=1)
    return s, dp, dq


@gluon.jit
def _dq_consumer(p, CONSUMER: gl.constexpr):
    s_layout: gl.constexpr = tiling.accumulator(p.BLOCK)
    d_layout: gl.constexpr = tiling.accumulator(p.D)
    step = 0
    tile = 0
    for t in range(gl.program_id(0), tiling.laps_end(p), gl.num_programs(0)):
        batch, head, m = tiling.locate(p, t, p.LQ, p.H, p.HELD, True)
        q_start, q_len, _k_start, k_len = tiling.lengths(p, batch)
        if m < q_len:
            blocks, full = tiling.key_blocks(p, m, p.HELD, p.BLOCK, q_len, k_len)
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
            tiling.store_rows(
                p.dx_desc, batch, head, q_start, q_len, m + CONSUMER * p.ROWS, p.x_smem.index(at), p.VARLEN
            )
            tma.store_wait(0)
            mbarrier.arrive(p.held_empty.index(at), count=1)
            tile += 1


def _name(specialization):
    """What profilers show."""
    return "attention_dq_kernel" if specialization.constants["SHAPE"].DQ else "attention_dkdv_kernel"


@gluon.jit(
    repr=_name,
    do_not_specialize=["tiles", "H", "GROUP", "HEADS", "SECTION", "LQ", "LK", "stat_stride_b", "stat_stride_h"],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "cu_q_ptr", "cu_k_ptr"],
)
def attention_backward_kernel(
    x_desc,
    y_desc,
    a_desc,
    b_desc,
    dx_desc,
    dy_desc,
    lse_desc,
    delta_desc,
    lse_ptr,
    delta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    tiles,
    H,
    GROUP,
    HEADS,
    SECTION,
    LQ,
    LK,
    stat_stride_b,
    stat_stride_h,
    scale,
    scale_log2,
    SHAPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dQ, or dK and dV summed over the GROUP query heads of each key head. x, y, a, b: as `Backward` has them; dQ is
    dx. HEADS: of all sequences, query heads for dQ, else key heads.

    In shared memory: held rows x and y, and a ring of blocks a and b with their statistics."""
    HELD: gl.constexpr = SHAPE.SLOTS * SHAPE.CONSUMERS
    STAGES: gl.constexpr = SHAPE.STAGES
    x_smem = slots(x_desc, HELD)
    y_smem = slots(y_desc, HELD)
    a_smem = slots(a_desc, STAGES)
    b_smem = slots(b_desc, STAGES)
    lse_smem = slots(lse_desc, STAGES)
    delta_smem = slots(delta_desc, STAGES)
    held_full, held_empty = make_barriers(HELD, 1, 1)
    a_full, a_empty = make_barriers(STAGES, 1, SHAPE.CONSUMERS)
    b_full, b_empty = make_barriers(STAGES, 1, SHAPE.CONSUMERS)
    fence_async_shared()
    p = Backward(
        (x_desc, y_desc, a_desc, b_desc, dx_desc, dy_desc, lse_desc, delta_desc),
        (x_smem, y_smem, a_smem, b_smem, lse_smem, delta_smem),
        (held_full, held_empty, a_full, a_empty, b_full, b_empty),
        (lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr),
        (tiles, H, GROUP, HEADS, SECTION, LQ, LK, stat_stride_b, stat_stride_h, scale, scale_log2),
        SHAPE,
    )
    if SHAPE.DQ:
        specialise(p, _dq_consumer, _dq_producer, None, REGISTERS)
    else:
        specialise(p, _dkdv_consumer, _dkdv_producer, None, REGISTERS)
