"""Device code of the `gluon_fp8` backend: one persistent, warp-specialised FP8 grouped GEMM for sm_90a.

One warp loads tiles with TMA into a ring of `STAGES` shared-memory stages, each 128 summands deep: one block of
scales. One to three warpgroups ("consumers") multiply them, each its own ROWS of the tile:

    part = a_stage · b_stageᵀ                 four wgmmas of 32 summands, accumulated by the tensor cores
    acc += part * (scale_a ⊗ scale_b)         in float32, "promotion"; 128 FMAs a clock and SM

While one consumer promotes, the tensor cores work for the other. A tile 256 columns wide is two halves of 128, one
after the other in each consumer, because registers hold both halves' sums but only one half's products: it reads 48
bytes through L2 for every clock of the tensor cores, where 128 columns read 64. Its two consumers queue their products
in order (`hopper/ordered_barrier.py`), and a short last wave is of half tiles (`hopper/units.py`). Three consumers
queue theirs in order too: two of them promote while the third one's products run. The loading warp
copies each step's scales beside its operands, element by element, so any strides will do. One scale for each row or
column (ROW) is loaded after the last step.

With SPLIT_K > 1 the steps of a tile are dealt out to that many programs, neighbours in the grid; each stores its
float32 sum into a slice of its own, [SPLIT_K, M, N], and `reduce` adds the slices up in order: same bits every time.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from expertile.ops.hopper.context import context_of
from expertile.ops.hopper.ordered_barrier import ordered_arrive, ordered_begin, ordered_end, ordered_wait
from expertile.ops.hopper.prologue import begin, make_barriers, prefetch_descriptors, slots, specialise
from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.store import bias_of, store_tile
from expertile.ops.hopper.tiles import locate, make_plan
from expertile.ops.hopper.units import span, tile_of, units
from expertile.ops.launch.versions import reinterpret
from expertile.ops.scaled_grouped_mm.backends._gluon_producer import produce


class Shape(NamedTuple):
    """What the kernel is compiled for.

    GROUPS_POW2: a power of two >= max(G, 32). BLOCK_M = ROWS * CONSUMERS; A_BOX: rows of a that one load brings, which
    divide ROWS, and are ROWS where there are more consumers. A tile has HALVES of COLS columns, BLOCK_N in all, which
    divides 128 or is 256. ORDERED: three consumers, or two of halves, queue their products in order
    (`hopper/ordered_barrier.py`). TAIL: the last wave may be of half tiles (`hopper/units.py`); a split K needs no
    TAIL."""

    LAYOUT: str
    RECIPE: str
    HAS_BIAS: bool
    GROUPS_POW2: int
    ROWS: int
    A_BOX: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    GROUP_M: int
    SPLIT_K: int
    PAIRS: bool
    COLS: int
    HALVES: int
    CONSUMERS: int
    ORDERED: bool
    TAIL: bool


# What every partition is handed; sizes and strides count elements. sb_g, sb_n, sb_k: strides of scale_b over groups,
# columns (or blocks of 128 columns) and blocks of k; sa_m, sa_k: of scale_a over rows and blocks of k. a_boxes is
# a_smem cut into what one load brings.
Context = context_of(
    "a_desc b_desc c_desc",
    "a_boxes a_smem b_smem c_smem scale_a_smem scale_b_smem full empty",
    "offs bias scale_a scale_b G M N K sa_m sa_k sb_g sb_n sb_k",
    Shape,
)


@gluon.jit
def _row_scales(p, g, row, col, mma_layout: gl.constexpr):
    """scale_a ⊗ scale_b of the recipe ROW. Rows and columns that do not exist borrow the last one's."""
    rows = row + gl.arange(0, p.ROWS, layout=gl.SliceLayout(1, mma_layout))
    cols = col + gl.arange(0, p.COLS, layout=gl.SliceLayout(0, mma_layout))
    down = gl.load(p.scale_a + gl.minimum(rows, p.M - 1) * p.sa_m)
    across = gl.load(p.scale_b + g * p.sb_g + gl.minimum(cols, p.N - 1) * p.sb_n)
    return gl.expand_dims(down, 1) * gl.expand_dims(across, 0)


@gluon.jit
def _scales(p, i, PART: gl.constexpr, HALF: gl.constexpr, mma_layout: gl.constexpr):
    """The scales of stage i: this consumer's of a as a column, b's as a row (of one element for a whole block)."""
    down = p.scale_a_smem.index(i * p.CONSUMERS + PART).load(gl.SliceLayout(1, mma_layout))
    across = p.scale_b_smem.index(i * p.HALVES + HALF).load(gl.SliceLayout(0, mma_layout))
    return gl.expand_dims(down, 1), gl.expand_dims(across, 0)


