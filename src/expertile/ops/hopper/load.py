"""Device code that the Gluon kernels share: the producer warp, which keeps the ring of shared-memory stages full."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.schedule import next_tile, publish
from expertile.ops.hopper.tiles import locate, make_plan


@gluon.jit
def produce(p, FILL: gl.constexpr, FILL_MORE: gl.constexpr = None):
    """The producer: every tile's stages, in the order in which the consumers take them.

    FILL(p, g, row, row_end, col, k0, k_len, k, i, phase) loads stage i with the step that begins at k as soon as the
    stage is free. FILL_MORE does it for the last p.MORE steps of a tile, k counted anew."""
    plan = make_plan(p)
    i = 0
    phase = 1
    t = gl.program_id(0)
    number = 0
    g, row, row_end, col, k0, k_len = locate(p, plan, t)
    while t < plan.total:
        # An empty group has one step, of zeros from outside its descriptors.
        FILL(p, g, row, row_end, col, k0, k_len, 0, i, phase)
        after = next_tile(p, number, t)
        if p.GROUPS_POW2 <= 128:
            # Looked up while the ring is full, not when the tile after this one is due.
            next_g, next_row, next_row_end, next_col, next_k0, next_k_len = locate(p, plan, after)
        i, phase = advance(p, i, phase)
        last = k_len
        if FILL_MORE is not None:
            last = k_len - p.MORE * p.BLOCK_K
        for k in range(p.BLOCK_K, last, p.BLOCK_K):
            FILL(p, g, row, row_end, col, k0, k_len, k, i, phase)
            i, phase = advance(p, i, phase)
        if FILL_MORE is not None:
            for m in gl.static_range(p.MORE):
                FILL_MORE(p, g, row, row_end, col, k0, k_len, m * p.BLOCK_K, i, phase)
                i, phase = advance(p, i, phase)
        if p.GROUPS_POW2 > 128:
            # The longer plan and two tiles' places would not fit this warp's registers.
            next_g, next_row, next_row_end, next_col, next_k0, next_k_len = locate(p, plan, after)
        number += 1
        t = after
        g = next_g
        row = next_row
        row_end = next_row_end
        col = next_col
        k0 = next_k0
        k_len = next_k_len
    publish(p, number + 1, plan.total)
