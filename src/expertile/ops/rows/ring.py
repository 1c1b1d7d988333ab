"""Device code of rows that wait in shared memory: a ring of slots, filled by TMA, for a row and part of the next.

A tensor of contiguous rows is taken as one array of chunks of 512 bytes, wherever its rows start, so that every access
is to whole cache lines. What lies in a row's first and last chunk but belongs to its neighbours is masked when it is
read, and never written. A group of chunks is a slot of the ring.

One warp of a staying program asks for the groups, as slots come free. The others, its consumers, read a row from shared
memory twice, for its sum and for its result, and give each slot back after the second time. Several take the rows in
turn, so that one's result is computed while another sums: see `ordered_wait`.

TMA reads whole chunks only: the tensor's last elements, fewer than a chunk, are read by the last row's consumer, see
`complete`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from expertile.ops.launch.versions import reinterpret, thread_barrier, tma_load

# Chunks are counted from a row's first in 32-bit elements, up to here: further than a row is long.
_FAR: gl.constexpr = gl.constexpr(1 << 20)


# ------------------------------------------------------------------------------------------------- rows and the ring


@gluon.jit
def place(row, C, GROUP: gl.constexpr, CHUNK: gl.constexpr):
    """A row's first chunk, the elements of that chunk before the row, and its groups."""
    start = gl.cast(row, gl.int64) * C
    first = gl.cast(start // CHUNK, gl.int32)
    shift = gl.cast(start % CHUNK, gl.int32)
    return first, shift, (shift + C + (GROUP * CHUNK - 1)) // (GROUP * CHUNK)


@gluon.jit
def forward_by(slot, phase, groups, SLOTS: gl.constexpr):
    """The slot so many groups on, at most a round, and the phase of its barriers."""
    slot += groups
    phase = gl.where(slot >= SLOTS, phase ^ 1, phase)
    return gl.where(slot >= SLOTS, slot - SLOTS, slot), phase


@gluon.jit
def allocate(desc, GROUP: gl.constexpr, BOX: gl.constexpr, SLOTS: gl.constexpr):
    """A ring's shared memory, as boxes and as groups."""
    CHUNK: gl.constexpr = desc.block_type.shape[1]
    boxes = gl.allocate_shared_memory(desc.dtype, [SLOTS * (GROUP // BOX), BOX, CHUNK], desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return boxes, reinterpret(boxes, desc.dtype, [SLOTS, GROUP, CHUNK], plain)


@gluon.jit
def barriers(SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Barriers: of full slots, of empty slots, and the consumers' ordered barrier."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(order.index(i), count=1)
    fence_async_shared()
    return full, empty, order


# ----------------------------------------------------------------------------------------------------- the loading warp


@gluon.jit
def _ask(desc, boxes, bar, chunk, chunks, slot, PARTS: gl.constexpr, BOX: gl.constexpr, first):
    """A group from the row's chunk `chunk` on, box by box as far as the row's `chunks` go."""
    for b in gl.static_range(PARTS):
        wanted = chunk + b * BOX < chunks
        tma_load(desc, [first + chunk + b * BOX, 0], bar, boxes.index(slot * PARTS + b), pred=wanted)


@gluon.jit
def produce(p, a_desc, b_desc, a_boxes, b_boxes, BOX: gl.constexpr, TENSORS: gl.constexpr):
    """The loading warp: all groups of all rows of this program, of one tensor or of two side by side."""
    PARTS: gl.constexpr = p.GROUP // BOX
    slot = 0
    phase = 1
    for row in range(gl.program_id(0), p.R, gl.num_programs(0)):
        first, shift, n = place(row, p.C, p.GROUP, p.CHUNK)
        chunks = (shift + p.C + (p.CHUNK - 1)) // p.CHUNK
        for g in range(0, n):
            bar = p.full.index(slot)
            mbarrier.wait(p.empty.index(slot), phase)
            for b in gl.static_range(PARTS):
                last = (chunks - g * p.GROUP > b * BOX) & ((chunks - g * p.GROUP <= (b + 1) * BOX) | (b == PARTS - 1))
                mbarrier.expect(bar, (b + 1) * TENSORS * a_desc.block_type.nbytes, pred=last)
            _ask(a_desc, a_boxes, bar, g * p.GROUP, chunks, slot, PARTS, BOX, first)
            if TENSORS == 2:
                _ask(b_desc, b_boxes, bar, g * p.GROUP, chunks, slot, PARTS, BOX, first)
            slot, phase = forward_by(slot, phase, 1, p.SLOTS)


# ----------------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def ordered_wait(order, order_phase, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Wait until the consumer of the row before has seen all of that row arrive.

    A barrier tells a phase from the next, not from the one after it. A consumer that waited for its contents of a slot
    too soon would take those of another consumer's row for its own."""
    if CONSUMERS > 1:
        if CONSUMER == 0:  # begins
            mbarrier.wait(order.index(CONSUMER), order_phase ^ 1)
        else:
            mbarrier.wait(order.index(CONSUMER), order_phase)


@gluon.jit
def ordered_arrive(order, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """All warps have seen all of their row arrive, as they have if they have its sum."""
    if CONSUMERS > 1:
        thread_barrier()
        mbarrier.arrive(order.index((CONSUMER + 1) % CONSUMERS), count=1)


@gluon.jit
def next_row(slot, phase, order_phase, consumer, groups, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Behind a row of so many groups: where the next one begins (slot, phase), its order phase and its consumer."""
    slot, phase = forward_by(slot, phase, groups, SLOTS)
    order_phase = gl.where(consumer == CONSUMERS - 1, order_phase ^ 1, order_phase)
    consumer = gl.where(consumer == CONSUMERS - 1, 0, consumer + 1)
    return slot, phase, order_phase, consumer


@gluon.jit
def give_back(empty, slot):
    """All warps have read the slot."""
    thread_barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def positions(group, GROUP: gl.constexpr, CHUNK: gl.constexpr, layout: gl.constexpr):
    """Elements of a group [GROUP, CHUNK], counted from the start of the row's first chunk."""
    rows = gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    return group * (GROUP * CHUNK) + gl.expand_dims(rows, 1) * CHUNK + gl.expand_dims(cols, 0)


@gluon.jit
def whole(first, whole_chunks, CHUNK: gl.constexpr):
    """Elements from a row's first chunk to the end of the tensor's whole chunks, or more than a row's."""
    return gl.minimum(whole_chunks - first, _FAR) * CHUNK


@gluon.jit
def complete(slot, ptr, at, whole, end, layout: gl.constexpr):
    """The last group of the tensor, whose elements from `whole` to `end` no TMA has read: from memory at `ptr`, into
    the slot too, for the second time. No copy comes into that slot any more."""
    late = gl.load(ptr + at, mask=(at >= whole) & (at < end), other=0.0)
    found = gl.where(at >= whole, late, slot.load(layout))
    thread_barrier()
    slot.store(found)
    thread_barrier()
    return found


@gluon.jit
def words(shift, C, VECTOR: gl.constexpr):
    """Where a row's whole words of 16 bytes start and end."""
    return (shift + (VECTOR - 1)) // VECTOR * VECTOR, (shift + C) // VECTOR * VECTOR


@gluon.jit
def head_and_tail(shift, C, VECTOR: gl.constexpr, layout: gl.constexpr):
    """The elements of a row before and after its whole words, [2 * VECTOR], and which of them there are: read and
    written one by one, as their words are the neighbours' too."""
    head, tail = words(shift, C, VECTOR)
    lanes = gl.arange(0, 2 * VECTOR, layout=layout)
    at = gl.where(lanes < VECTOR, shift + lanes, tail - VECTOR + lanes)
    return at, gl.where(lanes < VECTOR, at < head, at < shift + C)


@gluon.jit
def consume(p, ROW: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer: every CONSUMERS-th row of this program. ROW(p, first, shift, n, slot, phase, order_phase, CONSUMER)
    does one that lies at `place`, from `slot` on."""
    slot = 0
    phase = 0
    order_phase = 0
    consumer = 0
    for row in range(gl.program_id(0), p.R, gl.num_programs(0)):
        first, shift, n = place(row, p.C, p.GROUP, p.CHUNK)
        if consumer == CONSUMER:
            ROW(p, first, shift, n, slot, phase, order_phase, CONSUMER)
        slot, phase, order_phase, consumer = next_row(slot, phase, order_phase, consumer, n, p.SLOTS, p.CONSUMERS)


@gluon.jit
def specialise(
    p,
    ROW: gl.constexpr,
    a_desc,
    b_desc,
    a_boxes,
    b_boxes,
    BOX: gl.constexpr,
    TENSORS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """Start the consumers, which do ROW, and the loading warp."""
    WARPS: gl.constexpr = gl.num_warps()
    if p.CONSUMERS == 1:
        gl.warp_specialize(
            [(consume, (p, ROW, 0)), (produce, (p, a_desc, b_desc, a_boxes, b_boxes, BOX, TENSORS))],
            [1],
            [LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (p, ROW, 0)),
                (consume, (p, ROW, 1)),
                (produce, (p, a_desc, b_desc, a_boxes, b_boxes, BOX, TENSORS)),
            ],
            [WARPS, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
