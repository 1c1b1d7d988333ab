"""Rung 4, hints and an unmasked interior: the same tiles and the same walk, said so that the compiler can see it.

Changed from rung 3: `tl.multiple_of` promises that every row of a tile begins on 16 bytes; rows and columns past the
end are clamped onto the last one instead of masked (what they compute is not stored); k is masked only where BLOCK_K
does not divide it; sizes and strides may be specialised. Spends less of: load instructions and registers. Eight
elements travel in one cp.async, past the registers and NUM_STAGES - 1 steps ahead of the products.
"""

import triton
import triton.language as tl

from expertile.ladder._common import launch, takes_aligned
from expertile.ladder.masked_pointer import Config, walk_to_group
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.persistent import Tiles
from expertile.ops.launch.shape import constants


@triton.jit
def multiply_tile(pointers, strides, group, row, row_end, col, N, K, EVEN_K: tl.constexpr, t):
    """One tile of the result: rows [row, row_end), columns from `col` on, of group `group`."""
    a_ptr, b_ptr, out_ptr = pointers
    a_stride_m, b_stride_g, b_stride_n, out_stride_m = strides
    rows = tl.minimum(tl.arange(0, t.BLOCK_M), row_end - row - 1)[:, None]
    cols = tl.minimum(tl.arange(0, t.BLOCK_N), N - col - 1)[None, :]
    ks = tl.arange(0, t.BLOCK_K)
    a_tile = a_ptr + row.to(tl.int64) * a_stride_m
    b_tile = b_ptr + group.to(tl.int64) * b_stride_g + col.to(tl.int64) * b_stride_n
    a_offsets = rows * a_stride_m + ks[None, :]
    b_offsets = cols * b_stride_n + ks[:, None]
    acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
    for k in range(0, K, t.BLOCK_K):
        a_ptrs = tl.multiple_of(a_tile + k + a_offsets, [1, 16])
        b_ptrs = tl.multiple_of(b_tile + k + b_offsets, [16, 1])
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=ks[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=ks[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc)
    out_rows = row + tl.arange(0, t.BLOCK_M)[:, None]
    out_cols = col + tl.arange(0, t.BLOCK_N)[None, :]
    out_ptrs = out_ptr + out_rows.to(tl.int64) * out_stride_m + out_cols
    # N // 8 * 8 is N, and tells the compiler that eight neighbours share their mask.
    mask = (out_rows < row_end) & (out_cols < N // 8 * 8)
    tl.store(tl.multiple_of(out_ptrs, [1, 16]), acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unmasked_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    offs_ptr,
    N,
    K,
    groups,
    a_stride_m,
    b_stride_g,
    b_stride_n,
    out_stride_m,
    EVEN_K: tl.constexpr,
    TILES: tl.constexpr,
):
    t: tl.constexpr = constants(Tiles, TILES)
    pointers, strides = (a_ptr, b_ptr, out_ptr), (a_stride_m, b_stride_g, b_stride_n, out_stride_m)
    tiles_n = tl.cdiv(N, t.BLOCK_N)
    group, start, end, place, found = walk_to_group(tl.program_id(0), offs_ptr, groups, tiles_n, t.BLOCK_M)
    if found:
        row = start + place // tiles_n * t.BLOCK_M
        col = place % tiles_n * t.BLOCK_N
        multiply_tile(pointers, strides, group, row, end, col, N, K, EVEN_K, t)


BACKEND = Backend(
    name="4_hints_unmasked",
    summary="as rung 3, with alignment hints and no masks in the interior",
    supports=takes_aligned,
    configs=lambda problem, device: (Config(),),
    run=lambda problem, operands, config, out: launch(
        _unmasked_kernel, problem, operands, config, out, EVEN_K=problem.k % config.block_k == 0
    ),
)
