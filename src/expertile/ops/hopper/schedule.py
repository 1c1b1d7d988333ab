"""Tile schedulers of `gluon_hopper` and `gluon_gather`: which tile a program takes next.

Static (not DYNAMIC): program p of P takes tiles p, p + P, p + 2P, … Every partition knows these numbers. Programs
differ in speed and drift apart over many tiles. Rows of a and columns of b that neighbouring tiles share have then left
L2 when the later tile needs them. The fastest program idles at the end.

DYNAMIC: program p begins with tile p and then fetches tile numbers from a counter in memory, so that all programs stay
within a tile of each other. Each tile is followed by one fetch, so the fetch of the last number sets the counter to
zero again. The producer fetches the number and passes it to its consumers through a ring of SLOTS in
shared memory. No barrier tells that a slot has been read, because SLOTS >= STAGES + 2 is enough. The producer fetches a
tile when it has filled the first stage of the tile before; all but the last STAGES have then been multiplied. A
consumer reads a tile's number, and the other consumer's number before, before it multiplies the tile.

Dynamic, less is read from memory, but programs that run side by side no longer have neighbouring tiles: L2 answers more
requests, and small tiles lose more by that than they gain (figures: docs/notes/ladder.md).

`p` is the kernel's context, with DYNAMIC, tile_counter (pointer to an int32 that is zero when the kernel begins, and
when it ends), queue and queued (the slots, and a barrier for each).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SLOTS: gl.constexpr = gl.constexpr(16)
_LANES: gl.constexpr = gl.constexpr(32)


@gluon.jit
def make_queue(DYNAMIC: gl.constexpr, barriers):
    """(queue, queued): the slots and their barriers; `barriers` for both where there is no queue. To be called before
    `fence_async_shared` of the kernel's start."""
    if DYNAMIC:
        queue = gl.allocate_shared_memory(gl.int32, [SLOTS, _LANES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        queued = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(SLOTS):
            mbarrier.init(queued.index(s), count=1)
        return queue, queued
    else:
        return barriers, barriers


@gluon.jit
def publish(p, number, t):
    """Producer: tile number `number` of this program is t. One number more than the last tile's is published, for the
    consumer that would be next."""
    if p.DYNAMIC:
        # Every partition knows number 0.
        slot = (number - 1) % SLOTS
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        p.queue.index(slot).store(gl.full([_LANES], t, gl.int32, layout))
        mbarrier.arrive(p.queued.index(slot), count=1)


@gluon.jit
def next_tile(p, total, number, t):
    """Producer: the tile after t, which is this program's tile number `number` of `total` in all; published."""
    if p.DYNAMIC:
        fetched = gl.atomic_add(p.tile_counter, 1, sem="relaxed")
        gl.store(p.tile_counter, 0, mask=fetched == total - 1)
        after = gl.num_programs(0) + fetched
        publish(p, number + 1, after)
        return after
    else:
        return t + gl.num_programs(0)


@gluon.jit
def take(p, number, t):
    """Consumer: this program's tile number `number` >= 1, which is t where that is known beforehand."""
    if p.DYNAMIC:
        slot = (number - 1) % SLOTS
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        mbarrier.wait(p.queued.index(slot), ((number - 1) // SLOTS) & 1)
        return gl.max(p.queue.index(slot).load(layout), 0)
    else:
        return t
