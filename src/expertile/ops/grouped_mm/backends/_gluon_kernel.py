"""Device code of the `gluon_hopper` backend: one persistent, warp-specialised grouped GEMM for sm_90a.

One warp loads tiles with TMA into a ring of `STAGES` shared-memory stages; one or two warpgroups ("consumers")
multiply them with wgmma and store the result with TMA. Consumers share the tile in one of two ways:

  split     Both take the same tile, each its own ROWS of it, and run freely: a stage is free again when both have
            read it. Consumer 1 starts one stage late, so one of them multiplies while the other stores. A consumer
            whose rows all lie past the end of the group drops out of the tile, and its half of `a` is not loaded.
  pingpong  Each takes every other tile of the program; a pair of barriers keeps their main loops apart.

The tile a program works on follows from `offs` alone, on the device: the main body turns group sizes into a prefix
sum of tile counts in shared memory, and every partition looks its tiles up in it.
"""
# ruff: noqa: RUF005, SIM113  (Gluon's front end knows neither `*` in a list nor enumerate)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

# Ragged descriptors (triton.tools.ragged_tma) wrap 64-bit addresses around at this coordinate.
_WRAP: gl.constexpr = gl.constexpr(0x40000000)


@aggregate
class _Context:
    """What every partition needs: descriptors, shared memory, and the problem."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    tile_ends: gl.shared_memory_descriptor
    offs: gl.tensor
    bias: gl.tensor
    total: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    LAYOUT: gl.constexpr
    A_K_MAJOR: gl.constexpr
    B_K_MAJOR: gl.constexpr
    HAS_BIAS: gl.constexpr
    CONSUMERS: gl.constexpr
    ROWS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    GROUP_M: gl.constexpr
    C_PARTS: gl.constexpr
    C_SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, a_desc, b_desc, c_desc, a_smem, b_smem, c_smem, full, empty, turn, tile_ends, offs, bias, total, M, N, K,
        LAYOUT, A_K_MAJOR, B_K_MAJOR, HAS_BIAS, CONSUMERS, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, C_PARTS,
        C_SLOTS,
    ):  # fmt: skip
        self.a_desc = a_desc
        self.b_desc = b_desc
        self.c_desc = c_desc
        self.a_smem = a_smem
        self.b_smem = b_smem
        self.c_smem = c_smem
        self.full = full
        self.empty = empty
        self.turn = turn
        self.tile_ends = tile_ends
        self.offs = offs
        self.bias = bias
        self.total = total
        self.M = M
        self.N = N
        self.K = K
        self.LAYOUT = gl.constexpr(LAYOUT)
        self.A_K_MAJOR = gl.constexpr(A_K_MAJOR)
        self.B_K_MAJOR = gl.constexpr(B_K_MAJOR)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.ROWS = gl.constexpr(ROWS)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.BLOCK_K = gl.constexpr(BLOCK_K)
        self.STAGES = gl.constexpr(STAGES)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.C_PARTS = gl.constexpr(C_PARTS)
        self.C_SLOTS = gl.constexpr(C_SLOTS)


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _raster(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(row tile, column tile) of a group's tile: about GROUP_M rows of tiles at a time, down the rows first.

    The rows are cut evenly (17 rows of tiles are one band, 25 are 13 and 12), because a thin last band would read all
    of the group's weights once more for little work.
    """
    bands = gl.maximum((tiles_m + GROUP_M // 2) // GROUP_M, 1)
    height = (tiles_m + bands - 1) // bands
    band = tile // (height * tiles_n)
    within = tile - band * height * tiles_n
    height_here = gl.minimum(height, tiles_m - band * height)
    n = within // height_here
    return band * height + within - n * height_here, n


@gluon.jit
def _locate(p, ends, t):
    """Tile number -> (group, first row, row where the group ends, first column, first k, length of k)."""
    tiles_n = (p.N + p.BLOCK_N - 1) // p.BLOCK_N
    if p.LAYOUT == "ragged_m":
        before = ends <= t
        g = gl.sum(before.to(gl.int32), 0)
        first = gl.max(gl.where(before, ends, 0), 0)
        row = gl.load(p.offs + g - 1, mask=g > 0, other=0)
        row_end = gl.load(p.offs + g)
        tiles_m = (row_end - row + p.BLOCK_M - 1) // p.BLOCK_M
        m, n = _raster(t - first, tiles_m, tiles_n, p.GROUP_M)
        return g, row + m * p.BLOCK_M, row_end, n * p.BLOCK_N, 0, p.K
    else:
        tiles_m = (p.M + p.BLOCK_M - 1) // p.BLOCK_M
        g = t // (tiles_m * tiles_n)
        m, n = _raster(t - g * tiles_m * tiles_n, tiles_m, tiles_n, p.GROUP_M)
        k = 0
        k_len = p.K
        if p.LAYOUT == "ragged_k":
            k = gl.load(p.offs + g - 1, mask=g > 0, other=0)
            k_len = gl.load(p.offs + g) - k
        return g, m * p.BLOCK_M, p.M, n * p.BLOCK_N, k, k_len


@gluon.jit
def _tile_ends(p):
    """The prefix sum of tile counts, all of it in every warp so that looking a tile up needs no barrier."""
    PER_THREAD: gl.constexpr = p.tile_ends.type.shape[0] // 32
    return p.tile_ends.load(gl.BlockedLayout([PER_THREAD], [32], [gl.num_warps()], [0]))


@gluon.jit
def _load_a(p, g, row, k0, k_len, k, bar, dst, pred):
    if p.LAYOUT == "ragged_k":
        tma.async_copy_global_to_shared(p.a_desc, [_WRAP, k0 + k_len, _WRAP - k_len + k, row], bar, dst, pred)
    elif p.LAYOUT == "batched":
        if p.A_K_MAJOR:
            tma.async_copy_global_to_shared(p.a_desc, [g, row, k], bar, dst, pred)
        else:
            tma.async_copy_global_to_shared(p.a_desc, [g, k, row], bar, dst, pred)
    elif p.A_K_MAJOR:
        tma.async_copy_global_to_shared(p.a_desc, [row, k], bar, dst, pred)
    else:
        tma.async_copy_global_to_shared(p.a_desc, [k, row], bar, dst, pred)


@gluon.jit
def _load_b(p, g, col, k0, k_len, k, bar, dst):
    if p.LAYOUT == "ragged_k":
        tma.async_copy_global_to_shared(p.b_desc, [_WRAP, k0 + k_len, _WRAP - k_len + k, col], bar, dst)
    elif p.B_K_MAJOR:
        tma.async_copy_global_to_shared(p.b_desc, [g, col, k], bar, dst)
    else:
        tma.async_copy_global_to_shared(p.b_desc, [g, k, col], bar, dst)


@gluon.jit
def _producer(p):
    A_PARTS: gl.constexpr = p.BLOCK_M // p.ROWS
    A_BYTES: gl.constexpr = p.a_desc.block_type.nbytes
    B_BYTES: gl.constexpr = p.b_desc.block_type.nbytes
    ends = _tile_ends(p)
    i = 0
    phase = 1
    for t in range(gl.program_id(0), p.total, gl.num_programs(0)):
        g, row, row_end, col, k0, k_len = _locate(p, ends, t)
        both = row + p.ROWS < row_end
        for k in range(0, k_len, p.BLOCK_K):
            mbarrier.wait(p.empty.index(i), phase)
            bar = p.full.index(i)
            if A_PARTS == 2:
                mbarrier.expect(bar, 2 * A_BYTES + B_BYTES, pred=both)
                mbarrier.expect(bar, A_BYTES + B_BYTES, pred=row + p.ROWS >= row_end)
            else:
                mbarrier.expect(bar, A_BYTES + B_BYTES)
            _load_a(p, g, row, k0, k_len, k, bar, p.a_smem.index(i * A_PARTS), True)
            _load_b(p, g, col, k0, k_len, k, bar, p.b_smem.index(i))
            if A_PARTS == 2:
                _load_a(p, g, row + p.ROWS, k0, k_len, k, bar, p.a_smem.index(i * A_PARTS + 1), both)
            i += 1
            phase = gl.where(i == p.STAGES, phase ^ 1, phase)
            i = gl.where(i == p.STAGES, 0, i)


@gluon.jit
def _multiply(p, step, k_len, PART: gl.constexpr, mma_layout: gl.constexpr):
    """One tile's K loop, from the ring's step number `step`, with one wgmma batch in flight."""
    A_PARTS: gl.constexpr = p.BLOCK_M // p.ROWS
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    acc = gl.zeros((p.ROWS, p.BLOCK_N), gl.float32, mma_layout)
    for k in range(0, k_len, p.BLOCK_K):
        mbarrier.wait(p.full.index(i), phase)
        a = p.a_smem.index(i * A_PARTS + PART)
        b = p.b_smem.index(i)
        if p.A_K_MAJOR:
            a = a.reshape([p.ROWS, p.BLOCK_K])
        else:
            a = a.reshape([p.BLOCK_K, p.ROWS]).permute((1, 0))
        if p.B_K_MAJOR:
            b = b.reshape([p.BLOCK_N, p.BLOCK_K]).permute((1, 0))
        else:
            b = b.reshape([p.BLOCK_K, p.BLOCK_N])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
        # The batch before this one is done, so its stage is free. (Computed, not carried as `previous = i`: Triton 3.6
        # drops a loop-carried name that starts as an alias of another.)
        mbarrier.arrive(p.empty.index(gl.where(i == 0, p.STAGES - 1, i - 1)), count=1, pred=k > 0)
        i += 1
        phase = gl.where(i == p.STAGES, phase ^ 1, phase)
        i = gl.where(i == p.STAGES, 0, i)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(p.empty.index(gl.where(i == 0, p.STAGES - 1, i - 1)), count=1, pred=k_len > 0)
    return acc


@gluon.jit
def _skip(p, step, k_len):
    """Give back the stages of a tile that this consumer has no rows in."""
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    for _k in range(0, k_len, p.BLOCK_K):
        mbarrier.wait(p.full.index(i), phase)
        mbarrier.arrive(p.empty.index(i), count=1)
        i += 1
        phase = gl.where(i == p.STAGES, phase ^ 1, phase)
        i = gl.where(i == p.STAGES, 0, i)


@gluon.jit
def _halves(x, PARTS: gl.constexpr):
    """The tensor cut into PARTS pieces along its columns."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        return _halves(left, PARTS // 2) + _halves(right, PARTS // 2)


@gluon.jit
def _store(p, acc, g, row, row_end, col, WHO: gl.constexpr, mma_layout: gl.constexpr):
    """Accumulators -> shared memory -> TMA, in C_PARTS pieces through C_SLOTS buffers.

    Nothing waits for the last stores here: a buffer is waited for when it is needed again, one tile later.
    """
    if p.HAS_BIAS:
        cols = col + gl.arange(0, p.BLOCK_N, layout=gl.SliceLayout(0, mma_layout))
        bias = gl.load(p.bias + g * p.N + cols, mask=cols < p.N, other=0.0)
        acc = acc + gl.expand_dims(bias.to(gl.float32), 0)
    PART_N: gl.constexpr = p.BLOCK_N // p.C_PARTS
    pieces = _halves(acc, p.C_PARTS)
    for s in gl.static_range(p.C_PARTS):
        buf = p.c_smem.index(WHO * p.C_SLOTS + s % p.C_SLOTS)
        tma.store_wait(p.C_SLOTS - 1)
        buf.reshape([p.ROWS, PART_N]).store(pieces[s].to(p.c_desc.dtype))
        fence_async_shared()
        if p.LAYOUT == "ragged_m":
            # Rows past the end of the group fall outside the descriptor's box: the hardware drops them.
            at = [_WRAP, row_end, _WRAP - (row_end - row), col + s * PART_N]
            tma.async_copy_shared_to_global(p.c_desc, at, buf)
        else:
            tma.async_copy_shared_to_global(p.c_desc, [g, row, col + s * PART_N], buf)


@gluon.jit
def _consumer_split(p, mma_layout: gl.constexpr, WHO: gl.constexpr):
    ends = _tile_ends(p)
    step = 0
    for t in range(gl.program_id(0), p.total, gl.num_programs(0)):
        g, row, row_end, col, _k0, k_len = _locate(p, ends, t)
        steps = (k_len + p.BLOCK_K - 1) // p.BLOCK_K
        if WHO == 0:
            acc = _multiply(p, step, k_len, 0, mma_layout)
            _store(p, acc, g, row, row_end, col, 0, mma_layout)
        else:
            # The late start that puts one consumer's stores beside the other's products. It lasts: whoever stores
            # leaves the tensor cores to the other, and so falls behind again by just that much.
            mbarrier.wait(p.full.index(1), 0, pred=(step == 0) & (steps > 1))
            if row + p.ROWS < row_end:
                acc = _multiply(p, step, k_len, 1, mma_layout)
                _store(p, acc, g, row + p.ROWS, row_end, col, 1, mma_layout)
            else:
                _skip(p, step, k_len)
        step += steps
    tma.store_wait(0)


@gluon.jit
def _consumer_pingpong(p, mma_layout: gl.constexpr, WHO: gl.constexpr):
    ends = _tile_ends(p)
    step = 0
    tile = 0
    for t in range(gl.program_id(0), p.total, gl.num_programs(0)):
        g, row, row_end, col, _k0, k_len = _locate(p, ends, t)
        if tile % 2 == WHO:
            mbarrier.wait(p.turn.index(WHO), (tile // 2 & 1) ^ (1 - WHO))
            acc = _multiply(p, step, k_len, 0, mma_layout)
            mbarrier.arrive(p.turn.index(1 - WHO), count=1)
            _store(p, acc, g, row, row_end, col, WHO, mma_layout)
        # Both consumers count every tile's steps: with a ragged K they differ from tile to tile.
        step += (k_len + p.BLOCK_K - 1) // p.BLOCK_K
        tile += 1
    tma.store_wait(0)


@gluon.jit
def _consumer(p, mma_layout: gl.constexpr, WHO: gl.constexpr):
    if p.CONSUMERS == 2 and p.BLOCK_M == p.ROWS:
        _consumer_pingpong(p, mma_layout, WHO)
    else:
        _consumer_split(p, mma_layout, WHO)


@gluon.jit
def _consumer_0(p, mma_layout: gl.constexpr):
    _consumer(p, mma_layout, 0)


@gluon.jit
def _consumer_1(p, mma_layout: gl.constexpr):
    _consumer(p, mma_layout, 1)


@gluon.jit(
    # One compilation serves every token count.
    do_not_specialize=["G", "M", "N", "K"],
    do_not_specialize_on_alignment=["offs_ptr", "bias_ptr"],
)
def grouped_mm_kernel(
    a_desc, b_desc, c_desc, offs_ptr, bias_ptr, G, M, N, K,
    LAYOUT: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_BIAS: gl.constexpr,
    GROUPS_POW2: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    C_PARTS: gl.constexpr, C_SLOTS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[g] = a[g] @ b[g] over groups g; see `gluon_hopper` for shapes. Grid: one program per multiprocessor.

    GROUPS_POW2: a power of two >= max(G, 32). BLOCK_M = ROWS * CONSUMERS (split) or ROWS (pingpong).
    """
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * A_PARTS] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [CONSUMERS * C_SLOTS] + c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_ends = gl.allocate_shared_memory(gl.int32, [GROUPS_POW2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=A_PARTS)
    for s in gl.static_range(2):
        mbarrier.init(turn.index(s), count=1)
    fence_async_shared()

    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    if LAYOUT == "ragged_m":
        g = gl.arange(0, GROUPS_POW2, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
        end = gl.load(offs_ptr + g, mask=g < G, other=0)
        start = gl.load(offs_ptr + g - 1, mask=(g > 0) & (g < G), other=0)
        counts = (end - start + BLOCK_M - 1) // BLOCK_M * tiles_n
        ends = gl.associative_scan(counts, 0, _add)
        tile_ends.store(ends)
        total = gl.max(ends, 0)
    else:
        total = G * ((M + BLOCK_M - 1) // BLOCK_M) * tiles_n
    p = _Context(
        a_desc, b_desc, c_desc, a_smem, b_smem, c_smem, full, empty, turn, tile_ends, offs_ptr, bias_ptr, total, M, N,
        K, LAYOUT, A_K_MAJOR, B_K_MAJOR, HAS_BIAS, CONSUMERS, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
        C_PARTS, C_SLOTS,
    )  # fmt: skip
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer_0, (p, mma_layout)), (_consumer_1, (p, mma_layout)), (_producer, (p,))],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize([(_consumer_0, (p, mma_layout)), (_producer, (p,))], [1], [PRODUCER_REGS])
