"""Host side of the `gluon_fp8` backend: TMA descriptors of one problem, the launch, and the sum of a split K."""

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.hopper import reduce
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.device import starts_early, torch_device
from expertile.ops.launch.launch import Launch
from expertile.ops.scaled_grouped_mm.backends._gluon_kernel import Shape, scaled_grouped_mm_kernel
from expertile.ops.scaled_grouped_mm.backends.triton_fp8 import scale_strides
from expertile.ops.scaled_grouped_mm.problem import BLOCK, EARLY_FLOPS, Operands, Recipe, ScaledProblem
from expertile.ragged import power_of_two


@lru_cache(maxsize=1024)
def _launch(
    p: ScaledProblem,
    config: Any,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: int,
) -> Launch:
    """The launch of `scaled_grouped_mm_kernel` on GPU number `device` that writes a tensor of those strides."""
    rows, cols = config.rows, min(config.block_n, 128)
    a = Blocks((p.m, p.k), p.a_strides, (config.a_box, BLOCK))
    if p.layout is Layout.RAGGED_M:
        b = Blocks((p.groups, p.n, p.k), (p.b_strides[0], p.b_strides[2], 1), (1, cols, BLOCK))
        c = ragged(p.n, strides[-2], (rows, cols))
    else:
        b = Blocks((1, p.n, p.k), (p.n * p.b_strides[1], p.b_strides[1], 1), (1, cols, BLOCK))
        c = Blocks((p.groups, p.m, p.n), strides, (1, rows, cols))
    consumers = config.consumers
    groups_pow2 = power_of_two(p.groups, 32)
    consumer_regs, producer_regs = (152, 56) if consumers == 3 else (232, 40)
    if config.block_n > 128 and p.recipe is Recipe.BLOCK:  # with these the fewest values spill, most often none
        consumer_regs, producer_regs = (
            (208, 88) if groups_pow2 <= 64 else (216, 72) if groups_pow2 <= 256 else (224, 56)
        )
    halves = config.block_n // cols
    shape = Shape(
        LAYOUT=p.layout.value,
        RECIPE=p.recipe.value,
        HAS_BIAS=p.has_bias,
        GROUPS_POW2=groups_pow2,
        ROWS=rows,
        A_BOX=config.a_box,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        GROUP_M=config.group_m,
        SPLIT_K=config.split_k,
        PAIRS=config.pairs,
        COLS=cols,
        HALVES=halves,
        CONSUMERS=consumers,
        ORDERED=consumers == 3 or (consumers == 2 and halves == 2),
        TAIL=halves == 2 and config.split_k == 1,
    )
    options = {
        "SHAPE": shape,
        "CONSUMER_REGS": consumer_regs,
        "PRODUCER_REGS": producer_regs,
        "num_warps": 4,
        # Warps come in fours; the register file holds 65536.
        "maxnreg": {1: 248, 2: 168, 3: 128}[consumers],
        "launch_pdl": starts_early(p, EARLY_FLOPS),
    }
    (_, sa_m, sa_k), (sb_g, sb_n, sb_k) = scale_strides(p)
    return Launch(
        scaled_grouped_mm_kernel,
        (a, b, c),
        (p.dtype, p.dtype, dtype),
        (torch.int32, bias_dtype or dtype, torch.float32, torch.float32),
        (p.groups, p.m, p.n, p.k, sa_m, sa_k, sb_g, sb_n, sb_k),
        tuple(options.items()),
        Device.current(torch_device(device)).sm_count,
    )


def prepared(
    p: ScaledProblem, operands: Operands, config: Any, target: torch.Tensor
) -> tuple[Launch, int, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The launch that writes `target`, the output or the partial sums [split_k, M, N] of a split K, and what it runs
    with: the device, the tensors of its descriptors, and those of its pointers (`target` for an absent bias)."""
    o, bias = operands, operands.bias
    device, bias_dtype = target.get_device(), None if bias is None else bias.dtype
    launch = _launch(p, config, target.stride(), target.dtype, bias_dtype, device)
    return launch, device, (o.a, o.b, target), (o.offs, target if bias is None else bias, o.scale_a, o.scale_b)


def run(p: ScaledProblem, operands: Operands, config: Any, out: torch.Tensor) -> None:
    """Queue the kernel, and after a split K the sum of its slices, on the current stream of `out`'s device."""
    target = out
    if config.split_k > 1:
        target = out.new_empty((config.split_k, p.m, p.n), dtype=torch.float32)
    launch, device, tensors, pointers = prepared(p, operands, config, target)
    launch.run(device, tensors, pointers)
    if config.split_k > 1:
        reduce.run(target, operands.offs, out)
