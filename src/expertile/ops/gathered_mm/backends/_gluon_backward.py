"""Device code of `gluon_gather`: the epilogue of the backward pass through a gated activation.

A tile of the accumulator is a [BLOCK_M, BLOCK_N], the gradient of the weighted activation without its weight. With w
the routing weight of a row, the epilogue reads the tile's gate and up columns of pre and writes
dpre = f'(pre) (w a), act_w = w f(pre), and the tile's part of the row sums <a, f(pre)>.

Each consumer works through its tile by halves of the columns, in three buffers: gate and up, which come by TMA and are
overwritten by their gradients, and act_w. The first half is fetched during the main loop. Row sums go to memory one
column of tiles each, so that they can be added in a fixed order (`pointwise.add_row_sums`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from expertile.ops.gathered_mm.backends._gluon_activation import activate_backward
from expertile.ops.gathered_mm.backends._gluon_epilogue import pairs, unpair
from expertile.ops.hopper.columns import halves, pieces
from expertile.ops.hopper.tiles import WRAP
from expertile.ops.launch.versions import tma_load, tma_store

# Columns are worked on in this many parts, whose intermediate results fit the registers.
_PARTS: gl.constexpr = gl.constexpr(4)


@gluon.constexpr_function
def _pairs_layout(rows, cols):
    """[rows, cols] over four warps such that `pairs` gives two tensors in wgmma's layout for [rows, cols / 2]."""
    columns = [[0, 16 << i] for i in range((cols // 16).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [8, 0], *columns, *([[64, 0]] if rows == 128 else [])]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, cols])


@gluon.jit
def routing_weights(p, row, row_end, part_layout: gl.constexpr):
    """The routing weights of the tile's rows; those past the end of the group mean nothing."""
    r = row + gl.arange(0, p.BLOCK_M, layout=gl.SliceLayout(1, part_layout))
    r = gl.maximum(gl.minimum(r, gl.minimum(row_end, p.M) - 1), 0)
    return gl.load(p.weights + gl.load(p.slots + r))


@gluon.jit
def fetch_pre(p, row, row_end, col, CONSUMER: gl.constexpr):
    """Gate and up of half a tile, from column `col` of the activation on, when the buffers' last stores are done."""
    HALF: gl.constexpr = p.BLOCK_N // 2
    tma.store_wait(0)
    bar = p.loaded.index(CONSUMER)
    mbarrier.expect(bar, 2 * p.pre_desc.block_type.nbytes)
    for h in gl.static_range(2):
        buf = p.c_smem.index(3 * CONSUMER + h)
        if p.INTERLEAVED:
            at = [WRAP, row_end, WRAP - (row_end - row), 2 * col + h * HALF]
            tma_load(p.pre_desc, at, bar, buf)
        else:
            at = [WRAP, row_end, WRAP - (row_end - row), h, col]
            tma_load(p.pre_desc, at, bar, buf.reshape([1, 1, p.BLOCK_M, 1, HALF]))


@gluon.jit
def _part(p, a, x, y, z, weight, part_layout: gl.constexpr):
    """A part of the columns: gate and up, in x and y (interleaved: both in x), become their gradients, and z becomes
    act_w. Returns the row sums."""
    if p.INTERLEAVED:
        gate, up = pairs(x.load(_pairs_layout(p.BLOCK_M, x.type.shape[1])))
        gate = gl.convert_layout(gate, part_layout, assert_trivial=True)
        up = gl.convert_layout(up, part_layout, assert_trivial=True)
    else:
        gate = x.load(part_layout)
        up = y.load(part_layout)
    a = gl.convert_layout(a, part_layout, assert_trivial=True)
    w = gl.expand_dims(weight, 1)
    value, d_gate, d_up = activate_backward(gate.to(gl.float32), up.to(gl.float32), a * w, p.ACTIVATION)
    dtype: gl.constexpr = p.out_desc.dtype
    if p.INTERLEAVED:
        x.store(unpair(d_gate.to(dtype), d_up.to(dtype)))
    else:
        x.store(d_gate.to(dtype))
        y.store(d_up.to(dtype))
    z.store((value * w).to(dtype))
    return gl.sum(a * value, 1)


@gluon.jit
def _half(p, a, weight, row, row_end, col, PHASE: gl.constexpr, CONSUMER: gl.constexpr, part_layout: gl.constexpr):
    """Half a tile, from column `col` of the activation on; its row sums."""
    HALF: gl.constexpr = p.BLOCK_N // 2
    PART: gl.constexpr = HALF // _PARTS
    first = p.c_smem.index(3 * CONSUMER)
    second = p.c_smem.index(3 * CONSUMER + 1)
    third = p.c_smem.index(3 * CONSUMER + 2)
    x = first.reshape([p.BLOCK_M, HALF])
    y = second.reshape([p.BLOCK_M, HALF])
    z = third.reshape([p.BLOCK_M, HALF])
    cut = pieces(a, _PARTS)
    sums = gl.zeros((p.BLOCK_M,), gl.float32, gl.SliceLayout(1, part_layout))
    mbarrier.wait(p.loaded.index(CONSUMER), PHASE)
    for j in gl.static_range(_PARTS):
        if p.INTERLEAVED:
            both = x if 2 * j < _PARTS else y
            x_part = both.slice(2 * j * PART % HALF, 2 * PART, dim=1)
            y_part = x_part
        else:
            x_part = x.slice(j * PART, PART, dim=1)
            y_part = y.slice(j * PART, PART, dim=1)
        sums += _part(p, cut[j], x_part, y_part, z.slice(j * PART, PART, dim=1), weight, part_layout)
    fence_async_shared()
    at = [WRAP, row_end, WRAP - (row_end - row)]
    if p.INTERLEAVED:
        tma_store(p.dpre_desc, [at[0], at[1], at[2], 2 * col], first)
        tma_store(p.dpre_desc, [at[0], at[1], at[2], 2 * col + HALF], second)
    else:
        box: gl.constexpr = p.dpre_desc.block_type.shape
        tma_store(p.dpre_desc, [at[0], at[1], at[2], 0, col], first.reshape(box))
        tma_store(p.dpre_desc, [at[0], at[1], at[2], 1, col], second.reshape(box))
    tma_store(p.out_desc, [at[0], at[1], at[2], col], third)
    return sums


@gluon.jit
def store_backward(p, acc, weight, row, row_end, col, CONSUMER: gl.constexpr, part_layout: gl.constexpr):
    """dpre, act_w and row sums of one tile; `fetch_pre` has been called for its first half."""
    HALF: gl.constexpr = p.BLOCK_N // 2
    left, right = halves(acc)
    sums = _half(p, left, weight, row, row_end, col, 0, CONSUMER, part_layout)
    fetch_pre(p, row, row_end, col + HALF, CONSUMER)
    sums += _half(p, right, weight, row, row_end, col + HALF, 1, CONSUMER, part_layout)
    r = row + gl.arange(0, p.BLOCK_M, layout=gl.SliceLayout(1, part_layout))
    gl.store(p.sums + col // p.BLOCK_N * p.M + r, sums, mask=r < row_end)
