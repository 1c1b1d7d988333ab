"""Device code that the Gluon kernels share: from accumulators to memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from expertile.ops.hopper.columns import pieces
from expertile.ops.hopper.tiles import WRAP
from expertile.ops.launch.versions import tma_add, tma_store


@gluon.jit
def bias_of(p, g, col, end, COLS: gl.constexpr, layout: gl.constexpr):
    """Group g's bias [COLS] from column `col` on, float32; zeros from column `end` on."""
    cols = col + gl.arange(0, COLS, layout=layout)
    return gl.load(p.bias + g * p.N + cols, mask=cols < end, other=0.0).to(gl.float32)


@gluon.jit
def store_tile(p, buf, x, g, row, row_end, last, col, ADD: gl.constexpr = False):
    """x [rows, columns] -> shared memory -> TMA, rows `row` to `row_end` of a ragged M; `last`: row_end in the
    descriptor, which counts the rows of all slices of a split K. ADD: add to what stands there, with other layouts than
    ragged M. Nothing waits for the store here.

    Rows past the end of the group fall outside the descriptor's box: the hardware drops them."""
    buf.reshape([x.shape[0], x.shape[1]]).store(x.to(p.c_desc.dtype))
    fence_async_shared()
    if p.LAYOUT == "ragged_m":
        tma_store(p.c_desc, [WRAP, last, WRAP - (row_end - row), col], buf)
    elif ADD:
        tma_add(p.c_desc, [g, row, col], buf)
    else:
        tma_store(p.c_desc, [g, row, col], buf)


@gluon.jit
def store_turned(p, acc, split, g, row, row_end, col, PARTS: gl.constexpr, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """acc [columns of the result, rows] of a unit of a ragged M -> shared memory, transposed -> TMA, PARTS pieces of
    rows through consumer WHO's buffer, which is waited for when it is used again."""
    COLS: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1] // PARTS
    if p.HAS_BIAS:
        # The slices of a split K are added up: one of them takes the bias along.
        bias = bias_of(p, g, col, gl.where(split == 0, p.N, 0), COLS, gl.SliceLayout(1, mma_layout))
        acc = acc + gl.expand_dims(bias, 1)
    cut = pieces(acc, PARTS)
    for s in gl.static_range(PARTS):
        buf = p.c_smem.index(WHO)
        tma.store_wait(0)
        buf.reshape([ROWS, COLS]).permute((1, 0)).store(cut[s].to(p.c_desc.dtype))
        fence_async_shared()
        # Rows past the end of the group fall outside the descriptor's box: the hardware drops them.
        at = [WRAP, row_end + split * p.M, WRAP - (row_end - row) + s * ROWS, col]
        tma_store(p.c_desc, at, buf)
