"""Device code of the `gluon_hopper` backend, forward: persistent, warp-specialised flash attention for sm_90a.

    S = Q Kᵀ,  P = exp(scale · (S − rowmax S)),  O = P V / rowsum P,  LSE = scale · rowmax S + ln rowsum P

One warp loads tiles of Q, K and V with TMA; two or three warpgroups ("consumers") hold 64 query rows each. The keys of
a tile are taken from the last block to the first: blocks that need a mask come first, and the long rest needs none. In
a consumer the softmax of block j + 1 runs while the tensor cores do P V of block j (Shah et al., FlashAttention-3,
2024, §3.2). P never leaves the registers: the first product's accumulator layout is the second's operand layout.

Shared memory: Q twice (the next tile's arrives while this one's is in use; O leaves through the buffer that Q came in),
K and V in rings of STAGES blocks.
"""
# ruff: noqa: SIM102  (compile-time conditions stand alone)

from typing import NamedTuple

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
from expertile.ops.hopper.context import context_of
from expertile.ops.hopper.prologue import make_barriers, slots, specialise

_LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


class ForwardShape(NamedTuple):
    """What the forward kernel is compiled for: tiles of BLOCK_M queries, ROWS for each consumer, in Q_SLOTS buffers,
    and BLOCK_N keys in STAGES."""

    CAUSAL: bool
    VARLEN: bool
    D: int
    CONSUMERS: int
    ROWS: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    Q_SLOTS: int


# What every partition is handed.
Forward = context_of(
    "q_desc k_desc v_desc o_desc",
    "q_smem k_smem v_smem q_full q_empty k_full k_empty v_full v_empty",
    "lse_ptr cu_q_ptr cu_k_ptr tiles H GROUP HEADS SECTION LQ LK lse_stride_b lse_stride_h scale_log2",
    ForwardShape,
)