@gluon.jit
def _products(p, i, PART: gl.constexpr, mma_layout: gl.constexpr, HALF: gl.constexpr = 0):
    """Queue the wgmmas of one stage: this consumer's rows of a by the columns of b, or one half of them."""
    a = p.a_smem.index(i * p.CONSUMERS + PART)
    b = p.b_smem.index(i * p.HALVES + HALF).reshape([p.COLS, 128]).permute((1, 0))
    zeros = gl.zeros((p.ROWS, p.COLS), gl.float32, mma_layout)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def _promote(
    p,
    acc,
    part,
    i,
    OTHERS: gl.constexpr,
    LAST: gl.constexpr,
    PART: gl.constexpr,
    HALF: gl.constexpr,
    mma_layout: gl.constexpr,
):
    """acc and the products of stage i by their scales, when all products queued but OTHERS are done. LAST: nothing of
    the stage is read after this; it is free again."""
    if p.RECIPE == "block":
        # Read while the tensor cores are busy.
        down, across = _scales(p, i, PART, HALF, mma_layout)
    part = warpgroup_mma_wait(OTHERS, (part,))
    if p.RECIPE == "vector":
        # Read late: a row of them takes 32 registers.
        down, across = _scales(p, i, PART, HALF, mma_layout)
    if LAST:
        mbarrier.arrive(p.empty.index(i), count=1)
    if p.RECIPE == "row":
        return acc + part
    else:
        return acc + part * (down * across)


