"""Device code of the `gluon_hopper` backend: one persistent, warp-specialised grouped GEMM for sm_90a.

One warp loads tiles with TMA into a ring of `STAGES` shared-memory stages; one or two warpgroups ("consumers")
multiply them with wgmma and store the result with TMA. Consumers share the tile in one of two ways:

  split     Both take the same tile, each its own ROWS of it, and run freely: a stage is free again when both have
            read it. Consumer 1 starts LAG stages late, so one of them multiplies while the other stores. A consumer
            whose rows all lie past the end of the group drops out of the tile, and its half of `a` is not loaded.
  pingpong  Each takes every other tile of the program; a pair of barriers keeps their main loops apart.

Where a tile lies, every partition works out for itself (`hopper/tiles.py`): nothing of that stands between the start of
the kernel and its first load but one read of `offs`. `hopper/schedule.py` says which tiles a program takes.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from expertile.ops.hopper.columns import pieces
from expertile.ops.hopper.context import context_of
from expertile.ops.hopper.load import produce
from expertile.ops.hopper.prologue import begin, make_barriers, make_order, prefetch_descriptors, slots, specialise
from expertile.ops.hopper.ring import multiply_rest, skip, steps_of
from expertile.ops.hopper.schedule import make_queue, take
from expertile.ops.hopper.store import bias_of, store_tile
from expertile.ops.hopper.tiles import WRAP, k_range, make_plan, place_of
from expertile.ops.launch.versions import reinterpret, tma_load


class Shape(NamedTuple):
    """What the kernel is compiled for.

    GROUPS_POW2: a power of two >= max(G, 32). BLOCK_M = ROWS * CONSUMERS (split) or ROWS (pingpong). A_BOX: rows of a
    that one load brings, ROWS or, for a with 64 elements of K in a row of a box, a divisor of 64 rows. ADD: results are
    added to the elements of out. MORE: the steps at the end of K, of BLOCK_K each, whose operands come from more_a_desc
    and more_b_desc."""

    LAYOUT: str
    A_K_MAJOR: bool
    B_K_MAJOR: bool
    HAS_BIAS: bool
    GROUPS_POW2: int
    CONSUMERS: int
    ROWS: int
    A_BOX: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    LAG: int
    GROUP_M: int
    STORE_PARTS: int
    STORE_SLOTS: int
    DYNAMIC: bool
    ADD: bool
    MORE: int


# What every partition is handed. `a_boxes` is `a_smem` cut into what one load brings.
Context = context_of(
    "a_desc b_desc c_desc more_a_desc more_b_desc",
    "a_boxes a_smem b_smem c_smem full empty order queue queued",
    "offs bias tile_counter G M N K",
    Shape,
)


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
def _fill(p, a_desc, b_desc, place, k, i, phase):
    """Load one stage as soon as it is free: of `a` the boxes that have rows of the group, at least one.

    What the products make of whatever lies in the others' place is not stored.
    """
    A_BYTES: gl.constexpr = p.a_desc.block_type.nbytes
    B_BYTES: gl.constexpr = p.b_desc.block_type.nbytes
    BOXES: gl.constexpr = p.BLOCK_M // p.A_BOX
    FLAT: gl.constexpr = p.LAYOUT == "ragged_m"
    g, row, k0, k_len = place.g, place.row, place.k0, place.k_len
    mbarrier.wait(p.empty.index(i), phase)
    bar = p.full.index(i)
    boxes = gl.minimum((place.row_end - row + p.A_BOX - 1) // p.A_BOX, BOXES)
    if BOXES == 1:
        mbarrier.expect(bar, A_BYTES + B_BYTES)
    else:
        # Exactly one predicate holds, and the barrier counts one arrival.
        for count in gl.static_range(1, BOXES + 1):
            mbarrier.expect(bar, count * A_BYTES + B_BYTES, pred=boxes == count)
    _load(p, a_desc, g, row, k0, k_len, k, bar, p.a_boxes.index(i * BOXES), FLAT, p.A_K_MAJOR)
    _load(p, b_desc, g, place.col, k0, k_len, k, bar, p.b_smem.index(i), False, p.B_K_MAJOR)
    for s in gl.static_range(1, BOXES):
        at, box = row + s * p.A_BOX, p.a_boxes.index(i * BOXES + s)
        _load(p, a_desc, g, at, k0, k_len, k, bar, box, FLAT, p.A_K_MAJOR, s < boxes)


@gluon.jit
def _batch(p, acc, i, phase, PART: gl.constexpr, FIRST: gl.constexpr):
    """Queue the wgmmas of one stage."""
    A_PARTS: gl.constexpr = p.BLOCK_M // p.ROWS
    mbarrier.wait(p.full.index(i), phase)
    a = p.a_smem.index(i * A_PARTS + PART)
    b = p.b_smem.index(i)
    a = a.reshape([p.ROWS, p.BLOCK_K]) if p.A_K_MAJOR else a.reshape([p.BLOCK_K, p.ROWS]).permute((1, 0))
    b = b.reshape([p.BLOCK_N, p.BLOCK_K]).permute((1, 0)) if p.B_K_MAJOR else b.reshape([p.BLOCK_K, p.BLOCK_N])
    acc = warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def _multiply(p, plan, step, k_len, number, t, PART: gl.constexpr, NEXT: gl.constexpr, mma_layout: gl.constexpr):
    """One tile's K loop, from the ring's step number `step`; and this program's tile number `number`, which is t where
    that is known beforehand: which it is, and where. NEXT: as in `multiply_rest`."""
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    acc = gl.zeros((p.ROWS, p.BLOCK_N), gl.float32, mma_layout)
    acc = _batch(p, acc, i, phase, PART, True)
    if NEXT is None:
        # Looked up while the tensor cores are busy.
        after = take(p, number, t)
        place = place_of(p, plan, after)
    acc = multiply_rest(p, _batch, acc, i, phase, k_len, PART, NEXT)
    if NEXT is not None:
        # Looked up while the other consumer keeps them busy.
        after = take(p, number, t)
        place = place_of(p, plan, after)
    return after, acc, place


@gluon.jit
def _store(p, acc, place, tile, PART: gl.constexpr, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    """Accumulators -> shared memory -> TMA, in STORE_PARTS pieces through STORE_SLOTS buffers, used in turn; `tile`
    counts this consumer's tiles.

    Nothing waits for the last stores here: a buffer is waited for when it is needed again, one tile later.
    """
    g, row, row_end, col = place.g, place.row + PART * p.ROWS, place.row_end, place.col
    if p.HAS_BIAS:
        bias = bias_of(p, g, col, p.N, p.BLOCK_N, gl.SliceLayout(0, mma_layout))
        acc = acc + gl.expand_dims(bias, 0)
    PART_N: gl.constexpr = p.BLOCK_N // p.STORE_PARTS
    cut = pieces(acc, p.STORE_PARTS)
    for s in gl.static_range(p.STORE_PARTS):
        buf = p.c_smem.index(CONSUMER * p.STORE_SLOTS + (tile * p.STORE_PARTS + s) % p.STORE_SLOTS)
        tma.store_wait(p.STORE_SLOTS - 1)
        store_tile(p, buf, cut[s], g, row, row_end, row_end, col + s * PART_N, p.ADD)


@gluon.jit
def _consumer_split(p, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    plan = make_plan(p)
    step = 0
    tile = 0
    number = 0
    t = gl.program_id(0)
    place = place_of(p, plan, t)
    while t < plan.total:
        number += 1
        steps = steps_of(p, place.k_len)
        if CONSUMER == 1:
            # The late start that puts one consumer's stores beside the other's products. It lasts: the
            # consumer that stores leaves the tensor cores to the other and falls behind by as much.
            late = (step == 0) & (steps > p.LAG) & (t + gl.num_programs(0) < plan.total)
            mbarrier.wait(p.full.index(p.LAG), 0, pred=late)
        if CONSUMER == 0 or place.row + p.ROWS < place.row_end:
            after, acc, next_place = _multiply(
                p, plan, step, place.k_len, number, t + gl.num_programs(0), CONSUMER, None, mma_layout
            )
            _store(p, acc, place, tile, CONSUMER, CONSUMER, mma_layout)
            tile += 1
        else:
            skip(p, step, place.k_len)
            after = take(p, number, t + gl.num_programs(0))
            next_place = place_of(p, plan, after)
        step += steps
        t = after
        place = next_place
    tma.store_wait(0)


@gluon.jit
def _consumer_pingpong(p, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    plan = make_plan(p)
    tile = 0
    # The ring's steps go on through the other consumer's tiles.
    step = 0
    t = gl.program_id(0)
    if CONSUMER == 1:
        step += steps_of(p, _k_length(p, plan, t))
        t = take(p, 1, t + gl.num_programs(0))
    place = place_of(p, plan, t)
    while t < plan.total:
        mbarrier.wait(p.order.index(CONSUMER), (tile & 1) ^ (1 - CONSUMER))
        after, acc, next_place = _multiply(
            p, plan, step, place.k_len, 2 * tile + CONSUMER + 2, t + 2 * gl.num_programs(0), 0, 1 - CONSUMER, mma_layout
        )
        _store(p, acc, place, tile, 0, CONSUMER, mma_layout)
        step += steps_of(p, place.k_len)
        if p.LAYOUT == "ragged_k":
            step += steps_of(p, _k_length(p, plan, take(p, 2 * tile + CONSUMER + 1, t + gl.num_programs(0))))
        else:
            step += steps_of(p, p.K)
        tile += 1
        t = after
        place = next_place
    tma.store_wait(0)


@gluon.jit
def _k_length(p, plan, t):
    k_len = p.K
    if p.LAYOUT == "ragged_k":
        _k0, k_len = k_range(p, plan, t)
    return k_len


@gluon.jit
def _consumer(p, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    if p.CONSUMERS == 2 and p.BLOCK_M == p.ROWS:
        _consumer_pingpong(p, CONSUMER, mma_layout)
    else:
        _consumer_split(p, CONSUMER, mma_layout)


@gluon.jit
def _producer(p):
    produce(p, _fill)


@gluon.jit(
    # One compilation serves every token count.
    do_not_specialize=["G", "M", "N", "K"],
    do_not_specialize_on_alignment=["offs_ptr", "bias_ptr", "tile_counter_ptr"],
)
def grouped_mm_kernel(
    a_desc,
    b_desc,
    c_desc,
    more_a_desc,
    more_b_desc,
    offs_ptr,
    bias_ptr,
    tile_counter_ptr,
    G,
    M,
    N,
    K,
    SHAPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """out[g] = a[g] @ b[g] over groups g; see `gluon_hopper` for shapes. Grid: one program per multiprocessor.

    tile_counter_ptr: an int32 that is zero, and is left so, for DYNAMIC. K counts the MORE steps of a second pair of
    operands.

    Launched as a programmatic dependent, the kernel sets itself up while the kernel before it ends.
    """
    prefetch_descriptors(a_desc, b_desc, "grouped_mm_kernel")
    A_PARTS: gl.constexpr = SHAPE.BLOCK_M // SHAPE.ROWS
    a_boxes = slots(a_desc, SHAPE.STAGES * SHAPE.BLOCK_M // SHAPE.A_BOX)
    a_smem = a_boxes
    if SHAPE.A_BOX < SHAPE.ROWS:
        a_smem = reinterpret(a_boxes, a_desc.dtype, [SHAPE.STAGES * A_PARTS, SHAPE.ROWS, SHAPE.BLOCK_K], a_desc.layout)
    b_smem = slots(b_desc, SHAPE.STAGES)
    c_smem = slots(c_desc, SHAPE.CONSUMERS * SHAPE.STORE_SLOTS)
    full, empty = make_barriers(SHAPE.STAGES, 1, A_PARTS)
    order = make_order()
    queue, queued = make_queue(SHAPE.DYNAMIC, empty)
    begin()
    p = Context(
        (a_desc, b_desc, c_desc),
        (a_desc if more_a_desc is None else more_a_desc, b_desc if more_b_desc is None else more_b_desc),
        (a_boxes, a_smem, b_smem, c_smem),
        (full, empty, order, queue, queued),
        (offs_ptr, bias_ptr, tile_counter_ptr),
        (G, M, N, K),
        SHAPE,
    )
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SHAPE.BLOCK_N, 16])
    specialise(p, _consumer, _producer, mma_layout, REGISTERS)
