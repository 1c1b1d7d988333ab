"""Device code of the `triton_tma` backend: products of tiles that descriptors load and, where they can, store."""

import triton
import triton.language as tl

from expertile.ops.grouped_mm.persistent import Tiles, columns, count_tiles, group_range, locate_tile
from expertile.ops.launch.pdl import begin
from expertile.ops.launch.shape import constants


@triton.jit
def _load(desc, group, at, k, k_start, k_length, t, FLAT: tl.constexpr, K_INNER: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK_K]: a's rows, or b's columns, from `at` on. FLAT: an operand of two dimensions, K not ragged.
    K_INNER: stored with k contiguous."""
    if t.RAGGED == "k":
        block = desc.load([0x40000000, k_start + k_length, 0x40000000 - k_length + k, at])
        return block.reshape(t.BLOCK_K, BLOCK).T
    elif FLAT:
        return desc.load([at, k]) if K_INNER else desc.load([k, at]).T
    elif K_INNER:
        return desc.load([group, at, k]).reshape(BLOCK, t.BLOCK_K)
    else:
        return desc.load([group, k, at]).reshape(t.BLOCK_K, BLOCK).T


@triton.jit
def _store(out_desc, out_ptr, acc, place, strides, t, OUT_BY_TMA: tl.constexpr, OUT_DTYPE: tl.constexpr):
    """Store one block; rows past the group's end and columns past n are dropped, by the hardware if OUT_BY_TMA. With
    ALIGN also those ahead of the group, which starts at `start` in the ragged dimension."""
    group, row, row_end, col, col_end, start = place
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    block = acc.to(OUT_DTYPE)
    if not OUT_BY_TMA:
        rows = (row + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
        cols = (col + tl.arange(0, WIDTH)).to(tl.int64)[None, :]
        out_ptrs = out_ptr + group.to(tl.int64) * strides[0] + rows * strides[1] + cols * strides[2]
        inside = (rows < row_end) & (cols < col_end)
        if t.ALIGN > 1:
            inside = inside & ((rows if t.RAGGED == "m" else cols) >= start)
        tl.store(out_ptrs, block, mask=inside)
    elif t.RAGGED == "m":
        out_desc.store([0x40000000, row_end, 0x40000000 - row_end + row, col], block.reshape(1, 1, HEIGHT, WIDTH))
    else:
        out_desc.store([group, row, col], block.reshape(1, HEIGHT, WIDTH))


# Descriptors know their alignment; whether N is a multiple of 16 concerns stores through pointers, and the bias.
@triton.jit(do_not_specialize=["M", "K", "groups", "GROUP_M"])
def tma_kernel(
    a_desc,
    b_desc,
    out_desc,
    out_ptr,
    offs_ptr,
    bias_ptr,
    M,
    N,
    K,
    groups,
    out_stride_g,
    out_stride_m,
    out_stride_n,
    bias_stride_g,
    bias_stride_n,
    GROUP_M,
    A_COLUMN: tl.constexpr,
    B_COLUMN: tl.constexpr,
    OUT_BY_TMA: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    TILES: tl.constexpr,
    FLATTEN: tl.constexpr,
    SUBTILE: tl.constexpr,
    PDL: tl.constexpr,
):
    t: tl.constexpr = constants(Tiles, TILES)
    begin(PDL)
    total, ends = count_tiles(offs_ptr, M, N, groups, t)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        place = locate_tile(tile, ends, offs_ptr, M, N, K, GROUP_M, t)
        group, row, row_end, col, col_end, k_start, k_length = place
        start = 0
        if t.ALIGN > 1:
            start, _ = group_range(offs_ptr, group)
        acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        for k in range(0, k_length, t.BLOCK_K):
            a = _load(a_desc, group, row, k, k_start, k_length, t, t.RAGGED == "m", not A_COLUMN, t.BLOCK_M)
            b = _load(b_desc, group, col, k, k_start, k_length, t, t.RAGGED == "n", B_COLUMN, t.BLOCK_N).T
            acc = tl.dot(a, b, acc)
        cols = col + tl.arange(0, t.BLOCK_N)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + group.to(tl.int64) * bias_stride_g + cols * bias_stride_n
            acc += tl.load(bias_ptrs, mask=cols < col_end, other=0.0).to(tl.float32)[None, :]
        WIDTH: tl.constexpr = t.BLOCK_N // SUBTILE
        parts = columns(acc, SUBTILE)
        for i in tl.static_range(SUBTILE):
            part = (group, row, row_end, col + i * WIDTH, col_end, start)
            strides = (out_stride_g, out_stride_m, out_stride_n)
            _store(out_desc, out_ptr, parts[i], part, strides, t, OUT_BY_TMA, OUT_DTYPE)
