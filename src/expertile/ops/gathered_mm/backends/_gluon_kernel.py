"""Device code of `gluon_gather`: persistent, warp-specialised grouped GEMM for sm_90a whose rows may be gathered.

Producers keep a ring of STAGES shared-memory stages full (`_gluon_producer`). Two consumers, a warpgroup each,
multiply, and while one finishes its tile (`_gluon_epilogue`) the other has the tensor cores. As in `grouped_mm`'s
kernel they share the tiles in one of two ways:

  pingpong  Each takes every other tile of the program; a pair of barriers keeps their main loops apart.
  split     Both take the same tile, each ROWS of its rows, and run freely; consumer 1 starts a stage late.

A tile of 128x256 for both moves three quarters of the bytes from L2 that two of 128x128 do, and half of the gathered
ones. Which tiles a program takes, and where they lie, is `grouped_mm`'s (`hopper/schedule.py`, `hopper/tiles.py`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertile.ops.gathered_mm.backends._gluon_epilogue import store_gated, store_plain
from expertile.ops.gathered_mm.backends._gluon_producer import fill_in_order, produce_gathered
from expertile.ops.hopper.context import context_of
from expertile.ops.hopper.load import produce
from expertile.ops.hopper.prologue import make_barriers, make_order, slots
from expertile.ops.hopper.ring import multiply_rest, skip, steps_of
from expertile.ops.hopper.schedule import make_queue, take
from expertile.ops.hopper.tiles import make_plan, place_of


class Shape(NamedTuple):
    """What the kernel is compiled for. GROUPS_POW2: a power of two >= max(G, 32). ROWS: of a tile, what one consumer
    multiplies. MORE: steps at the end of K, of BLOCK_K each, whose operands come from more_a_desc and more_b_desc."""

    LAYOUT: str
    PRODUCT: str
    ACTIVATION: str
    INTERLEAVED: bool
    HALVED: bool
    SAVE_PRE: bool
    GATHERED: str
    B_K_MAJOR: bool
    HAS_BIAS: bool
    GROUPS_POW2: int
    BLOCK_M: int
    ROWS: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    GROUP_M: int
    STORE_PARTS: int
    STORE_SLOTS: int
    DYNAMIC: bool
    MASKED: bool
    MORE: int


# What every partition is handed. The plan of tiles reads LAYOUT, G, M, N, K, offs, BLOCK_M, BLOCK_N, GROUP_M and
# GROUPS_POW2; queue, queued, tile_counter and DYNAMIC say which of them a program takes.
Context = context_of(
    "a_desc b_desc out_desc pre_desc more_a_desc more_b_desc",
    "a_smem b_smem c_smem full empty order queue queued",
    "a rows offs bias tile_counter G M N K A_PITCH",
    Shape,
)


@gluon.jit
def _batch(p, acc, i, phase, PART: gl.constexpr, FIRST: gl.constexpr):
    """Queue the wgmmas of one stage, on the tile's rows number PART * ROWS and following."""
    mbarrier.wait(p.full.index(i), phase)
    if p.GATHERED != "":
        # cp.async writes through the generic proxy, wgmma reads through the asynchronous one.
        fence_async_shared()
    a = p.a_smem.index(i)
    b = p.b_smem.index(i)
    a = a.reshape([p.BLOCK_M, p.BLOCK_K])
    if p.ROWS < p.BLOCK_M:
        a = a.slice(PART * p.ROWS, p.ROWS)
    b = b.reshape([p.BLOCK_N, p.BLOCK_K]).permute((1, 0)) if p.B_K_MAJOR else b.reshape([p.BLOCK_K, p.BLOCK_N])
    acc = warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def _multiply(p, step, PART: gl.constexpr, NEXT: gl.constexpr, mma_layout: gl.constexpr):
    """One tile's K loop, from the ring's step number `step`. NEXT: as in `multiply_rest`."""
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    acc = gl.zeros((p.ROWS, p.BLOCK_N), gl.float32, mma_layout)
    acc = _batch(p, acc, i, phase, PART, True)
    return multiply_rest(p, _batch, acc, i, phase, p.K, PART, NEXT)


