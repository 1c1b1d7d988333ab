"""Rung 3, a masked pointer kernel: one launch, no padding, and everything else left to the compiler.

A program for each tile of 128 x 128 walks the groups until it finds its own and masks every load against the ends of
rows, columns and k. `do_not_specialize` withholds what report 000's kernels, which read sizes and addresses from tables
in device memory, cannot know either.

Changed from rung 2: our own kernel. Spends less of: padding, and host knowledge (offs stays on the device). Spends more
of: load instructions, 2 bytes each, through registers, and nothing in flight while the tensor cores work.
"""

from dataclasses import dataclass
from functools import partial

import triton
import triton.language as tl

from expertile.ladder._common import launch, takes_pointers
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.persistent import Tiles
from expertile.ops.launch.shape import constants


@dataclass(frozen=True)
class Config:
    """Tile sizes in elements."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    num_warps: int = 8
    num_stages: int = 4


@triton.jit
def walk_to_group(tile, offs_ptr, groups, tiles_n, BLOCK_M: tl.constexpr):
    """(group of the tile, its first row, the end of its rows, place of the tile in it, whether there is such a tile)"""
    group = 0
    start = 0
    end = tl.load(offs_ptr)
    tiles = tl.cdiv(end, BLOCK_M) * tiles_n
    while (tile >= tiles) & (group < groups - 1):
        tile -= tiles
        group += 1
        start = end
        end = tl.load(offs_ptr + group)
        tiles = tl.cdiv(end - start, BLOCK_M) * tiles_n
    return group, start, end, tile, tile < tiles


_UNKNOWN = ("a_ptr", "b_ptr", "out_ptr", "N", "K", "a_stride_m", "b_stride_g", "b_stride_n", "out_stride_m")


@triton.jit(do_not_specialize=_UNKNOWN, do_not_specialize_on_alignment=_UNKNOWN)
def _masked_kernel(
    a_ptr, b_ptr, out_ptr, offs_ptr, N, K, groups, a_stride_m, b_stride_g, b_stride_n, out_stride_m, TILES: tl.constexpr
):
    t: tl.constexpr = constants(Tiles, TILES)
    tiles_n = tl.cdiv(N, t.BLOCK_N)
    group, start, end, place, found = walk_to_group(tl.program_id(0), offs_ptr, groups, tiles_n, t.BLOCK_M)
    if found:
        row = start + place // tiles_n * t.BLOCK_M
        col = place % tiles_n * t.BLOCK_N
        rows = tl.arange(0, t.BLOCK_M)[:, None]
        cols = tl.arange(0, t.BLOCK_N)[None, :]
        ks = tl.arange(0, t.BLOCK_K)
        a_tile = a_ptr + row.to(tl.int64) * a_stride_m
        b_tile = b_ptr + group.to(tl.int64) * b_stride_g + col.to(tl.int64) * b_stride_n
        out_tile = out_ptr + row.to(tl.int64) * out_stride_m + col
        acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        for k in range(0, K, t.BLOCK_K):
            a_mask = (row + rows < end) & (k + ks[None, :] < K)
            b_mask = (k + ks[:, None] < K) & (col + cols < N)
            a = tl.load(a_tile + rows * a_stride_m + (k + ks[None, :]), mask=a_mask, other=0.0)
            b = tl.load(b_tile + cols * b_stride_n + (k + ks[:, None]), mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc)
        out_mask = (row + rows < end) & (col + cols < N)
        tl.store(out_tile + rows * out_stride_m + cols, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


BACKEND = Backend(
    name="3_masked_pointer",
    summary="one program per tile, groups walked, every load masked, no hints",
    supports=takes_pointers,
    configs=lambda problem, device: (Config(),),
    run=partial(launch, _masked_kernel),
)
