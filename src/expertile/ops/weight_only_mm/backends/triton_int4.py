"""Grouped product with 4-bit weights in plain Triton, for sm_80 and later: dequantised in registers, never in memory.

For each group g:  out_g[m, n] = Σ_k a_g[m, k] · (q_g[n, k] − zero_g[n, k // group]) · scale_g[n, k // group]  (+ bias)

Operands are swapped: a tile computes out_gᵀ [BLOCK_N, BLOCK_M] = ŵ · aᵀ, so that the weights are the first operand of
the tensor cores, which comes from registers, and few rows of a become a narrow second one (a multiple of 8) instead of
padding a tile of 64. A step takes the words of one packed block (`formats.int4.packing`), [BLOCK_N, half / 4], whose
low and high nibbles are two operands [BLOCK_N, half], against two runs of a.

Unpacking takes 11 instructions for 8 values (triton_unpack.py) and leaves q − 8. A word's values are those of one lane
of a matrix product, but Triton's layouts get there in two ways. Where products take a from shared memory (wgmma,
tcgen05), unpacked values are put in the order of K, which moves none. Where a comes through registers (mma.sync), they
stay as they come and a's rows follow them, read by ldmatrix: Triton gives a lane of mma.sync four neighbours where a
word of four comes from a join, and would otherwise send unpacked values through shared memory.

Zero points and scales come on top:

    scale on the sum      the products of one group of K with q − zero are added up, then scaled in float32: exact
                          weights, a multiply-add for every element of out and group of K, twice the accumulators
    scale on the weights  (q − zero) · scale is rounded to 16 bits as `Int4Weight.dequantize` does: half an instruction
                          a value more, one chain of products over all of K

An `Mxfp4Weight` is unpacked by triton_mxfp4.py, steps of 64 of K, and its scales multiply the weights, exactly.

Bytes: a (tiles of a group share it in L2) and out once, the packed weights and scales once for every BLOCK_M rows. Few
rows are limited by those bytes; many by the unpacking, which every BLOCK_M rows pay for again, and by the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from expertile.device import Device
from expertile.formats.int4.packing import words
from expertile.ops.grouped_mm.backend import new_out
from expertile.ops.grouped_mm.persistent import (
    best_group_m,
    count_tiles,
    groups_p2,
    locate_tile,
    mean_tile_extents,
    tiles_bound,
)
from expertile.ops.launch import versions
from expertile.ops.launch.blocks import Blocks
from expertile.ops.launch.device import program_count, torch_device
from expertile.ops.launch.launch import Launch, pointer
from expertile.ops.launch.versions import FP_FUSION
from expertile.ops.weight_only_mm.backend import Backend, Operands
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem
from expertile.ops.weight_only_mm.triton_mxfp4 import power_of_two, unpack_mxfp4
from expertile.ops.weight_only_mm.triton_unpack import by_word, in_order, shifted, side_by_side, unpack


@dataclass(frozen=True)
class Config:
    """A tile is block_m rows of a by block_n columns of out, K in steps of one packed block.

    scale_weights: see above. tma: a, the weights and their scales come by TMA (sm_90+). products: the instructions that
    Triton multiplies with, "wgmma" (sm_90), "mma.sync" (sm_8x, sm_12x) or "tcgen05" (sm_10x); results are right with
    any. group_m: tile rows per raster panel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    scale_weights: bool = False
    tma: bool = False
    blocks_per_sm: int = 1
    products: str = "wgmma"
    group_m: int = 8


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
def _weight_only_kernel(
    a_desc,
    w_desc,
    scales_desc,
    zeros_desc,
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
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HALF: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    # SCALES: "row", one for all of K; "block", one for a step; "half", one for the low and one for the high nibbles;
    # "mxfp4", that format's.
    total, ends = count_tiles(offs_ptr, M, N, groups, "m", GROUPS_P2, BLOCK_M, BLOCK_N)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        group, row, row_end, col, _, _, _ = locate_tile(
            tile, ends, offs_ptr, M, N, K, GROUP_M, "m", GROUPS_P2, BLOCK_M, BLOCK_N
        )
        group_64 = group.to(tl.int64)
        rows, cols, ks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HALF)
        row_mask, col_mask = rows < row_end - row, cols < N - col
        a_tile = a_ptr
        w_tile = w_ptr
        if not TMA:
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
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        SECOND: tl.constexpr = 1 if SCALES == "half" else 0
        if SCALES == "mxfp4":
            scale_low = tl.load(scales_ptr + scale_at, mask=col_mask, other=0)
            scale_high = tl.load(scales_ptr + scale_at + 1, mask=col_mask, other=0)
        elif SCALES == "row" or not TMA:
            # Loaded a step before they are needed: straight into registers, as nothing narrow can be copied ahead.
            scale_low = tl.load(scales_ptr + scale_at, mask=col_mask, other=0.0)
            scale_high = tl.load(scales_ptr + scale_at + SECOND * N, mask=col_mask, other=0.0)
            if HAS_ZEROS:
                zero_low = tl.load(zeros_ptr + scale_at, mask=col_mask, other=0.0)
                zero_high = tl.load(zeros_ptr + scale_at + SECOND * N, mask=col_mask, other=0.0)
        for k in range(0, K, 2 * HALF):
            if TMA:
                q = w_desc.load([group, col, k // 8]).reshape(BLOCK_N, HALF // 4)
                a_low = a_desc.load([row, k]).T
                a_high = a_desc.load([row, k + HALF]).T
            else:
                if EVEN_N:
                    q = tl.load(w_tile)
                else:
                    q = tl.load(w_tile, mask=col_mask[:, None], other=0)
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
                if HAS_ZEROS:
                    low, high = shifted(low, zero_low, DTYPE), shifted(high, zero_high, DTYPE)
                acc = tl.dot(low, a_low, acc)
                acc = _awaited(tl.dot(high, a_high, acc), ASSEMBLY and PRODUCTS == "wgmma")
            else:
                if TMA:
                    block = k // GROUP_SIZE
                    first = scales_desc.load([group, block, col]).reshape(BLOCK_N)
                    second = scales_desc.load([group, block + SECOND, col]).reshape(BLOCK_N) if SECOND else first
                    if HAS_ZEROS:
                        zero = zeros_desc.load([group, block, col]).reshape(BLOCK_N)
                        low = shifted(low, zero, DTYPE)
                        high = shifted(
                            high, zeros_desc.load([group, block + 1, col]).reshape(BLOCK_N) if SECOND else zero, DTYPE
                        )
                else:
                    first, second = scale_low, scale_high
                    next_at = scale_at + (k + 2 * HALF) // GROUP_SIZE * N
                    next_mask = col_mask & (k + 2 * HALF < K)
                    scale_low = tl.load(scales_ptr + next_at, mask=next_mask, other=0.0)
                    scale_high = tl.load(scales_ptr + next_at + SECOND * N, mask=next_mask, other=0.0)
                    if HAS_ZEROS:
                        low, high = shifted(low, zero_low, DTYPE), shifted(high, zero_high, DTYPE)
                        zero_low = tl.load(zeros_ptr + next_at, mask=next_mask, other=0.0)
                        zero_high = tl.load(zeros_ptr + next_at + SECOND * N, mask=next_mask, other=0.0)
                if SCALE_WEIGHTS:
                    acc = tl.dot(low * first[:, None], a_low, acc)
                    acc = _awaited(tl.dot(high * second[:, None], a_high, acc), ASSEMBLY and PRODUCTS == "wgmma")
                elif SECOND:
                    acc += tl.dot(low, a_low) * first.to(tl.float32)[:, None]
                    acc += tl.dot(high, a_high) * second.to(tl.float32)[:, None]
                else:
                    part = tl.dot(low, a_low)
                    part = tl.dot(high, a_high, part)
                    acc += part * first.to(tl.float32)[:, None]
        if SCALES == "row":
            acc *= scale_low.to(tl.float32)[:, None]
        if HAS_BIAS:
            bias_at = bias_ptr + group_64 * bias_stride_g + (col + cols) * bias_stride_n
            acc += tl.load(bias_at, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        out_rows = row.to(tl.int64) + rows
        out_at = out_ptr + out_rows[None, :] * out_stride_m + (col + cols).to(tl.int64)[:, None] * out_stride_n
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_mask[None, :] & col_mask[:, None])


_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _scales_in_a_step(problem: WeightOnlyProblem) -> str:
    """Which values of a packed block share a scale; SCALES of the kernel."""
    if problem.format == "mxfp4":
        return "mxfp4"
    if problem.group_size == problem.k:
        return "row"
    return "half" if problem.group_size == problem.half else "block"


@lru_cache(maxsize=1024)
def _launch(
    problem: WeightOnlyProblem,
    config: Config,
    out_strides: tuple[int, ...],
    aligned: tuple[bool, bool],
    bias: tuple[torch.dtype, bool, tuple[int, ...]] | None,
    device: int,
) -> Launch:
    """The launch on GPU `device` (-1: none), for an output of those strides, (out, offs) aligned or not to 16 bytes,
    and a bias of (dtype, aligned, strides)."""
    m, n, k, groups, half = problem.m, problem.n, problem.k, problem.groups, problem.half
    block_m, block_n = config.block_m, config.block_n
    dtype = problem.dtype
    reach = half * problem.a_strides[1] + block_m * problem.a_strides[0]
    options = {
        "TMA": config.tma,
        "DTYPE": _TRITON_DTYPE[dtype],
        "HAS_ZEROS": problem.has_zeros,
        "HAS_BIAS": problem.has_bias,
        "EVEN_N": n % block_n == 0,
        "EVEN_K": k % (2 * half) == 0,
        "SCALES": _scales_in_a_step(problem),
        "GROUP_SIZE": problem.group_size if problem.group_size != k else 0,
        "SCALE_WEIGHTS": config.scale_weights and problem.group_size != k,
        "HALF": half,
        "OFFSET": tl.int32 if reach < 2**31 else tl.int64,
        "GROUPS_P2": groups_p2(problem),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "PRODUCTS": config.products,
        "ASSEMBLY": not triton.knobs.runtime.interpret,
        "num_warps": config.num_warps,
        **FP_FUSION,
        "num_stages": config.num_stages,
    }
    if config.products == "mma.sync":
        # Triton's own choice may take registers that another block should have.
        options["maxnreg"] = min(255, 65536 // (32 * config.num_warps * config.blocks_per_sm) // 8 * 8)
    blocks: tuple[Blocks | None, ...] = (None, None, None, None)
    if config.tma:
        if reason := _not_for_tma(problem):
            raise ValueError(f"config: expected tma=False for this problem ({reason}), got True")
        per_group = problem.scale_groups
        scale_block = Blocks((groups, per_group, n), (per_group * n, n, 1), (1, 1, block_n))
        scaled = problem.group_size != k
        blocks = (
            Blocks((m, k), problem.a_strides, (block_m, half)),
            Blocks((groups, n, k // 8), (n * k // 8, k // 8, 1), (1, block_n, half // 4)),
            scale_block if scaled else None,
            scale_block if scaled and problem.has_zeros else None,
        )
    scales = pointer(torch.uint8 if problem.format == "mxfp4" else dtype, problem.b_aligned)
    return Launch(
        _weight_only_kernel,
        blocks,
        (dtype, torch.int32, dtype, dtype),
        (
            None if config.tma else pointer(dtype, problem.a_aligned),
            None if config.tma else pointer(torch.int32, problem.b_aligned),
            pointer(problem.out_dtype, aligned[0]),
            scales,
            scales if problem.has_zeros else None,
            pointer(torch.int32, aligned[1]),
            None if bias is None else pointer(bias[0], bias[1]),
        ),
        (0, n, k, groups, *problem.a_strides, *out_strides, *((0, 0) if bias is None else bias[2]), config.group_m),
        tuple(options.items()),
        program_count(torch_device(device), tiles_bound("m", groups, m, n, block_m, block_n), config.blocks_per_sm),
    )


def run(
    problem: WeightOnlyProblem, operands: Operands, config: Config, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Queue the kernel on the current stream; `out` (any strides) is written in place if given."""
    out = new_out(problem, operands, out)
    if problem.groups == 0 or problem.m == 0 or problem.n == 0:
        return out
    a, w, offs, bias = operands.a, operands.w, operands.offs, operands.bias
    packed = words(w.packed)
    to, offs_at, bias_at = out.data_ptr(), offs.data_ptr(), 0 if bias is None else bias.data_ptr()
    described = None if bias is None else (bias.dtype, bias_at % 16 == 0, bias.stride())
    device = a.get_device()
    launch = _launch(problem, config, out.stride(), (to % 16 == 0, offs_at % 16 == 0), described, device)
    zeros_at = 0 if w.zeros is None else w.zeros.data_ptr()
    pointers = (out, w.scales, w.zeros, offs, bias)
    pointers_at = (to, w.scales.data_ptr(), zeros_at, offs_at, bias_at)
    read = a, packed, w.scales, w.scales if w.zeros is None else w.zeros
    read_at = a.data_ptr(), packed.data_ptr(), pointers_at[1], zeros_at or pointers_at[1]
    unused = (None, None)
    if config.tma:
        launch.run(device, read, (*unused, *pointers), (*read_at, *unused, *pointers_at))
    else:
        nothing = (*unused, *unused)
        launch.run(device, nothing, (*read[:2], *pointers), (*nothing, *read_at[:2], *pointers_at))
    return out


def supports(problem: WeightOnlyProblem, device: Device) -> str | None:
    """Everything, on a GPU of compute capability 8.0 or later, or under the Triton interpreter."""
    if problem.groups > 4096:
        return f"plans at most 4096 groups in registers, got {problem.groups}"
    if not triton.knobs.runtime.interpret and (problem.device_type != "cuda" or not device.at_least(8)):
        return "needs a CUDA GPU of compute capability 8.0 or later (or TRITON_INTERPRET=1)"
    return None


_HOPPER = (
    Config(16, 64, 4, 5, blocks_per_sm=4),
    Config(16, 64, 4, 8, blocks_per_sm=3),
    Config(16, 64, 4, 5, tma=True, blocks_per_sm=4),
    Config(16, 128, 8, 5, blocks_per_sm=2),
    Config(16, 128, 8, 5, tma=True, blocks_per_sm=2),
    Config(16, 128, 4, 5, tma=True, blocks_per_sm=3),
    Config(32, 64, 4, 5, blocks_per_sm=3),
    Config(32, 128, 8, 4, blocks_per_sm=2),
    Config(32, 128, 8, 4, tma=True, blocks_per_sm=2),
    Config(64, 64, 4, 3, blocks_per_sm=2),
    Config(64, 128, 8, 4, tma=True, blocks_per_sm=1),
    Config(64, 128, 8, 3, scale_weights=True, tma=True, blocks_per_sm=2),
    Config(128, 64, 4, 3, scale_weights=True, tma=True, blocks_per_sm=2),
    Config(128, 128, 8, 4, tma=True),
    Config(128, 128, 8, 4, scale_weights=True, tma=True),
    Config(256, 128, 8, 3, scale_weights=True, tma=True),
)
_PORTABLE = (
    Config(16, 64, 4, 4, blocks_per_sm=4, products="mma.sync"),
    Config(16, 128, 8, 4, blocks_per_sm=2, products="mma.sync"),
    Config(32, 64, 4, 4, blocks_per_sm=2, products="mma.sync"),
    Config(64, 64, 4, 3, blocks_per_sm=2, products="mma.sync"),
    Config(64, 128, 8, 3, products="mma.sync"),
    Config(128, 64, 8, 3, products="mma.sync"),
    Config(128, 128, 8, 3, products="mma.sync"),
)


@lru_cache(maxsize=4096)
def configs(problem: WeightOnlyProblem, device: Device) -> tuple[Config, ...]:
    """The tiles that fit shared memory and that TMA, where they use it, can load; the lowest modelled time first."""
    found = []
    hopper = device.at_least(9) and not device.at_least(10)
    for c in _HOPPER if hopper else _PORTABLE:
        # Zero points, a second scale in a step and masked columns take registers that another block would have.
        if problem.format == "mxfp4":
            if c.tma:
                continue  # their scales come by pointers
            c = replace(c, scale_weights=True)
        heavy = not c.tma and (problem.has_zeros or problem.group_size == problem.half or problem.n % c.block_n > 0)
        if heavy and not hopper and c.block_m == 128:
            continue
        blocks = c.blocks_per_sm - 1 if heavy and c.blocks_per_sm > 1 else c.blocks_per_sm
        stage = c.block_n * problem.half + 4 * problem.half * c.block_m
        fits = stage * c.num_stages * blocks <= (device.smem_bytes or 101376)
        if fits and not (c.tma and _not_for_tma(problem)):
            products = "tcgen05" if device.at_least(10) and not device.at_least(12) else c.products
            # From Triton 3.8 on, a step of this tile on sm_80 has 236 values wait in memory, before it had none.
            if products == "mma.sync" and c.block_m * c.block_n > 128 * 64 and versions.TRITON >= (3, 8):
                continue
            programs = device.sm_count * blocks
            group_m = best_group_m(problem, c.block_m, c.block_n, programs, device.l2_bytes)
            found.append(replace(c, group_m=group_m, blocks_per_sm=blocks, products=products))
    return tuple(sorted(found, key=lambda c: _cost(problem, device, c)))


def _not_for_tma(problem: WeightOnlyProblem) -> str | None:
    """Why TMA cannot load this problem's operands, or None: it takes rows of whole 16 bytes, K contiguous."""
    if problem.format == "mxfp4":
        return "its scales are bytes, four beside one another"
    pitch, step = problem.a_strides
    if step != 1 or pitch <= 0 or pitch % 8 or not problem.a_aligned:
        return f"a must have K contiguous and rows that start on multiples of 16 bytes, got strides {problem.a_strides}"
    if problem.n % 8 or not problem.b_aligned:
        return f"scales must have rows of whole 16 bytes, got N = {problem.n}"
    return None


def _cost(problem: WeightOnlyProblem, device: Device, config: Config) -> float:
    """Modelled clocks of one call. A step of 128 of K takes a multiprocessor the longest of: its packed bytes from
    memory; its instructions (some 3.5 clocks for a column of out, measured in SASS); its products; and the last two
    one after the other, shared by the warp groups that run at once."""
    rows, cols = mean_tile_extents(problem)
    tiles = problem.groups * -(-rows // config.block_m) * -(-cols // config.block_n)
    clock, sms = device.max_clock_hz, device.sm_count
    macs = (device.peak("bf16") or 1e14) / 2 / clock / sms
    issue = 3.5 * config.block_n * (1.3 if config.scale_weights else 1 + config.block_m / 256)
    products = 128.0 * config.block_n * config.block_m / macs
    weight_bytes = 66.0 * config.block_n / ((device.memory_bps or 1e12) / clock / sms)
    groups_at_once = config.blocks_per_sm * config.num_warps / 4
    step = max(issue, products, (issue + products) / groups_at_once, weight_bytes)
    programs = sms * config.blocks_per_sm
    waves = -(-tiles // programs) if tiles < 8 * programs else tiles / programs + 0.5
    return waves * config.blocks_per_sm * step * problem.k / 128


BACKEND = Backend(
    name="triton_int4",
    summary="Triton, weights dequantised in registers: any rows, any strides of a (sm_80+)",
    supports=supports,
    configs=configs,
    run=run,
)
