"""Products of the `gluon_int4` kernel: a stage's weights unpacked in registers, and queued to the tensor cores.

For each stage a consumer unpacks and queues one slab of K after another: while the tensor cores multiply a slab, the
next one is unpacked, and while one consumer adds up, they work for the others. Scales multiply either

  fused   the weight, in the multiply-add that makes a number of its nibble: bfloat16 without zero points. No further
          instruction, weights rounded as a dequantised one is, and products add up in the tensor cores over all of K;
  sum     the product of each group of K, in float32: exact, BLOCK_M / 128 multiply-adds for each weight;
  weight  the unpacked weight, rounded to the activations' type: half a multiplication for each weight whatever BLOCK_M,
          and products add up over all of K;
  tile    the sum, once, where a row has one scale; or
  mxfp4   the weight of that format: a power of two, whose multiplication makes a number of the code (`_gluon_mxfp4`).

Left to themselves two consumers fall into step: both unpack, then both wait for products (on an H200, tiles of 64 x
256: 422 clocks for 64 x 128 weights, of which products need 256 and unpacking 160). With ORDERED, one queues its
products while the other unpacks (`hopper/ordered_barrier.py`, one round a stage).
"""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a list)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from expertile.ops.hopper.ordered_barrier import ordered_arrive, ordered_wait
from expertile.ops.hopper.ring import advance
from expertile.ops.weight_only_mm.backends._gluon_mxfp4 import factors, unit_of_mxfp4, unpacked_mxfp4
from expertile.ops.weight_only_mm.backends._gluon_unpack import (
    fused_scales,
    packed_layout,
    rows_of,
    twice,
    unit_of,
    unpacked,
    zeros_twice,
)


@gluon.jit
def scale_groups(p):
    """Elements of the scales of a row."""
    return gl.cdiv(p.K, p.GROUP) if p.SCALE == "mxfp4" else p.K // p.GROUP


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
    return (low, low) if HIGH == LOW else (low, _of_rows(p, smem, i, HIGH, WHO, layout))


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
def _tokens(p, i, SLAB: gl.constexpr, ROWS: gl.constexpr, HIGH: gl.constexpr = 0):
    """The activations that meet a slab's low nibbles, or with HIGH 1 its high ones: [SLAB, ROWS]."""
    x = p.x_smem.index(i).slice(_first_k(SLAB, p.HALF, p.SLAB) + HIGH * p.HALF, p.SLAB, 1)
    return x.slice(0, ROWS, 0).permute((1, 0))


@gluon.constexpr_function
def _later_products(group, groups, single, per_block):
    """How many products of a stage are queued behind the last one of a group: the groups of a block alternate."""
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
            part = warpgroup_mma(low, _tokens(p, i, slab, ROWS), part, use_acc=later, is_async=True)
            if SINGLE:
                other = warpgroup_mma(high, _tokens(p, i, slab, ROWS, 1), other, use_acc=later, is_async=True)
            else:
                part = warpgroup_mma(high, _tokens(p, i, slab, ROWS, 1), part, is_async=True)
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
                ordered_wait(p, WHO)
            acc = warpgroup_mma(low, _tokens(p, i, slab, ROWS), acc, is_async=True)
            if slab > 0:
                # The slab before is done, and its registers are free.
                acc = warpgroup_mma_wait(1, (acc,))
            acc = warpgroup_mma(high, _tokens(p, i, slab, ROWS, 1), acc, is_async=True)
    ordered_arrive(p, WHO)
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
            ordered_wait(p, WHO)
        acc = warpgroup_mma(low, _tokens(p, i, 2 * pair, ROWS), acc, is_async=True)
        if pair > 0:
            # The pair before is done, and its registers are free.
            acc = warpgroup_mma_wait(1, (acc,))
        acc = warpgroup_mma(high, _tokens(p, i, 2 * pair, ROWS, 1), acc, is_async=True)
        acc = warpgroup_mma(later_low, _tokens(p, i, 2 * pair + 1, ROWS), acc, is_async=True)
        acc = warpgroup_mma(later_high, _tokens(p, i, 2 * pair + 1, ROWS, 1), acc, is_async=True)
    ordered_arrive(p, WHO)
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
def multiply(p, ring, steps, g, col, WHO: gl.constexpr, mma_layout: gl.constexpr):
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
    return acc * unit_of_mxfp4(p.BF16) if p.SCALE == "mxfp4" else acc * unit_of(p.BF16, p.SCALE == "fused")
