"""Device code of the `triton_tma` backend: products of tiles that descriptors load and, where they can, store."""

import triton
import triton.language as tl

from expertile.ops.grouped_mm.persistent import columns, count_tiles, group_range, locate_tile
from expertile.ops.launch.pdl import begin


@triton.jit
def _load(
    desc,
    group,
    at,
    k,
    k_start,
    k_length,
    RAGGED: tl.constexpr,
    FLAT: tl.constexpr,
    K_INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK, BLOCK_K]: a's rows, or b's columns, from `at` on. FLAT: an operand of two dimensions, K not ragged.
    K_INNER: stored with k contiguous."""
    if RAGGED == "k":
        block = desc.load([0x40000000, k_start + k_length, 0x40000000 - k_length + k, at])
        return block.reshape(BLOCK_K, BLOCK).T
    elif FLAT:
        return desc.load([at, k]) if K_INNER else desc.load([k, at]).T
    elif K_INNER:
        return desc.load([group, at, k]).reshape(BLOCK, BLOCK_K)
    else:
        return desc.load([group, k, at]).reshape(BLOCK_K, BLOCK).T


@triton.jit
def _store(
    out_desc,
    out_ptr,
    acc,
    place,
    strides,
    RAGGED: tl.constexpr,
    OUT_BY_TMA: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
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
        if ALIGN > 1:
            inside = inside & ((rows if RAGGED == "m" else cols) >= start)
        tl.store(out_ptrs, block, mask=inside)
    elif RAGGED == "m":
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
    RAGGED: tl.constexpr,
    A_COLUMN: tl.constexpr,
    B_COLUMN: tl.constexpr,
    OUT_BY_TMA: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
    SUBTILE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    total, ends = count_tiles(offs_ptr, M, N, groups, RAGGED, GROUPS_P2, BLOCK_M, BLOCK_N, ALIGN)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        group, row, row_end, col, col_end, k_start, k_length = locate_tile(
            tile, ends, offs_ptr, M, N, K, GROUP_M, RAGGED, GROUPS_P2, BLOCK_M, BLOCK_N, ALIGN
        )
        start = 0
        if ALIGN > 1:
            start, _ = group_range(offs_ptr, group)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, k_length, BLOCK_K):
            a = _load(a_desc, group, row, k, k_start, k_length, RAGGED, RAGGED == "m", not A_COLUMN, BLOCK_M, BLOCK_K)
            b = _load(b_desc, group, col, k, k_start, k_length, RAGGED, RAGGED == "n", B_COLUMN, BLOCK_N, BLOCK_K).T
            acc = tl.dot(a, b, acc)
        cols = col + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + group.to(tl.int64) * bias_stride_g + cols * bias_stride_n
            acc += tl.load(bias_ptrs, mask=cols < col_end, other=0.0).to(tl.float32)[None, :]
        WIDTH: tl.constexpr = BLOCK_N // SUBTILE
        parts = columns(acc, SUBTILE)
        for i in tl.static_range(SUBTILE):
            place = (group, row, row_end, col + i * WIDTH, col_end, start)
            strides = (out_stride_g, out_stride_m, out_stride_n)
            _store(out_desc, out_ptr, parts[i], place, strides, RAGGED, OUT_BY_TMA, OUT_DTYPE, ALIGN)
