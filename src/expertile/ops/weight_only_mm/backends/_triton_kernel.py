"""Device code of the `triton_int4` backend: 4-bit weights unpacked in registers, then multiplied.

Operands are swapped: a tile computes out_gᵀ [BLOCK_N, BLOCK_M] = ŵ · aᵀ, so that the weights are the first operand of
the tensor cores, which comes from registers, and few rows of a become a narrow second one (a multiple of 8) instead of
padding a tile of 64. A step takes the words of one packed block (`formats.int4.packing`), [BLOCK_N, half / 4], whose
low and high nibbles are two operands [BLOCK_N, half], against two runs of a.

Unpacking takes 11 instructions for 8 values (triton_unpack.py) and leaves q − 8. A word's values are those of one lane
of a matrix product, but Triton's layouts get there in two ways. Where products take a from shared memory (wgmma,
tcgen05), unpacked values are put in the order of K, which moves none. Where a comes through registers (mma.sync), they
stay as they come and a's rows follow them, read by ldmatrix: Triton gives a lane of mma.sync four neighbours where a
word of four comes from a join, and would otherwise send unpacked values through shared memory.
"""

import triton
import triton.language as tl

from expertile.ops.grouped_mm.persistent import Tiles, count_tiles, locate_tile
from expertile.ops.launch.shape import constants
from expertile.ops.weight_only_mm.triton_mxfp4 import power_of_two, unpack_mxfp4
from expertile.ops.weight_only_mm.triton_unpack import by_word, in_order, shifted, side_by_side, unpack