@gluon.constexpr_function
def _sum_layout():
    """[64, 4]: the four threads of a warp that hold a row of a product, a sum each."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def _load_keys(p, desc, smem, full, empty, batch, head, start, length, n, step):
    """TMA of K or V of the keys [n, n + BLOCK_N) into stage `step`, when that is free."""
    i = step % p.STAGES
    mbarrier.wait(empty.index(i), ((step // p.STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(i), desc.block_type.nbytes)
    tiling.load_rows(desc, batch, head, start, length, n, full.index(i), smem.index(i), p.VARLEN)


@gluon.jit
def _producer(p):
    step = 0
    tile = 0
    for t in range(gl.program_id(0), tiling.laps_end(p), gl.num_programs(0)):
        batch, head, m = tiling.locate(p, t, p.LQ, p.H, p.BLOCK_M, True)
        q_start, q_len, k_start, k_len = tiling.lengths(p, batch)
        if m < q_len:
            kv_head = head // p.GROUP
            blocks, _full = tiling.key_blocks(p, m, p.BLOCK_M, p.BLOCK_N, q_len, k_len)
            slot = tile % p.Q_SLOTS
            for w in gl.static_range(p.CONSUMERS):
                at = slot * p.CONSUMERS + w
                mbarrier.wait(p.q_empty.index(at), ((tile // p.Q_SLOTS) & 1) ^ 1)
                mbarrier.expect(p.q_full.index(at), p.q_desc.block_type.nbytes)
                row, full, to = m + w * p.ROWS, p.q_full.index(at), p.q_smem.index(at)
                tiling.load_rows(p.q_desc, batch, head, q_start, q_len, row, full, to, p.VARLEN)
            n = (blocks - 1) * p.BLOCK_N
            _load_keys(p, p.k_desc, p.k_smem, p.k_full, p.k_empty, batch, kv_head, k_start, k_len, n, step)
            for _j in range(1, blocks):
                # K is needed, and free again, one block before V is.
                _load_keys(
                    p, p.k_desc, p.k_smem, p.k_full, p.k_empty, batch, kv_head, k_start, k_len, n - p.BLOCK_N, step + 1
                )
                _load_keys(p, p.v_desc, p.v_smem, p.v_full, p.v_empty, batch, kv_head, k_start, k_len, n, step)
                n -= p.BLOCK_N
                step += 1
            _load_keys(p, p.v_desc, p.v_smem, p.v_full, p.v_empty, batch, kv_head, k_start, k_len, n, step)
            step += 1
            tile += 1


@gluon.jit
def _scores(p, q, step, s_layout: gl.constexpr):
    """Queue S = Q Kᵀ for the block in stage `step`."""
    i = step % p.STAGES
    mbarrier.wait(p.k_full.index(i), (step // p.STAGES) & 1)
    k = p.k_smem.index(i).reshape([p.BLOCK_N, p.D]).permute((1, 0))
    zeros = gl.zeros((p.ROWS, p.BLOCK_N), gl.float32, s_layout)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _weigh(p, probs, o, step):
    """Queue O += P V for the block in stage `step`, which `_values_here` has waited for."""
    v = p.v_smem.index(step % p.STAGES).reshape([p.BLOCK_N, p.D])
    return warpgroup_mma(probs, v, o, is_async=True)


@gluon.jit
def _values_here(p, step):
    """Wait for V of the block in stage `step`.

    Standing between a softmax and the wait for the products beside it, it ends a basic block there: ptxas would else
    move the softmax behind the products that it is to run beside.
    """
    mbarrier.wait(p.v_full.index(step % p.STAGES), (step // p.STAGES) & 1)


@gluon.jit
def _softmax(p, s, row_max):
    """exp2(scale · (s − new maximum)), the new maximum, and the factor for what was summed with the old one."""
    new_max = gl.maximum(row_max, gl.max(s, axis=1))
    # A row without any key so far: its weights are exp2(-inf) = 0, not NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * p.scale_log2)
    factor = gl.exp2(row_max * p.scale_log2 - shift)
    return gl.exp2(s * p.scale_log2 - gl.expand_dims(shift, 1)), new_max, factor


@gluon.jit
def _add(p, row_sum, factor, e, sum_layout: gl.constexpr):
    """Sums of each row's weights by the four threads that hold it: [ROWS, 4], added up when the tile is done."""
    own = gl.sum(gl.sum(gl.reshape(e, [p.ROWS, p.BLOCK_N // 8, 4, 2]), axis=3), axis=1)
    own = gl.convert_layout(own, sum_layout, assert_trivial=True)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, sum_layout))
    return row_sum * gl.expand_dims(factor, 1) + own


@gluon.jit
def _packed(p, e):
    """Weights rounded, in pairs, each pair in one of two 32-bit registers, the other unused.

    Loops carry them so: as they are, every one would have a register, and be packed in every round. To be called when
    the product before is done: ptxas would else wait for each, as their operands might have the same registers.
    """
    x = e.to(p.q_desc.dtype)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, 0;", "=r,=r,r", [x], dtype=gl.int32, is_pure=False, pack=2
    )


@gluon.jit
def _as_left(p, x, o_layout: gl.constexpr):
    """What `_packed` was given, as left operand of the next product: the same registers.

    To be called before any product is queued: a move among them would make ptxas wait for each.
    """
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=p.q_desc.dtype, is_pure=False, pack=2)
    return gl.convert_layout(x, gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def _weights(p, s, row_max, row_sum, n, unmasked, last_key, MASKED: gl.constexpr, s_layout: gl.constexpr):
    """(P, new maximum, new sum, factor of what was summed before) of the block of keys from `n` on."""
    if MASKED:
        if n >= unmasked:
            s = tiling.mask_keys(s, n, last_key, s_layout)
    e, row_max, factor = _softmax(p, s, row_max)
    return e, row_max, _add(p, row_sum, factor, e, _sum_layout()), factor


@gluon.jit
def _block(p, q, o, row_max, row_sum, probs, n, unmasked, last_key, step, MASKED: gl.constexpr):
    """Softmax of the block in stage `step`, whose first key is `n`, beside P V of the block before it."""
    s_layout: gl.constexpr = tiling.accumulator(p.BLOCK_N)
    o_layout: gl.constexpr = tiling.accumulator(p.D)
    left = _as_left(p, probs, o_layout)
    s = _scores(p, q, step, s_layout)
    o = _weigh(p, left, o, step - 1)
    s = warpgroup_mma_wait(1, (s,))
    e, row_max, row_sum, factor = _weights(p, s, row_max, row_sum, n, unmasked, last_key, MASKED, s_layout)
    _values_here(p, step)
    o = warpgroup_mma_wait(0, (o,))
    mbarrier.arrive(p.k_empty.index(step % p.STAGES), count=1)
    mbarrier.arrive(p.v_empty.index((step - 1) % p.STAGES), count=1)
    o = o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o_layout)), 1)
    return o, row_max, row_sum, _packed(p, e)


