"""Device code of the `gluon_fp8` backend: the warp that keeps the ring of shared-memory stages full, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.tiles import locate, make_plan
from expertile.ops.hopper.units import span, tile_of, units
from expertile.ops.launch.versions import cp_async, tma_load


@gluon.jit
def _expect(p, bar, boxes, wide):
    """Tell a stage's barrier what will come: so many boxes of a; one half of b, or with `wide` all of the tile's.

    Exactly one predicate holds, and the barrier counts one arrival."""
    A_BYTES: gl.constexpr = p.a_desc.block_type.nbytes
    B_BYTES: gl.constexpr = p.b_desc.block_type.nbytes
    for count in gl.static_range(1, p.BLOCK_M // p.A_BOX + 1):
        mbarrier.expect(bar, count * A_BYTES + p.HALVES * B_BYTES, pred=(boxes == count) & wide)
        if p.TAIL:
            mbarrier.expect(bar, count * A_BYTES + B_BYTES, pred=(boxes == count) & (wide == 0))


@gluon.jit
def _copy_scales(p, i, rows, cols, at_b, block, bar):
    """Copy the scales of one block of k into stage i, a thread at a time: any strides will do.

    rows: those of a's first ROWS scales; cols: of b's first half (columns, or what stands for a block of them). Rows
    and columns that do not exist borrow the last one's."""
    for part in gl.static_range(p.CONSUMERS):
        r = gl.minimum(rows + part * p.ROWS, p.M - 1)
        cp_async(p.scale_a_smem.index(i * p.CONSUMERS + part), p.scale_a + (r * p.sa_m + block * p.sa_k))
    for half in gl.static_range(p.HALVES):
        if p.RECIPE == "block":
            c = gl.minimum(cols + half, (p.N - 1) // 128)
        else:
            c = gl.minimum(cols + half * p.COLS, p.N - 1)
        cp_async(p.scale_b_smem.index(i * p.HALVES + half), p.scale_b + (at_b + c * p.sb_n + block * p.sb_k))
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def produce(p):
    """The loading warp: every unit's stages, in the order in which the consumers take them."""
    BOXES: gl.constexpr = p.BLOCK_M // p.A_BOX
    along: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    plan = make_plan(p)
    i = 0
    phase = 1
    for unit in range(gl.program_id(0), units(p, plan), gl.num_programs(0)):
        tile, shift, wide = tile_of(p, plan, unit)
        g, row, row_end, col, k0, k_len = locate(p, plan, tile)
        col += shift
        first, steps = span(p, unit, k_len, 128)
        # Rows past the end of the group are not loaded, but for what shares a box with others: what the products make
        # of whatever lies in their place is not stored.
        boxes = gl.minimum((row_end - row + p.A_BOX - 1) // p.A_BOX, BOXES)
        if p.LAYOUT == "ragged_k":
            layer = 0
        else:
            layer = g
        rows = row + gl.arange(0, p.ROWS, layout=along)
        if p.RECIPE == "block":
            cols = col // 128 + gl.arange(0, 1, layout=along)
        else:
            cols = col + gl.arange(0, p.COLS, layout=along)
        for step in range(first, first + steps):
            k = k0 + step * 128
            mbarrier.wait(p.empty.index(i), phase)
            bar = p.full.index(i)
            _expect(p, bar, boxes, wide)
            tma_load(p.a_desc, [row, k], bar, p.a_boxes.index(i * BOXES))
            tma_load(p.b_desc, [layer, col, k], bar, p.b_smem.index(i * p.HALVES))
            if p.HALVES == 2:
                right = p.b_smem.index(i * 2 + 1)
                tma_load(p.b_desc, [layer, col + 128, k], bar, right, wide)
            for s in gl.static_range(1, BOXES):
                at = [row + s * p.A_BOX, k]
                tma_load(p.a_desc, at, bar, p.a_boxes.index(i * BOXES + s), s < boxes)
            if p.RECIPE != "row":
                _copy_scales(p, i, rows, cols, layer * p.sb_g, k // 128, bar)
            i, phase = advance(p, i, phase)
