"""Device code of rows that wait in shared memory: a ring of slots, filled by TMA, for a row and part of the next.

A tensor of contiguous rows is one array of chunks of 512 bytes, wherever its rows start; a group of chunks is a slot.
What of a row's first and last chunk belongs to its neighbours is masked when it is read, and never written. One warp of
a staying program asks for the groups; its consumers take rows in turn (`ordered_wait`), read each twice, and give slots
back. TMA reads whole chunks: `complete` reads what the tensor has beyond them. docs/notes/rows.md has why.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from expertile.ops.hopper.context import context_of
from expertile.ops.hopper.prologue import make_barriers, make_order, specialise
from expertile.ops.launch.versions import reinterpret, thread_barrier, tma_load

# Chunks are counted from a row's first in 32-bit elements, up to here: further than a row is long.
_FAR: gl.constexpr = gl.constexpr(1 << 20)


class RingShape(NamedTuple):
    """What a kernel is compiled for: SLOTS groups of GROUP chunks of CHUNK elements, copied BOX chunks at a time, of
    each of TENSORS inputs; CONSUMERS."""

    TENSORS: int
    CONSUMERS: int
    GROUP: int
    BOX: int
    CHUNK: int
    SLOTS: int


# What the loading warp and the consumers are handed: the inputs a and b, which is a again where there is one alone, as
# TMA sees them, as rings of boxes and of groups, and as memory; the result; rows [R, C], in so many whole chunks.
Ring = context_of(
    "a_desc b_desc",
    "a_boxes b_boxes a_groups b_groups full empty order",
    "a_ptr b_ptr out_ptr R C whole_chunks",
    RingShape,
)


# ------------------------------------------------------------------------------------------------- rows and the ring


@gluon.jit
def place(p, row):
    """A row's first chunk, the elements of that chunk before the row, and its groups."""
    start = gl.cast(row, gl.int64) * p.C
    first = gl.cast(start // p.CHUNK, gl.int32)
    shift = gl.cast(start % p.CHUNK, gl.int32)
    return first, shift, (shift + p.C + (p.GROUP * p.CHUNK - 1)) // (p.GROUP * p.CHUNK)


@gluon.jit
def forward_by(p, slot, phase, groups):
    """The slot so many groups on, at most a round, and the phase of its barriers."""
    slot += groups
    phase = gl.where(slot >= p.SLOTS, phase ^ 1, phase)
    return gl.where(slot >= p.SLOTS, slot - p.SLOTS, slot), phase


@gluon.jit
def _allocate(desc, SHAPE: gl.constexpr):
    """A ring's shared memory, as boxes and as groups."""
    GROUP: gl.constexpr = SHAPE.GROUP
    BOX: gl.constexpr = SHAPE.BOX
    CHUNK: gl.constexpr = SHAPE.CHUNK
    SLOTS: gl.constexpr = SHAPE.SLOTS
    boxes = gl.allocate_shared_memory(desc.dtype, [SLOTS * (GROUP // BOX), BOX, CHUNK], desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return boxes, reinterpret(boxes, desc.dtype, [SLOTS, GROUP, CHUNK], plain)


# ----------------------------------------------------------------------------------------------------- the loading warp


@gluon.jit
def _ask(p, desc, boxes, bar, chunk, chunks, slot, first):
    """A group from the row's chunk `chunk` on, box by box as far as the row's `chunks` go."""
    PARTS: gl.constexpr = p.GROUP // p.BOX
    for b in gl.static_range(PARTS):
        wanted = chunk + b * p.BOX < chunks
        tma_load(desc, [first + chunk + b * p.BOX, 0], bar, boxes.index(slot * PARTS + b), pred=wanted)


@gluon.jit
def _produce(p):
    """The loading warp: all groups of all rows of this program, of one tensor or of two side by side."""
    PARTS: gl.constexpr = p.GROUP // p.BOX
    slot = 0
    phase = 1
    for row in range(gl.program_id(0), p.R, gl.num_programs(0)):
        first, shift, n = place(p, row)
        chunks = (shift + p.C + (p.CHUNK - 1)) // p.CHUNK
        for g in range(0, n):
            bar = p.full.index(slot)
            mbarrier.wait(p.empty.index(slot), phase)
            for b in gl.static_range(PARTS):
                left = chunks - g * p.GROUP
                last = (left > b * p.BOX) & ((left <= (b + 1) * p.BOX) | (b == PARTS - 1))
                mbarrier.expect(bar, (b + 1) * p.TENSORS * p.a_desc.block_type.nbytes, pred=last)
            _ask(p, p.a_desc, p.a_boxes, bar, g * p.GROUP, chunks, slot, first)
            if p.TENSORS == 2:
                _ask(p, p.b_desc, p.b_boxes, bar, g * p.GROUP, chunks, slot, first)
            slot, phase = forward_by(p, slot, phase, 1)


# ----------------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def ordered_wait(p, order_phase, CONSUMER: gl.constexpr):
    """Wait until the consumer of the row before has seen all of that row arrive.

    A barrier tells a phase from the next, not from the one after it. A consumer that waited for its contents of a slot
    too soon would take those of another consumer's row for its own."""
    if p.CONSUMERS > 1:
        if CONSUMER == 0:  # begins
            mbarrier.wait(p.order.index(CONSUMER), order_phase ^ 1)
        else:
            mbarrier.wait(p.order.index(CONSUMER), order_phase)


@gluon.jit
def ordered_arrive(p, CONSUMER: gl.constexpr):
    """All warps have seen all of their row arrive, as they have if they have its sum."""
    if p.CONSUMERS > 1:
        thread_barrier()
        mbarrier.arrive(p.order.index((CONSUMER + 1) % p.CONSUMERS), count=1)


@gluon.jit
def give_back(p, slot):
    """All warps have read the slot."""
    thread_barrier()
    mbarrier.arrive(p.empty.index(slot), count=1)


@gluon.jit
def positions(p, group, layout: gl.constexpr):
    """Elements of a group [GROUP, CHUNK], counted from the start of the row's first chunk."""
    rows = gl.arange(0, p.GROUP, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, p.CHUNK, layout=gl.SliceLayout(0, layout))
    return group * (p.GROUP * p.CHUNK) + gl.expand_dims(rows, 1) * p.CHUNK + gl.expand_dims(cols, 0)


@gluon.jit
def whole(p, first):
    """Elements from a row's first chunk to the end of the tensor's whole chunks, or more than a row's."""
    return gl.minimum(p.whole_chunks - first, _FAR) * p.CHUNK


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
def words(p, shift, VECTOR: gl.constexpr):
    """Where a row's whole words of 16 bytes start and end."""
    return (shift + (VECTOR - 1)) // VECTOR * VECTOR, (shift + p.C) // VECTOR * VECTOR


@gluon.jit
def head_and_tail(p, shift, VECTOR: gl.constexpr, layout: gl.constexpr):
    """The elements of a row before and after its whole words, [2 * VECTOR], and which of them there are: read and
    written one by one, as their words are the neighbours' too."""
    head, tail = words(p, shift, VECTOR)
    lanes = gl.arange(0, 2 * VECTOR, layout=layout)
    at = gl.where(lanes < VECTOR, shift + lanes, tail - VECTOR + lanes)
    return at, gl.where(lanes < VECTOR, at < head, at < shift + p.C)


@gluon.jit
def _consume(p, CONSUMER: gl.constexpr, ROW: gl.constexpr):
    """A consumer: every CONSUMERS-th row of this program. ROW(p, first, shift, n, slot, phase, order_phase, CONSUMER)
    does one that lies at `place`, from `slot` on."""
    slot = 0
    phase = 0
    order_phase = 0
    consumer = 0
    for row in range(gl.program_id(0), p.R, gl.num_programs(0)):
        first, shift, n = place(p, row)
        if consumer == CONSUMER:
            ROW(p, first, shift, n, slot, phase, order_phase, CONSUMER)
        slot, phase = forward_by(p, slot, phase, n)
        order_phase = gl.where(consumer == p.CONSUMERS - 1, order_phase ^ 1, order_phase)
        consumer = gl.where(consumer == p.CONSUMERS - 1, 0, consumer + 1)


@gluon.jit
def run(ROW: gl.constexpr, inputs, out_ptr, sizes, SHAPE: gl.constexpr, REGISTERS: gl.constexpr):
    """A whole kernel: rings and barriers, the consumers, which do ROW, and the loading warp. inputs: pairs of a
    descriptor and a pointer. sizes: R, C, whole chunks."""
    a_desc, a_ptr = inputs[0]
    b_desc, b_ptr = inputs[SHAPE.TENSORS - 1]
    a_boxes, a_groups = _allocate(a_desc, SHAPE)
    b_boxes, b_groups = a_boxes, a_groups
    if SHAPE.TENSORS == 2:
        b_boxes, b_groups = _allocate(b_desc, SHAPE)
    full, empty = make_barriers(SHAPE.SLOTS, 1, 1)
    order = make_order(SHAPE.CONSUMERS)
    fence_async_shared()
    shared = (a_boxes, b_boxes, a_groups, b_groups, full, empty, order)
    p = Ring((a_desc, b_desc), shared, (a_ptr, b_ptr, out_ptr), sizes, SHAPE)
    specialise(p, _consume, _produce, ROW, REGISTERS)
