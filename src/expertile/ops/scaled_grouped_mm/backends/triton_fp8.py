"""Scaled grouped FP8 product in plain Triton with pointers and masks, for sm_89 and later.

For each group g, with one block of scales for every 128 summands and promotion in float32:

    out_g[m, n] = Σ_blocks scale_a[m, block] · scale_b[n, block] · (Σ_{k in block} a_g[m, k] · b_g[k, n]) (+ bias[g, n])

    RAGGED_M  a [M_tot, K]   b [G, K, N]    out[rows of g] = â[rows of g] @ b̂[g]
    RAGGED_K  a [M, K_tot]   b [K_tot, N]   out[g] = â[:, columns of g] @ b̂[rows of g]

The inner sums are whole `tl.dot`s, accumulated by the tensor cores (on Hopper with about 14 bits, over at most 128
summands); scales of neighbouring blocks are never multiplied together. Any strides, K and N are right; operands are
read 16 bytes at a time only where K is contiguous and strides are multiples of 16 bytes.

Bytes: a and b at least once, out once; a tile reads (BLOCK_M + BLOCK_N) · K bytes, mostly from L2. Limits: the
promotion stands between the products of one tile and the next ones, so the tensor cores wait for it unless another
program shares the multiprocessor.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from expertile.device import Device
from expertile.ops.grouped_mm.backend import new_out
from expertile.ops.grouped_mm.backends.triton_pointer import Config, fitted
from expertile.ops.grouped_mm.persistent import (
    Tiles,
    count_tiles,
    locate_tile,
    mean_tile_extents,
    sizes_read,
    tile_options,
    tiles_bound,
    tiles_of,
)
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.launch.device import current_device, program_count
from expertile.ops.launch.shape import constants
from expertile.ops.launch.versions import FP_FUSION
from expertile.ops.scaled_grouped_mm.problem import Backend, Operands, Recipe, ScaledProblem


@triton.jit(do_not_specialize=["groups", "group_m"])
def _fp8_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    offs_ptr,
    bias_ptr,
    M,
    N,
    K,
    groups,
    group_m,
    a_strides,
    b_strides,
    out_strides,
    sa_strides,
    sb_strides,
    bias_strides,
    RECIPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    OFFSET: tl.constexpr,
    TILES: tl.constexpr,
):
    t: tl.constexpr = constants(Tiles, TILES)
    total, ends = count_tiles(offs_ptr, M, N, groups, t)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        place = locate_tile(tile, ends, offs_ptr, M, N, K, group_m, t)
        group, row, row_end, col, col_end, k_start, k_length = place
        # A tile's corner may lie more than 2^31 elements in; inside the tile OFFSET is as wide as it must be.
        group_64, row_64, col_64 = group.to(tl.int64), row.to(tl.int64), col.to(tl.int64)
        k_64 = tl.full((), 0, tl.int64) + k_start
        if t.RAGGED == "k" and RECIPE != "row":
            k_64 = k_64 // 128 * 128  # says that it is a multiple, so operands are loaded 16 bytes at a time
        rows, cols, ks = tl.arange(0, t.BLOCK_M), tl.arange(0, t.BLOCK_N), tl.arange(0, t.BLOCK_K)
        a_rows, b_cols = rows < row_end - row, cols < col_end - col
        a_tile = a_ptr + row_64 * a_strides[0] + k_64 * a_strides[1]
        b_tile = b_ptr + col_64 * b_strides[2] + k_64 * b_strides[1]
        if t.RAGGED == "m":
            b_tile += group_64 * b_strides[0]
        a_offsets = rows.to(OFFSET)[:, None] * a_strides[0] + ks.to(OFFSET)[None, :] * a_strides[1]
        b_offsets = ks.to(OFFSET)[:, None] * b_strides[1] + cols.to(OFFSET)[None, :] * b_strides[2]
        a_step = tl.full((), t.BLOCK_K, tl.int64) * a_strides[1]
        b_step = tl.full((), t.BLOCK_K, tl.int64) * b_strides[1]
        first_block = (k_start // 128).to(tl.int64) if t.RAGGED == "k" else tl.full((), 0, tl.int64)
        sa_tile = scale_a_ptr + row_64 * sa_strides[1] + first_block * sa_strides[2]
        sb_tile = scale_b_ptr + group_64 * sb_strides[0] + first_block * sb_strides[2]
        if RECIPE == "block":
            sb_tile += (col_64 // 128) * sb_strides[1]
        else:
            sb_tile += col_64 * sb_strides[1]
        if RECIPE == "row":
            sa_tile += group_64 * sa_strides[0]
        acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        for k in range(0, k_length, t.BLOCK_K):
            if EVEN_K:
                a = tl.load(a_tile + a_offsets, mask=a_rows[:, None], other=0.0)
                b = tl.load(b_tile + b_offsets, mask=b_cols[None, :], other=0.0)
            else:
                a = tl.load(a_tile + a_offsets, mask=a_rows[:, None] & (ks[None, :] < k_length - k), other=0.0)
                b = tl.load(b_tile + b_offsets, mask=b_cols[None, :] & (ks[:, None] < k_length - k), other=0.0)
            part = tl.dot(a, b)
            if RECIPE == "row":
                acc += part
            else:
                block = k // 128
                scale_a = tl.load(sa_tile + rows * sa_strides[1] + block * sa_strides[2], mask=a_rows, other=0.0)
                if RECIPE == "block":
                    acc += part * (scale_a * tl.load(sb_tile + block * sb_strides[2]))[:, None]
                else:
                    scale_b = tl.load(sb_tile + cols * sb_strides[1] + block * sb_strides[2], mask=b_cols, other=0.0)
                    acc += part * scale_a[:, None] * scale_b[None, :]
            a_tile += a_step
            b_tile += b_step
        if RECIPE == "row":
            acc *= tl.load(sa_tile + rows * sa_strides[1], mask=a_rows, other=0.0)[:, None]
            acc *= tl.load(sb_tile + cols * sb_strides[1], mask=b_cols, other=0.0)[None, :]
        if HAS_BIAS:
            bias_tile = bias_ptr + group_64 * bias_strides[0] + col_64 * bias_strides[1]
            acc += tl.load(bias_tile + cols * bias_strides[1], mask=b_cols, other=0.0).to(tl.float32)[None, :]
        out_tile = out_ptr + row_64 * out_strides[1] + col_64 * out_strides[2]
        if t.RAGGED == "k":
            out_tile += group_64 * out_strides[0]
        out_offsets = rows.to(OFFSET)[:, None] * out_strides[1] + cols.to(OFFSET)[None, :] * out_strides[2]
        tl.store(out_tile + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=a_rows[:, None] & b_cols[None, :])


def scale_strides(problem: ScaledProblem) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Strides of scale_a over (groups, rows, blocks of k) and of scale_b over (groups, columns or blocks of columns,
    blocks of k), in elements; 0 where a scale does not depend on it."""
    a, b = problem.scale_a_strides, problem.scale_b_strides
    ragged_m = problem.layout is Layout.RAGGED_M
    if problem.recipe is Recipe.ROW:
        if ragged_m:
            return (0, a[0], 0), (b[0], b[1], 0)
        return (problem.m * a[0], a[0], 0), (problem.n * b[0], b[0], 0)
    return (0, *a), (b if ragged_m else (0, *b))  # type: ignore[return-value]


