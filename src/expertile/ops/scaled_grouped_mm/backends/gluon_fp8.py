"""gluon_fp8: our warp-specialised Gluon kernel for sm_90a (H100, H200); e4m3 with float32 scales, promoted every 128.

    out_g = Σ_blocks (scale_a[:, block] ⊗ scale_b[:, block]) ∘ (a_g[:, block] @ b_g[block, :]) (+ bias[g])

    RAGGED_M  a [M_tot, K]  b [G, K, N] stored [G, N, K]   out[rows of g]; scales BLOCK, VECTOR or ROW
    RAGGED_K  a [M, K_tot]  b [K_tot, N] stored [N, K_tot]  out[g]; scales VECTOR, groups begin on multiples of 128

(`expertile.ops.scaled_grouped_mm.problem` gives the shapes of the scales.) e4m3 wgmma reads both operands with K
contiguous. K need be no multiple of 128, only of 16: TMA reads zeros past the end, and the last block of scales serves
the rest. Groups need no padding in RAGGED_M: TMA drops stores past a group's end. `offs` is read on the device only.

Limits: for long groups the tensor cores and the power they draw, as long as L2 keeps up: a tile reads
(block_m + block_n) · 128 bytes for block_m · block_n · 256 FLOP. For small ones HBM, where each group's weights are
read once; and where there are fewer tiles than multiprocessors, latency: `split_k` programs then share a tile. See
`_gluon_kernel` for how the work is laid out on the chip.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tail import filled
from expertile.ops.hopper import reduce
from expertile.ops.hopper.context import options_of, shape_of
from expertile.ops.hopper.limits import refusal
from expertile.ops.hopper.reduce import SPLITS, best_splits, fitted
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.device import torch_device, wants_pdl
from expertile.ops.launch.launch import Launch
from expertile.ops.scaled_grouped_mm.backends._gluon_kernel import Shape, scaled_grouped_mm_kernel
from expertile.ops.scaled_grouped_mm.backends.triton_fp8 import scale_strides
from expertile.ops.scaled_grouped_mm.problem import BLOCK, PDL_FLOPS, Backend, Operands, Recipe, ScaledProblem

_INT32 = 2**31


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule. Steps are 128 deep, one block of scales.

    block_m: 64 (one consumer of 64 rows), 128 (two) or 192 (three, which queue their products in order).
    block_n: 32, 64, 128, or 256 in two halves (`pairs` is nothing to those). Two consumers of halves queue their
        products in order.
    group_m: rows of tiles that share one pass over a group's weights. (H200, 8 groups of 512 rows, 7168 -> 7168: 331 us
        in bands of 4, 366 of 8, 368 of 16; within 1 % of each other on 26 other shapes.)
    split_k: programs that share a tile's steps.
    pairs: two steps at a time, the first one promoted under the products of the second.
    """

    block_m: int = 128
    block_n: int = 128
    num_stages: int = 6
    group_m: int = 4
    split_k: int = 1
    pairs: bool = False

    @property
    def consumers(self) -> int:
        return self.block_m // self.rows

    @property
    def rows(self) -> int:
        """Rows of the tile that one consumer multiplies."""
        return 64

    @property
    def a_box(self) -> int:
        """Rows of a that one TMA load brings. Tiles 64 high are for small groups: all programs of a group ask L2 for
        the same rows at the same time, and of 64 rows each most would be other groups'. (H200, 18 of 128 groups with 1
        to 16 rows, 5120 -> 27392: 583 us, and 679 in boxes of 64. In halves the producer has no registers for more.)"""
        return 16 if self.block_m == 64 and self.block_n <= 128 else self.rows

    def smem_bytes(self, problem: ScaledProblem) -> int:
        """Shared memory of one program, bytes (barriers and alignment rounded up to 768)."""
        beside = {Recipe.BLOCK: self.block_m + 2, Recipe.VECTOR: self.block_m + self.block_n, Recipe.ROW: 0}
        ring = self.num_stages * ((self.block_m + self.block_n) * BLOCK + 4 * beside[problem.recipe])
        itemsize = 4 if self.split_k > 1 else problem.out_dtype.itemsize
        return ring + self.block_m * min(self.block_n, 128) * itemsize + 768


