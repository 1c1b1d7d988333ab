"""Grouped matrix product in plain Triton with TMA descriptors, for sm_90 and later.

For each group g:  out_g[m, n] = sum_k a_g[m, k] * b_g[k, n] (+ bias[g, n]), accumulated in float32:

    RAGGED_M  a [M_tot, K]  b [G, K, N], stored so or as [G, N, K]   out[rows of g] = a[rows of g] @ b[g]
    RAGGED_K  a [M, K_tot] stored [K_tot, M]   b [K_tot, N]          out[g] = a[:, columns of g] @ b[rows of g]
    RAGGED_N  a [G, M, K]   b [K, N_tot]                             out[:, columns of g] = a[g] @ b[:, columns of g]
    BATCHED   a [G, M, K]   b [G, K, N]                              out[g] = a[g] @ b[g]

Every operand has one descriptor over the whole tensor, made by the host once per call. Where a block must end at the
group's end it is a ragged descriptor: two more dimensions whose strides cancel modulo 2^64 (the trick of
triton.tools.ragged_tma), so that the hardware drops stores past the end (out of RAGGED_M) and fills loads with zeros
(both operands of RAGGED_K). Elsewhere a block that reads into the next group only reaches elements that are not stored.
A block starts at a multiple of 16 bytes of the contiguous dimension. Where that is the ragged one (a of RAGGED_M by
columns, b of RAGGED_N by rows), the first tile of a group starts a little ahead of it.

Bytes: a and b at least once, out once; a tile reads (BLOCK_M + BLOCK_N) * K elements, mostly from L2 by the raster
order of `persistent.py`. Limits: wgmma's rate while K is long; the start and end of a tile, when no products run, while
it is short (`flatten` lets the next tile's loads start during the epilogue); bytes of b for groups of few rows.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton.language as tl

from expertile.device import Device
from expertile.ops.backend import Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out
from expertile.ops.grouped_mm.backends._tma import stored_order, unloadable
from expertile.ops.grouped_mm.backends._triton_tma_kernel import tma_kernel
from expertile.ops.grouped_mm.persistent import (
    best_group_m,
    mean_tile_extents,
    sizes_read,
    tile_options,
    tiles_bound,
    tiles_of,
)
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.grouped_mm.tiling import load_rows
from expertile.ops.launch.blocks import matrix, ragged
from expertile.ops.launch.device import no_triton, program_count, torch_device
from expertile.ops.launch.launch import Launch, Pointer, met
from expertile.ops.launch.pdl import pdl_options

_RAGGED_ROWS = 2**30  # the extent of a ragged descriptor: the most rows a tensor may have


@dataclass(frozen=True)
class Config:
    """Tile sizes in elements; `group_m` tile rows per raster panel; `flatten` fuses the loops over tiles and over k;
    `subtile` (1, 2 or 4) column parts the result is stored in, each through 1/subtile of the staging memory."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    flatten: bool = False
    subtile: int = 1
    blocks_per_sm: int = 1


_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _aligned_starts(problem: Problem) -> int:
    """Of which multiple a group's first tile has to start.

    A block's first element along the contiguous dimension has to lie at a multiple of 16 bytes; anything else is an
    illegal instruction to the hardware (triton-lang/triton issue 7385). Where that dimension is the ragged one, groups
    begin anywhere: their first tile starts a little ahead, and what lies ahead of the group is not stored."""
    layout, itemsize = problem.layout, problem.dtype.itemsize
    strides = {Layout.RAGGED_M: problem.a_strides, Layout.RAGGED_N: problem.b_strides}.get(layout)
    contiguous = "column" if layout is Layout.RAGGED_M else "row"
    return 16 // itemsize if strides is not None and stored_order(strides, itemsize) == contiguous else 1


