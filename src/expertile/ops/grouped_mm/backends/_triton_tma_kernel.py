"""Device code of the `triton_tma` backend: products of tiles that descriptors load and, where they can, store."""

from __future__ import annotations

import triton
import triton.language as tl

from expertile.ops.grouped_mm.persistent import count_tiles, group_range, locate_tile
from expertile.ops.launch.pdl import begin


@triton.jit
def _load_a(
    a_desc,
    group,
    row,
    k,
    k_start,
    k_length,
    RAGGED: tl.constexpr,
    A_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a's block [BLOCK_M, BLOCK_K]; A_COLUMN: stored with m contiguous."""
    if RAGGED == "m":
        if A_COLUMN:
            a = a_desc.load([k, row]).T
        else:
            a = a_desc.load([row, k])
    elif RAGGED == "k":
        block = a_desc.load([0x40000000, k_start + k_length, 0x40000000 - k_length + k, row])
        a = block.reshape(BLOCK_K, BLOCK_M).T
    elif A_COLUMN:
        a = a_desc.load([group, k, row]).reshape(BLOCK_K, BLOCK_M).T
    else:
        a = a_desc.load([group, row, k]).reshape(BLOCK_M, BLOCK_K)
    return a


@triton.jit
def _load_b(
    b_desc,
    group,
    col,
    k,
    k_start,
    k_length,
    RAGGED: tl.constexpr,
    B_COLUMN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """b's block [BLOCK_K, BLOCK_N]; B_COLUMN: stored with k contiguous (weights [G, N, K])."""
    if RAGGED == "n":
        if B_COLUMN:
            b = b_desc.load([col, k]).T
        else:
            b = b_desc.load([k, col])
    elif RAGGED == "k":
        block = b_desc.load([0x40000000, k_start + k_length, 0x40000000 - k_length + k, col])
        b = block.reshape(BLOCK_K, BLOCK_N)
    elif B_COLUMN:
        b = b_desc.load([group, col, k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        b = b_desc.load([group, k, col]).reshape(BLOCK_K, BLOCK_N)
    return b


@triton.jit
def _store(
    out_desc,
    out_ptr,
    acc,
    group,
    row,
    row_end,
    col,
    col_end,
    start,
    out_stride_g,
    out_stride_m,
    out_stride_n,
    RAGGED: tl.constexpr,
    OUT_BY_TMA: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Store one block; rows past the group's end and columns past n are dropped, by the hardware if OUT_BY_TMA. With
    ALIGN also those ahead of the group, which starts at `start` in the ragged dimension."""
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    block = acc.to(OUT_DTYPE)
    if not OUT_BY_TMA:
        rows = (row + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
        cols = (col + tl.arange(0, WIDTH)).to(tl.int64)[None, :]
        out_ptrs = out_ptr + group.to(tl.int64) * out_stride_g + rows * out_stride_m + cols * out_stride_n
        inside = (rows < row_end) & (cols < col_end)
        if ALIGN > 1:
            inside = inside & ((rows if RAGGED == "m" else cols) >= start)
        tl.store(out_ptrs, block, mask=inside)
    elif RAGGED == "m":
        out_desc.store([0x40000000, row_end, 0x40000000 - row_end + row, col], block.reshape(1, 1, HEIGHT, WIDTH))
    else:
        out_desc.store([group, row, col], block.reshape(1, HEIGHT, WIDTH))


@triton.jit
def _halves(block):
    """The left and the right half of a block's columns."""
    return block.reshape(block.shape[0], 2, block.shape[1] // 2).permute(0, 2, 1).split()


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
    HAS_BIAS: tl.constexpr,
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
            a = _load_a(a_desc, group, row, k, k_start, k_length, RAGGED, A_COLUMN, BLOCK_M, BLOCK_K)
            b = _load_b(b_desc, group, col, k, k_start, k_length, RAGGED, B_COLUMN, BLOCK_N, BLOCK_K)
            acc = tl.dot(a, b, acc)
        cols = col + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            bias_ptrs = bias_ptr + group.to(tl.int64) * bias_stride_g + cols * bias_stride_n
            acc += tl.load(bias_ptrs, mask=cols < col_end, other=0.0).to(tl.float32)[None, :]
        WIDTH: tl.constexpr = BLOCK_N // SUBTILE
        if SUBTILE == 1:
            parts = (acc,)
        elif SUBTILE == 2:
            parts = _halves(acc)
        else:
            left, right = _halves(acc)
            parts = _halves(left) + _halves(right)
        for i in tl.static_range(SUBTILE):
            _store(
                out_desc,
                out_ptr,
                parts[i],
                group,
                row,
                row_end,
                col + i * WIDTH,
                col_end,
                start,
                out_stride_g,
                out_stride_m,
                out_stride_n,
                RAGGED,
                OUT_BY_TMA,
                OUT_DTYPE,
                ALIGN,
            )
