"""Device code of `gluon_gather`: the producers, which keep the ring of shared-memory stages full.

b comes by TMA. Rows of a come by TMA where they stand in order, and by cp.async (16 bytes a thread) where they are
gathered: TMA on Hopper reaches only rows at a fixed distance. Each thread of the four gathering warps copies the same
column of BLOCK_M / 16 rows, so the addresses of a tile's rows stay in its registers for the whole K loop; the next
tile's row numbers are fetched while the ring is full.

A stage's `full` barrier counts one arrival with b's bytes and one of every gathering thread, which the hardware
delivers when that thread's copies have landed. No thread waits in between.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.schedule import next_tile, publish
from expertile.ops.hopper.tiles import make_plan, place_of
from expertile.ops.launch.versions import cp_async, tma_load

# Elements of one 16-byte copy.
_VECTOR: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _load_b(p, desc, g, col, k, bar, dst):
    if p.HALVED:
        # Gate columns and the up columns that belong to them: one box of [2, BLOCK_N / 2].
        tma_load(desc, [g, 0, col // 2, k], bar, dst)
    elif p.B_K_MAJOR:
        tma_load(desc, [g, col, k], bar, dst)
    else:
        tma_load(desc, [g, k, col], bar, dst)


@gluon.jit
def fill_in_order(p, a_desc, b_desc, place, k, i, phase):
    """Load one stage, where rows of a stand in order, by TMA as soon as it is free."""
    mbarrier.wait(p.empty.index(i), phase)
    bar = p.full.index(i)
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma_load(a_desc, [place.row, k], bar, p.a_smem.index(i))
    _load_b(p, b_desc, place.g, place.col, k, bar, p.b_smem.index(i))


@gluon.jit
def _tokens(p, place, layout: gl.constexpr):
    """Row numbers in `a` of the tile's rows. Past the end of the group -1 if MASKED, else that of its last row: in a
    tile that is nearly full the same bytes once more cost less than keeping track of which rows there are. In one that
    is nearly empty they are most of what is read: at one token by every program, from a single line of L2."""
    end = gl.minimum(place.row_end, p.M)
    r = place.row + gl.arange(0, p.BLOCK_M, layout=layout)
    if p.MASKED:
        # Where no expert has rows, `locate` finds places that mean nothing.
        token = gl.load(p.rows + r, mask=(r >= 0) & (r < end), other=-1)
    else:
        # Where no expert has rows, `locate` finds places that mean nothing.
        token = gl.load(p.rows + gl.maximum(gl.minimum(r, end - 1), 0))
    return token


@gluon.jit
def _fill_gathered(p, source, token, place, k, left, column, i, phase):
    """Load one stage, a by cp.async: `left` columns of K from `k` on, zeros behind them and in rows without token."""
    mbarrier.wait(p.empty.index(i), phase)
    bar = p.full.index(i)
    mbarrier.expect(bar, p.b_desc.block_type.nbytes)
    _load_b(p, p.b_desc, place.g, place.col, k, bar, p.b_smem.index(i))
    a = p.a_smem.index(i).reshape([p.BLOCK_M, p.BLOCK_K])
    inside = gl.expand_dims(column < left, 0)
    if p.MASKED:
        inside = inside & gl.expand_dims(token >= 0, 1)
    cp_async(a, source, mask=inside)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def produce_gathered(p):
    """The producers where rows of a are gathered: four warps."""
    ACROSS: gl.constexpr = p.BLOCK_K // _VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, _VECTOR], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, p.BLOCK_K, layout=gl.SliceLayout(0, layout))
    # The pitch comes in vectors, and K is cut to them, so that the compiler knows both to be whole ones.
    k_len = (p.K - p.MORE * p.BLOCK_K) // _VECTOR * _VECTOR
    plan = make_plan(p)
    i = 0
    phase = 1
    t = gl.program_id(0)
    number = 0
    place = place_of(p, plan, t)
    token = _tokens(p, place, by_row)
    while t < plan.total:
        source = p.a + gl.expand_dims(token.to(gl.int64) * p.A_PITCH * _VECTOR, 1) + gl.expand_dims(column, 0)
        _fill_gathered(p, source, token, place, 0, k_len, column, i, phase)
        after = next_tile(p, plan.total, number, t)
        if p.GROUPS_POW2 <= 128:
            next_place = place_of(p, plan, after)
            next_token = _tokens(p, next_place, by_row)
        i, phase = advance(p, i, phase)
        for k in range(p.BLOCK_K, k_len, p.BLOCK_K):
            _fill_gathered(p, source + k, token, place, k, k_len - k, column, i, phase)
            i, phase = advance(p, i, phase)
        for m in gl.static_range(p.MORE):
            fill_in_order(p, p.more_a_desc, p.more_b_desc, place, m * p.BLOCK_K, i, phase)
            # The gathering threads copy nothing here, but the barrier counts them.
            async_copy.mbarrier_arrive(p.full.index(i), increment_count=False)
            i, phase = advance(p, i, phase)
        if p.GROUPS_POW2 > 128:
            next_place = place_of(p, plan, after)
            next_token = _tokens(p, next_place, by_row)
        number += 1
        t = after
        place = next_place
        token = next_token
    publish(p, number + 1, plan.total)