@gluon.jit
def _multiply(p, ring, steps, PART: gl.constexpr, mma_layout: gl.constexpr):
    """The sum of one unit, from the ring's step number `ring`."""
    i = ring % p.STAGES
    phase = (ring // p.STAGES) & 1
    acc = gl.zeros((p.ROWS, p.COLS), gl.float32, mma_layout)
    for _s in range(steps):
        mbarrier.wait(p.full.index(i), phase)
        ordered_wait(p, PART)
        part = _products(p, i, PART, mma_layout)
        ordered_arrive(p, PART)
        acc = _promote(p, acc, part, i, 0, True, PART, 0, mma_layout)
        i, phase = advance(p, i, phase)
    return acc


@gluon.jit
def _multiply_pairs(p, ring, steps, PART: gl.constexpr, mma_layout: gl.constexpr):
    """`_multiply` two steps at a time: the first one's promotion goes on under the second one's products."""
    i = ring % p.STAGES
    phase = (ring // p.STAGES) & 1
    acc = gl.zeros((p.ROWS, p.COLS), gl.float32, mma_layout)
    for _t in range(steps // 2):
        j, phase_j = advance(p, i, phase)
        mbarrier.wait(p.full.index(i), phase)
        even = _products(p, i, PART, mma_layout)
        mbarrier.wait(p.full.index(j), phase_j)
        odd = _products(p, j, PART, mma_layout)
        acc = _promote(p, acc, even, i, 1, True, PART, 0, mma_layout)
        acc = _promote(p, acc, odd, j, 0, True, PART, 0, mma_layout)
        i, phase = advance(p, j, phase_j)
    if steps % 2 == 1:
        mbarrier.wait(p.full.index(i), phase)
        even = _products(p, i, PART, mma_layout)
        acc = _promote(p, acc, even, i, 0, True, PART, 0, mma_layout)
    return acc


@gluon.jit
def _in_order(x):
    """x, computed before whatever comes after: products queued earlier than that would need registers of their own."""
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _multiply_halves(p, ring, steps, PART: gl.constexpr, mma_layout: gl.constexpr):
    """`_multiply` for two halves of the columns in turn: (left, right) sum."""
    i = ring % p.STAGES
    phase = (ring // p.STAGES) & 1
    left = gl.zeros((p.ROWS, p.COLS), gl.float32, mma_layout)
    right = gl.zeros((p.ROWS, p.COLS), gl.float32, mma_layout)
    for _s in range(steps):
        mbarrier.wait(p.full.index(i), phase)
        ordered_wait(p, PART)
        part = _products(p, i, PART, mma_layout, 0)
        ordered_arrive(p, PART)
        left = _in_order(_promote(p, left, part, i, 0, False, PART, 0, mma_layout))
        ordered_wait(p, PART)
        part = _products(p, i, PART, mma_layout, 1)
        ordered_arrive(p, PART)
        right = _in_order(_promote(p, right, part, i, 0, True, PART, 1, mma_layout))
        i, phase = advance(p, i, phase)
    return left, right


@gluon.jit
def _skip(p, ring, steps, wide, PART: gl.constexpr):
    """Give back the stages of a unit in which this consumer has no rows, and do its rounds of the ordered barrier."""
    i = ring % p.STAGES
    phase = (ring // p.STAGES) & 1
    for _s in range(steps):
        mbarrier.wait(p.full.index(i), phase)
        ordered_wait(p, PART)
        ordered_arrive(p, PART)
        if p.HALVES == 2 and wide:
            ordered_wait(p, PART)
            ordered_arrive(p, PART)
        mbarrier.arrive(p.empty.index(i), count=1)
        i, phase = advance(p, i, phase)


@gluon.jit
def _store(p, acc, split, g, row, row_end, col, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    """Sums -> shared memory -> TMA. Nothing waits for the store here: its buffer is waited for one tile later."""
    if p.RECIPE == "row":
        acc = acc * _row_scales(p, g, row, col, mma_layout)
    if p.HAS_BIAS:
        # The slices of a split K are added up: one of them takes the bias along.
        bias = bias_of(p, g, col, gl.where(split == 0, p.N, 0), p.COLS, gl.SliceLayout(0, mma_layout))
        acc = acc + gl.expand_dims(bias, 0)
    buf = p.c_smem.index(CONSUMER)
    tma.store_wait(0)
    store_tile(p, buf, acc, g, row, row_end, row_end + split * p.M, col)


@gluon.jit
def _consumer(p, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    plan = make_plan(p)
    ordered_begin(p, CONSUMER)
    ring = 0
    for unit in range(gl.program_id(0), units(p, plan), gl.num_programs(0)):
        tile, shift, wide = tile_of(p, plan, unit)
        g, row, row_end, col, _k0, k_len = locate(p, plan, tile)
        col += shift
        _first, steps = span(p, unit, k_len, 128)
        row += CONSUMER * p.ROWS
        if CONSUMER == 0 or row < row_end:
            if p.HALVES == 2:
                if wide:
                    left, right = _multiply_halves(p, ring, steps, CONSUMER, mma_layout)
                    _store(p, left, unit % p.SPLIT_K, g, row, row_end, col, CONSUMER, mma_layout)
                    _store(p, right, unit % p.SPLIT_K, g, row, row_end, col + 128, CONSUMER, mma_layout)
                elif p.TAIL:
                    acc = _multiply(p, ring, steps, CONSUMER, mma_layout)
                    _store(p, acc, 0, g, row, row_end, col, CONSUMER, mma_layout)
            else:
                if p.PAIRS:
                    acc = _multiply_pairs(p, ring, steps, CONSUMER, mma_layout)
                else:
                    acc = _multiply(p, ring, steps, CONSUMER, mma_layout)
                _store(p, acc, unit % p.SPLIT_K, g, row, row_end, col, CONSUMER, mma_layout)
        else:
            _skip(p, ring, steps, wide, CONSUMER)
        ring += steps
    ordered_end(p, CONSUMER)
    tma.store_wait(0)


@gluon.jit(
    # One compilation serves every token count and every stride of the scales.
    do_not_specialize=["G", "M", "N", "K", "sa_m", "sa_k", "sb_g", "sb_n", "sb_k"],
    do_not_specialize_on_alignment=["offs_ptr", "bias_ptr", "scale_a_ptr", "scale_b_ptr"],
)
def scaled_grouped_mm_kernel(
    a_desc,
    b_desc,
    c_desc,
    offs_ptr,
    bias_ptr,
    scale_a_ptr,
    scale_b_ptr,
    G,
    M,
    N,
    K,
    sa_m,
    sa_k,
    sb_g,
    sb_n,
    sb_k,
    SHAPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """out[g] = (a[g] ∘ scale_a[g]) @ (b[g] ∘ scale_b[g]) over groups g; see `gluon_fp8` for shapes.

    Grid: any number of programs, one per multiprocessor. Launched as a programmatic dependent, it sets itself up while
    the kernel before it ends.
    """
    prefetch_descriptors(a_desc, b_desc, "scaled_grouped_mm_kernel")
    CONSUMERS: gl.constexpr = SHAPE.CONSUMERS
    STAGES: gl.constexpr = SHAPE.STAGES
    a_boxes = slots(a_desc, STAGES * SHAPE.BLOCK_M // SHAPE.A_BOX)
    a_smem = a_boxes
    if SHAPE.A_BOX < SHAPE.ROWS:
        a_smem = reinterpret(a_boxes, a_desc.dtype, [STAGES * CONSUMERS, SHAPE.ROWS, 128], a_desc.layout)
    b_smem = slots(b_desc, STAGES * SHAPE.HALVES)
    c_smem = slots(c_desc, CONSUMERS)
    # Scales stand beside the stage's operands.
    BESIDE: gl.constexpr = STAGES if SHAPE.RECIPE != "row" else 1
    COLUMNS: gl.constexpr = 1 if SHAPE.RECIPE == "block" else SHAPE.COLS
    scale_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    scale_a_smem = gl.allocate_shared_memory(gl.float32, [BESIDE * CONSUMERS, SHAPE.ROWS], scale_layout)
    scale_b_smem = gl.allocate_shared_memory(gl.float32, [BESIDE * SHAPE.HALVES, COLUMNS], scale_layout)
    # The threads of the loading warp arrive one by one, each when its copies of scales have landed.
    full, empty = make_barriers(STAGES, 33 if SHAPE.RECIPE != "row" else 1, CONSUMERS)
    begin()
    p = Context(
        (a_desc, b_desc, c_desc),
        (a_boxes, a_smem, b_smem, c_smem, scale_a_smem, scale_b_smem),
        (full, empty),
        (offs_ptr, bias_ptr, scale_a_ptr, scale_b_ptr),
        (G, M, N, K, sa_m, sa_k, sb_g, sb_n, sb_k),
        SHAPE,
    )
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SHAPE.COLS, 32])
    specialise(p, _consumer, produce, mma_layout, REGISTERS)
