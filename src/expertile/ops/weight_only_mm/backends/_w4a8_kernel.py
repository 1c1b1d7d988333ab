"""Device code of the `gluon_w4a8` backend: one persistent, warp-specialised grouped GEMM of FP8 activations with 4-bit
weights, sm_90a.

out[rows of g] = (x ∘ scale_x)[rows of g] @ w[g]ᵀ is computed as its transpose: 64 rows of w are wgmma's M and come from
registers, where they are unpacked to e4m3; rows of x are wgmma's N and come from shared memory. One warp loads packed
weights, activations and their scales into a ring of `STAGES` stages, each 128 of K deep. Two warpgroups ("consumers")
multiply them, each COLS rows of w with BLOCK_M rows of x, a product of 64 x TOKENS after the other:

    part = w[64, 128] · x[TOKENS, 128]ᵀ           two times two wgmmas of 32 summands, accumulated by the tensor cores
    acc += part * scale_x (* scale of w)          in float32, "promotion"

The last 64 of K are unpacked under the products of the first 64. A row of w is unpacked once for all BLOCK_M rows of x.
Consumers queue their products in order (`hopper/ordered_barrier.py`): while one promotes and unpacks, the tensor cores
work for the other. MXFP4 has one scale for a row of w, which multiplies the sum; INT4 has one for each 128 of K.

With SPLIT_K > 1 the steps of a tile are dealt out to that many programs. Each stores its float32 sum into a slice of
its own, [SPLIT_K, M, N]. The slices are added up in order afterwards: same bits every time.
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a tuple)

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from expertile.ops.hopper.context import context_of
from expertile.ops.hopper.ordered_barrier import ordered_arrive, ordered_begin, ordered_end, ordered_wait
from expertile.ops.hopper.prologue import begin, make_barriers, slots, specialise
from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.store import store_turned
from expertile.ops.hopper.tiles import locate, make_plan
from expertile.ops.hopper.units import span
from expertile.ops.launch.versions import cp_async, tma_load
from expertile.ops.weight_only_mm.backends._w4a8_unpack import (
    UNIT_OF_INT4,
    rows_layout,
    unpacked_int4,
    unpacked_mxfp4,
    words_of_int4,
    words_of_mxfp4,
)


class Shape(NamedTuple):
    """What the kernel is compiled for. GROUPS_POW2: a power of two >= max(G, 32).

    FORMAT: "mxfp4_fp8" or "int4". RECIPE: scales of x, one for each 1x128 ("vector") or each row ("row"). TOKENS: rows
    of x in one product, BLOCK_M or half of it. ORDERED: True, for `hopper/ordered_barrier.py`. AHEAD: the next words
    are read while a product runs."""

    LAYOUT: str
    FORMAT: str
    RECIPE: str
    HAS_BIAS: bool
    GROUPS_POW2: int
    CONSUMERS: int
    COLS: int
    BLOCK_M: int
    BLOCK_N: int
    TOKENS: int
    STAGES: int
    GROUP_M: int
    SPLIT_K: int
    STORE_PARTS: int
    ORDERED: bool
    AHEAD: bool


# What every partition is handed: descriptors, shared memory, and the problem. Shared memory: x of a stage [BLOCK_M,
# 128]; w of a stage and consumer [COLS, 16] words; scales of a stage, of w [BLOCK_N] and of x [BLOCK_M]; results of a
# consumer [TOKENS / STORE_PARTS, 64]. SCALE_GROUPS: elements of the scales of a row of w.
Context = context_of(
    "x_desc w_desc s_desc c_desc",
    "x_smem w_smem s_smem c_smem scale_x_smem full empty",
    "offs bias row_scales scale_x G M N K SCALE_GROUPS sx_m sx_k",
    Shape,
)


@gluon.jit
def _producer(p):
    X_BYTES: gl.constexpr = p.x_desc.block_type.nbytes
    W_BYTES: gl.constexpr = p.w_desc.block_type.nbytes
    S_BYTES: gl.constexpr = p.s_desc.block_type.nbytes
    along: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    plan = make_plan(p)
    i = 0
    phase = 1
    for unit in range(gl.program_id(0), plan.total * p.SPLIT_K, gl.num_programs(0)):
        g, row, _row_end, col, _k0, _k_len = locate(p, plan, unit // p.SPLIT_K)
        first, steps = span(p, unit, p.K, 128)
        # Rows that do not exist borrow the last one's scale.
        rows = gl.minimum(row + gl.arange(0, p.BLOCK_M, layout=along), p.M - 1) * p.sx_m
        for s in range(first, first + steps):
            mbarrier.wait(p.empty.index(i), phase)
            bar = p.full.index(i)
            mbarrier.expect(bar, X_BYTES + W_BYTES * p.CONSUMERS + S_BYTES)
            for c in gl.static_range(p.CONSUMERS):
                tma_load(p.w_desc, [g, col + c * p.COLS, s * 16], bar, p.w_smem.index(i * p.CONSUMERS + c))
            tma_load(p.x_desc, [row, s * 128], bar, p.x_smem.index(i))
            tma_load(p.s_desc, [(g * p.SCALE_GROUPS + s) * p.N + col], bar, p.s_smem.index(i))
            if p.RECIPE == "vector":
                cp_async(p.scale_x_smem.index(i), p.scale_x + (rows + s * p.sx_k))
                async_copy.mbarrier_arrive(bar, increment_count=False)
            i, phase = advance(p, i, phase)


@gluon.jit
def _in_order(x):
    """x, computed before whatever comes after: products queued earlier than that would need registers of their own."""
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _product(p, w, part, i, SLAB: gl.constexpr, FIRST: gl.constexpr):
    """Queue w [64, 64] times TOKENS rows of x, from row FIRST on: values 64 SLAB to 64 SLAB + 63 of a stage's K."""
    x = p.x_smem.index(i).slice(FIRST, p.TOKENS, 0).slice(SLAB * 64, 64, 1).permute((1, 0))
    return warpgroup_mma(w, x, part, use_acc=SLAB > 0, is_async=True)


