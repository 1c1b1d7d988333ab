"""Device code of the `gluon_hopper` backend, backward: the kernel whose consumers make dQ, or dK and dV.

    P = exp(scale · S − LSE),  dP = dO Vᵀ,  dS = P · (dP − delta),  delta = rowsum(dO · O)
    dV = Pᵀ dO,  dK = scale · dSᵀ Q,  dQ = scale · dS K

`_hopper_dkdv` holds a block of keys and goes over all queries that see them, of all query heads that share the key
head; `_hopper_dq` holds a block of queries and goes over its keys. S and dP are computed in both: seven products
instead of the five that one kernel with atomic additions to dQ needs, and every run gives the same bits.

The tensor cores leave P and dS, or their transposes, in the registers in which the next product takes its left operand.
A consumer never waits for its last product before it queues the next block's first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from expertile.ops.attention.backends._hopper_context import Backward
from expertile.ops.attention.backends._hopper_dkdv import dkdv_consumer, dkdv_producer
from expertile.ops.attention.backends._hopper_dq import dq_consumer, dq_producer
from expertile.ops.hopper.prologue import make_barriers, slots, specialise


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
    p = Backward(  # type: ignore[call-arg]
        (x_desc, y_desc, a_desc, b_desc, dx_desc, dy_desc, lse_desc, delta_desc),
        (x_smem, y_smem, a_smem, b_smem, lse_smem, delta_smem),
        (held_full, held_empty, a_full, a_empty, b_full, b_empty),
        (lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr),
        (tiles, H, GROUP, HEADS, SECTION, LQ, LK, stat_stride_b, stat_stride_h, scale, scale_log2),
        SHAPE,
    )
    if SHAPE.DQ:
        specialise(p, dq_consumer, dq_producer, None, CONSUMER_REGS, PRODUCER_REGS)
    else:
        specialise(p, dkdv_consumer, dkdv_producer, None, CONSUMER_REGS, PRODUCER_REGS)
