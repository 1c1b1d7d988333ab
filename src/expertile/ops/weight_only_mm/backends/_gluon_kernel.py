"""Device code of the `gluon_int4` backend: one persistent, warp-specialised grouped GEMM with 4-bit weights, sm_90a.

out[rows of g] = a[rows of g] @ w[g]ᵀ is computed as its transpose: rows of w are wgmma's M, 64 or 128 for each of the
"consumer" warpgroups, and come from registers, where their nibbles are unpacked; rows of a are wgmma's N and come from
shared memory. So no unpacked weight is ever stored, and a tile may have as few as 8 rows.

One warp loads packed weights, activations, scales and zero points with TMA into a ring of `STAGES` stages. For each
stage a consumer unpacks and queues one slab of K after another: while the tensor cores multiply a slab, the next one is
unpacked, and while one consumer adds up, they work for the others. Scales multiply either

  fused   the weight, in the multiply-add that makes a number of its nibble: bfloat16 without zero points. No further
          instruction, weights rounded as a dequantised one is, and products add up in the tensor cores over all of K;
  sum     the product of each group of K, in float32: exact, BLOCK_M / 128 multiply-adds for each weight;
  weight  the unpacked weight, rounded to the activations' type: half a multiplication for each weight whatever BLOCK_M,
          and products add up over all of K;
  tile    the sum, once, where a row has one scale; or
  mxfp4   the weight of that format: a power of two, whose multiplication makes a number of the code (`_gluon_mxfp4`).

Left to themselves two consumers fall into step: both unpack, then both wait for products (on an H200, tiles of 64 x
256: 422 clocks for 64 x 128 weights, of which products need 256 and unpacking 160). With TURNS, one queues its products
while the other unpacks (`hopper/ordered_barrier.py`, one round a stage).

With SPLIT_K > 1 the steps of a tile are dealt out to that many programs, each storing its float32 sum into a slice of
its own, [SPLIT_K, M, N], which are added up in order afterwards: same bits every time.
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a list)

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

from expertile.ops.hopper.columns import pieces
from expertile.ops.hopper.ordered_barrier import ordered_arrive as pass_turn
from expertile.ops.hopper.ordered_barrier import ordered_begin as open_turns
from expertile.ops.hopper.ordered_barrier import ordered_end as close_turns
from expertile.ops.hopper.ordered_barrier import ordered_wait as take_turn
from expertile.ops.hopper.prologue import make_barriers
from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.store import bias_of
from expertile.ops.hopper.tiles import WRAP, locate, make_plan
from expertile.ops.hopper.units import span
from expertile.ops.launch.versions import tma_load, tma_store
from expertile.ops.weight_only_mm.backends._gluon_context import Context
from expertile.ops.weight_only_mm.backends._gluon_mxfp4 import factors, unit_of_mxfp4, unpacked_mxfp4
from expertile.ops.weight_only_mm.backends._gluon_unpack import (
    fused_scales,
    half_layout,
    packed_layout,
    rows_of,
    twice,
    unit_of,
    unpacked,
    zeros_twice,
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
                # Past the end of K weights and activations are zeros; their scale must only be no one else's.
                groups = p.K // p.GROUP
                if p.SCALE == "mxfp4":
                    groups = gl.cdiv(p.K, p.GROUP)
                first_scale = (g * groups + gl.minimum(s * p.GROUPS + j, groups - 1)) * p.N + col
                tma_load(p.s_desc, [first_scale], bar, p.s_smem.index(i * p.GROUPS + j))
                if p.HAS_ZEROS:
                    tma_load(p.z_desc, [first_scale], bar, p.z_smem.index(i * p.GROUPS + j))
            i, phase = advance(p, i, phase)


@gluon.jit
def _of_rows(p, smem, i, GROUP: gl.constexpr, WHO: gl.constexpr, layout: gl.constexpr):
    """Scales or zero points of this consumer's rows of w, for one group of a stage: [COLS, 1]."""
    mine = smem.index(i * p.GROUPS + GROUP).slice(WHO * p.COLS, p.COLS, 0)
    return gl.expand_dims(mine.load(gl.SliceLayout(1, layout)), 1)


