"""gluon_int4: our warp-specialised Gluon kernel for sm_90a (H100, H200); 4-bit weights, bf16 or fp16 activations.

    out[rows of g] = a[rows of g] @ ((q[g] - zero) * scale)ᵀ (+ bias[g])
    a [M_tot, K], q [G, N, K] packed two to a byte (`expertile.formats.int4.packing`), scales and zeros [G, K/group, N]

Every `Int4Weight` will do: groups of 32, 64 or 128 along K or one for each row, with zero points or without, K any
multiple of 64. Groups of rows need no padding: TMA drops stores past a group's end. `offs` is read on the device only.

Every `Mxfp4Weight` as well, K any multiple of 32: codes [G, N, K/2] and scales [G, K/128, N, 4] as
`expertile.formats.mxfp4` has them, 17/32 bytes a value (`_gluon_mxfp4`).

Scales of bfloat16 weights without zero points must be below 2^27 in magnitude: of larger ones products are infinite or
NaN. Weights lose digits where scales are below about 2^-94 (`_gluon_unpack`). Values are not looked at.

Bytes: packed weights and scales once from HBM (N K (1/2 + 2/group) for each group, with zero points 4/group), `a` and
the output once. Limits: HBM for short groups; instructions for those in between (`_gluon_config` counts them); the
tensor cores for long ones; and latency where there are fewer tiles than multiprocessors: `split_k` programs then share
a tile. See `_gluon_kernel` for how the work is laid out on the chip.
"""

from dataclasses import replace
from functools import lru_cache

import torch

from expertile.device import Device
from expertile.ops.hopper.context import options_of, shape_of
from expertile.ops.hopper.reduce import SPLITS, best_splits
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.device import torch_device, wants_pdl
from expertile.ops.launch.launch import Launch
from expertile.ops.weight_only_mm.backends._gluon_config import Config, most_tiles, ranked, tiles
from expertile.ops.weight_only_mm.backends._gluon_kernel import Shape, weight_only_mm_kernel
from expertile.ops.weight_only_mm.backends._hopper import refusal, runner
from expertile.ops.weight_only_mm.problem import Backend, Operands, WeightOnlyProblem

_INT32 = 2**31
# Registers of a consumer's thread that `Config.registers` may count, by the number of consumers.
_REGISTERS = {2: 240, 4: 112}
_REGISTERS_OF_MANY_GROUPS = 232  # more than 256, whose plan takes more of the producer
# Registers of a thread of a consumer and of the producer. The plan of more than 256 groups fills a producer's 40.
_DIVIDED, _DIVIDED_FOR_MANY_GROUPS = {2: (232, 40), 4: (112, 32)}, (224, 56)


def supports(problem: WeightOnlyProblem, device: Device) -> str | None:
    p = problem
    if p.fp8:
        return "takes activations of 16 bits"
    reason = refusal(p, device)
    if reason is None and p.groups * p.scale_bytes >= 2 * _INT32:
        return "scales must lie within 2^31 elements"
    return reason


def _fitted(config: Config, problem: WeightOnlyProblem, device: Device) -> Config | None:
    """`config` for groups and results of this problem: scaled weights where the sums of many groups would not fit the
    registers, and fewer stages where scales or 4-byte results leave no room for as many; None if it can't be."""
    if config.consumers == 4 and problem.groups > 256:
        return None  # their producer has 32 registers, too few for the plan
    most = _REGISTERS[config.consumers] if problem.groups <= 256 else _REGISTERS_OF_MANY_GROUPS
    if config.scale == "sum" and config.registers(problem) > most:
        config = replace(config, scale="weight", slab=32)
    if config.registers(problem) > most:
        return None
    while config.smem_bytes(problem) > device.smem_bytes:
        if config.num_stages <= 2 and config.block_m // config.store_parts <= 16:
            return None
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        else:
            config = replace(config, store_parts=2 * config.store_parts)
    return config