@gluon.jit
def _finish(p, o, row_max, row_sum, batch, head, first, q_start, q_len, at, rows):
    """LSE and O of the `rows` from the first on; O leaves through buffer `at`."""
    row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), gl.SliceLayout(1, tiling.accumulator(p.BLOCK_N)))
    # Rows that see no key: zeros, and minus infinity for the log-sum-exp.
    empty = row_sum == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum))
    lse = gl.where(empty, float("-inf"), (row_max * p.scale_log2 + gl.log2(row_sum)) * _LN2)
    lse_ptr = p.lse_ptr + batch * p.lse_stride_b + head * p.lse_stride_h + q_start + rows
    gl.store(lse_ptr, lse, mask=rows < q_len)
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, tiling.accumulator(p.D))), 1)
    o = gl.where(inverse == 0.0, 0.0, o * inverse)
    out = p.q_smem.index(at)
    out.reshape([p.ROWS, p.D]).store(o.to(p.q_desc.dtype))
    fence_async_shared()
    tiling.store_rows(p.o_desc, batch, head, q_start, q_len, first, out, p.VARLEN)


@gluon.jit
def _consumer(p, CONSUMER: gl.constexpr):
    s_layout: gl.constexpr = tiling.accumulator(p.BLOCK_N)
    o_layout: gl.constexpr = tiling.accumulator(p.D)
    step = 0
    tile = 0
    for t in range(gl.program_id(0), tiling.laps_end(p), gl.num_programs(0)):
        batch, head, m = tiling.locate(p, t, p.LQ, p.H, p.BLOCK_M, True)
        q_start, q_len, _k_start, k_len = tiling.lengths(p, batch)
        if m < q_len:
            blocks, full = tiling.key_blocks(p, m, p.BLOCK_M, p.BLOCK_N, q_len, k_len)
            rows = m + CONSUMER * p.ROWS + gl.arange(0, p.ROWS, layout=gl.SliceLayout(1, s_layout))
            last_key = gl.full((p.ROWS,), 0, gl.int32, gl.SliceLayout(1, s_layout)) + (k_len - 1)
            # The first key from which on a block needs a mask.
            unmasked = k_len - p.BLOCK_N + 1
            if p.CAUSAL:
                last_key = gl.minimum(last_key, rows + (k_len - q_len))
                unmasked = gl.minimum(unmasked, m + CONSUMER * p.ROWS + k_len - q_len - p.BLOCK_N + 2)
            slot = tile % p.Q_SLOTS
            at = slot * p.CONSUMERS + CONSUMER
            mbarrier.wait(p.q_full.index(at), (tile // p.Q_SLOTS) & 1)
            q = p.q_smem.index(at).reshape([p.ROWS, p.D])
            s = _scores(p, q, step, s_layout)
            if p.Q_SLOTS == 2:
                # The tile before has left its buffer by now, so waiting for that costs nothing.
                if tile > 0:
                    tma.store_wait(0)
                    mbarrier.arrive(p.q_empty.index((1 - slot) * p.CONSUMERS + CONSUMER), count=1)
            s = warpgroup_mma_wait(0, (s,))
            n = (blocks - 1) * p.BLOCK_N
            row_max = gl.full((p.ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            row_sum = gl.zeros((p.ROWS, 4), gl.float32, _sum_layout())
            e, row_max, row_sum, _f = _weights(p, s, row_max, row_sum, n, unmasked, last_key, True, s_layout)
            _values_here(p, step)
            o = gl.zeros((p.ROWS, p.D), gl.float32, o_layout)
            probs = _packed(p, e)
            mbarrier.arrive(p.k_empty.index(step % p.STAGES), count=1)
            step += 1
            for _j in range(blocks - 1 - full):
                n -= p.BLOCK_N
                o, row_max, row_sum, probs = _block(p, q, o, row_max, row_sum, probs, n, unmasked, last_key, step, True)
                step += 1
            for _j in range(full):
                n -= p.BLOCK_N
                o, row_max, row_sum, probs = _block(
                    p, q, o, row_max, row_sum, probs, n, unmasked, last_key, step, False
                )
                step += 1
            o = _weigh(p, _as_left(p, probs, o_layout), o, step - 1)
            o = warpgroup_mma_wait(0, (o,))
            mbarrier.arrive(p.v_empty.index((step - 1) % p.STAGES), count=1)
            _finish(p, o, row_max, row_sum, batch, head, m + CONSUMER * p.ROWS, q_start, q_len, at, rows)
            if p.Q_SLOTS == 1:
                tma.store_wait(0)
                mbarrier.arrive(p.q_empty.index(CONSUMER), count=1)
            tile += 1
    tma.store_wait(0)


@gluon.jit(
    # One compilation serves every batch and length.
    do_not_specialize=["tiles", "H", "GROUP", "HEADS", "SECTION", "LQ", "LK", "lse_stride_b", "lse_stride_h"],
    do_not_specialize_on_alignment=["lse_ptr", "cu_q_ptr", "cu_k_ptr"],
)
def attention_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    tiles,
    H,
    GROUP,
    HEADS,
    SECTION,
    LQ,
    LK,
    lse_stride_b,
    lse_stride_h,
    scale_log2,
    SHAPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """O and LSE of attention; see `gluon_hopper` for shapes. Grid: any number of programs.

    `tiles`: tiles of CONSUMERS * ROWS query rows over all HEADS = batch * H query heads. GROUP: query heads that share
    a key head. SECTION: heads whose keys and values are expected to stay in L2 while their tiles are worked on.
    """
    HELD: gl.constexpr = SHAPE.Q_SLOTS * SHAPE.CONSUMERS
    STAGES: gl.constexpr = SHAPE.STAGES
    q_smem = slots(q_desc, HELD)
    k_smem = slots(k_desc, STAGES)
    v_smem = slots(v_desc, STAGES)
    q_full, q_empty = make_barriers(HELD, 1, 1)
    k_full, k_empty = make_barriers(STAGES, 1, SHAPE.CONSUMERS)
    v_full, v_empty = make_barriers(STAGES, 1, SHAPE.CONSUMERS)
    fence_async_shared()
    p = Forward(
        (q_desc, k_desc, v_desc, o_desc),
        (q_smem, k_smem, v_smem),
        (q_full, q_empty, k_full, k_empty, v_full, v_empty),
        (lse_ptr, cu_q_ptr, cu_k_ptr),
        (tiles, H, GROUP, HEADS, SECTION, LQ, LK, lse_stride_b, lse_stride_h, scale_log2),
        SHAPE,
    )
    specialise(p, _consumer, _producer, None, REGISTERS)
