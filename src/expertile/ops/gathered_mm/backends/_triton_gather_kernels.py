"""The kernels of `triton_gather`: one for products of ragged rows, gated or not, one for weight gradients."""

import triton
import triton.language as tl

from expertile.ops.gathered_mm.activation_kernel import activate
from expertile.ops.gathered_mm.pointwise import store_pre
from expertile.ops.grouped_mm.persistent import Tiles, columns, count_tiles, locate_tile
from expertile.ops.launch.shape import constants


@triton.jit(do_not_specialize=["groups", "GROUP_M"])
def gather_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    act_ptr,
    rows_ptr,
    offs_ptr,
    bias_ptr,
    N,
    K,
    groups,
    a_stride_m,
    a_stride_k,
    b_stride_g,
    b_stride_k,
    b_stride_n,
    bias_stride_g,
    bias_stride_n,
    GROUP_M,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """N: columns of the product; for EPILOGUE "gated" those of the activation, half as many as b has.

    out: the product ("mm"), pre or None ("gated"). act: that of "gated"."""
    t: tl.constexpr = constants(Tiles, TILES)
    total, ends = count_tiles(offs_ptr, 0, N, groups, t)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        group, row, row_end, col, col_end, _, _ = locate_tile(tile, ends, offs_ptr, 0, N, K, GROUP_M, t)
        group_64, col_64 = group.to(tl.int64), col.to(tl.int64)
        row_of = row + tl.arange(0, t.BLOCK_M)
        used = row_of < row_end
        cols, ks = tl.arange(0, t.BLOCK_N), tl.arange(0, t.BLOCK_K)
        inside = cols < col_end - col
        if rows_ptr is None:
            # A tile's corner may lie more than 2^31 elements in; inside the tile OFFSET is as wide as it must be.
            a_tile = a_ptr + row.to(tl.int64) * a_stride_m
            source = tl.arange(0, t.BLOCK_M).to(OFFSET)
        else:
            a_tile = a_ptr
            source = tl.load(rows_ptr + row_of, mask=used, other=0).to(OFFSET)
        a_offsets = source[:, None] * a_stride_m + ks.to(OFFSET)[None, :] * a_stride_k
        # Gate and up columns: neighbours, or half a row apart. Two blocks of b and two sums serve both.
        COLUMN_STEP: tl.constexpr = 2 if EPILOGUE == "gated" and INTERLEAVED else 1
        col_stride = b_stride_n * COLUMN_STEP
        b_tile = b_ptr + group_64 * b_stride_g + col_64 * col_stride
        b_offsets = ks.to(OFFSET)[:, None] * b_stride_k + cols.to(OFFSET)[None, :] * col_stride
        a_step = tl.full((), t.BLOCK_K, tl.int64) * a_stride_k
        b_step = tl.full((), t.BLOCK_K, tl.int64) * b_stride_k
        acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        if EPILOGUE == "gated":
            apart = 1 if INTERLEAVED else N
            up_tile = b_tile + tl.full((), apart, tl.int64) * b_stride_n
            acc_up = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        for k in range(0, K, t.BLOCK_K):
            a_mask = used[:, None] if EVEN_K else used[:, None] & (ks[None, :] < K - k)
            b_mask = inside[None, :] if EVEN_K else inside[None, :] & (ks[:, None] < K - k)
            a = tl.load(a_tile + a_offsets, mask=a_mask, other=0.0)
            acc = tl.dot(a, tl.load(b_tile + b_offsets, mask=b_mask, other=0.0), acc, input_precision=PRECISION)
            if EPILOGUE == "gated":
                up = tl.load(up_tile + b_offsets, mask=b_mask, other=0.0)
                acc_up = tl.dot(a, up, acc_up, input_precision=PRECISION)
                up_tile += b_step
            a_tile += a_step
            b_tile += b_step
        # A piece of the columns at a time: the whole tile's gate, up and gradients would not fit the registers.
        WIDTH: tl.constexpr = t.BLOCK_N // PARTS
        pieces = columns(acc, PARTS)
        ups = columns(acc_up, PARTS) if EPILOGUE == "gated" else pieces
        at = row_of.to(tl.int64)[:, None] * N
        for i in tl.static_range(PARTS):
            start = col + i * WIDTH
            place = start + tl.arange(0, WIDTH)
            piece, up = pieces[i], ups[i]
            inside = used[:, None] & (place < col_end)[None, :]
            target = at + place[None, :]
            if bias_ptr is not None:
                bias_ptrs = bias_ptr + group_64 * bias_stride_g + place * COLUMN_STEP * bias_stride_n
                piece += tl.load(bias_ptrs, mask=place < col_end, other=0.0).to(tl.float32)[None, :]
                if EPILOGUE == "gated":
                    bias_up = tl.load(bias_ptrs + apart * bias_stride_n, mask=place < col_end, other=0.0)
                    up += bias_up.to(tl.float32)[None, :]
            if EPILOGUE == "mm":
                tl.store(out_ptr + target, piece.to(out_ptr.dtype.element_ty), mask=inside)
            else:
                if out_ptr is not None:
                    store_pre(out_ptr, at, start, used[:, None], N, piece, up, INTERLEAVED, WIDTH, EVEN_N)
                value = activate(piece, up, ACTIVATION)
                tl.store(act_ptr + target, value.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["groups", "GROUP_M"])
def wgrad_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    rows_ptr,
    offs_ptr,
    M,
    N,
    groups,
    a_stride_r,
    a_stride_m,
    b_stride_r,
    b_stride_n,
    GROUP_M,
    GATHERED: tl.constexpr,
    PRECISION: tl.constexpr,
    TILES: tl.constexpr,
):
    """out[g] = Σ a[r]ᵀ b[r] over the rows of g; GATHERED: the operand ("a", "b" or "") whose rows are looked up."""
    t: tl.constexpr = constants(Tiles, TILES)
    total, ends = count_tiles(offs_ptr, M, N, groups, t)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        group, m, m_end, n, n_end, first, length = locate_tile(tile, ends, offs_ptr, M, N, 0, GROUP_M, t)
        ks = tl.arange(0, t.BLOCK_K)
        ms, ns = m + tl.arange(0, t.BLOCK_M), n + tl.arange(0, t.BLOCK_N)
        acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        for k in range(0, length, t.BLOCK_K):
            used = ks < length - k
            place = (first + k + ks).to(tl.int64)
            a_row, b_row = place, place
            if GATHERED != "":
                token = tl.load(rows_ptr + place, mask=used, other=0).to(tl.int64)
                if GATHERED == "a":
                    a_row = token
                else:
                    b_row = token
            a = tl.load(
                a_ptr + a_row[None, :] * a_stride_r + ms[:, None] * a_stride_m,
                mask=used[None, :] & (ms < m_end)[:, None],
                other=0.0,
            )
            b = tl.load(
                b_ptr + b_row[:, None] * b_stride_r + ns[None, :] * b_stride_n,
                mask=used[:, None] & (ns < n_end)[None, :],
                other=0.0,
            )
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        at = (group.to(tl.int64) * M + ms)[:, None] * N + ns[None, :]
        inside = (ms < m_end)[:, None] & (ns < n_end)[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