@gluon.jit
def _promoted(p, acc, part, i, ROW: gl.constexpr, FIRST: gl.constexpr, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """acc and a product of stage i by their scales."""
    if p.FORMAT == "int4":
        mine = p.s_smem.index(i).slice(WHO * p.COLS + ROW, 64, 0)
        part = part * gl.expand_dims(mine.load(gl.SliceLayout(1, mma_layout)).to(gl.float32), 1)
    if p.RECIPE == "vector":
        # Read late: a row of them takes 32 registers.
        across = p.scale_x_smem.index(i).slice(FIRST, p.TOKENS, 0).load(gl.SliceLayout(0, mma_layout))
        return acc + part * gl.expand_dims(across, 0)
    else:
        return acc + part


@gluon.jit
def _words(p, i, ROW: gl.constexpr, WHO: gl.constexpr):
    """What the first 64 of K are unpacked of, for 64 of this consumer's rows of w in stage i, from row ROW on."""
    w = p.w_smem.index(i * p.CONSUMERS + WHO).reshape([p.COLS, 16]).slice(ROW, 64, 0)
    if p.FORMAT == "int4":
        return (words_of_int4(w),)
    else:
        scales = p.s_smem.index(i).slice(WHO * p.COLS + ROW, 64, 0).load(rows_layout())
        return words_of_mxfp4(w, 0), scales


@gluon.jit
def _first(p, words, mma_layout: gl.constexpr):
    """The first 64 of K of `_words`, e4m3 [64, 64]."""
    if p.FORMAT == "int4":
        return unpacked_int4(words[0], False, gl.DotOperandLayout(0, mma_layout, 4))
    else:
        return unpacked_mxfp4(words[0], words[1], 0, gl.DotOperandLayout(0, mma_layout, 4))


@gluon.jit
def _second(p, words, i, ROW: gl.constexpr, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """The last 64 of K of the rows whose `_words` those are."""
    if p.FORMAT == "int4":
        return unpacked_int4(words[0], True, gl.DotOperandLayout(0, mma_layout, 4))
    else:
        w = p.w_smem.index(i * p.CONSUMERS + WHO).reshape([p.COLS, 16]).slice(ROW, 64, 0)
        return unpacked_mxfp4(words_of_mxfp4(w, 1), words[1], 1, gl.DotOperandLayout(0, mma_layout, 4))


@gluon.jit
def _add_stage(p, accs, ahead, i, next_i, next_phase, more, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """The sums of a unit and the products of stage i, which is free afterwards; and the first words of stage next_i,
    if there is `more`. `ahead`: those of stage i."""
    PARTS: gl.constexpr = p.BLOCK_M // p.TOKENS
    ROWS: gl.constexpr = p.COLS // 64
    zeros = gl.zeros((64, p.TOKENS), gl.float32, mma_layout)
    done = ()
    for r in gl.static_range(ROWS):
        if not p.AHEAD:
            ahead = _words(p, i, r * 64, WHO)
        first = _first(p, ahead, mma_layout)
        for t in gl.static_range(PARTS):
            ordered_wait(p, WHO)
            part = _product(p, first, zeros, i, 0, t * p.TOKENS)
            if t == 0:
                # While the tensor cores are busy.
                second = _second(p, ahead, i, r * 64, WHO, mma_layout)
            part = _product(p, second, part, i, 1, t * p.TOKENS)
            ordered_arrive(p, WHO)
            if t == PARTS - 1 and p.AHEAD:
                if r < ROWS - 1:
                    ahead = _words(p, i, (r + 1) * 64, WHO)
                else:
                    mbarrier.wait(p.full.index(next_i), next_phase, pred=more)
                    ahead = _words(p, next_i, 0, WHO)
            part = warpgroup_mma_wait(0, (part,))
            acc = _promoted(p, accs[r * PARTS + t], part, i, r * 64, t * p.TOKENS, WHO, mma_layout)
            done = done + (_in_order(acc),)  # type: ignore[assignment]
    mbarrier.arrive(p.empty.index(i), count=1)
    return done, ahead


@gluon.jit
def _multiply(p, ring, steps, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """The sums of one unit, from the ring's step number `ring`: [64, TOKENS] each, down w's rows, then along x's."""
    i = ring % p.STAGES
    phase = (ring // p.STAGES) & 1
    accs = ()
    for _j in gl.static_range(p.COLS // 64 * p.BLOCK_M // p.TOKENS):
        accs = accs + (gl.zeros((64, p.TOKENS), gl.float32, mma_layout),)  # type: ignore[assignment]
    # A K of fewer steps than SPLIT_K leaves units without any: nothing is loaded for them.
    mbarrier.wait(p.full.index(i), phase, pred=steps > 0)
    ahead = _words(p, i, 0, WHO)
    for s in range(steps):
        if not p.AHEAD:
            mbarrier.wait(p.full.index(i), phase)
        j, phase = advance(p, i, phase)
        accs, ahead = _add_stage(p, accs, ahead, i, j, phase, s + 1 < steps, WHO, mma_layout)
        i = j
    return accs


@gluon.jit
def _scaled(p, acc, g, row, col, mma_layout: gl.constexpr):
    """A sum by the scales that belong to all of K: of w's rows from `col` on, and with one for each row of x, x's."""
    if p.FORMAT == "int4":
        acc = acc * UNIT_OF_INT4
    else:
        cols = col + gl.arange(0, 64, layout=gl.SliceLayout(1, mma_layout))
        last = (g * p.SCALE_GROUPS + p.SCALE_GROUPS - 1) * p.N
        of_w = gl.load(p.row_scales + last + cols, mask=cols < p.N, other=0.0)
        acc = acc * gl.expand_dims(of_w, 1)
    if p.RECIPE == "row":
        rows = row + gl.arange(0, p.TOKENS, layout=gl.SliceLayout(0, mma_layout))
        of_x = gl.load(p.scale_x + gl.minimum(rows, p.M - 1) * p.sx_m)
        acc = acc * gl.expand_dims(of_x, 0)
    return acc


@gluon.jit
def _consumer(p, WHO: gl.constexpr, mma_layout: gl.constexpr):
    PARTS: gl.constexpr = p.BLOCK_M // p.TOKENS
    plan = make_plan(p)
    ring = 0
    ordered_begin(p, WHO)
    for unit in range(gl.program_id(0), plan.total * p.SPLIT_K, gl.num_programs(0)):
        g, row, row_end, col, _k0, _k_len = locate(p, plan, unit // p.SPLIT_K)
        _first, steps = span(p, unit, p.K, 128)
        col += WHO * p.COLS
        accs = _multiply(p, ring, steps, WHO, mma_layout)
        for r in gl.static_range(p.COLS // 64):
            for t in gl.static_range(PARTS):
                at_row, at_col = row + t * p.TOKENS, col + r * 64
                acc = _scaled(p, accs[r * PARTS + t], g, at_row, at_col, mma_layout)
                split = unit % p.SPLIT_K
                store_turned(p, acc, split, g, at_row, row_end, at_col, p.STORE_PARTS, WHO, mma_layout)
        ring += steps
    ordered_end(p, WHO)
    tma.store_wait(0)


@gluon.jit(
    # One compilation serves every token count and every stride of the scales.
    do_not_specialize=["G", "M", "N", "K", "SCALE_GROUPS", "sx_m", "sx_k"],
    do_not_specialize_on_alignment=["offs_ptr", "bias_ptr", "row_scales_ptr", "scale_x_ptr"],
)
def w4a8_mm_kernel(
    x_desc,
    w_desc,
    s_desc,
    c_desc,
    offs_ptr,
    bias_ptr,
    row_scales_ptr,
    scale_x_ptr,
    G,
    M,
    N,
    K,
    SCALE_GROUPS,
    sx_m,
    sx_k,
    SHAPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """out[rows of g] = (x ∘ scale_x)[rows of g] @ ŵ[g]ᵀ; see `gluon_w4a8` for shapes. 4 warps.

    Grid: any number of programs, one per multiprocessor. Launched as a programmatic dependent, it sets itself up while
    the kernel before it ends.
    """
    STAGES: gl.constexpr = SHAPE.STAGES
    VECTOR: gl.constexpr = SHAPE.RECIPE == "vector"
    x_smem = slots(x_desc, STAGES)
    w_smem = slots(w_desc, STAGES * SHAPE.CONSUMERS)
    c_smem = slots(c_desc, SHAPE.CONSUMERS)
    s_smem = slots(s_desc, STAGES)
    scale_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    scale_x_smem = gl.allocate_shared_memory(gl.float32, [STAGES if VECTOR else 1, SHAPE.BLOCK_M], scale_layout)
    # The threads of the loading warp arrive one by one, each when its copies of scales have landed.
    full, empty = make_barriers(STAGES, 33 if VECTOR else 1, SHAPE.CONSUMERS)
    begin()
    p = Context(
        (x_desc, w_desc, s_desc, c_desc),
        (x_smem, w_smem, s_smem, c_smem, scale_x_smem),
        (full, empty),
        (offs_ptr, bias_ptr, row_scales_ptr, scale_x_ptr),
        (G, M, N, K, SCALE_GROUPS, sx_m, sx_k),
        SHAPE,
    )
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.TOKENS, 32])
    specialise(p, _consumer, _producer, mma_layout, REGISTERS)
