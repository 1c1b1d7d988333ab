"""Device code of `gluon_gather`: what becomes of a tile of products, from the accumulators to memory.

Everything leaves through shared memory by TMA, half a tile's width in STORE_PARTS pieces, through STORE_SLOTS buffers
used in turn; a buffer is waited for when it is needed again. Rows past the end of the group lie outside the
descriptors' windows, and the hardware drops them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from expertile.ops.gathered_mm.backends._gluon_activation import activate
from expertile.ops.hopper.columns import beside, halves, pieces
from expertile.ops.hopper.tiles import WRAP
from expertile.ops.launch.versions import tma_store


@gluon.jit
def pairs(x):
    """The even and the odd columns of a tensor; wgmma leaves each such pair in one thread."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def unpair(even, odd):
    """The inverse of `pairs`."""
    return gl.reshape(gl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@gluon.jit
def _activate(gate, up, ACTIVATION: gl.constexpr, PARTS: gl.constexpr):
    """`activate` of 16-bit values, rounded to their dtype, a part of the columns after another: Triton orders the work
    by operation, and would hold the intermediate results of all columns in registers."""
    if PARTS == 1:
        return activate(gate.to(gl.float32), up.to(gl.float32), ACTIVATION).to(gate.dtype)
    else:
        gate_left, gate_right = halves(gate)
        up_left, up_right = halves(up)
        left = _activate(gate_left, up_left, ACTIVATION, PARTS // 2)
        right = _activate(gate_right, up_right, ACTIVATION, PARTS // 2)
        return beside(left, right)


@gluon.jit
def _buffer(p, count, CONSUMER: gl.constexpr):
    """The consumer's buffer for its store number `count`, empty again."""
    buf = p.c_smem.index(CONSUMER * p.STORE_SLOTS + count % p.STORE_SLOTS)
    tma.store_wait(p.STORE_SLOTS - 1)
    return buf


@gluon.jit
def _store(p, desc, x, row, row_end, col, count, CONSUMER: gl.constexpr, HALF: gl.constexpr = None):
    """x, half a tile's width, to column `col` and following, as this consumer's store number `count`. HALF: into the
    gate half (0) or the up half (1) of the pre-activation."""
    cut = pieces(x, p.STORE_PARTS)
    PART: gl.constexpr = x.shape[1] // p.STORE_PARTS
    for s in gl.static_range(p.STORE_PARTS):
        buf = _buffer(p, count * p.STORE_PARTS + s, CONSUMER)
        buf.reshape([x.shape[0], PART]).store(cut[s])
        fence_async_shared()
        if HALF is None:
            tma_store(desc, [WRAP, row_end, WRAP - (row_end - row), col + s * PART], buf)
        else:
            at = [WRAP, row_end, WRAP - (row_end - row), HALF, col + s * PART]
            tma_store(desc, at, buf.reshape([1, 1, x.shape[0], 1, PART]))


@gluon.jit
def _store_pairs(p, gate, up, row, row_end, col, count, CONSUMER: gl.constexpr):
    """Gate and up columns in turn, as pieces of the box's width: `_store` of twice as much."""
    PIECES: gl.constexpr = 2 * p.STORE_PARTS
    WIDTH: gl.constexpr = 2 * gate.shape[1] // PIECES
    gates = pieces(gate, PIECES)
    ups = pieces(up, PIECES)
    for s in gl.static_range(PIECES):
        buf = _buffer(p, count * p.STORE_PARTS + s, CONSUMER)
        buf.reshape([gate.shape[0], WIDTH]).store(unpair(gates[s], ups[s]))
        fence_async_shared()
        tma_store(p.pre_desc, [WRAP, row_end, WRAP - (row_end - row), col + s * WIDTH], buf)


@gluon.jit
def _biased_halves(p, acc, g, col, mma_layout: gl.constexpr):
    """The left and the right half of acc + bias, rounded."""
    HALF: gl.constexpr = p.BLOCK_N // 2
    dtype: gl.constexpr = p.out_desc.dtype
    if p.HAS_BIAS:
        j = gl.arange(0, p.BLOCK_N, layout=gl.SliceLayout(0, mma_layout))
        cols = col + j
        inside = cols < p.N
        if p.HALVED:
            inner = p.N // 2
            cols = col // 2 + j % HALF
            inside = cols < inner
            if p.INTERLEAVED:
                cols = 2 * cols + j // HALF
            else:
                cols += j // HALF * inner
        bias = gl.load(p.bias + g * p.N + cols, mask=inside, other=0.0)
        acc = acc + gl.expand_dims(bias.to(gl.float32), 0)
    left, right = halves(acc)
    return left.to(dtype), right.to(dtype)


@gluon.jit
def store_plain(p, acc, g, row, row_end, col, tile, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    """out = acc (+ bias)"""
    left, right = _biased_halves(p, acc, g, col, mma_layout)
    _store(p, p.out_desc, left, row, row_end, col, 2 * tile, CONSUMER)
    _store(p, p.out_desc, right, row, row_end, col + p.BLOCK_N // 2, 2 * tile + 1, CONSUMER)


@gluon.jit
def store_gated(p, acc, g, row, row_end, col, tile, CONSUMER: gl.constexpr, mma_layout: gl.constexpr):
    """pre = acc (+ bias), if it is kept, and act = activation(gate, up) of the rounded pre, which is what a backward
    pass starts from."""
    HALF: gl.constexpr = p.BLOCK_N // 2
    # 8 columns lie in a quad of threads, and are not cut any further.
    PARTS: gl.constexpr = 4 if HALF >= 32 else HALF // 8
    count = tile
    left, right = _biased_halves(p, acc, g, col, mma_layout)
    if p.SAVE_PRE:
        count = 3 * tile + 2
        if p.INTERLEAVED and p.HALVED:
            _store_pairs(p, left, right, row, row_end, col, 3 * tile, CONSUMER)
        elif p.INTERLEAVED:
            _store(p, p.pre_desc, left, row, row_end, col, 3 * tile, CONSUMER)
            _store(p, p.pre_desc, right, row, row_end, col + HALF, 3 * tile + 1, CONSUMER)
        else:
            _store(p, p.pre_desc, left, row, row_end, col // 2, 3 * tile, CONSUMER, 0)
            _store(p, p.pre_desc, right, row, row_end, col // 2, 3 * tile + 1, CONSUMER, 1)
    if not p.HALVED:
        left_gate, left_up = pairs(left)
        right_gate, right_up = pairs(right)
        act_left = _activate(left_gate, left_up, p.ACTIVATION, PARTS)
        act = beside(act_left, _activate(right_gate, right_up, p.ACTIVATION, PARTS))
        # Each thread has every other column; exchanged within quads, they can be stored as matrices.
        half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
        act = gl.convert_layout(act, half_layout)
    else:
        act = _activate(left, right, p.ACTIVATION, PARTS)
    _store(p, p.out_desc, act, row, row_end, col // 2, count, CONSUMER)
