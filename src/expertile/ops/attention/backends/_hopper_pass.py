"""What both passes of attention's backward on Hopper share: shape, context, loads, and a product's left operand."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.attention.backends import _hopper_tiles as tiling
from expertile.ops.hopper.context import context_of
from expertile.ops.launch.versions import tma_load


class PassShape(NamedTuple):
    """What the backward kernel is compiled for: dQ, or dK and dV; HELD rows, ROWS for each consumer, in SLOTS buffers,
    and blocks of BLOCK rows in STAGES. AHEAD: see `_dkdv_block`."""

    DQ: bool
    CAUSAL: bool
    VARLEN: bool
    D: int
    CONSUMERS: int
    ROWS: int
    HELD: int
    BLOCK: int
    STAGES: int
    SLOTS: int
    AHEAD: bool
    STAT_PAD: int


# What every partition is handed. x, y: the rows that consumers hold (K and V, or Q and dO); a, b: the blocks gone over
# (Q and dO, or K and V).
Backward = context_of(
    "x_desc y_desc a_desc b_desc dx_desc dy_desc lse_desc delta_desc",
    "x_smem y_smem a_smem b_smem lse_smem delta_smem held_full held_empty a_full a_empty b_full b_empty",
    "lse_ptr delta_ptr cu_q_ptr cu_k_ptr "
    "tiles H GROUP HEADS SECTION LQ LK stat_stride_b stat_stride_h scale scale_log2",
    PassShape,
)


@gluon.jit
def padded_start(p, q_start, batch):
    """Where a sequence's row statistics start: each sequence's rows are padded to multiples of STAT_PAD."""
    return (q_start + batch * p.STAT_PAD) // p.STAT_PAD * p.STAT_PAD if p.VARLEN else 0


@gluon.jit
def load_held(p, batch, head, start, length, row, tile):
    """TMA of the rows that the consumers hold: K and V, or Q and dO."""
    HELD_BYTES: gl.constexpr = p.x_desc.block_type.nbytes
    slot = tile % p.SLOTS
    for w in gl.static_range(p.CONSUMERS):
        at = slot * p.CONSUMERS + w
        mbarrier.wait(p.held_empty.index(at), ((tile // p.SLOTS) & 1) ^ 1)
        mbarrier.expect(p.held_full.index(at), 2 * HELD_BYTES)
        first, full = row + w * p.ROWS, p.held_full.index(at)
        tiling.load_rows(p.x_desc, batch, head, start, length, first, full, p.x_smem.index(at), p.VARLEN)
        tiling.load_rows(p.y_desc, batch, head, start, length, first, full, p.y_smem.index(at), p.VARLEN)


@gluon.jit
def load_stage(p, batch, head, start, length, row, stats, step, OF_Q: gl.constexpr):
    """TMA of one block of what is gone over: (Q, LSE) and (dO, delta), or K and V."""
    NBYTES: gl.constexpr = p.a_desc.block_type.nbytes + (p.lse_desc.block_type.nbytes if OF_Q else 0)
    i = step % p.STAGES
    phase = ((step // p.STAGES) & 1) ^ 1
    mbarrier.wait(p.a_empty.index(i), phase)
    mbarrier.expect(p.a_full.index(i), NBYTES)
    tiling.load_rows(p.a_desc, batch, head, start, length, row, p.a_full.index(i), p.a_smem.index(i), p.VARLEN)
    if OF_Q:
        tma_load(p.lse_desc, [stats + row], p.a_full.index(i), p.lse_smem.index(i))
    mbarrier.wait(p.b_empty.index(i), phase)
    mbarrier.expect(p.b_full.index(i), NBYTES)
    tiling.load_rows(p.b_desc, batch, head, start, length, row, p.b_full.index(i), p.b_smem.index(i), p.VARLEN)
    if OF_Q:
        tma_load(p.delta_desc, [stats + row], p.b_full.index(i), p.delta_smem.index(i))


@gluon.jit
def as_left(p, x):
    """A result of the tensor cores, rounded, as the left operand of the next product: the same registers."""
    return gl.convert_layout(x.to(p.a_desc.dtype), gl.DotOperandLayout(0, tiling.accumulator(p.D), 2))
