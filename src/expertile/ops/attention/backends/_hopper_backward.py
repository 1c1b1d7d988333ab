"""Device code of the `gluon_hopper` backend, backward: the kernel whose consumers make dQ, or dK and dV.

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
from expertile.ops.attention.backends._hopper_dkdv import dkdv_consumer, dkdv_producer
from expertile.ops.attention.backends._hopper_dq import dq_consumer, dq_producer


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
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dQ, or dK and dV summed over the GROUP query heads of each key head. x, y, a, b: as `Backward` has them; dQ is
    dx. HEADS: of all sequences, query heads for dQ, else key heads.

    In shared memory: held rows x and y, and a ring of blocks a and b with their statistics."""
    HELD: gl.constexpr = SHAPE.SLOTS * SHAPE.CONSUMERS
    STAGES: gl.constexpr = SHAPE.STAGES
    held: gl.constexpr = [HELD] + x_desc.block_type.shape
    ring: gl.constexpr = [STAGES] + a_desc.block_type.shape
    x_smem = gl.allocate_shared_memory(x_desc.dtype, held, x_desc.layout)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, held, y_desc.layout)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, ring, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, ring, b_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_desc.block_type.shape, lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES] + delta_desc.block_type.shape, delta_desc.layout)
    held_full = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    held_empty = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    a_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(HELD):
        mbarrier.init(held_full.index(s), count=1)
        mbarrier.init(held_empty.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(a_full.index(s), count=1)
        mbarrier.init(a_empty.index(s), count=SHAPE.CONSUMERS)
        mbarrier.init(b_full.index(s), count=1)
        mbarrier.init(b_empty.index(s), count=SHAPE.CONSUMERS)
    fence_async_shared()
    p = Backward(  # type: ignore[call-arg]
        (x_desc, y_desc, a_desc, b_desc, dx_desc, dy_desc, lse_desc, delta_desc),
        (x_smem, y_smem, a_smem, b_smem, lse_smem, delta_smem),
        (held_full, held_empty, a_full, a_empty, b_full, b_empty),
        (lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr),
        (tiles, H, GROUP, HEADS, SECTION, LQ, LK, stat_stride_b, stat_stride_h, scale, scale_log2),
        SHAPE,
    )
    if SHAPE.DQ:
        gl.warp_specialize(
            [(dq_consumer, (p, 0)), (dq_consumer, (p, 1)), (dq_producer, (p,))], [4, 1], [CONSUMER_REGS, PRODUCER_REGS]
        )
    else:
        gl.warp_specialize(
            [(dkdv_consumer, (p, 0)), (dkdv_consumer, (p, 1)), (dkdv_producer, (p,))],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