def supports(problem: ScaledProblem, device: Device) -> str | None:
    """The reason this kernel can't compute `problem` on `device`, or None."""
    p = problem
    if reason := refusal(p, device):
        return reason
    if p.layout is Layout.RAGGED_K and p.recipe is Recipe.ROW:
        return "with one scale per row a ragged K may begin anywhere, where TMA cannot stop"
    if p.a_strides[-1] != 1 or p.b_strides[-2] != 1:
        return f"e4m3 wgmma reads both operands with K contiguous, got strides {p.a_strides} and {p.b_strides}"
    pitches = (p.a_strides[0], p.b_strides[-1], *p.b_strides[:-2])
    if any(s <= 0 or s % 16 for s in pitches):
        return f"TMA needs strides that are positive multiples of 16 bytes, got {p.a_strides} and {p.b_strides}"
    if max(_reach(p.scale_a_strides, (p.m, p.k_blocks)), _reach(p.scale_b_strides, _scale_b_shape(p))) >= _INT32:
        return "scales must lie within 2^31 elements"
    return None


def _scale_b_shape(p: ScaledProblem) -> tuple[int, ...]:
    if p.recipe is Recipe.ROW:
        return (p.groups, p.n)
    across = p.n_blocks if p.recipe is Recipe.BLOCK else p.n
    return (p.groups, across, p.k_blocks) if p.layout is Layout.RAGGED_M else (across, p.k_blocks)


