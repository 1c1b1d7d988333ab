"""Grouped product with 4-bit weights in plain Triton, for sm_80 and later: dequantised in registers, never in memory.

For each group g:  out_g[m, n] = Σ_k a_g[m, k] · (q_g[n, k] − zero_g[n, k // group]) · scale_g[n, k // group]  (+ bias)

`_triton_kernel` multiplies; the products of one group of K with q − zero are added up, then scaled in float32: exact
weights, a multiply-add for every element of out and group of K, twice the accumulators. An `Mxfp4Weight` is unpacked by
triton_mxfp4.py, steps of 64 of K, and its scales multiply the weights, exactly.

Bytes: a (tiles of a group share it in L2) and out once, the packed weights and scales once for every BLOCK_M rows. Few
rows are limited by those bytes; many by the unpacking, which every BLOCK_M rows pay for again, and by the tensor cores.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from expertile.device import Device
from expertile.formats.int4.packing import words
from expertile.ops.grouped_mm.backend import new_out
from expertile.ops.grouped_mm.persistent import best_group_m, mean_tile_extents, tile_options, tiles_bound, tiles_of
from expertile.ops.launch import versions
from expertile.ops.launch.device import no_triton, program_count, torch_device
from expertile.ops.launch.launch import Launch, Pointer, met
from expertile.ops.weight_only_mm.backends._triton_kernel import weight_only_kernel
from expertile.ops.weight_only_mm.problem import Backend, Operands, WeightOnlyProblem


@dataclass(frozen=True)
class Config:
    """A tile is block_m rows of a by block_n columns of out, K in steps of one packed block.

    products: the instructions that Triton multiplies with, "wgmma" (sm_90), "mma.sync" (sm_8x, sm_12x) or "tcgen05"
    (sm_10x); results are right with any. group_m: tile rows per raster panel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int = 1
    products: str = "wgmma"
    group_m: int = 8


def _scales_in_a_step(problem: WeightOnlyProblem) -> str:
    """Which values of a packed block share a scale; SCALES of the kernel."""
    if problem.scales_are_codes:
        return problem.format
    if problem.group_size == problem.k:
        return "row"
    return "half" if problem.group_size == problem.half else "block"


@lru_cache(maxsize=1024)
def _launch(
    problem: WeightOnlyProblem,
    config: Config,
    pointers: tuple[Pointer | None, ...],
    out_strides: tuple[int, ...],
    bias_strides: tuple[int, ...],
    device: int,
) -> Launch:
    """The launch on GPU `device` (-1: none), for `pointers` of a, packed words, out, scales, zeros, offs and bias, an
    output and a bias of those strides."""
    m, n, k, groups, half = problem.m, problem.n, problem.k, problem.groups, problem.half
    tiles = tiles_of(problem, config.block_m, config.block_n, 2 * half)
    reach = half * problem.a_strides[1] + config.block_m * problem.a_strides[0]
    options = {
        "EVEN_N": n % config.block_n == 0,
        "EVEN_K": k % (2 * half) == 0,
        "SCALES": _scales_in_a_step(problem),
        "GROUP_SIZE": problem.group_size if problem.group_size != k else 0,
        "HALF": half,
        "OFFSET": tl.int32 if reach < 2**31 else tl.int64,
        "PRODUCTS": config.products,
        "ASSEMBLY": not triton.knobs.runtime.interpret,
        **tile_options(tiles, config),
    }
    if config.products == "mma.sync":
        # Triton's own choice may take registers that another block should have.
        options["maxnreg"] = min(255, 65536 // (32 * config.num_warps * config.blocks_per_sm) // 8 * 8)
    numbers = (0, n, k, groups, *problem.a_strides, *out_strides, *bias_strides, config.group_m)
    programs = program_count(torch_device(device), tiles_bound(tiles, groups, m, n), config.blocks_per_sm)
    return Launch(weight_only_kernel, (), (), pointers, numbers, options, programs)


def run(
    problem: WeightOnlyProblem, operands: Operands, config: Config, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Queue the kernel on the current stream; `out` (any strides) is written in place if given."""
    out = new_out(problem, operands, out)
    if problem.groups == 0 or problem.m == 0 or problem.n == 0:
        return out
    w, bias, device = operands.w, operands.bias, operands.a.get_device()
    given = (operands.a, words(w.packed), out, w.scales, w.zeros, operands.offs, bias)
    addresses, pointers = met(given)
    bias_strides = (0, 0) if bias is None else bias.stride()
    launch = _launch(problem, config, pointers, out.stride(), bias_strides, device)
    launch.run(device, (), given, addresses)
    return out


def supports(problem: WeightOnlyProblem, device: Device) -> str | None:
    """Everything, on a GPU of compute capability 8.0 or later, or under the Triton interpreter."""
    if problem.fp8:
        return "takes activations of 16 bits"
    if problem.groups > 4096:
        return f"plans at most 4096 groups in registers, got {problem.groups}"
    return no_triton(problem, device)


_HOPPER = (
    Config(16, 64, 4, 5, blocks_per_sm=4),
    Config(16, 64, 4, 8, blocks_per_sm=3),
    Config(16, 128, 8, 5, blocks_per_sm=2),
    Config(32, 64, 4, 5, blocks_per_sm=3),
    Config(32, 128, 8, 4, blocks_per_sm=2),
    Config(64, 64, 4, 3, blocks_per_sm=2),
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
    """The tiles that fit shared memory, the lowest modelled time first."""
    found = []
    hopper = device.at_least(9) and not device.at_least(10)
    for c in _HOPPER if hopper else _PORTABLE:
        # Zero points, a second scale in a step and masked columns take registers that another block would have.
        heavy = problem.has_zeros or problem.group_size == problem.half or problem.n % c.block_n > 0
        if heavy and not hopper and c.block_m == 128:
            continue
        blocks = c.blocks_per_sm - 1 if heavy and c.blocks_per_sm > 1 else c.blocks_per_sm
        stage = c.block_n * problem.half + 4 * problem.half * c.block_m
        if stage * c.num_stages * blocks <= (device.smem_bytes or 101376):
            products = "tcgen05" if device.at_least(10) and not device.at_least(12) else c.products
            # From Triton 3.8 on, a step of this tile on sm_80 has 236 values wait in memory, before it had none.
            if products == "mma.sync" and c.block_m * c.block_n > 128 * 64 and versions.TRITON >= (3, 8):
                continue
            programs = device.sm_count * blocks
            group_m = best_group_m(problem, c.block_m, c.block_n, programs, device.l2_bytes)
            found.append(replace(c, group_m=group_m, blocks_per_sm=blocks, products=products))
    return tuple(sorted(found, key=lambda c: _cost(problem, device, c)))


def _cost(problem: WeightOnlyProblem, device: Device, config: Config) -> float:
    """Modelled clocks of one call. A step of 128 of K takes a multiprocessor the longest of: its packed bytes from
    memory; its instructions (some 3.5 clocks for a column of out, measured in SASS); its products; and the last two
    one after the other, shared by the warp groups that run at once."""
    rows, cols = mean_tile_extents(problem)
    tiles = problem.groups * -(-rows // config.block_m) * -(-cols // config.block_n)
    clock, sms = device.max_clock_hz, device.sm_count
    macs = (device.peak("bf16") or 1e14) / 2 / clock / sms
    issue = 3.5 * config.block_n * (1.3 if problem.scales_are_codes else 1 + config.block_m / 256)
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
