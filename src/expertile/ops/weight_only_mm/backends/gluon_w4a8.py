"""gluon_w4a8: our warp-specialised Gluon kernel for sm_90a (H100, H200); FP8 activations, 4-bit weights made e4m3.

    out[rows of g] = (a ∘ scale_a)[rows of g] @ ŵ[g]ᵀ (+ bias[g])
    a [M_tot, K] float8_e4m3fn, scale_a [M_tot, K/128] or [M_tot] float32, ŵ an Mxfp4Fp8Weight or Int4Weight [G, N, K]

Products of 128 of K are accumulated by the tensor cores, scaled and added up in float32. The weights' e4m3 values are
exact (`formats.mxfp4_fp8`, `_w4a8_unpack`). INT4 has groups of 128, and no zero points: K is a multiple of 128; of
MXFP4 a multiple of 32. Groups of rows need no padding. `offs` is read on the device only.

Bytes: packed weights and scales once from HBM (17/32 a value of MXFP4, 1/2 + 1/64 of INT4), `a` and the output once.
Limits: HBM for short groups, the tensor cores and the power they draw for long ones. A tile of 128 rows of w and 256
of a reads 40 bytes through L2 for every clock of the tensor cores.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from expertile.device import Device
from expertile.ops.hopper.context import options_of, shape_of
from expertile.ops.hopper.reduce import SPLITS, best_splits, fitted
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.device import torch_device, wants_pdl
from expertile.ops.launch.launch import Launch
from expertile.ops.weight_only_mm.backends._hopper import refusal, runner
from expertile.ops.weight_only_mm.backends._w4a8_kernel import Shape, w4a8_mm_kernel
from expertile.ops.weight_only_mm.problem import BLOCK, Backend, Operands, WeightOnlyProblem

_INT32 = 2**31
_CONSUMERS = 2  # warpgroups, each with its own columns of a tile


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule. Steps are 128 deep.

    block_m: rows of `a` in a tile, a power of two from 8 to 256; 256 are multiplied in two halves.
    cols: rows of w, columns of the result, that one consumer multiplies: 64, or 128, one 64 after the other.
    group_m: rows of tiles that share one pass over a group's weights.
    split_k: programs that share a tile's steps.
    store_parts: pieces in which a product's result leaves.
    ahead: whether the next words are read while a product runs, which takes registers; INT4 has none left.
    """

    block_m: int = 128
    cols: int = 64
    num_stages: int = 6
    group_m: int = 4
    split_k: int = 1
    store_parts: int = 1
    ahead: bool = True

    @property
    def tokens(self) -> int:
        """Rows of `a` in one product."""
        return min(self.block_m, 128)

    @property
    def block_n(self) -> int:
        """Columns of the result in a tile."""
        return _CONSUMERS * self.cols

    def smem_bytes(self, problem: WeightOnlyProblem) -> int:
        """Shared memory of one program, bytes (barriers and alignment rounded up to 1 KiB)."""
        p = problem
        scales = self.block_n * p.layout_of_weight.scale_itemsize + self.block_m * 4
        stage = self.block_m * BLOCK + self.block_n * BLOCK // 2 + scales
        itemsize = 4 if self.split_k > 1 else p.out_dtype.itemsize
        return self.num_stages * stage + _CONSUMERS * self.tokens // self.store_parts * 64 * itemsize + 1024