def run(problem: ScaledProblem, operands: Operands, config: Config, out: torch.Tensor | None = None) -> torch.Tensor:
    """Launch the kernel on the current stream; `out` (any strides) is written in place if given."""
    out = new_out(problem, operands, out)
    m, n, k, groups = problem.m, problem.n, problem.k, problem.groups
    if groups == 0 or m == 0 or n == 0:
        return out
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tiles, ragged_m = tiles_of(problem, block_m, block_n, block_k), problem.layout is Layout.RAGGED_M
    a_strides = problem.a_strides
    b_strides = problem.b_strides if ragged_m else (0, *problem.b_strides)
    out_strides = (0, *out.stride()) if ragged_m else out.stride()
    reach = max(
        block_m * a_strides[0] + block_k * a_strides[1],
        block_k * b_strides[1] + block_n * b_strides[2],
        block_m * out_strides[1] + block_n * out_strides[2],
    )
    bias = operands.bias
    device = operands.a.device
    programs = program_count(device, tiles_bound(tiles, groups, m, n), config.blocks_per_sm)
    with current_device(device):
        _fp8_kernel[(programs,)](
            operands.a,
            operands.b,
            out,
            operands.scale_a,
            operands.scale_b,
            operands.offs,
            bias,
            *sizes_read(problem),
            groups,
            config.group_m,
            a_strides,
            b_strides,
            out_strides,
            *scale_strides(problem),
            bias.stride() if bias is not None else (0, 0),
            RECIPE=problem.recipe.value,
            HAS_BIAS=bias is not None,
            EVEN_K=k % block_k == 0 if ragged_m else problem.recipe is not Recipe.ROW,
            OFFSET=tl.int32 if reach < 2**31 else tl.int64,
            **tile_options(tiles, config),
            **FP_FUSION,
        )
    return out


