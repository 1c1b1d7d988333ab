"""Grouped matrix product in plain Triton with pointers and masks: takes everything, on sm_80 and later.

For each group g:  out_g[m, n] = sum_k a_g[m, k] * b_g[k, n] (+ bias[g, n]), accumulated in float32, where

    RAGGED_M  a_g = a[rows of g]      [M_g, K]   b_g = b[g]                [K, N]    out[rows of g]      [M_g, N]
    RAGGED_K  a_g = a[:, columns]     [M, K_g]   b_g = b[rows of g]        [K_g, N]  out[g]              [M, N]
    RAGGED_N  a_g = a[g]              [M, K]     b_g = b[:, columns of g]  [K, N_g]  out[:, columns]     [M, N_g]
    BATCHED   a_g = a[g]              [M, K]     b_g = b[g]                [K, N]    out[g]              [M, N]

One kernel serves all four: a tile knows its group, its rows, its columns and its summands, and every operand has a
group stride (0 where the group only shifts a range). Any strides, sizes and alignments are right; how fast depends on
whether neighbouring elements can be loaded 16 bytes at a time (contiguous dimension, other strides and the base
multiples of 16 bytes), which Triton finds out from the arguments' divisibility.

Bytes: a and b at least once and out once; a tile reads (BLOCK_M + BLOCK_N) * K elements, mostly from L2 by the raster
order of `persistent.py`. Limits: cp.async takes its addresses from registers, which costs issue slots
that TMA does not: about 0.6 of the peak on Hopper. Small groups are limited by the bytes of b.
float32 without TF32 has no tensor cores and runs on FMA units.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from expertile.device import Device
from expertile.ops.backend import Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out, rows_are_tokens
from expertile.ops.grouped_mm.persistent import (
    Tiles,
    best_group_m,
    count_tiles,
    locate_tile,
    mean_tile_extents,
    sizes_read,
    tile_options,
    tiles_bound,
    tiles_of,
)
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch.device import no_triton, program_count, torch_device
from expertile.ops.launch.launch import Launch, Pointer, met
from expertile.ops.launch.shape import constants


@dataclass(frozen=True)
class Config:
    """Tile sizes in elements; `group_m` tile rows per raster panel; `blocks_per_sm` programs launched per SM."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    blocks_per_sm: int = 1


@triton.jit
def _in_eights(x, EIGHTS: tl.constexpr):
    """x, known to be a multiple of 8 where EIGHTS says so."""
    if EIGHTS:
        x = x // 8 * 8
    return x


