"""Device code of the `gluon_int4` backend: one persistent, warp-specialised grouped GEMM with 4-bit weights, sm_90a.

out[rows of g] = a[rows of g] @ w[g]ᵀ is computed as its transpose: rows of w are wgmma's M, 64 or 128 for each of the
"consumer" warpgroups, and come from registers, where their nibbles are unpacked; rows of a are wgmma's N and come from
shared memory. So no unpacked weight is ever stored, and a tile may have as few as 8 rows.

One warp loads packed weights, activations, scales and zero points with TMA into a ring of `STAGES` stages.
`_gluon_multiply` says how consumers multiply them.

With SPLIT_K > 1 the steps of a tile are dealt out to that many programs. Each stores its float32 sum into a slice of
its own, [SPLIT_K, M, N]. The slices are added up in order afterwards: same bits every time.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from expertile.ops.hopper.context import context_of
from expertile.ops.hopper.ordered_barrier import ordered_begin, ordered_end
from expertile.ops.hopper.prologue import begin, make_barriers, slots, specialise
from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.store import store_turned
from expertile.ops.hopper.tiles import locate, make_plan
from expertile.ops.hopper.units import span
from expertile.ops.launch.versions import tma_load
from expertile.ops.weight_only_mm.backends._gluon_multiply import multiply, scale_groups
from expertile.ops.weight_only_mm.backends._gluon_unpack import half_layout, rows_of


class Shape(NamedTuple):
    """What the kernel is compiled for. GROUPS_POW2: a power of two >= max(G, 32).

    GROUP: values of K that share a scale, 0 where a row has only one. GROUPS: scales of a row in one stage. SCALE: what
    the scales multiply, "fused" or "weight" (the unpacked weights), "sum" (the product of a group) or "tile" (the whole
    sum); "mxfp4": weights of that format, four scales in a word, GROUP 128 for the four. ORDERED: two consumers queue
    their products in order (`hopper/ordered_barrier.py`). PAIRS: two blocks of MXFP4 are unpacked at a time."""

    LAYOUT: str
    HAS_BIAS: bool
    HAS_ZEROS: bool
    GROUPS_POW2: int
    CONSUMERS: int
    COLS: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    HALF: int
    SLAB: int
    GROUP: int
    GROUPS: int
    SCALE: str
    STAGES: int
    GROUP_M: int
    SPLIT_K: int
    STORE_PARTS: int
    TAILS: bool
    ORDERED: bool
    PAIRS: bool
    BF16: bool


# What every partition is handed: descriptors, shared memory, and the problem. Shared memory: x of a stage [BLOCK_M,
# BLOCK_K]; w of a stage and consumer [COLS, BLOCK_K / 8] words; scales and zeros of a stage and group of K [BLOCK_N];
# results of a consumer [BLOCK_M / STORE_PARTS, COLS].
Context = context_of(
    "x_desc w_desc s_desc z_desc c_desc",
    "x_smem w_smem s_smem z_smem c_smem full empty",
    "offs bias scales zeros G M N K",
    Shape,
)


@gluon.jit
def _producer(p):
    X_BYTES: gl.constexpr = p.x_desc.block_type.nbytes
    W_BYTES: gl.constexpr = p.w_desc.block_type.nbytes
    S_BYTES: gl.constexpr = p.s_desc.block_type.nbytes * p.GROUPS
    Z_BYTES: gl.constexpr = S_BYTES if p.HAS_ZEROS else 0
    plan = make_plan(p)
    i = 0
    phase = 1
    for unit in range(gl.program_id(0), plan.total * p.SPLIT_K, gl.num_programs(0)):
        g, row, _row_end, col, _k0, _k_len = locate(p, plan, unit // p.SPLIT_K)
        first, steps = span(p, unit, p.K, p.BLOCK_K)
        for s in range(first, first + steps):
            mbarrier.wait(p.empty.index(i), phase)
            bar = p.full.index(i)
            mbarrier.expect(bar, X_BYTES + W_BYTES * p.CONSUMERS + S_BYTES + Z_BYTES)
            for c in gl.static_range(p.CONSUMERS):
                at = [g, col + c * p.COLS, s * (p.BLOCK_K // 8)]
                tma_load(p.w_desc, at, bar, p.w_smem.index(i * p.CONSUMERS + c))
            tma_load(p.x_desc, [row, s * p.BLOCK_K], bar, p.x_smem.index(i))
            for j in gl.static_range(p.GROUPS):
                # Past the end of K weights and activations are zeros, whatever their scale; it must lie in this expert.
                groups = scale_groups(p)
                first_scale = (g * groups + gl.minimum(s * p.GROUPS + j, groups - 1)) * p.N + col
                tma_load(p.s_desc, [first_scale], bar, p.s_smem.index(i * p.GROUPS + j))
                if p.HAS_ZEROS:
                    tma_load(p.z_desc, [first_scale], bar, p.z_smem.index(i * p.GROUPS + j))
            i, phase = advance(p, i, phase)


@gluon.jit
def _tile(p, ring, steps, split, g, row, row_end, col, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """One unit: its sum, stored."""
    acc = multiply(p, ring, steps, g, col, WHO, mma_layout)
    PARTS: gl.constexpr = p.STORE_PARTS * rows_of(mma_layout) // p.BLOCK_M
    store_turned(p, acc, split, g, row, row_end, col, PARTS, WHO, mma_layout)


@gluon.jit
def _consumer(p, WHO: gl.constexpr, mma_layout: gl.constexpr):
    plan = make_plan(p)
    ring = 0
    ordered_begin(p, WHO)
    for unit in range(gl.program_id(0), plan.total * p.SPLIT_K, gl.num_programs(0)):
        g, row, row_end, col, _k0, _k_len = locate(p, plan, unit // p.SPLIT_K)
        _first, steps = span(p, unit, p.K, p.BLOCK_K)
        col += WHO * p.COLS
        split = unit % p.SPLIT_K
        if p.TAILS:
            if row_end - row <= p.BLOCK_M // 2:
                _tile(p, ring, steps, split, g, row, row_end, col, WHO, half_layout(mma_layout))
            else:
                _tile(p, ring, steps, split, g, row, row_end, col, WHO, mma_layout)
        else:
            _tile(p, ring, steps, split, g, row, row_end, col, WHO, mma_layout)
        ring += steps
    ordered_end(p, WHO)
    tma.store_wait(0)


@gluon.jit(
    # One compilation serves every token count.
    do_not_specialize=["G", "M", "N", "K"],
    do_not_specialize_on_alignment=["offs_ptr", "bias_ptr", "scales_ptr", "zeros_ptr"],
)
def weight_only_mm_kernel(
    x_desc,
    w_desc,
    s_desc,
    z_desc,
    c_desc,
    offs_ptr,
    bias_ptr,
    scales_ptr,
    zeros_ptr,
    G,
    M,
    N,
    K,
    SHAPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """out[rows of g] = a[rows of g] @ ŵ[g]ᵀ; see `gluon_int4` for shapes. 4 warps.

    Grid: any number of programs, one per multiprocessor. Launched as a programmatic dependent, it sets itself up while
    the kernel before it ends.
    """
    STAGES: gl.constexpr = SHAPE.STAGES
    CONSUMERS: gl.constexpr = SHAPE.CONSUMERS
    SCALES: gl.constexpr = max(1, STAGES * SHAPE.GROUPS)
    x_smem = slots(x_desc, STAGES)
    w_smem = slots(w_desc, STAGES * CONSUMERS)
    c_smem = slots(c_desc, CONSUMERS)
    s_smem = slots(s_desc, SCALES)
    z_smem = slots(z_desc, SCALES if SHAPE.HAS_ZEROS else 1)
    full, empty = make_barriers(STAGES, 1, CONSUMERS)
    begin()
    p = Context(
        (x_desc, w_desc, s_desc, z_desc, c_desc),
        (x_smem, w_smem, s_smem, z_smem, c_smem),
        (full, empty),
        (offs_ptr, bias_ptr, scales_ptr, zeros_ptr),
        (G, M, N, K),
        SHAPE,
    )
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.BLOCK_M, 16])
    specialise(p, _consumer, _producer, mma_layout, REGISTERS)