def _reach(strides: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return sum(abs(s) * max(d - 1, 0) for s, d in zip(strides, shape, strict=False))


def _fits(config: Config, problem: ScaledProblem, device: Device) -> bool:
    if config.split_k > 1 and (problem.layout is Layout.RAGGED_K or config.split_k > problem.k_blocks):
        return False
    return config.smem_bytes(problem) <= device.smem_bytes


_CANDIDATES = (
    Config(128, 256, 4),
    Config(192, 128, 4),
    Config(128, 128, 6, pairs=True),
    Config(64, 128, 8, pairs=True),
    Config(64, 64, 12, pairs=True),
    Config(64, 32, 16),
    Config(128, 64, 8, pairs=True),
    Config(128, 128, 6),
    Config(64, 128, 8),
)


# From so many rows of a group on three consumers are tried. (H200, 2026-11-23, against two of halves: 1.02 times as
# fast at 2048 rows, 1.04 to 1.07 at 4096 and 8192, 0.78 to 0.97 at 300 and 512.)
_MANY_ROWS = 1536


@lru_cache(maxsize=1024)
def configs(problem: ScaledProblem, device: Device) -> tuple[Config, ...]:
    """Configs worth timing, the one with the lowest modelled time first."""
    found = []
    for tile in _CANDIDATES:
        if tile.consumers == 3 and (problem.layout is Layout.RAGGED_K or problem.mean_group < _MANY_ROWS):
            continue
        for split in SPLITS:
            config = fitted(replace(tile, split_k=split), problem, device)
            if _fits(config, problem, device):
                found.append(config)
    # Of 128 x 64 and 64 x 128 the taller where it holds a group's rows. (us in both, H200: 128 rows, 7168 -> 7168, 18.1
    # and 19.1; 512 rows, 7168 -> 2048, 17.3 and 16.8; H100: 80 rows, 1280 -> 4352, 6.7 and 6.0; 440 rows, 5504 -> 1408,
    # 13.6 and 12.9.)
    worse = (64, 128) if 96 < problem.mean_group <= 128 else (128, 64)

    def rank(c: Config) -> float:
        return _seconds(problem, device, c) * (1.02 if (c.block_m, c.block_n) == worse else 1.0)

    return best_splits(sorted(found, key=rank))


def _seconds(problem: ScaledProblem, device: Device, config: Config) -> float:
    """Modelled time of one call."""
    p = problem
    # 4096 multiply-adds a clock and SM. One consumer alone waits for its own promotion, less where that goes on under
    # the products of a pair; two cover each other's, entirely in pairs, best in halves, which they queue in order.
    # (Factors and the 64 bytes a clock that reach each SM from L2: fitted to 31 shapes on an H200, 2026-11-21, where
    # the config of the lowest modelled time was at 0.994 of the fastest in geometric mean, 0.90 at worst; order and
    # narrow tiles to three shapes of 512 rows, 2026-11-22.)
    halves = config.block_n > 128
    if config.consumers == 1:
        waiting = 1.3 if config.pairs else 1.5
    elif halves:
        waiting = 0.92
    elif config.consumers == 3:
        waiting = 0.88
    else:
        waiting = 1.0 if config.pairs else 1.15
    rows = max(p.mean_group, 1) if p.layout is Layout.RAGGED_M else p.m
    across = p.groups * math.ceil(p.n / config.block_n) * config.split_k

    units = math.ceil(rows / config.block_m) * across
    if units >= 8 * device.sm_count:
        waves = units / device.sm_count + 0.5
    elif halves and config.split_k == 1 and 0 < 2 * (units % device.sm_count) <= device.sm_count:
        waves = units // device.sm_count + 0.8  # the last tiles are taken in halves
    else:
        waves = math.ceil(units / device.sm_count)
    # H200, 64 rows, 7168 -> 4096: 16.2 us in tiles of 32 columns, 14.5 in 64 and two parts of K.
    loading = 1.7 if config.block_n < 64 else 1.0
    seconds = modelled(p, device, (config.block_m, config.block_n), waiting, waves, units, config.split_k, loading)
    # The partial sums, written and read through L2, and the launch of the kernel that adds them up.
    if config.split_k > 1:
        seconds += 4e-6 + 8.0 * config.split_k * p.m * p.n / 5e12
    return seconds


def modelled(
    problem: ScaledProblem,
    device: Device,
    tile: tuple[int, int],
    waiting: float,
    waves: float,
    units: float,
    split_k: int = 1,
    loading: float = 1.0,
) -> float:
    """Modelled time of one call in tiles of so many rows and columns, without what adds up the sums of a split K.

    Waves of work units, each as long as the longest of its products (tensor cores and promotion: `waiting` times the
    products alone), its bytes through L2 (64 a clock, `loading` times as long) and its share of the bytes from memory.
    """
    p, (block_m, block_n) = problem, tile
    # Hz: 700 W leave 1.5 GHz of 1.98 under FP8 products that last, more to those that are done soon.
    clock = 1.78e9 - 0.28e9 * min(1.0, max(0.0, (math.log10(max(p.work().flops, 1)) - 10) / 1.5))
    depth = p.k if p.layout is Layout.RAGGED_M else max(p.mean_group, 1)
    steps = math.ceil(depth / BLOCK) / split_k
    products = block_m * block_n * BLOCK / 4096 * waiting
    loads = (block_m + block_n) * BLOCK / 64 * loading
    on_chip = waves * (steps * max(products, loads) + 350) / clock
    from_memory = p.work().nbytes / (0.9 * (device.memory_bps or 4e12))
    # Few programs do not ask for bytes fast enough. (This and what a split K costs: fitted to 52 shapes on an H200,
    # 2026-11-26, where the config of the lowest modelled time was at 0.988 of the fastest in geometric mean.)
    from_memory *= math.sqrt(device.sm_count / min(max(1, units), device.sm_count))
    return 2e-6 + max(on_chip, from_memory) + 0.4 * min(on_chip, from_memory)


@lru_cache(maxsize=1024)
def _launch(
    p: ScaledProblem,
    config: Config,
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
    consumers, halves, groups = config.consumers, config.block_n // cols, p.groups
    registers = (152, 56) if consumers == 3 else (232, 40)
    if halves == 2 and p.recipe is Recipe.BLOCK:  # with these the fewest values spill, most often none
        registers = (208, 88) if groups <= 64 else (216, 72) if groups <= 256 else (224, 56)
    shape = shape_of(
        Shape,
        config,
        p,
        LAYOUT=p.layout.value,
        RECIPE=p.recipe.value,
        COLS=cols,
        HALVES=halves,
        ORDERED=consumers == 3 or (consumers == 2 and halves == 2),
        TAIL=halves == 2 and config.split_k == 1,
    )
    dtypes, pointers = (p.dtype, p.dtype, dtype), (torch.int32, bias_dtype or dtype, torch.float32, torch.float32)
    (_, sa_m, sa_k), of_b = scale_strides(p)
    numbers, programs = (groups, p.m, p.n, p.k, sa_m, sa_k, *of_b), Device.current(torch_device(device)).sm_count
    options = options_of(shape, consumers, registers, pdl=wants_pdl(p, PDL_FLOPS))
    return Launch(scaled_grouped_mm_kernel, (a, b, c), dtypes, pointers, numbers, options, programs)


def prepared(
    p: ScaledProblem, operands: Operands, config: Config, target: torch.Tensor
) -> tuple[Launch, int, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What `reduce.queue` asks for; the pointers are `target`'s for an absent bias."""
    o, bias = operands, operands.bias
    device, bias_dtype = target.get_device(), None if bias is None else bias.dtype
    launch = _launch(p, config, target.stride(), target.dtype, bias_dtype, device)
    return launch, device, (o.a, o.b, target), (o.offs, target if bias is None else bias, o.scale_a, o.scale_b)


def run(problem: ScaledProblem, operands: Operands, config: Config, out: torch.Tensor | None) -> torch.Tensor:
    """Compute into `out` (rows past offs[-1] are left alone) or a new tensor; queues one kernel, or two for a split K,
    and waits for nothing."""
    return filled(problem, operands, out, partial(reduce.queue, prepared, problem, operands, config))


BACKEND = Backend(
    name="gluon_fp8",
    summary="warp-specialised Gluon kernel for Hopper: TMA ring, FP8 wgmma, float32 promotion every 128",
    supports=supports,
    configs=configs,
    run=run,
)
