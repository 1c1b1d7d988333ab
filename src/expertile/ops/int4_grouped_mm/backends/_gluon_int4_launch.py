"""Host side of the `gluon_int4` backend: TMA descriptors of one problem, the launch, and the sum of a split K."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.hopper import reduce
from expertile.ops.int4_grouped_mm.backend import Operands
from expertile.ops.int4_grouped_mm.backends._gluon_int4_kernel import int4_grouped_mm_kernel
from expertile.ops.int4_grouped_mm.problem import Int4Problem
from expertile.ops.launch import driver
from expertile.ops.launch.blocks import Blocks, compiled, ragged
from expertile.ops.launch.versions import FP_FUSION

# Registers of a thread: at launch, and of a consumer and of the producer afterwards. A warpgroup counts as four warps
# even where it has one, and the register file holds 65536.
_REGISTERS = {2: (168, 232, 40), 4: (96, 112, 32)}
# The plan of more than 256 groups fills a producer's 40.
_REGISTERS_OF_MANY_GROUPS = (168, 224, 56)


@dataclass(frozen=True)
class Plan:
    """All of a launch that follows from the problem, the config and the strides of what the kernel writes: how TMA sees
    activations, packed weights (as 32-bit words), scales, zeros and results; compile-time options; sizes."""

    blocks: tuple[Blocks, ...]
    options: dict[str, Any]
    sizes: tuple[int, int, int, int]


def plan(p: Int4Problem, config: Any, out_strides: tuple[int, ...]) -> Plan:
    """Descriptors, compile-time options and sizes for `int4_grouped_mm_kernel`. ValueError for fused scales of weights
    that have zero points or activations that are not bfloat16."""
    if config.scale == "fused" and (p.has_zeros or p.dtype is not torch.bfloat16):
        raise ValueError(f'config: scale "fused" takes bfloat16 without zero points, not {p.dtype}, {p.has_zeros = }')
    scales = Blocks((p.groups * p.scale_groups * p.n,), (1,), (config.block_n,))
    blocks = (
        Blocks((p.m, p.k), p.a_strides, (config.block_m, config.block_k)),
        Blocks((p.groups, p.n, p.k // 8), (p.n * p.k // 8, p.k // 8, 1), (1, config.cols, config.block_k // 8)),
        scales,
        scales,
        ragged(p.n, out_strides[-2], (config.block_m // config.store_parts, config.cols)),
    )
    many = config.consumers == 2 and p.groups > 256
    registers, of_consumer, of_producer = _REGISTERS_OF_MANY_GROUPS if many else _REGISTERS[config.consumers]
    per_channel = p.group_size == p.k and p.group_size not in (p.half, 2 * p.half)
    options = {
        "HAS_BIAS": p.has_bias,
        "HAS_ZEROS": p.has_zeros,
        "GROUPS_POW2": max(32, 1 << (p.groups - 1).bit_length()),
        "CONSUMERS": config.consumers,
        "COLS": config.cols,
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
        "HALF": p.half,
        "SLAB": min(p.half, config.slab),
        "GROUP": 0 if per_channel else p.group_size,
        "SCALE": "tile" if per_channel else config.scale,
        "STAGES": config.num_stages,
        "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k,
        "STORE_PARTS": config.store_parts,
        "TAILS": config.tails,
        "TURNS": config.turns,
        "CONSUMER_REGS": of_consumer,
        "PRODUCER_REGS": of_producer,
        "num_warps": 4,
        **FP_FUSION,
        "maxnreg": registers,
        "launch_pdl": True,
    }
    return Plan(blocks, options, (p.groups, p.m, p.n, p.k))


def _described(operands: Operands, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors behind a plan's descriptors."""
    w = operands.w
    return operands.a, w.packed, w.scales, w.scales if w.zeros is None else w.zeros, target


def _pointers(operands: Operands, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w = operands.w
    bias = target if operands.bias is None else operands.bias
    return operands.offs, bias, w.scales, w.scales if w.zeros is None else w.zeros


def arguments(
    p: Int4Problem, operands: Operands, config: Any, target: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `int4_grouped_mm_kernel` that writes `target`: the output, or the partial
    sums [split_k, M, N] of a split K."""
    made = plan(p, config, target.stride())
    a, packed, *others = _described(operands, target)
    bases = (a, packed.view(torch.int32), *others)
    descriptors = (blocks.of(base) for blocks, base in zip(made.blocks, bases, strict=True))
    return (*descriptors, *_pointers(operands, target), *made.sizes), made.options


@dataclass(frozen=True, eq=False)
class _Ready:
    """A plan with its compiled kernel."""

    kernel: driver.Compiled
    tensors: tuple[driver.Tensor, ...]
    rest: tuple[Any, ...]
    programs: int


@lru_cache(maxsize=1024)
def _ready(
    p: Int4Problem,
    config: Any,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: int,
) -> _Ready | None:
    made = plan(p, config, strides)
    scales = p.dtype
    dtypes = (p.dtype, torch.int32, scales, scales, dtype, torch.int32, bias_dtype or dtype, scales, scales)
    forms = tuple(blocks.form for blocks in made.blocks)
    numbers = (2,) * len(made.sizes)
    kernel = compiled(int4_grouped_mm_kernel, forms, dtypes, numbers, tuple(made.options.items()), device)
    if kernel is None:
        return None
    tensors = tuple(kernel.tensor(i, list(b.shape), list(b.strides)) for i, b in enumerate(made.blocks))
    constants = (None,) * (len(int4_grouped_mm_kernel.arg_names) - len(dtypes) - len(made.sizes))
    return _Ready(kernel, tensors, (*made.sizes, *constants), Device.current(f"cuda:{device}").sm_count)


def launch(p: Int4Problem, operands: Operands, config: Any, out: torch.Tensor) -> None:
    """Queue the kernel, and after a split K the sum of its slices, on the current stream of `out`'s device."""
    target = out
    if config.split_k > 1:
        target = out.new_empty((config.split_k, p.m, p.n), dtype=torch.float32)
    _multiply(p, operands, config, target)
    if config.split_k > 1:
        reduce.launch(target, operands.offs, out)


def _multiply(p: Int4Problem, operands: Operands, config: Any, target: torch.Tensor) -> None:
    device = target.get_device()
    ready = None
    if device >= 0 and not driver.hooked():
        bias_dtype = None if operands.bias is None else operands.bias.dtype
        ready = _ready(p, config, target.stride(), target.dtype, bias_dtype, device)
    if ready is None:
        args, options = arguments(p, operands, config, target)
        int4_grouped_mm_kernel[(Device.current(target.device).sm_count,)](*args, **options)
        return
    addresses = (x.data_ptr() for x in _described(operands, target))
    pointers = tuple(x.data_ptr() for x in _pointers(operands, target))
    ready.kernel(device, ready.programs, zip(ready.tensors, addresses, strict=True), (*pointers, *ready.rest))