@gluon.jit
def _store_tile(p, acc, place, tile, PART: gl.constexpr, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    g, row, row_end, col = place.g, place.row + PART * p.ROWS, place.row_end, place.col
    if p.PRODUCT == "gated":
        store_gated(p, acc, g, row, row_end, col, tile, CONSUMER, mma_layout)
    else:
        store_plain(p, acc, g, row, row_end, col, tile, CONSUMER, mma_layout)


@gluon.jit
def _consumer_split(p, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    plan = make_plan(p)
    steps = steps_of(p, p.K)
    t = gl.program_id(0)
    number = 0
    place = place_of(p, plan, t)
    step = 0
    tile = 0
    if CONSUMER == 1:
        # A late start puts one consumer's stores beside the other's products. It lasts: the consumer that
        # stores leaves the tensor cores to the other and falls behind by as much.
        mbarrier.wait(p.full.index(1), 0, pred=(steps > 1) & (t < plan.total))
    while t < plan.total:
        number += 1
        if place.row + CONSUMER * p.ROWS < place.row_end:
            acc = _multiply(p, step, CONSUMER, None, mma_layout)
            after = take(p, number, t + gl.num_programs(0))
            next_place = place_of(p, plan, after)
            _store_tile(p, acc, place, tile, CONSUMER, CONSUMER, mma_layout)
            tile += 1
        else:
            skip(p, step, p.K)
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
        step += steps_of(p, p.K)
        t = take(p, 1, t + gl.num_programs(0))
    place = place_of(p, plan, t)
    while t < plan.total:
        mbarrier.wait(p.order.index(CONSUMER), (tile & 1) ^ (1 - CONSUMER))
        acc = _multiply(p, step, 0, 1 - CONSUMER, mma_layout)
        # Looked up while the other consumer keeps the tensor cores busy.
        take(p, 2 * tile + CONSUMER + 1, t + gl.num_programs(0))
        after = take(p, 2 * tile + CONSUMER + 2, t + 2 * gl.num_programs(0))
        next_place = place_of(p, plan, after)
        _store_tile(p, acc, place, tile, 0, CONSUMER, mma_layout)
        step += 2 * steps_of(p, p.K)
        tile += 1
        t = after
        place = next_place
    tma.store_wait(0)


@gluon.jit
def _consumer(p, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    if p.ROWS < p.BLOCK_M:
        _consumer_split(p, CONSUMER, mma_layout)
    else:
        _consumer_pingpong(p, CONSUMER, mma_layout)


@gluon.jit
def _producer(p):
    if p.GATHERED != "":
        produce_gathered(p)
    else:
        produce(p, fill_in_order)


@gluon.jit(
    # One compilation serves every token count.
    do_not_specialize=["G", "M", "N", "K", "A_PITCH"],
    do_not_specialize_on_alignment=[f"{name}_ptr" for name in ("rows", "offs", "bias", "tile_counter")],
)
def gathered_mm_kernel(
    a_desc,
    b_desc,
    out_desc,
    pre_desc,
    more_a_desc,
    more_b_desc,
    a_ptr,
    rows_ptr,
    offs_ptr,
    bias_ptr,
    tile_counter_ptr,
    G,
    M,
    N,
    K,
    A_PITCH,
    SHAPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """The products of `gathered_mm.problem`. Grid: one program per multiprocessor.

    a_ptr, A_PITCH: the gathered operand, and the elements between its rows divided by 8. K counts the MORE steps of a
    second pair of operands. For few rows (MASKED) it is launched as a programmatic dependent: it sets itself up while
    the kernel before it ends, and lets the one after it do so.
    """
    a_smem = slots(a_desc, SHAPE.STAGES)
    b_smem = slots(b_desc, SHAPE.STAGES)
    c_smem = slots(out_desc, 2 * SHAPE.STORE_SLOTS)
    # One arrival for what TMA brings, and one for each thread of the four gathering warps.
    full, empty = make_barriers(SHAPE.STAGES, 129 if SHAPE.GATHERED != "" else 1, SHAPE.BLOCK_M // SHAPE.ROWS)
    order = make_order()
    queue, queued = make_queue(SHAPE.DYNAMIC, empty)
    fence_async_shared()
    if SHAPE.MASKED:
        # Memory of the kernel before is touched only after this; the kernel after may begin to set itself up.
        gdc_wait()
        gdc_launch_dependents()
    p = Context(
        (a_desc, b_desc, out_desc, pre_desc),
        (a_desc if more_a_desc is None else more_a_desc, b_desc if more_b_desc is None else more_b_desc),
        (a_smem, b_smem, c_smem),
        (full, empty, order, queue, queued),
        (a_ptr, rows_ptr, offs_ptr, bias_ptr, tile_counter_ptr),
        (G, M, N, K, A_PITCH),
        SHAPE,
    )
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SHAPE.BLOCK_N, 16])
    gl.warp_specialize(
        [(_consumer, (p, 0, mma_layout)), (_consumer, (p, 1, mma_layout)), (_producer, (p,))],
        [4, 4 if SHAPE.GATHERED != "" else 1],
        REGISTERS,
    )