@lru_cache(maxsize=1024)
def configs(problem: WeightOnlyProblem, device: Device) -> tuple[Config, ...]:
    found: dict[Config, None] = {}
    for tile in tiles(problem):
        for split in SPLITS:
            if split > 1 and (split * tile.block_k > problem.k or most_tiles(problem, tile) > 2 * device.sm_count):
                continue
            config = _fitted(replace(tile, split_k=split), problem, device)
            if config is not None:
                found[config] = None
    return best_splits(ranked(problem, device, tuple(found)))


@lru_cache(maxsize=1024)
def _launch(
    p: WeightOnlyProblem, config: Config, pitch: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, device: int
) -> Launch:
    """The launch of `weight_only_mm_kernel` on GPU number `device` that writes rows `pitch` elements apart. Its
    descriptors: activations, packed weights (as 32-bit words), scales, zeros and results. ValueError for fused scales
    of weights that have zero points or activations that are not bfloat16."""
    if config.format != p.format:
        raise ValueError(f'config: scale "{config.scale}" takes weights of format {config.format}, not {p.format}')
    if config.scale == "fused" and (p.has_zeros or p.dtype is not torch.bfloat16):
        raise ValueError(f'config: scale "fused" takes bfloat16 without zero points, not {p.dtype}, {p.has_zeros = }')
    layout = p.layout_of_weight
    words = layout.row_bytes // 4
    scales = Blocks((p.groups * p.scale_groups * p.n,), (1,), (config.block_n,))
    blocks = (
        Blocks((p.m, p.k), p.a_strides, (config.block_m, config.block_k)),
        Blocks((p.groups, p.n, words), (p.n * words, words, 1), (1, config.cols, config.block_k // 8)),
        scales,
        scales,
        ragged(p.n, pitch, (config.block_m // config.store_parts, config.cols)),
    )
    many = config.consumers == 2 and p.groups > 256
    per_channel = layout.span == p.k and p.k not in (p.half, 2 * p.half) and layout.scale_dtype is None
    group = 0 if per_channel else layout.span
    shape = shape_of(
        Shape,
        config,
        p,
        LAYOUT="ragged_m",
        SLAB=min(p.half, config.slab),
        GROUP=group,
        GROUPS=config.block_k // group if group else 0,
        SCALE="tile" if per_channel else config.scale,
        BF16=p.dtype is torch.bfloat16,
    )
    of_scales = (layout.scale_dtype or p.dtype,) * 2
    dtypes, pointers = (p.dtype, torch.int32, *of_scales, dtype), (torch.int32, bias_dtype or dtype, *of_scales)
    registers = _DIVIDED_FOR_MANY_GROUPS if many else _DIVIDED[config.consumers]
    options = options_of(shape, config.consumers, registers, pdl=wants_pdl(p))
    numbers, programs = (p.groups, p.m, p.n, p.k), Device.current(torch_device(device)).sm_count
    return Launch(weight_only_mm_kernel, blocks, dtypes, pointers, numbers, options, programs)


def prepared(
    p: WeightOnlyProblem, operands: Operands, config: Config, target: torch.Tensor
) -> tuple[Launch, int, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """As `runner` wants it; other tensors stand for an absent bias and absent zeros."""
    w, bias = operands.w, operands.bias
    device, bias_dtype = target.get_device(), None if bias is None else bias.dtype
    launch = _launch(p, config, target.stride(-2), target.dtype, bias_dtype, device)
    zeros = w.scales if w.zeros is None else w.zeros
    tensors = (operands.a, w.packed, w.scales, zeros, target)
    return launch, device, tensors, (operands.offs, target if bias is None else bias, w.scales, zeros)


BACKEND = Backend(
    name="gluon_int4",
    summary="warp-specialised Gluon kernel for Hopper: TMA ring, nibbles unpacked into wgmma's register operand",
    supports=supports,
    configs=configs,
    run=runner(prepared),
)
