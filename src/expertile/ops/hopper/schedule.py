"""Device code of `gluon_hopper` and `gluon_gather`: which tile a program takes next.

Not DYNAMIC: program p of P takes tiles p, p + P, p + 2P, …, which every partition knows for itself. Programs do not run
at the same speed, and over many tiles they drift apart: what neighbours in the line of tiles share (rows of a, columns
of b) is then no longer in L2 when the later one comes, and the fastest wait at the end for the slowest.

DYNAMIC: program p begins with tile p and then draws from a counter in memory, so that all stay within a tile of each
other. The producer draws, and hands the tiles' numbers to its consumers through a ring of SLOTS in shared memory.
Nobody reports that a slot has been read: a tile is drawn when the first stage of the one before it has been filled,
when all but the last STAGES have been multiplied; and before a consumer multiplies a tile it has read which it is, and
which the other consumer's before it was. Hence SLOTS >= STAGES + 2.

On an H200, 128 groups of about 2048 rows, 4096 -> 2048 (Nsight Compute): drawn, 128x256 tiles read 5.2 GB from memory
and 128x128 tiles 5.7, taken in turn 128x128 tiles 11.6; cuBLAS reads 3.2 for one dense product of that size. But
programs that run side by side then no longer have neighbouring tiles: L2 answers a third more requests (62.7 GB against
46.4), and small tiles, which live on L2, lose more by that than they gain.

`p` is the kernel's context, with DYNAMIC, tickets (pointer to an int32 that is zero when the kernel begins), queue and
queued (the slots, and a barrier for each).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SLOTS: gl.constexpr = gl.constexpr(16)
_LANES: gl.constexpr = gl.constexpr(32)


@gluon.jit
def make_queue():
    """(queue, queued): the slots and their barriers. To be called before `fence_async_shared` of the kernel's start."""
    queue = gl.allocate_shared_memory(gl.int32, [SLOTS, _LANES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queued = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(queued.index(s), count=1)
    return queue, queued


@gluon.jit
def publish(p, number, t):
    """Producer: tile number `number` of this program is t. One more than the last tile's must be published, for the
    consumer whose turn that would be."""
    if p.DYNAMIC:
        # Number 0 is known to everyone.
        slot = (number - 1) % SLOTS
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        p.queue.index(slot).store(gl.full([_LANES], t, gl.int32, layout))
        mbarrier.arrive(p.queued.index(slot), count=1)


@gluon.jit
def draw(p, number, t):
    """Producer: the tile after t, which is this program's tile number `number`; published."""
    if p.DYNAMIC:
        after = gl.num_programs(0) + gl.atomic_add(p.tickets, 1, sem="relaxed")
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