def supports(problem: ScaledProblem, device: Device) -> str | None:
    """Everything, on a GPU of compute capability 8.9 or later, or under the Triton interpreter."""
    if triton.knobs.runtime.interpret:
        return None
    if problem.device_type != "cuda" or not device.at_least(8, 9):
        return "needs a CUDA GPU of compute capability 8.9 or later, whose tensor cores take e4m3"
    if problem.groups > 4096:
        return f"plans at most 4096 groups in registers, got {problem.groups}"
    return None


# block_n and block_k divide 128.
_TILES = (
    Config(128, 64, 128, 8, 4),
    Config(128, 64, 128, 8, 3),
    Config(64, 128, 128, 8, 4),
    Config(64, 128, 128, 8, 3),
    Config(64, 64, 128, 4, 4),
    Config(16, 128, 128, 4, 4),
    Config(16, 64, 128, 4, 4),
)
# Sums and partial sums of 128 x 128 fill the registers: no room beside them for a scale of every column, nor, 128 deep,
# for a tail's masks; nor, on sm_120, for mma.sync's operands.
_WIDE = (Config(128, 128, 128, 8, 4), Config(128, 128, 128, 8, 3))
_WIDE_SHALLOW = Config(128, 128, 64, 8, 3)


def _tiles(problem: ScaledProblem, device: Device) -> tuple[Config, ...]:
    if problem.recipe is Recipe.VECTOR or device.at_least(12):
        return _TILES
    if problem.k % 128 or problem.has_bias:
        return (_WIDE_SHALLOW, *_TILES)
    return (*_WIDE, _WIDE_SHALLOW, *_TILES)


@lru_cache(maxsize=4096)
def configs(problem: ScaledProblem, device: Device) -> tuple[Config, ...]:
    """The tiles whose stages fit shared memory, the one with the lowest modelled time first."""
    # Sums and partial sums, and some 64 registers.
    tiles = fitted(_tiles(problem, device), problem, device, 2, 64)
    return tuple(sorted(tiles, key=lambda c: _cost(problem, device, c)))


def _cost(problem: ScaledProblem, device: Device, config: Config) -> float:
    """Modelled time in arbitrary units: waves of tiles, each as long as its products, or its loads if they take longer.

    A multiprocessor does 8192 FLOP in the clock in which it loads some 64 bytes; a tile's promotion costs about as much
    as a quarter of its products, and is hidden when two programs share the multiprocessor."""
    rows, cols = mean_tile_extents(problem)
    tiles = problem.groups * -(-rows // config.block_m) * -(-cols // config.block_n)
    programs = device.sm_count * config.blocks_per_sm
    waves = max(1.0, tiles / programs)
    products = max(config.block_m, 64) * config.block_n / 4096 * (1.25 if config.blocks_per_sm == 1 else 1.0)
    return waves * max(products, (config.block_m + config.block_n) / 64) * config.blocks_per_sm


BACKEND = Backend(
    name="triton_fp8",
    summary="Triton, pointers and masks: any strides, any K (sm_89+)",
    supports=supports,
    configs=configs,
    run=run,
)
