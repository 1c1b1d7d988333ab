"""Device code of `gluon_hopper`: the warp that keeps the ring of shared-memory stages full, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.hopper.tiles import WRAP
from expertile.ops.launch.versions import tma_load


@gluon.jit
def _load(p, desc, g, at, k0, k_len, k, bar, dst, FLAT: gl.constexpr, K_MAJOR: gl.constexpr, pred=True):
    """TMA of rows of a, or columns of b, from `at` on. FLAT: an operand of two dimensions, K not ragged."""
    if p.LAYOUT == "ragged_k":
        tma_load(desc, [WRAP, k0 + k_len, WRAP - k_len + k, at], bar, dst, pred)
    elif FLAT:
        if K_MAJOR:
            tma_load(desc, [at, k], bar, dst, pred)
        else:
            tma_load(desc, [k, at], bar, dst, pred)
    elif K_MAJOR:
        tma_load(desc, [g, at, k], bar, dst, pred)
    else:
        tma_load(desc, [g, k, at], bar, dst, pred)


@gluon.jit
def fill(p, a_desc, b_desc, g, row, row_end, col, k0, k_len, k, i, phase):
    """Load one stage as soon as it is free: of `a` the boxes that have rows of the group, at least one.

    What the products make of whatever lies in the others' place is not stored.
    """
    A_BYTES: gl.constexpr = p.a_desc.block_type.nbytes
    B_BYTES: gl.constexpr = p.b_desc.block_type.nbytes
    BOXES: gl.constexpr = p.BLOCK_M // p.A_BOX
    FLAT: gl.constexpr = p.LAYOUT == "ragged_m"
    mbarrier.wait(p.empty.index(i), phase)
    bar = p.full.index(i)
    boxes = gl.minimum((row_end - row + p.A_BOX - 1) // p.A_BOX, BOXES)
    if BOXES == 1:
        mbarrier.expect(bar, A_BYTES + B_BYTES)
    else:
        # Exactly one predicate holds, and the barrier counts one arrival.
        for count in gl.static_range(1, BOXES + 1):
            mbarrier.expect(bar, count * A_BYTES + B_BYTES, pred=boxes == count)
    _load(p, a_desc, g, row, k0, k_len, k, bar, p.a_boxes.index(i * BOXES), FLAT, p.A_K_MAJOR)
    _load(p, b_desc, g, col, k0, k_len, k, bar, p.b_smem.index(i), False, p.B_K_MAJOR)
    for s in gl.static_range(1, BOXES):
        at, box = row + s * p.A_BOX, p.a_boxes.index(i * BOXES + s)
        _load(p, a_desc, g, at, k0, k_len, k, bar, box, FLAT, p.A_K_MAJOR, s < boxes)


@gluon.jit
def fill_first(p, g, row, row_end, col, k0, k_len, k, i, phase):
    """`fill` with the operands."""
    fill(p, p.a_desc, p.b_desc, g, row, row_end, col, k0, k_len, k, i, phase)


@gluon.jit
def fill_more(p, g, row, row_end, col, k0, k_len, k, i, phase):
    """`fill` with the second pair of operands; zeros past its K."""
    fill(p, p.more_a_desc, p.more_b_desc, g, row, row_end, col, k0, k_len, k, i, phase)