@triton.jit(do_not_specialize=["groups", "GROUP_M"])
def _pointer_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    offs_ptr,
    bias_ptr,
    M,
    N,
    K,
    groups,
    a_stride_g,
    a_stride_m,
    a_stride_k,
    b_stride_g,
    b_stride_k,
    b_stride_n,
    out_stride_g,
    out_stride_m,
    out_stride_n,
    bias_stride_g,
    bias_stride_n,
    GROUP_M,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    TILES: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    t: tl.constexpr = constants(Tiles, TILES)
    M, N, K = _in_eights(M, EIGHTS[0]), _in_eights(N, EIGHTS[1]), _in_eights(K, EIGHTS[2])
    a_stride_g, a_stride_m = _in_eights(a_stride_g, EIGHTS[3]), _in_eights(a_stride_m, EIGHTS[4])
    a_stride_k, b_stride_g = _in_eights(a_stride_k, EIGHTS[5]), _in_eights(b_stride_g, EIGHTS[6])
    b_stride_k, b_stride_n = _in_eights(b_stride_k, EIGHTS[7]), _in_eights(b_stride_n, EIGHTS[8])
    out_stride_g, out_stride_m = _in_eights(out_stride_g, EIGHTS[9]), _in_eights(out_stride_m, EIGHTS[10])
    out_stride_n = _in_eights(out_stride_n, EIGHTS[11])
    total, ends = count_tiles(offs_ptr, M, N, groups, t)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        place = locate_tile(tile, ends, offs_ptr, M, N, K, GROUP_M, t)
        group, row, row_end, col, col_end, k_start, k_length = place
        # A tile's corner may lie more than 2^31 elements in; inside the tile OFFSET is as wide as it must be.
        group_64, row_64, col_64 = group.to(tl.int64), row.to(tl.int64), col.to(tl.int64)
        k_64 = tl.full((), 0, tl.int64) + k_start
        rows = tl.arange(0, t.BLOCK_M).to(OFFSET)[:, None]
        cols = tl.arange(0, t.BLOCK_N).to(OFFSET)[None, :]
        ks = tl.arange(0, t.BLOCK_K)
        a_tile = a_ptr + group_64 * a_stride_g + row_64 * a_stride_m + k_64 * a_stride_k
        b_tile = b_ptr + group_64 * b_stride_g + k_64 * b_stride_k + col_64 * b_stride_n
        a_offsets = rows * a_stride_m + ks.to(OFFSET)[None, :] * a_stride_k
        b_offsets = ks.to(OFFSET)[:, None] * b_stride_k + cols * b_stride_n
        a_step = tl.full((), t.BLOCK_K, tl.int64) * a_stride_k
        b_step = tl.full((), t.BLOCK_K, tl.int64) * b_stride_k
        a_rows = rows < row_end - row
        b_cols = cols < col_end - col
        acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        for k in range(0, k_length, t.BLOCK_K):
            if EVEN_K:
                a = tl.load(a_tile + a_offsets, mask=a_rows, other=0.0)
                b = tl.load(b_tile + b_offsets, mask=b_cols, other=0.0)
            else:
                a = tl.load(a_tile + a_offsets, mask=a_rows & (ks[None, :] < k_length - k), other=0.0)
                b = tl.load(b_tile + b_offsets, mask=b_cols & (ks[:, None] < k_length - k), other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            a_tile += a_step
            b_tile += b_step
        if bias_ptr is not None:
            bias_tile = bias_ptr + group_64 * bias_stride_g + col_64 * bias_stride_n
            acc += tl.load(bias_tile + cols * bias_stride_n, mask=b_cols, other=0.0).to(tl.float32)
        out_tile = out_ptr + group_64 * out_stride_g + row_64 * out_stride_m + col_64 * out_stride_n
        out_offsets = rows * out_stride_m + cols * out_stride_n
        tl.store(out_tile + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=a_rows & b_cols)


def _with_group(strides: tuple[int, ...]) -> tuple[int, ...]:
    """(group, row, column) strides, the group's 0 for a tensor without a group dimension."""
    return (0, *strides) if len(strides) == 2 else strides


@lru_cache(maxsize=1024)
def _launch(
    problem: Problem,
    config: Config,
    out_strides: tuple[int, ...],
    pointers: tuple[Pointer | None, ...],
    bias_strides: tuple[int, ...],
    device: int,
) -> Launch:
    """The launch on GPU `device` for a, b, out, offs and bias like `pointers`, output and bias of those strides."""
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tiles = tiles_of(problem, block_m, block_n, block_k)
    a_strides, b_strides, out_strides = map(_with_group, (problem.a_strides, problem.b_strides, out_strides))
    reach = max(
        block_m * a_strides[1] + block_k * a_strides[2],
        block_k * b_strides[1] + block_n * b_strides[2],
        block_m * out_strides[1] + block_n * out_strides[2],
    )
    options = {
        "EVEN_K": problem.layout is not Layout.RAGGED_K and problem.k % block_k == 0,
        "PRECISION": "tf32" if problem.allow_tf32 else "ieee",
        "OFFSET": tl.int32 if reach < 2**31 else tl.int64,
        **tile_options(tiles, config),
    }
    sizes = sizes_read(problem)
    # Triton looks for multiples of 16 by itself. Of 16-bit elements 8 are enough for a load of 16 bytes.
    options["EIGHTS"] = tuple(x % 16 == 8 for x in (*sizes, *a_strides, *b_strides, *out_strides))
    numbers = (*sizes, problem.groups, *a_strides, *b_strides, *out_strides, *bias_strides, config.group_m)
    most = tiles_bound(tiles, problem.groups, problem.m, problem.n)
    programs = program_count(torch_device(device), most, config.blocks_per_sm)
    return Launch(_pointer_kernel, (), (), pointers, numbers, options, programs)


def run(problem: Problem, operands: Operands, config: Config, out: torch.Tensor | None = None) -> torch.Tensor:
    """Queue the kernel on the current stream; `out` (any strides) is written in place if given."""
    out = new_out(problem, operands, out)
    if problem.groups == 0 or problem.m == 0 or problem.n == 0:
        return out
    bias, device = operands.bias, operands.a.get_device()
    tensors = (operands.a, operands.b, out, operands.offs, bias)
    addresses, pointers = met(tensors)
    launch = _launch(problem, config, out.stride(), pointers, (0, 0) if bias is None else bias.stride(), device)
    launch.run(device, (), tensors, addresses)
    return out


def supports(problem: Problem, device: Device) -> str | None:
    """Everything but float64, on a GPU of compute capability 8.0 or later, or under the Triton interpreter."""
    if problem.dtype is torch.float64:
        return "float64 runs in torch's own products"
    if reason := no_triton(problem, device):
        return reason
    if not triton.knobs.runtime.interpret and problem.groups > 4096:
        return f"plans at most 4096 groups in registers, got {problem.groups}"
    return None


_TILES_16_BIT = (
    Config(128, 128, 64, 8, 3),
    Config(128, 128, 32, 8, 4),
    Config(64, 128, 64, 4, 3),
    Config(64, 64, 64, 4, 4),
    Config(32, 128, 64, 4, 4),
    Config(16, 128, 64, 4, 4),
    Config(16, 64, 128, 4, 4),
)
# 128 accumulators per thread leave mma.sync no registers for its operands, wgmma reads them from shared memory; nor do
# they leave any for the addresses of stores that are not 16 bytes wide.
_WIDE_TILE_16_BIT = Config(128, 256, 64, 8, 3)
# Operands that can only be loaded element by element: every element of a block costs a thread an address.
_TILES_NARROW = (
    Config(128, 128, 32, 8, 2),
    Config(64, 64, 32, 4, 2),
    Config(32, 64, 32, 4, 2),
    Config(16, 64, 32, 4, 2),
)
_TILES_TF32 = (
    Config(128, 128, 32, 8, 3),
    Config(64, 128, 32, 4, 3),
    Config(64, 64, 32, 4, 4),
    Config(32, 64, 32, 4, 4),
)
_TILES_FP32 = (Config(64, 64, 16, 8, 3), Config(32, 64, 16, 4, 3), Config(32, 32, 32, 4, 3))


def _loads_wide(problem: Problem) -> bool:
    """Whether both operands can be loaded 16 bytes at a time from the first element of any tile."""
    per_16_bytes = 16 // problem.dtype.itemsize
    # the dimension whose start in a tile is any number: the ragged one, where groups begin
    a_ragged = {Layout.RAGGED_M: 0, Layout.RAGGED_K: 1}.get(problem.layout)
    b_ragged = {Layout.RAGGED_K: 0, Layout.RAGGED_N: 1}.get(problem.layout)
    for strides, aligned, ragged in (
        (problem.a_strides, problem.a_aligned, a_ragged),
        (problem.b_strides, problem.b_aligned, b_ragged),
    ):
        contiguous = [i for i, s in enumerate(strides) if s == 1 and i != ragged]
        if not aligned or not contiguous:
            return False
        if any(s % per_16_bytes for i, s in enumerate(strides) if i != contiguous[-1]):
            return False
    return True


_variant = lru_cache(maxsize=1024)(replace)  # few differ, and making one takes longer than finding it


@lru_cache(maxsize=4096)
def configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The tiles whose stages fit shared memory, the one with the lowest modelled time first."""
    tiles: tuple[Config, ...]
    if problem.dtype.itemsize == 2 and not _loads_wide(problem):
        tiles = _TILES_NARROW
    elif problem.dtype.itemsize == 2:
        wide_stores = problem.layout is not Layout.RAGGED_N and problem.n * problem.out_dtype.itemsize % 16 == 0
        tiles = _TILES_16_BIT + ((_WIDE_TILE_16_BIT,) if device.capability == (9, 0) and wide_stores else ())
    else:
        tiles = _TILES_TF32 if problem.allow_tf32 else _TILES_FP32
    return tuple(sorted(fitted(tiles, problem, device, 1, 96), key=lambda c: _cost(problem, device, c)))


def fitted(tiles: Iterable[Config], problem: Problem, device: Device, sums: int, registers: int) -> list[Config]:
    """Those of `tiles` whose stages fit shared memory, as many to a multiprocessor as there is room for: a thread holds
    `sums` values for each element of its tile, and some `registers` for everything else."""
    smem = device.smem_bytes or 101376
    found = []
    for c in tiles:
        stages = (c.block_m + c.block_n) * c.block_k * problem.dtype.itemsize * c.num_stages
        if stages > smem:
            continue
        held = sums * c.block_m * c.block_n + registers * 32 * c.num_warps
        blocks = max(1, min(4, smem // stages, 65536 // held))
        group_m = best_group_m(problem, c.block_m, c.block_n, blocks * device.sm_count, device.l2_bytes)
        found.append(_variant(c, group_m=group_m, blocks_per_sm=blocks))
    return found


def invariant(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The widest tile of 64 rows: one for all numbers of rows, as the tensor cores' instruction, and with it the order
    of a sum, depends on the tile. On a GPU: what the interpreter multiplies with is numpy's choice."""
    if device.kind != "cuda" or not rows_are_tokens(problem):
        return ()
    tiles = [c for c in configs(problem, device) if c.block_m == 64]
    return (max(tiles, key=lambda c: c.block_n),) if tiles else ()


def _cost(problem: Problem, device: Device, config: Config) -> float:
    """Modelled time in arbitrary units: waves of tiles, each as long as its products, or its loads if they take longer.

    A tile of a x b elements needs a*b products and a+b loads for each summand; a pair of tensor cores does 128 products
    (in units of the 16-bit rate) in the time of about one load from L2.
    """
    rows, cols = mean_tile_extents(problem)
    tiles = problem.groups * -(-rows // config.block_m) * -(-cols // config.block_n)
    programs = device.sm_count * config.blocks_per_sm
    waves = max(1.0, tiles / programs) if tiles < 4 * programs else tiles / programs
    per_tile = max(config.block_m * config.block_n / 128, config.block_m + config.block_n)
    return waves * per_tile * config.blocks_per_sm


BACKEND = Backend(
    name="triton_pointer",
    summary="Triton, pointers and masks: any strides, sizes and layouts (sm_80+)",
    supports=supports,
    configs=configs,
    run=run,
    invariant=invariant,
    speed=Speed(0.595, 0.935, 1.5e-6, stores=0.475),
)
