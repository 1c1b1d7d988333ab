"""Device code that the Gluon kernels share: the producer warp, which keeps the ring of shared-memory stages full."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.schedule import next_tile, publish
from expertile.ops.hopper.tiles import make_plan, place_of


@gluon.jit
def produce(p, FILL: gl.constexpr):
    """The producer: every tile's stages, in the order in which the consumers take them.

    FILL(p, a_desc, b_desc, place, k, i, phase) loads stage i as soon as the stage is free, with the step that begins at
    k of the tile at `place`. The last p.MORE steps of a tile are those of a second pair of operands, k counted anew."""
    plan = make_plan(p)
    i = 0
    phase = 1
    t = gl.program_id(0)
    number = 0
    place = place_of(p, plan, t)
    while t < plan.total:
        # An empty group has one step, of zeros from outside its descriptors.
        FILL(p, p.a_desc, p.b_desc, place, 0, i, phase)
        after = next_tile(p, plan.total, number, t)
        if p.GROUPS_POW2 <= 128:
            # Looked up while the ring is full, not when the tile after this one is due.
            next_place = place_of(p, plan, after)
        i, phase = advance(p, i, phase)
        for k in range(p.BLOCK_K, place.k_len - p.MORE * p.BLOCK_K, p.BLOCK_K):
            FILL(p, p.a_desc, p.b_desc, place, k, i, phase)
            i, phase = advance(p, i, phase)
        for m in gl.static_range(p.MORE):
            FILL(p, p.more_a_desc, p.more_b_desc, place, m * p.BLOCK_K, i, phase)
            i, phase = advance(p, i, phase)
        if p.GROUPS_POW2 > 128:
            # The longer plan and two tiles' places would not fit this warp's registers.
            next_place = place_of(p, plan, after)
        number += 1
        t = after
        place = next_place
    publish(p, number + 1, plan.total)
