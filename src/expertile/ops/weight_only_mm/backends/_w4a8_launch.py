"""Host side of the `gluon_w4a8` backend: TMA descriptors of one problem and the launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.device import torch_device
from expertile.ops.launch.launch import Launch
from expertile.ops.weight_only_mm.backends._hopper import options_of, shape_of
from expertile.ops.weight_only_mm.backends._w4a8_kernel import Shape, w4a8_mm_kernel
from expertile.ops.weight_only_mm.problem import BLOCK, Operands, WeightOnlyProblem


@lru_cache(maxsize=1024)
def _launch(
    p: WeightOnlyProblem,
    config: Any,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    scale_dtype: torch.dtype,
    device: int,
) -> Launch:
    """The launch of `w4a8_mm_kernel` on GPU number `device` that writes a tensor of those strides. Its descriptors:
    activations, packed weights (as 32-bit words), scales of weights and results."""
    words = p.layout_of_weight.row_bytes // 4
    blocks = (
        Blocks((p.m, p.k), p.a_strides, (config.block_m, BLOCK)),
        Blocks((p.groups, p.n, words), (p.n * words, words, 1), (1, config.cols, BLOCK // 8)),
        Blocks((p.groups * p.scale_groups * p.n,), (1,), (config.block_n,)),
        ragged(p.n, strides[-2], (config.tokens // config.store_parts, 64)),
    )
    shape = Shape(
        **shape_of(p, config),
        FORMAT=p.format,
        RECIPE="vector" if len(p.scale_a_strides) == 2 else "row",
        TOKENS=config.tokens,
        AHEAD=config.ahead,
        ORDERED=config.ordered and config.consumers == 2,
    )
    # Warps come in fours; the register file holds 65536.
    registers = (168 if config.consumers == 2 else 248, *((232, 40) if p.groups <= 256 else (224, 56)))
    sx_m, sx_k = (*p.scale_a_strides, 0)[:2]
    return Launch(
        w4a8_mm_kernel,
        blocks,
        (p.dtype, torch.int32, scale_dtype, dtype),
        (torch.int32, bias_dtype or dtype, torch.float32, torch.float32),
        (p.groups, p.m, p.n, p.k, p.scale_groups, sx_m, sx_k),
        options_of(p, shape, registers),
        Device.current(torch_device(device)).sm_count,
    )


def prepared(
    p: WeightOnlyProblem, operands: Operands, config: Any, target: torch.Tensor
) -> tuple[Launch, int, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The launch that writes `target`, the output or the partial sums [split_k, M, N] of a split K, and what it runs
    with: the device, the tensors of its descriptors, and those of its pointers (`target` for an absent bias)."""
    w, bias, scale_a = operands.w, operands.bias, operands.scale_a
    assert scale_a is not None
    device, bias_dtype = target.get_device(), None if bias is None else bias.dtype
    scale_dtype = p.layout_of_weight.scale_dtype or w.scales.dtype
    launch = _launch(p, config, target.stride(), target.dtype, bias_dtype, scale_dtype, device)
    # MXFP4's scales of rows are among the bytes of its scales; INT4 has none.
    row_scales = w.scales.view(torch.float32) if w.scales.dtype is torch.uint8 else scale_a
    pointers = (operands.offs, target if bias is None else bias, row_scales, scale_a)
    return launch, device, (operands.a, w.packed, w.scales, target), pointers
