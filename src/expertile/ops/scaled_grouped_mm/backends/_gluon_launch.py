"""Host side of the `gluon_fp8` backend: TMA descriptors of one problem, the launch, and the sum of a split K."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.hopper import reduce
from expertile.ops.launch import driver
from expertile.ops.launch.blocks import Blocks, Ready, make_ready, ragged
from expertile.ops.launch.versions import FP_FUSION
from expertile.ops.scaled_grouped_mm.backend import Operands
from expertile.ops.scaled_grouped_mm.backends._gluon_kernel import scaled_grouped_mm_kernel
from expertile.ops.scaled_grouped_mm.backends.triton_fp8 import scale_strides
from expertile.ops.scaled_grouped_mm.problem import BLOCK, Recipe, ScaledProblem


@dataclass(frozen=True)
class Plan:
    """All of a launch that follows from the problem, the config and the strides of what the kernel writes."""

    a: Blocks
    b: Blocks
    c: Blocks
    options: dict[str, Any]
    numbers: tuple[int, ...]


def plan(p: ScaledProblem, config: Any, out_strides: tuple[int, ...]) -> Plan:
    """Descriptors, compile-time options, sizes and strides for `scaled_grouped_mm_kernel`."""
    rows, cols = config.rows, min(config.block_n, 128)
    a = Blocks((p.m, p.k), p.a_strides, (config.a_box, BLOCK))
    if p.layout is Layout.RAGGED_M:
        b = Blocks((p.groups, p.n, p.k), (p.b_strides[0], p.b_strides[2], 1), (1, cols, BLOCK))
        c = ragged(p.n, out_strides[-2], (rows, cols))
    else:
        b = Blocks((1, p.n, p.k), (p.n * p.b_strides[1], p.b_strides[1], 1), (1, cols, BLOCK))
        c = Blocks((p.groups, p.m, p.n), out_strides, (1, rows, cols))
    consumers = config.consumers
    groups_pow2 = max(32, 1 << (p.groups - 1).bit_length())
    consumer_regs, producer_regs = 232, 40
    if config.block_n > 128 and p.recipe is not Recipe.VECTOR:  # fewer spills so, most often none
        consumer_regs, producer_regs = (216, 72) if groups_pow2 <= 64 else (224, 56)
    options = {
        "LAYOUT": p.layout.value,
        "RECIPE": p.recipe.value,
        "HAS_BIAS": p.has_bias,
        "GROUPS_POW2": groups_pow2,
        "ROWS": rows,
        "A_BOX": config.a_box,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k,
        "PAIRS": config.pairs,
        # The first consumer gets what the second and the producer leave: as many.
        "CONSUMER_REGS": consumer_regs,
        "PRODUCER_REGS": producer_regs,
        "num_warps": 4,
        **FP_FUSION,
        # Warps come in fours; the register file holds 65536.
        "maxnreg": 168 if consumers == 2 else 248,
        "launch_pdl": True,
    }
    (_, sa_m, sa_k), (sb_g, sb_n, sb_k) = scale_strides(p)
    return Plan(a, b, c, options, (p.groups, p.m, p.n, p.k, sa_m, sa_k, sb_g, sb_n, sb_k))


def arguments(
    p: ScaledProblem, operands: Operands, config: Any, target: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `scaled_grouped_mm_kernel` that writes `target`: the output, or the partial
    sums [split_k, M, N] of a split K."""
    made = plan(p, config, target.stride())
    bias = operands.bias if operands.bias is not None else target
    descriptors = (made.a.of(operands.a), made.b.of(operands.b), made.c.of(target))
    return (*descriptors, operands.offs, bias, operands.scale_a, operands.scale_b, *made.numbers), made.options


@lru_cache(maxsize=1024)
def _ready(
    p: ScaledProblem,
    config: Any,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: int,
) -> Ready | None:
    made = plan(p, config, strides)
    dtypes = (p.dtype, p.dtype, dtype, torch.int32, bias_dtype or dtype, torch.float32, torch.float32)
    programs = Device.current(f"cuda:{device}").sm_count
    return make_ready(
        scaled_grouped_mm_kernel, (made.a, made.b, made.c), dtypes, made.numbers, made.options, programs, device
    )


def launch(p: ScaledProblem, operands: Operands, config: Any, out: torch.Tensor) -> None:
    """Queue the kernel, and after a split K the sum of its slices, on the current stream of `out`'s device."""
    target = out
    if config.split_k > 1:
        target = out.new_empty((config.split_k, p.m, p.n), dtype=torch.float32)
    _multiply(p, operands, config, target)
    if config.split_k > 1:
        reduce.launch(target, operands.offs, out)


def _multiply(p: ScaledProblem, operands: Operands, config: Any, target: torch.Tensor) -> None:
    bias = operands.bias
    device = target.get_device()
    ready = None
    if device >= 0 and not driver.hooked():
        bias_dtype = None if bias is None else bias.dtype
        ready = _ready(p, config, target.stride(), target.dtype, bias_dtype, device)
    if ready is None:
        args, options = arguments(p, operands, config, target)
        scaled_grouped_mm_kernel[(Device.current(target.device).sm_count,)](*args, **options)
        return
    here = target.data_ptr()
    pointers = (
        operands.offs.data_ptr(), here if bias is None else bias.data_ptr(), operands.scale_a.data_ptr(),
        operands.scale_b.data_ptr(),
    )  # fmt: skip
    ready(device, operands.a.data_ptr(), operands.b.data_ptr(), here, pointers)