def supports(problem: WeightOnlyProblem, device: Device) -> str | None:
    p = problem
    if not p.fp8:
        return "takes FP8 activations"
    reason = refusal(p, device)
    if reason is not None:
        return reason
    extents = (p.m, -(-p.k // BLOCK))
    reach = sum(abs(s) * (d - 1) for s, d in zip(p.scale_a_strides, extents, strict=False))
    if max(reach, p.groups * p.scale_groups * p.n) >= _INT32:
        return "scales must lie within 2^31 elements"
    return None


_TILES = (
    Config(256, 64, 5, store_parts=2),
    Config(128, 128, 5),
    Config(128, 64, 7),
    Config(64, 128, 7),
    Config(64, 64, 10),
    Config(32, 128, 8),
    Config(16, 128, 9),
    Config(8, 128, 9),
)


def candidates(format: str) -> tuple[Config, ...]:
    """Tiles worth timing."""
    return tuple(replace(config, ahead=format != "int4") for config in _TILES)


@lru_cache(maxsize=1024)
def configs(problem: WeightOnlyProblem, device: Device) -> tuple[Config, ...]:
    found = []
    for tile in candidates(problem.format):
        for split in SPLITS:
            if split > 1 and split > -(-problem.k // BLOCK):
                continue
            config = fitted(replace(tile, split_k=split), problem, device)
            if config.smem_bytes(problem) <= device.smem_bytes:
                found.append(config)
    return best_splits(sorted(found, key=lambda c: _seconds(problem, device, c)))


def _seconds(problem: WeightOnlyProblem, device: Device, config: Config) -> float:
    """Modelled time of one call: waves of work units, each as long as its products or its instructions, and what memory
    has to deliver; and the partial sums of a split K, written and read through L2, with a launch of their own."""
    p, c = problem, config
    clock = 1.5e9  # Hz, what 700 W leave of 1.98 GHz under FP8 products
    rows = max(p.mean_group, 1)
    tiles = p.groups * math.ceil(rows / c.block_m) * math.ceil(p.n / c.block_n)
    units = tiles * c.split_k
    steps = math.ceil(p.k / BLOCK) / c.split_k
    # 4096 multiply-adds a clock and SM. Unpacking 64 x 128 weights takes a scheduler about 170 clocks.
    products = c.block_m * c.block_n * BLOCK / 4096
    issued = c.block_n / 64 * (170 + 0.75 * c.block_m) + 100
    loads = (c.block_m * BLOCK + c.block_n * BLOCK / 2) / 64
    waves = units / device.sm_count + 0.5 if units >= 8 * device.sm_count else math.ceil(units / device.sm_count)
    on_chip = waves * (steps * (max(products, issued, loads) + 60) + 900) / clock
    from_memory = p.work().nbytes / (0.9 * (device.memory_bps or 4e12))
    # Few programs do not ask for bytes fast enough.
    from_memory *= max(1.0, 0.75 * device.sm_count / min(units, device.sm_count))
    seconds = 2e-6 + max(on_chip, from_memory) + 0.2 * min(on_chip, from_memory)
    if c.split_k > 1:
        seconds += 1.5e-6 + 8.0 * c.split_k * p.m * p.n / 5e12
    return seconds


@lru_cache(maxsize=1024)
def _launch(
    p: WeightOnlyProblem,
    config: Config,
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
    recipe = "vector" if len(p.scale_a_strides) == 2 else "row"
    shape = shape_of(Shape, config, p, LAYOUT="ragged_m", RECIPE=recipe, CONSUMERS=_CONSUMERS, ORDERED=True)
    registers = (232, 40) if p.groups <= 256 else (224, 56)
    sx_m, sx_k = (*p.scale_a_strides, 0)[:2]
    dtypes = (p.dtype, torch.int32, scale_dtype, dtype)
    pointers = (torch.int32, bias_dtype or dtype, torch.float32, torch.float32)
    numbers = (p.groups, p.m, p.n, p.k, p.scale_groups, sx_m, sx_k)
    options = options_of(shape, _CONSUMERS, registers, pdl=wants_pdl(p))
    programs = Device.current(torch_device(device)).sm_count
    return Launch(w4a8_mm_kernel, blocks, dtypes, pointers, numbers, options, programs)


def prepared(
    p: WeightOnlyProblem, operands: Operands, config: Config, target: torch.Tensor
) -> tuple[Launch, int, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """As `runner` wants it; `target` also stands for an absent bias."""
    w, bias, scale_a = operands.w, operands.bias, operands.scale_a
    assert scale_a is not None
    device, bias_dtype = target.get_device(), None if bias is None else bias.dtype
    scale_dtype = p.layout_of_weight.scale_dtype or w.scales.dtype
    launch = _launch(p, config, target.stride(), target.dtype, bias_dtype, scale_dtype, device)
    # MXFP4's scales of rows are among the bytes of its scales; INT4 has none.
    row_scales = w.scales.view(torch.float32) if w.scales.dtype is torch.uint8 else scale_a
    pointers = (operands.offs, target if bias is None else bias, row_scales, scale_a)
    return launch, device, (operands.a, w.packed, w.scales, target), pointers


BACKEND = Backend(
    name="gluon_w4a8",
    summary="warp-specialised Gluon kernel for Hopper: FP8 activations, 4-bit weights unpacked to e4m3 in registers",
    supports=supports,
    configs=configs,
    run=runner(prepared),
)