@gluon.constexpr_function
def _first_k(slab, half, width):
    """Where the low nibbles of a stage's slab number `slab` begin, in values; its high ones: `half` later."""
    block, within = divmod(slab * width, half)
    return block * 2 * half + within


@gluon.jit
def _both(p, smem, i, LOW: gl.constexpr, HIGH: gl.constexpr, WHO: gl.constexpr, layout: gl.constexpr):
    """`_of_rows` for two groups."""
    low = _of_rows(p, smem, i, LOW, WHO, layout)
    if HIGH == LOW:
        return low, low
    else:
        return low, _of_rows(p, smem, i, HIGH, WHO, layout)


@gluon.jit
def _words_of_stage(p, i, WHO: gl.constexpr):
    """MXFP4's scales of a stage, four of a row in a word, each [COLS, 1]; () for other formats."""
    words = ()
    if p.SCALE == "mxfp4":
        for j in gl.static_range(p.GROUPS):
            words = words + (_of_rows(p, p.s_smem, i, j, WHO, packed_layout(p.COLS, p.SLAB)),)  # type: ignore[assignment]
    return words


@gluon.jit
def _of_block(p, row_zeros, words, i, BLOCK: gl.constexpr, WHO: gl.constexpr):
    """Zero points and scales of a stage's block of packed bytes, as `unpacked` takes them."""
    layout: gl.constexpr = packed_layout(p.COLS, p.SLAB)
    zeros = row_zeros
    scales = ()
    if p.SCALE == "mxfp4":
        scales = factors(words[BLOCK // 2], BLOCK % 2, p.BF16)
    elif p.GROUP > 0:
        LOW: gl.constexpr = BLOCK * 2 * p.HALF // p.GROUP
        HIGH: gl.constexpr = (BLOCK * 2 * p.HALF + p.HALF) // p.GROUP
        if p.HAS_ZEROS:
            low_zeros, high_zeros = _both(p, p.z_smem, i, LOW, HIGH, WHO, layout)
            zeros = (zeros_twice(low_zeros, p.BF16), zeros_twice(high_zeros, p.BF16))  # type: ignore[assignment]
        if p.SCALE == "fused" or p.SCALE == "weight":
            low_scales, high_scales = _both(p, p.s_smem, i, LOW, HIGH, WHO, layout)
            if p.SCALE == "fused":
                scales = fused_scales(low_scales, high_scales)
            else:
                scales = (twice(low_scales), twice(high_scales))  # type: ignore[assignment]
    return zeros, scales


@gluon.jit
def _slabs(p, zeros, scales, i, SLAB: gl.constexpr, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """Weights [COLS, SLAB] from the low nibbles, and from the high ones, of a slab of packed bytes, unpacked."""
    w = p.w_smem.index(i * p.CONSUMERS + WHO).reshape([p.COLS, p.BLOCK_K // 8])
    q = w.slice(SLAB * p.SLAB // 4, p.SLAB // 4, 1).load(packed_layout(p.COLS, p.SLAB))
    if p.SCALE == "mxfp4":
        return unpacked_mxfp4(q, scales, p.BF16, gl.DotOperandLayout(0, mma_layout, 2))
    else:
        return unpacked(q, zeros, scales, p.BF16, gl.DotOperandLayout(0, mma_layout, 2))


@gluon.jit
def _low_tokens(p, i, SLAB: gl.constexpr, ROWS: gl.constexpr):
    """The activations that meet a slab's low nibbles, [SLAB, ROWS]."""
    x = p.x_smem.index(i).slice(_first_k(SLAB, p.HALF, p.SLAB), p.SLAB, 1)
    return x.slice(0, ROWS, 0).permute((1, 0))


@gluon.jit
def _high_tokens(p, i, SLAB: gl.constexpr, ROWS: gl.constexpr):
    x = p.x_smem.index(i).slice(_first_k(SLAB, p.HALF, p.SLAB) + p.HALF, p.SLAB, 1)
    return x.slice(0, ROWS, 0).permute((1, 0))


@gluon.constexpr_function
def _later_products(group, groups, single, per_block):
    """How many products of a stage are queued behind the last one of a group: the two groups of a block take turns."""
    if single:
        return 1 - group % 2 + (groups // 2 - 1 - group // 2) * 2 * per_block
    return (groups - 1 - group) * 2 * per_block


@gluon.jit
def _add_groups(p, acc, row_zeros, i, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """acc + the products of a stage, each group's times its scale; the stage is free afterwards."""
    ROWS: gl.constexpr = rows_of(mma_layout)
    # Groups are as long as a block of packed bytes, or as half of one.
    SINGLE: gl.constexpr = p.GROUP == p.HALF
    PER_BLOCK: gl.constexpr = p.HALF // p.SLAB
    parts = ()
    for block in gl.static_range(p.BLOCK_K // (2 * p.HALF)):
        part = gl.zeros((p.COLS, ROWS), gl.float32, mma_layout)
        other = part
        zeros, scales = _of_block(p, row_zeros, (), i, block, WHO)
        for slab in gl.static_range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
            low, high = _slabs(p, zeros, scales, i, slab, WHO, mma_layout)
            later = slab > block * PER_BLOCK
            part = warpgroup_mma(low, _low_tokens(p, i, slab, ROWS), part, use_acc=later, is_async=True)
            if SINGLE:
                other = warpgroup_mma(high, _high_tokens(p, i, slab, ROWS), other, use_acc=later, is_async=True)
            else:
                part = warpgroup_mma(high, _high_tokens(p, i, slab, ROWS), part, is_async=True)
        if SINGLE:
            parts = parts + (part, other)  # type: ignore[assignment]
        else:
            parts = parts + (part,)  # type: ignore[assignment]
    for j in gl.static_range(p.GROUPS):
        scale = _of_rows(p, p.s_smem, i, j, WHO, mma_layout).to(gl.float32)
        done = warpgroup_mma_wait(_later_products(j, p.GROUPS, SINGLE, PER_BLOCK), (parts[j],))
        if j == p.GROUPS - 1:
            mbarrier.arrive(p.empty.index(i), count=1)
        acc += done * scale
    return acc


@gluon.jit
def _add_slabs(p, acc, row_zeros, i, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """acc + the products of a stage, a slab being unpacked while the one before is multiplied; the stage is free
    afterwards. (ptxas serialises products whose register operand would have to outlive a loop's step.)"""
    ROWS: gl.constexpr = rows_of(mma_layout)
    PER_BLOCK: gl.constexpr = p.HALF // p.SLAB
    words = _words_of_stage(p, i, WHO)
    for block in gl.static_range(p.BLOCK_K // (2 * p.HALF)):
        zeros, scales = _of_block(p, row_zeros, words, i, block, WHO)
        for slab in gl.static_range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
            low, high = _slabs(p, zeros, scales, i, slab, WHO, mma_layout)
            if slab == 0:
                take_turn(p, WHO)
            acc = warpgroup_mma(low, _low_tokens(p, i, slab, ROWS), acc, is_async=True)
            if slab > 0:
                # The slab before is done, and its registers are free.
                acc = warpgroup_mma_wait(1, (acc,))
            acc = warpgroup_mma(high, _high_tokens(p, i, slab, ROWS), acc, is_async=True)
    pass_turn(p, WHO)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(p.empty.index(i), count=1)
    return acc


@gluon.jit
def _add_pairs(p, acc, i, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """`_add_slabs` for MXFP4, two blocks of 64 values being unpacked before the first of their products is queued."""
    ROWS: gl.constexpr = rows_of(mma_layout)
    words = _words_of_stage(p, i, WHO)
    for pair in gl.static_range(p.BLOCK_K // 128):
        _, scales = _of_block(p, (), words, i, 2 * pair, WHO)
        low, high = _slabs(p, (), scales, i, 2 * pair, WHO, mma_layout)
        _, scales = _of_block(p, (), words, i, 2 * pair + 1, WHO)
        later_low, later_high = _slabs(p, (), scales, i, 2 * pair + 1, WHO, mma_layout)
        if pair == 0:
            take_turn(p, WHO)
        acc = warpgroup_mma(low, _low_tokens(p, i, 2 * pair, ROWS), acc, is_async=True)
        if pair > 0:
            # The pair before is done, and its registers are free.
            acc = warpgroup_mma_wait(1, (acc,))
        acc = warpgroup_mma(high, _high_tokens(p, i, 2 * pair, ROWS), acc, is_async=True)
        acc = warpgroup_mma(later_low, _low_tokens(p, i, 2 * pair + 1, ROWS), acc, is_async=True)
        acc = warpgroup_mma(later_high, _high_tokens(p, i, 2 * pair + 1, ROWS), acc, is_async=True)
    pass_turn(p, WHO)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(p.empty.index(i), count=1)
    return acc


@gluon.jit
def _zeros_of_rows(p, g, col, layout: gl.constexpr):
    """Zero points where a row has one only, as `unpacked` takes them; else ()."""
    if p.HAS_ZEROS and p.GROUP == 0:
        rows = col + gl.arange(0, p.COLS, layout=gl.SliceLayout(1, layout))
        numbers = gl.load(p.zeros + g * p.N + rows, mask=rows < p.N, other=0.0)
        zeros = zeros_twice(gl.expand_dims(numbers, 1), p.BF16)
        return zeros, zeros
    else:
        return ()


@gluon.jit
def _multiply(p, ring, steps, g, col, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """The sum of one unit, from the ring's step number `ring`: [COLS, rows of mma_layout's products]."""
    i = ring % p.STAGES
    phase = (ring // p.STAGES) & 1
    acc = gl.zeros((p.COLS, rows_of(mma_layout)), gl.float32, mma_layout)
    row_zeros = _zeros_of_rows(p, g, col, packed_layout(p.COLS, p.SLAB))
    for _s in range(steps):
        mbarrier.wait(p.full.index(i), phase)
        if p.SCALE == "sum":
            acc = _add_groups(p, acc, row_zeros, i, WHO, mma_layout)
        elif p.PAIRS:
            acc = _add_pairs(p, acc, i, WHO, mma_layout)
        else:
            acc = _add_slabs(p, acc, row_zeros, i, WHO, mma_layout)
        i, phase = advance(p, i, phase)
    if p.SCALE == "tile":
        rows = col + gl.arange(0, p.COLS, layout=gl.SliceLayout(1, mma_layout))
        scale = gl.load(p.scales + g * p.N + rows, mask=rows < p.N, other=0.0)
        acc = acc * gl.expand_dims(scale.to(gl.float32), 1)
    if p.SCALE == "mxfp4":
        return acc * unit_of_mxfp4(p.BF16)
    else:
        return acc * unit_of(p.BF16, p.SCALE == "fused")


@gluon.jit
def _store(p, acc, split, g, row, row_end, col, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """Sums -> shared memory, transposed -> TMA. A buffer is waited for when it is used again."""
    PARTS: gl.constexpr = p.STORE_PARTS * rows_of(mma_layout) // p.BLOCK_M
    ROWS: gl.constexpr = p.BLOCK_M // p.STORE_PARTS
    if p.HAS_BIAS:
        # The slices of a split K are added up: one of them takes the bias along.
        bias = bias_of(p, g, col, gl.where(split == 0, p.N, 0), p.COLS, gl.SliceLayout(1, mma_layout))
        acc = acc + gl.expand_dims(bias, 1)
    cut = pieces(acc, PARTS)
    for s in gl.static_range(PARTS):
        buf = p.c_smem.index(WHO)
        tma.store_wait(0)
        buf.reshape([ROWS, p.COLS]).permute((1, 0)).store(cut[s].to(p.c_desc.dtype))
        fence_async_shared()
        # Rows past the end of the group fall outside the descriptor's box: the hardware drops them.
        at = [WRAP, row_end + split * p.M, WRAP - (row_end - row) + s * ROWS, col]
        tma_store(p.c_desc, at, buf)


@gluon.jit
def _tile(p, ring, steps, split, g, row, row_end, col, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """One unit: its sum, stored."""
    acc = _multiply(p, ring, steps, g, col, WHO, mma_layout)
    _store(p, acc, split, g, row, row_end, col, WHO, mma_layout)


@gluon.jit
def _consumer(p, WHO: gl.constexpr, mma_layout: gl.constexpr):
    plan = make_plan(p)
    ring = 0
    open_turns(p, WHO)
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
    close_turns(p, WHO)
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
    HAS_BIAS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    GROUPS_POW2: gl.constexpr,
    CONSUMERS: gl.constexpr,
    COLS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HALF: gl.constexpr,
    SLAB: gl.constexpr,
    GROUP: gl.constexpr,
    SCALE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STORE_PARTS: gl.constexpr,
    TAILS: gl.constexpr,
    TURNS: gl.constexpr,
    PAIRS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """out[rows of g] = a[rows of g] @ ŵ[g]ᵀ; see `gluon_int4` for shapes. 4 warps.

    GROUPS_POW2: a power of two >= max(G, 32). GROUP: HALF or 2 * HALF values of K, or 0 for one scale of a row.
    Grid: any number of programs, one per multiprocessor. Launched as a programmatic dependent, it sets itself up while
    the kernel before it ends.
    """
    SCALES: gl.constexpr = STAGES * (BLOCK_K // GROUP) if GROUP else 1
    ZEROS: gl.constexpr = SCALES if HAS_ZEROS else 1
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CONSUMERS] + w_desc.block_type.shape, w_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [CONSUMERS] + c_desc.block_type.shape, c_desc.layout)
    s_smem = gl.allocate_shared_memory(s_desc.dtype, [SCALES] + s_desc.block_type.shape, s_desc.layout)
    z_smem = gl.allocate_shared_memory(z_desc.dtype, [ZEROS] + z_desc.block_type.shape, z_desc.layout)
    full, empty = make_barriers(STAGES, 1, CONSUMERS)
    fence_async_shared()
    # Memory of the kernel before is touched only after this; the kernel after may begin to set itself up.
    gdc_wait()
    gdc_launch_dependents()
    GROUPS: gl.constexpr = BLOCK_K // GROUP if GROUP else 0
    p = Context(
        x_desc,
        w_desc,
        s_desc,
        z_desc,
        c_desc,
        x_smem,
        w_smem,
        s_smem,
        z_smem,
        c_smem,
        full,
        empty,
        offs_ptr,
        bias_ptr,
        scales_ptr,
        zeros_ptr,
        G,
        M,
        N,
        K,
        "ragged_m",
        HAS_BIAS,
        HAS_ZEROS,
        GROUPS_POW2,
        CONSUMERS,
        COLS,
        BLOCK_M,
        COLS * CONSUMERS,
        BLOCK_K,
        HALF,
        SLAB,
        GROUP,
        GROUPS,
        SCALE,
        STAGES,
        GROUP_M,
        SPLIT_K,
        STORE_PARTS,
        TAILS,
        TURNS,
        PAIRS,
        x_desc.dtype == gl.bfloat16,
    )
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    if CONSUMERS == 4:
        gl.warp_specialize(
            [
                (_consumer, (p, 0, mma_layout)),
                (_consumer, (p, 1, mma_layout)),
                (_consumer, (p, 2, mma_layout)),
                (_consumer, (p, 3, mma_layout)),
                (_producer, (p,)),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (p, 0, mma_layout)), (_consumer, (p, 1, mma_layout)), (_producer, (p,))],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize([(_consumer, (p, 0, mma_layout)), (_producer, (p,))], [1], [PRODUCER_REGS])