@lru_cache(maxsize=1024)
def _launch(
    problem: Problem,
    config: Config,
    out_strides: tuple[int, ...],
    pointers: tuple[Pointer | None, ...],
    bias_strides: tuple[int, ...],
    device: int,
) -> Launch:
    """The launch on GPU `device` for out, offs and bias like `pointers`, an output and a bias of those strides."""
    layout, m, n, k, groups = problem.layout, problem.m, problem.n, problem.k, problem.groups
    dtype = problem.dtype
    a_column = stored_order(problem.a_strides, dtype.itemsize) == "column"
    b_column = stored_order(problem.b_strides, dtype.itemsize) == "column"
    a_shape = (m, k) if len(problem.a_strides) == 2 else (groups, m, k)
    b_shape = (k, n) if len(problem.b_strides) == 2 else (groups, k, n)
    if layout is Layout.RAGGED_K:  # a by columns, b by rows
        a = ragged(m, problem.a_strides[1], (config.block_k, config.block_m))
        b = ragged(n, problem.b_strides[0], (config.block_k, config.block_n))
    else:
        a = matrix(a_shape, problem.a_strides, (config.block_m, config.block_k), a_column)
        b = matrix(b_shape, problem.b_strides, (config.block_k, config.block_n), b_column)
    out_block = (config.block_m, config.block_n // config.subtile)
    tiles = tiles_of(problem, config.block_m, config.block_n, config.block_k, _aligned_starts(problem))
    to, *others = pointers
    assert to is not None
    out_by_tma = (
        to.aligned
        and layout is not Layout.RAGGED_N
        and tiles.ALIGN == 1
        and out_strides[-1] == 1
        and stored_order(out_strides, problem.out_dtype.itemsize) == "row"
    )
    out = None
    if out_by_tma:
        rows_end = layout is Layout.RAGGED_M
        out = ragged(n, out_strides[0], out_block) if rows_end else matrix(problem.out_shape, out_strides, out_block)
    options = {
        "A_COLUMN": a_column,
        "B_COLUMN": b_column,
        "OUT_BY_TMA": out_by_tma,
        "OUT_DTYPE": _TRITON_DTYPE[problem.out_dtype],
        **tile_options(tiles, config),
        "FLATTEN": config.flatten,
        "SUBTILE": config.subtile,
        # Triton may keep one stage less than it is asked for.
        **pdl_options(device, _smem_bytes(problem, replace(config, num_stages=config.num_stages - 1)), problem),
    }
    strides = (0, 0, 0) if out_by_tma else (0, *out_strides)[-3:]
    numbers = (*sizes_read(problem), groups, *strides, *bias_strides, config.group_m)
    programs = program_count(torch_device(device), tiles_bound(tiles, groups, m, n), config.blocks_per_sm)
    dtypes, pointers = (dtype, dtype, problem.out_dtype), (None if out_by_tma else to, *others)
    return Launch(tma_kernel, (a, b, out), dtypes, pointers, numbers, options, programs)


def run(problem: Problem, operands: Operands, config: Config, out: torch.Tensor | None = None) -> torch.Tensor:
    """Queue the kernel on the current stream; `out` is written in place if given."""
    a, b, offs, bias = operands.a, operands.b, operands.offs, operands.bias
    out = new_out(problem, operands, out)
    if problem.groups == 0 or problem.m == 0 or problem.n == 0:
        return out
    device, (addresses, pointers) = a.get_device(), met((out, offs, bias))
    launch = _launch(problem, config, out.stride(), pointers, (0, 0) if bias is None else bias.stride(), device)
    to, *others = addresses
    if launch.blocks[2] is None:
        launch.run(device, (a, b, None), (out, offs, bias), (a.data_ptr(), b.data_ptr(), None, to, *others))
    else:
        launch.run(device, (a, b, out), (None, offs, bias), (a.data_ptr(), b.data_ptr(), to, None, *others))
    return out


def supports(problem: Problem, device: Device) -> str | None:
    """16-bit (or TF32) operands whose strides and base TMA can take, on sm_90 or later or under the interpreter."""
    if reason := no_triton(problem, device, 9):
        return reason
    if device.kind == "cuda" and device.smem_bytes < 192 * 1024:
        return f"its tiles need 227 KiB of shared memory per block, this GPU has {device.smem_bytes // 1024} KiB"
    if problem.dtype is torch.float64:
        return "float64 runs in torch's own products"
    if problem.groups > 4096:
        return f"plans at most 4096 groups in registers, got {problem.groups}"
    if problem.k == 0:
        return "a descriptor cannot describe k = 0"
    if reason := unloadable(problem):
        return reason
    if problem.dtype is torch.float32:
        if not problem.allow_tf32:
            return "float32 without TF32 has no tensor cores to feed"
        if problem.a_strides[-1] != 1 or problem.b_strides[-2] != 1:
            return "TF32 wgmma needs k contiguous in both operands"
    if max(problem.m, problem.n, problem.k) > _RAGGED_ROWS:
        return "a ragged descriptor reaches at most 2^30 rows"
    return None


# (tile, warps, stages) worth trying, for 16-bit operands; BLOCK_K halves for TF32.
_TILES = (
    Config(128, 256, 64, 8, 3, flatten=True),
    Config(128, 256, 64, 8, 4, flatten=True, subtile=2),
    Config(128, 256, 64, 8, 3),
    Config(128, 128, 64, 4, 4, flatten=True),
    Config(128, 128, 64, 8, 4, flatten=True),
    Config(128, 128, 64, 4, 3, blocks_per_sm=2),
    Config(64, 256, 64, 4, 4, flatten=True),
    Config(64, 256, 64, 4, 4),
    Config(64, 128, 64, 4, 4, blocks_per_sm=2),
    Config(64, 128, 128, 4, 4, flatten=True),
    Config(64, 128, 128, 4, 4),
    Config(64, 64, 128, 4, 3, blocks_per_sm=2),
)


_variant = lru_cache(maxsize=1024)(replace)  # few differ, and making one takes longer than finding it


@lru_cache(maxsize=4096)
def configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The tiles whose stages fit shared memory, the one with the lowest modelled time first."""
    itemsize = problem.dtype.itemsize
    by_pointers = problem.layout is Layout.RAGGED_N or _aligned_starts(problem) > 1
    by_pointers = by_pointers or problem.n * problem.out_dtype.itemsize % 16 != 0
    found = []
    for tile in _TILES:
        config = _variant(tile, block_k=tile.block_k * 2 // itemsize)
        if _smem_bytes(problem, config) > (device.smem_bytes or 232448) // config.blocks_per_sm:
            continue
        programs = device.sm_count * config.blocks_per_sm
        group_m = best_group_m(problem, config.block_m, config.block_n, programs, device.l2_bytes)
        flatten = config.flatten and problem.layout is not Layout.RAGGED_K and not by_pointers
        subtile = config.subtile
        if by_pointers:
            # More than 32 addresses per thread at a time spill.
            subtile = max(1, min(4, config.block_m * config.block_n // (1024 * config.num_warps)))
        found.append(_variant(config, group_m=group_m, flatten=flatten, subtile=subtile))
    return tuple(sorted(dict.fromkeys(found), key=lambda c: _cost(problem, device, c)))


def _smem_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of the stages and the staged result, barriers included."""
    stage = (config.block_m + config.block_n) * config.block_k * problem.dtype.itemsize
    staged = config.block_m * config.block_n // config.subtile * problem.out_dtype.itemsize
    return stage * config.num_stages + staged + 1024


def _cost(problem: Problem, device: Device, config: Config) -> float:
    """Modelled clocks of one call: waves of tiles, each the longer of its products and its bytes from memory, and its
    start and end.

    Products run at the dense peak (2048 multiply-adds per clock and SM on Hopper) times a share. It falls with the
    tile, as narrower wgmma and more blocks per SM read shared memory oftener. From memory come a and b once per group;
    what a tile reads through L2 (64 bytes per clock and SM) mostly overlaps, a tenth is counted: it settles ties. Where
    rows begin anywhere in L2's lines it is what takes longest.
    """
    rows, cols = mean_tile_extents(problem)
    summands = problem.mean_group if problem.layout is Layout.RAGGED_K else problem.k
    tiles_m, tiles_n = -(-rows // config.block_m), -(-cols // config.block_n)
    tiles = problem.groups * tiles_m * tiles_n
    programs = device.sm_count * config.blocks_per_sm
    waves = -(-tiles // programs) if tiles < 8 * programs else tiles / programs + 0.5
    share = {128 * 256: 1.0, 128 * 128: 0.93, 64 * 256: 0.9, 64 * 128: 0.75}.get(config.block_m * config.block_n, 0.5)
    products = config.block_m * config.block_n * summands / 2048 / share
    per_group = (rows + cols) * summands * problem.dtype.itemsize + rows * cols * problem.out_dtype.itemsize
    bytes_per_clock = (device.memory_bps or 4e12) / device.max_clock_hz / device.sm_count
    bytes_clocks = per_group / (tiles_m * tiles_n) / bytes_per_clock
    loaded = load_rows(config.block_m, config.block_n, problem.aligned_rows)
    l2_clocks = loaded * summands * problem.dtype.itemsize / 64
    ends = 1600 if config.flatten else 2400
    slowest = max(products, bytes_clocks, 0.0 if all(problem.aligned_rows) else l2_clocks)
    return waves * ((slowest + 0.1 * l2_clocks) * config.blocks_per_sm + ends)


BACKEND = Backend(
    name="triton_tma",
    summary="Triton, TMA descriptors, persistent with an L2 raster order (sm_90+)",
    supports=supports,
    configs=configs,
    run=run,
    speed=Speed(0.645, 0.91, 1.7e-6, stores=0.47),
)