@triton.jit
def _awaited(acc, WAIT: tl.constexpr):
    """acc, once the wgmma that computes it is done; no instruction.

    The next step unpacks into the registers of this one's first operand. Triton 3.6 lets a loop's last product run on
    into the next step and waits for such registers only where no product of the loop is waited for
    (triton-lang/triton, WGMMAPipeline.cpp); of two in a row it does wait for the first. A use of the sum within the
    step makes it wait for the second."""
    if WAIT:  # wgmma; mma.sync reads its registers when it is issued
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit(do_not_specialize=["M", "groups", "GROUP_M"])
def weight_only_kernel(
    a_ptr,
    w_ptr,
    out_ptr,
    scales_ptr,
    zeros_ptr,
    offs_ptr,
    bias_ptr,
    M,
    N,
    K,
    groups,
    a_stride_m,
    a_stride_k,
    out_stride_m,
    out_stride_n,
    bias_stride_g,
    bias_stride_n,
    GROUP_M,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    OFFSET: tl.constexpr,
    TILES: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    # SCALES: "row", one for all of K; "block", one for a step; "half", one for the low and one for the high nibbles;
    # "mxfp4", that format's.
    t: tl.constexpr = constants(Tiles, TILES)
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    total, ends = count_tiles(offs_ptr, M, N, groups, t)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        group, row, row_end, col, _, _, _ = locate_tile(tile, ends, offs_ptr, M, N, K, GROUP_M, t)
        group_64 = group.to(tl.int64)
        rows, cols, ks = tl.arange(0, t.BLOCK_M), tl.arange(0, t.BLOCK_N), tl.arange(0, HALF)
        row_mask, col_mask = rows < row_end - row, cols < N - col
        a_offsets = ks[:, None].to(OFFSET) * a_stride_k + rows[None, :].to(OFFSET) * a_stride_m
        a_tile = a_ptr + row.to(tl.int64) * a_stride_m + a_offsets
        in_row = tl.arange(0, HALF // 4)
        if EVEN_K:
            w_tile = w_ptr + (group_64 * N + col) * (K // 8) + (cols[:, None] * (K // 8) + in_row[None, :])
        else:
            pitch = tl.cdiv(K, 2 * HALF) * (HALF // 4)
            w_tile = w_ptr + (group_64 * N + col) * pitch + (cols[:, None] * pitch + in_row[None, :])
        if SCALES == "mxfp4":
            scale_at = (group_64 * tl.cdiv(K, 128) * N + col + cols) * 4
        else:
            scale_groups = 1 if SCALES == "row" else K // GROUP_SIZE
            scale_at = (group_64 * scale_groups) * N + col + cols
        acc = tl.zeros((t.BLOCK_N, t.BLOCK_M), tl.float32)
        SECOND: tl.constexpr = 1 if SCALES == "half" else 0
        if SCALES == "mxfp4":
            scale_low = tl.load(scales_ptr + scale_at, mask=col_mask, other=0)
            scale_high = tl.load(scales_ptr + scale_at + 1, mask=col_mask, other=0)
        else:
            # Loaded a step before they are needed: straight into registers, as nothing narrow can be copied ahead.
            scale_low = tl.load(scales_ptr + scale_at, mask=col_mask, other=0.0)
            scale_high = tl.load(scales_ptr + scale_at + SECOND * N, mask=col_mask, other=0.0)
            if zeros_ptr is not None:
                zero_low = tl.load(zeros_ptr + scale_at, mask=col_mask, other=0.0)
                zero_high = tl.load(zeros_ptr + scale_at + SECOND * N, mask=col_mask, other=0.0)
        for k in range(0, K, 2 * HALF):
            q = tl.load(w_tile) if EVEN_N else tl.load(w_tile, mask=col_mask[:, None], other=0)
            a_low = tl.load(a_tile, mask=row_mask[None, :], other=0.0)
            if EVEN_K:
                a_high = tl.load(a_tile + HALF * a_stride_k, mask=row_mask[None, :], other=0.0)
            else:
                high_mask = row_mask[None, :] & (k + HALF + ks[:, None] < K)
                a_high = tl.load(a_tile + HALF * a_stride_k, mask=high_mask, other=0.0)
            w_tile += HALF // 4
            a_tile += 2 * HALF * a_stride_k
            if SCALES == "mxfp4":
                l0, l1, l2, l3, h0, h1, h2, h3 = unpack_mxfp4(q, DTYPE, ASSEMBLY)
                if PRODUCTS == "mma.sync":
                    low, high = side_by_side(l0, l1, l2, l3), side_by_side(h0, h1, h2, h3)
                else:
                    low, high = in_order(l0, l1, l2, l3), in_order(h0, h1, h2, h3)
            else:
                low, high = unpack(q, DTYPE, PRODUCTS == "mma.sync", ASSEMBLY)
            if PRODUCTS == "mma.sync":
                a_low, a_high = by_word(a_low), by_word(a_high)
            if SCALES == "mxfp4":
                first, second = power_of_two(scale_low).to(DTYPE), power_of_two(scale_high).to(DTYPE)
                after = k + 2 * HALF
                next_at = scale_at + after // 128 * N * 4 + after % 128 // HALF
                next_mask = col_mask & (after < K)
                scale_low = tl.load(scales_ptr + next_at, mask=next_mask, other=0)
                scale_high = tl.load(scales_ptr + next_at + 1, mask=next_mask, other=0)
                acc = tl.dot(low * first[:, None], a_low, acc)
                acc = _awaited(tl.dot(high * second[:, None], a_high, acc), ASSEMBLY and PRODUCTS == "wgmma")
            elif SCALES == "row":
                if zeros_ptr is not None:
                    low, high = shifted(low, zero_low, DTYPE), shifted(high, zero_high, DTYPE)
                acc = tl.dot(low, a_low, acc)
                acc = _awaited(tl.dot(high, a_high, acc), ASSEMBLY and PRODUCTS == "wgmma")
            else:
                first, second = scale_low, scale_high
                next_at = scale_at + (k + 2 * HALF) // GROUP_SIZE * N
                next_mask = col_mask & (k + 2 * HALF < K)
                scale_low = tl.load(scales_ptr + next_at, mask=next_mask, other=0.0)
                scale_high = tl.load(scales_ptr + next_at + SECOND * N, mask=next_mask, other=0.0)
                if zeros_ptr is not None:
                    low, high = shifted(low, zero_low, DTYPE), shifted(high, zero_high, DTYPE)
                    zero_low = tl.load(zeros_ptr + next_at, mask=next_mask, other=0.0)
                    zero_high = tl.load(zeros_ptr + next_at + SECOND * N, mask=next_mask, other=0.0)
                if SECOND:
                    acc += tl.dot(low, a_low) * first.to(tl.float32)[:, None]
                    acc += tl.dot(high, a_high) * second.to(tl.float32)[:, None]
                else:
                    part = tl.dot(low, a_low)
                    part = tl.dot(high, a_high, part)
                    acc += part * first.to(tl.float32)[:, None]
        if SCALES == "row":
            acc *= scale_low.to(tl.float32)[:, None]
        if bias_ptr is not None:
            bias_at = bias_ptr + group_64 * bias_stride_g + (col + cols) * bias_stride_n
            acc += tl.load(bias_at, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        out_rows = row.to(tl.int64) + rows
        out_at = out_ptr + out_rows[None, :] * out_stride_m + (col + cols).to(tl.int64)[:, None] * out_stride_n
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_mask[None, :] & col_mask[:, None])
