"""Device code that both backward kernels of the `gluon_hopper` backend share: their shared memory, and their producers'
TMA.

    P = exp(scale · S − LSE),  dP = dO Vᵀ,  dS = P · (dP − delta),  delta = rowsum(dO · O)
    dV = Pᵀ dO,  dK = scale · dSᵀ Q,  dQ = scale · dS K

`_hopper_dkdv` holds a block of keys and goes over all queries that see them, of all query heads that share the key
head; `_hopper_dq` holds a block of queries and goes over its keys. S and dP are computed in both: seven products
instead of the five that one kernel with atomic additions to dQ needs, and every run gives the same bits.

The tensor cores leave P and dS, or their transposes, in the registers in which the next product takes its left operand.
A consumer never waits for its last product before it queues the next block's first.
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a list)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from expertile.ops.attention.backends._hopper_context import Backward
from expertile.ops.attention.backends._hopper_tiles import load_rows
from expertile.ops.launch.versions import tma_load


@gluon.jit
def load_stage(p, batch, q_head, kv_head, start, length, row, stats, step, LOOP_Q: gl.constexpr):
    """TMA of one block of what is gone over: (Q, LSE) and (dO, delta), or K and V."""
    A_BYTES: gl.constexpr = p.a_desc.block_type.nbytes
    i = step % p.STAGES
    phase = ((step // p.STAGES) & 1) ^ 1
    mbarrier.wait(p.a_empty.index(i), phase)
    if LOOP_Q:
        STAT_BYTES: gl.constexpr = p.lse_desc.block_type.nbytes
        mbarrier.expect(p.a_full.index(i), A_BYTES + STAT_BYTES)
        load_rows(p.a_desc, batch, q_head, start, length, row, p.a_full.index(i), p.a_smem.index(i), p.VARLEN)
        tma_load(p.lse_desc, [stats + row], p.a_full.index(i), p.lse_smem.index(i))
        mbarrier.wait(p.b_empty.index(i), phase)
        mbarrier.expect(p.b_full.index(i), A_BYTES + STAT_BYTES)
        load_rows(p.b_desc, batch, q_head, start, length, row, p.b_full.index(i), p.b_smem.index(i), p.VARLEN)
        tma_load(p.delta_desc, [stats + row], p.b_full.index(i), p.delta_smem.index(i))
    else:
        mbarrier.expect(p.a_full.index(i), A_BYTES)
        load_rows(p.a_desc, batch, kv_head, start, length, row, p.a_full.index(i), p.a_smem.index(i), p.VARLEN)
        mbarrier.wait(p.b_empty.index(i), phase)
        mbarrier.expect(p.b_full.index(i), A_BYTES)
        load_rows(p.b_desc, batch, kv_head, start, length, row, p.b_full.index(i), p.b_smem.index(i), p.VARLEN)


@gluon.jit
def load_held(p, batch, head, start, length, row, tile):
    """TMA of the rows that the consumers hold: K and V, or Q and dO."""
    HELD_BYTES: gl.constexpr = p.x_desc.block_type.nbytes
    slot = tile % p.SLOTS
    for w in gl.static_range(p.CONSUMERS):
        at = slot * p.CONSUMERS + w
        mbarrier.wait(p.held_empty.index(at), ((tile // p.SLOTS) & 1) ^ 1)
        mbarrier.expect(p.held_full.index(at), 2 * HELD_BYTES)
        load_rows(
            p.x_desc, batch, head, start, length, row + w * p.ROWS, p.held_full.index(at), p.x_smem.index(at), p.VARLEN
        )
        load_rows(
            p.y_desc, batch, head, start, length, row + w * p.ROWS, p.held_full.index(at), p.y_smem.index(at), p.VARLEN
        )


@gluon.jit
def as_left(p, x, d_layout: gl.constexpr):
    """A result of the tensor cores, rounded, as the left operand of the next product: the same registers."""
    return gl.convert_layout(x.to(p.a_desc.dtype), gl.DotOperandLayout(0, d_layout, 2))


@gluon.jit
def setup(
    descs,
    pointers,
    numbers,
    CAUSAL: gl.constexpr,
    VARLEN: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    AHEAD: gl.constexpr,
    STAT_PAD: gl.constexpr,
):
    """Shared memory and barriers of either kernel: held rows x and y, and a ring of blocks a and b with statistics.
    `descs`, `pointers` and `numbers` as `Backward` has them."""
    x_desc, y_desc, a_desc, b_desc, _dx_desc, _dy_desc, lse_desc, delta_desc = descs
    CONSUMERS: gl.constexpr = 2
    held: gl.constexpr = [SLOTS * CONSUMERS] + x_desc.block_type.shape
    ring: gl.constexpr = [STAGES] + a_desc.block_type.shape
    x_smem = gl.allocate_shared_memory(x_desc.dtype, held, x_desc.layout)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, held, y_desc.layout)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, ring, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, ring, b_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_desc.block_type.shape, lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES] + delta_desc.block_type.shape, delta_desc.layout)
    held_full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], mbarrier.MBarrierLayout())
    held_empty = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], mbarrier.MBarrierLayout())
    a_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS * CONSUMERS):
        mbarrier.init(held_full.index(s), count=1)
        mbarrier.init(held_empty.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(a_full.index(s), count=1)
        mbarrier.init(a_empty.index(s), count=CONSUMERS)
        mbarrier.init(b_full.index(s), count=1)
        mbarrier.init(b_empty.index(s), count=CONSUMERS)
    fence_async_shared()
    return Backward(  # type: ignore[call-arg]
        descs,
        (x_smem, y_smem, a_smem, b_smem, lse_smem, delta_smem),
        (held_full, held_empty, a_full, a_empty, b_full, b_empty),
        pointers,
        numbers,
        (CAUSAL, VARLEN, D, CONSUMERS, ROWS, CONSUMERS * ROWS, BLOCK, STAGES, SLOTS, AHEAD, STAT_PAD),
    )
