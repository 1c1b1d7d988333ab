"""Host side of the `gluon_int4` backend: TMA descriptors of one problem and the launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.device import torch_device
from expertile.ops.launch.launch import Launch
from expertile.ops.weight_only_mm.backends._gluon_kernel import Shape, weight_only_mm_kernel
from expertile.ops.weight_only_mm.backends._hopper import options_of, shape_of
from expertile.ops.weight_only_mm.problem import Operands, WeightOnlyProblem

# Registers of a thread: at launch, and of a consumer and of the producer afterwards. A warpgroup counts as four warps
# even where it has one, and the register file holds 65536.
_REGISTERS = {2: (168, 232, 40), 4: (96, 112, 32)}
# The plan of more than 256 groups fills a producer's 40.
_REGISTERS_OF_MANY_GROUPS = (168, 224, 56)


@lru_cache(maxsize=1024)
def _launch(
    p: WeightOnlyProblem,
    config: Any,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: int,
) -> Launch:
    """The launch of `weight_only_mm_kernel` on GPU number `device` that writes a tensor of those strides. Its
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
        ragged(p.n, strides[-2], (config.block_m // config.store_parts, config.cols)),
    )
    many = config.consumers == 2 and p.groups > 256
    per_channel = layout.span == p.k and p.k not in (p.half, 2 * p.half) and layout.scale_dtype is None
    group = 0 if per_channel else layout.span
    shape = Shape(
        **shape_of(p, config),
        HAS_ZEROS=p.has_zeros,
        BLOCK_K=config.block_k,
        HALF=p.half,
        SLAB=min(p.half, config.slab),
        GROUP=group,
        GROUPS=config.block_k // group if group else 0,
        SCALE="tile" if per_channel else config.scale,
        TAILS=config.tails,
        ORDERED=config.ordered,
        PAIRS=config.pairs,
        BF16=p.dtype is torch.bfloat16,
    )
    of_scales = (layout.scale_dtype or p.dtype,) * 2
    return Launch(
        weight_only_mm_kernel,
        blocks,
        (p.dtype, torch.int32, *of_scales, dtype),
        (torch.int32, bias_dtype or dtype, *of_scales),
        (p.groups, p.m, p.n, p.k),
        options_of(p, shape, _REGISTERS_OF_MANY_GROUPS if many else _REGISTERS[config.consumers]),
        Device.current(torch_device(device)).sm_count,
    )


def prepared(
    p: WeightOnlyProblem, operands: Operands, config: Any, target: torch.Tensor
) -> tuple[Launch, int, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The launch that writes `target`, the output or the partial sums [split_k, M, N] of a split K, and what it runs
    with: the device, the tensors of its descriptors, and those of its pointers (others for absent bias, zeros)."""
    w, bias = operands.w, operands.bias
    device, bias_dtype = target.get_device(), None if bias is None else bias.dtype
    launch = _launch(p, config, target.stride(), target.dtype, bias_dtype, device)
    zeros = w.scales if w.zeros is None else w.zeros
    tensors = (operands.a, w.packed, w.scales, zeros, target)
    return launch, device, tensors, (operands.offs, target if bias is None else bias, w.scales, zeros)
