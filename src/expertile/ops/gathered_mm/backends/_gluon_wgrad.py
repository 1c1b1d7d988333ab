"""Device code of `gluon_gather`: the producers of a weight gradient, which gather along K.

out[g] = Σ over rows r of g of a[r]ᵀ b[r]: a step is BLOCK_K rows of g, of which one operand's are gathered (by
cp.async, the tile's columns of each) and the other's stand in order (TMA). Every step has its own row numbers; they are
fetched two steps ahead. Rows past the end of the group are zeros on both sides.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.hopper.ring import advance
from expertile.ops.hopper.schedule import next_tile, publish
from expertile.ops.hopper.tiles import WRAP, locate, make_plan
from expertile.ops.launch.versions import cp_async, tma_load

_VECTOR: gl.constexpr = gl.constexpr(8)  # elements of one 16-byte copy


@gluon.jit
def _tokens(p, k0, k_len, k, r):
    """Row numbers of the step that begins at row k of the group; behind its last row, that row's."""
    at = k0 + gl.minimum(k + r, k_len - 1)
    return gl.load(p.rows + gl.maximum(at, 0))


@gluon.jit
def _fill(p, token, row, col, k0, k_len, k, r, column, i, phase):
    """Load one stage as soon as it is free."""
    mbarrier.wait(p.empty.index(i), phase)
    bar = p.full.index(i)
    at = [WRAP, k0 + k_len, WRAP - k_len + k]
    # In vectors, so that the compiler knows that rows begin and end on whole ones.
    source = p.a + gl.expand_dims(token.to(gl.int64) * p.A_PITCH * _VECTOR, 1)
    if p.GATHERED == "b":
        mbarrier.expect(bar, p.a_desc.block_type.nbytes)
        tma_load(p.a_desc, [at[0], at[1], at[2], row], bar, p.a_smem.index(i))
        dst = p.b_smem.index(i).reshape([p.BLOCK_K, p.BLOCK_N])
        column = column + col // _VECTOR * _VECTOR
        width = p.N // _VECTOR * _VECTOR
    else:
        mbarrier.expect(bar, p.b_desc.block_type.nbytes)
        tma_load(p.b_desc, [at[0], at[1], at[2], col], bar, p.b_smem.index(i))
        dst = p.a_smem.index(i).reshape([p.BLOCK_K, p.BLOCK_M])
        column = column + row // _VECTOR * _VECTOR
        width = p.M // _VECTOR * _VECTOR
    inside = gl.expand_dims(r < k_len - k, 1) & gl.expand_dims(column < width, 0)
    cp_async(dst, source + gl.expand_dims(column, 0), mask=inside)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def produce_wgrad(p):
    """The producers: four warps."""
    WIDTH: gl.constexpr = p.BLOCK_N if p.GATHERED == "b" else p.BLOCK_M
    ACROSS: gl.constexpr = min(WIDTH // _VECTOR, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, _VECTOR], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, p.BLOCK_K, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    plan = make_plan(p)
    i = 0
    phase = 1
    t = gl.program_id(0)
    number = 0
    _g, row, _row_end, col, k0, k_len = locate(p, plan, t)
    token = _tokens(p, k0, k_len, 0, r)
    after = _tokens(p, k0, k_len, p.BLOCK_K, r)
    while t < plan.total:
        # An empty group has one step, of zeros.
        _fill(p, token, row, col, k0, k_len, 0, r, column, i, phase)
        after_tile = next_tile(p, number, t)
        token = _tokens(p, k0, k_len, 2 * p.BLOCK_K, r)
        i, phase = advance(p, i, phase)
        for k in range(p.BLOCK_K, k_len, p.BLOCK_K):
            _fill(p, after, row, col, k0, k_len, k, r, column, i, phase)
            # These two do not begin as the same value, so Triton 3.6 carries both (see the front end's alias rule).
            after = token
            token = _tokens(p, k0, k_len, k + 2 * p.BLOCK_K, r)
            i, phase = advance(p, i, phase)
        number += 1
        t = after_tile
        _g, row, _row_end, col, k0, k_len = locate(p, plan, t)
        token = _tokens(p, k0, k_len, 0, r)
        after = _tokens(p, k0, k_len, p.BLOCK_K, r)
    publish(p, number + 1, plan.total)
