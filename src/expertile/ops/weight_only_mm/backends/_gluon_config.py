"""The configs of `gluon_int4`, its tiles by format, and the modelled time of a call, by which configs are put in order.

A unit takes as long as its stages, and a stage as long as the tensor cores and the schedulers need for its pieces of
64 x 128 weights. On an H200 (32 equal groups of 1 to 256 rows, 4096 x 7168, group 128) that is within 9 % of every
tile that was timed and not nearly empty.

Where rows of groups are on the device alone, a layer may meet equal groups, those of a router that prefers no expert,
or those of one that has favourites, so that groups stay empty. A config's rank is then how far it is, at worst, from
the config that is best for one of these routings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import torch

from expertile.device import Device
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem
from expertile.ragged import power_of_two

# Scales that multiply a weight where it is unpacked, and what unpacking 64 x 128 weights takes a scheduler, in clocks.
_IN_UNPACKING = ("fused", "mxfp4")
_UNPACKING = {"fused": 154, "mxfp4": 230, "sum": 174, "weight": 174}
_CLOCK = 1.75e9  # Hz, what 700 W leave of 1.98 GHz under products; the clocks below are of this length
_UNIT_CLOCKS = 1000  # before a unit's first stage and after its last one
_LAUNCH = 2.5e-6  # seconds, with the last wave's ends


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule.

    block_m: rows of `a` in a tile, a power of two from 8 to 256.
    cols: rows of w, columns of the result, that one consumer multiplies: 64 or 128.
    consumers: 2 or 4 warpgroups, each with its own columns of the tile.
    block_k: depth of a stage, 128 or 256.
    scale: "mxfp4" for weights of that format, and for no others. Of INT4 "fused" scales each weight
        where it is unpacked, which takes bfloat16, groups along K and no zero points; "sum" the product of each group
        of K in float32; "weight" the unpacked weights. In any case one activation alone meets each weight as
        `dequantize` of its class rounds it.
    slab: values of K unpacked for one run of products, twice (low and high nibbles): 32, or 64 where groups allow it;
        of MXFP4 as well, where 64 takes block_k from 128.
    group_m: rows of tiles that share one pass over a group's weights.
    split_k: programs that share a tile's steps.
    store_parts: pieces in which a tile's result leaves.
    tails: a tile that has at most half of its rows is multiplied as half a tile. Takes an even number of store_parts,
        and tiles of at least 16 rows.
    ordered: consumers queue their products by an ordered barrier. Takes two of them, and scale "fused" or "mxfp4".
    """

    block_m: int = 16
    cols: int = 128
    consumers: int = 2
    block_k: int = 128
    num_stages: int = 8
    scale: str = "sum"
    slab: int = 64
    group_m: int = 16
    split_k: int = 1
    store_parts: int = 1
    tails: bool = False
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.tails and (self.store_parts % 2 or self.block_m < 16):
            raise ValueError(f"tails: expected an even number of store_parts and block_m from 16, got {self}")
        if self.ordered and (self.consumers != 2 or self.scale not in _IN_UNPACKING):
            raise ValueError(f'ordered: expected two consumers and scale "fused" or "mxfp4", got {self}')

    @property
    def format(self) -> str:
        """Of the weights that it takes."""
        return "mxfp4" if self.scale == "mxfp4" else "int4"

    @property
    def pairs(self) -> bool:
        """Whether two blocks of MXFP4 are unpacked at a time."""
        return self.format == "mxfp4" and self.slab == 64

    @property
    def block_n(self) -> int:
        """Columns of the result in a tile."""
        return self.consumers * self.cols

    def smem_bytes(self, problem: WeightOnlyProblem) -> int:
        """Shared memory of one program, bytes (barriers and alignment rounded up to 2 KiB)."""
        p = problem
        layout = p.layout_of_weight
        scales = self.block_k // layout.span * self.block_n * layout.scale_itemsize * (2 if p.has_zeros else 1)
        stage = self.block_m * self.block_k * 2 + self.block_n * self.block_k // 2 + scales
        itemsize = 4 if self.split_k > 1 else p.out_dtype.itemsize
        return self.num_stages * stage + self.block_m // self.store_parts * self.block_n * itemsize + 2048

    def registers(self, problem: WeightOnlyProblem) -> int:
        """About how many registers a consumer's thread fills."""
        p = problem
        slab = self.slab if self.pairs else min(self.slab, p.half)
        of_sum = self.cols * self.block_m // 128
        sums = 1 + max(1, self.block_k // p.group_size) if self.scale == "sum" and p.group_size < p.k else 1
        # The slab that is multiplied and the one that is unpacked; half a slab's registers before that.
        unpacked = self.cols * slab // 128 * (1 if self.block_k == 2 * slab else 2)
        # A thread's rows, cols / 32 of them, have two factors and a summand each, where scaled weights have two scales.
        scales = self.cols // 32 if self.scale in _IN_UNPACKING else 0
        groups = power_of_two(p.groups, 32)
        plan = groups // 32 * (2 if groups <= 128 else 1)
        return of_sum * sums + unpacked + scales + plan + 36


_FUSED = (
    Config(8, 128, 2, 128, 10, "fused", ordered=True),
    Config(16, 128, 2, 128, 9, "fused", ordered=True),
    Config(16, 128, 2, 256, 5, "fused", ordered=True),
    Config(16, 64, 2, 256, 8, "fused", ordered=True),
    Config(32, 128, 2, 128, 8, "fused", ordered=True),
    Config(32, 128, 2, 128, 8, "fused", ordered=True, store_parts=2, tails=True),
    Config(64, 128, 2, 128, 5, "fused", ordered=True),
    Config(64, 128, 2, 128, 5, "fused", ordered=True, store_parts=2, tails=True),
    Config(128, 64, 2, 128, 5, "fused", ordered=True, store_parts=2),
    Config(128, 128, 2, 128, 4, "fused", slab=32, ordered=True, store_parts=4),
)
_MXFP4 = tuple(replace(tile, scale="mxfp4", slab=slab) for tile in _FUSED for slab in (64, 32) if slab <= tile.slab)
_UNFUSED = (
    Config(8, 128, 2, 128, 10),
    Config(16, 128, 2, 128, 9),
    Config(16, 128, 2, 256, 5),
    Config(16, 64, 4, 128, 9),
    Config(16, 64, 2, 256, 8),
    Config(32, 128, 2, 128, 8),
    Config(32, 64, 4, 128, 8),
    Config(32, 128, 2, 128, 8, store_parts=2, tails=True),
    Config(32, 64, 4, 128, 8, store_parts=2, tails=True),
    Config(64, 128, 2, 128, 6),
    Config(64, 128, 2, 128, 5, store_parts=2, tails=True),
    Config(64, 128, 2, 128, 6, "weight"),
    Config(64, 128, 2, 256, 3, "weight", slab=32, store_parts=2),
    Config(128, 64, 2, 128, 5, store_parts=2),
    Config(128, 128, 2, 128, 4, "weight", slab=32, store_parts=4),
    Config(128, 128, 2, 256, 2, "weight", slab=32, store_parts=4),
    Config(256, 64, 2, 128, 3, "weight", store_parts=8),
)


def tiles(problem: WeightOnlyProblem) -> tuple[Config, ...]:
    """Tiles for weights of the problem's format, of which `gluon_int4` makes configs."""
    if problem.format == "mxfp4":
        return _MXFP4
    # Zero points take unpacking's addition, and float16 has no room for a scale.
    fuses = problem.dtype is torch.bfloat16 and not problem.has_zeros and problem.group_size < problem.k
    return _FUSED if fuses else _UNFUSED


def ranked(problem: WeightOnlyProblem, device: Device, configs: Sequence[Config]) -> list[Config]:
    """`configs`, that to be expected the fastest first."""
    routings = routings_of(problem)
    times = [[seconds(problem, device, config, sizes) for sizes in routings] for config in configs]
    best = [min(of_routing) for of_routing in zip(*times, strict=True)]

    def regret(i: int) -> tuple[float, float]:
        ratios = [t / least for t, least in zip(times[i], best, strict=True)]
        return max(ratios), sum(ratios)

    return [configs[i] for i in sorted(range(len(configs)), key=regret)]


def routings_of(problem: WeightOnlyProblem) -> tuple[tuple[int, ...], ...]:
    """Rows of each group: as they are known, or as they may be."""
    if problem.group_sizes is not None:
        return (problem.group_sizes,)
    return _possible_sizes(problem.m, problem.groups)


@lru_cache(maxsize=1024)
def _possible_sizes(rows: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each group, where they are equal; where each row takes any group (a normal distribution of the variance
    that this has); and where groups are liked unequally (log-normal, σ = 2)."""
    if groups <= 1:
        return ((rows,),)
    mean = rows / groups
    deviates = _normal_deviates(groups)
    liked = [math.exp(2 * z) for z in deviates]
    return (
        (math.ceil(mean),) * groups,
        tuple(max(0, round(mean + math.sqrt(mean) * z)) for z in deviates),
        tuple(round(rows * x / sum(liked)) for x in liked),
    )


@lru_cache(maxsize=64)
def _normal_deviates(count: int) -> tuple[float, ...]:
    normal = NormalDist()
    return tuple(normal.inv_cdf((i + 0.5) / count) for i in range(count))


@lru_cache(maxsize=4096)
def _tiles_high(sizes: tuple[int, ...], block_m: int) -> int:
    """Tiles that the rows of all groups take."""
    return max(1, sum(-(-size // block_m) for size in sizes))


def most_tiles(problem: WeightOnlyProblem, config: Config) -> int:
    """Tiles of the routing that has the most."""
    return max(_tiles(problem, config, sizes) for sizes in routings_of(problem))


def _tiles(problem: WeightOnlyProblem, config: Config, sizes: tuple[int, ...]) -> int:
    return _tiles_high(sizes, config.block_m) * -(-problem.n // config.block_n)


@lru_cache(maxsize=4096)
def _half_tiles(sizes: tuple[int, ...], block_m: int) -> float:
    """The share of tiles of which at most half has rows."""
    return sum(0 < size % block_m <= block_m // 2 for size in sizes) / _tiles_high(sizes, block_m)


def seconds(problem: WeightOnlyProblem, device: Device, config: Config, sizes: tuple[int, ...]) -> float:
    """Modelled time of one call, with `sizes` rows of each group.

    Waves of work units, each as long as its stages; what memory has to deliver; and the partial sums of a split K,
    written and read through L2, with the launch of the kernel that adds them up.
    """
    p = problem
    units = _tiles(p, config, sizes) * config.split_k
    steps = -(-p.k // (config.block_k * config.split_k))
    # How full the last wave is follows from the exact sizes only.
    exact = p.group_sizes is not None or min(sizes) == max(sizes)
    waves = units / device.sm_count
    waves = math.ceil(waves) if exact and waves < 8 else max(1.0, waves + 0.5)
    step = _step_clocks(p, config, config.block_m)
    if config.tails:
        half = _half_tiles(sizes, config.block_m)
        step += half * (_step_clocks(p, config, config.block_m // 2) - step)
    on_chip = waves * (steps * step + _UNIT_CLOCKS) / _CLOCK
    from_memory = _bytes(p, sizes) / (0.9 * (device.memory_bps or 4e12))
    # Few programs do not ask for bytes fast enough.
    from_memory *= max(1.0, 0.75 * device.sm_count / min(units, device.sm_count))
    total = _LAUNCH + max(on_chip, from_memory) + 0.05 * min(on_chip, from_memory)
    if config.split_k > 1:
        total += 1.5e-6 + 8.0 * config.split_k * p.m * p.n / 5e12
    return total


@lru_cache(maxsize=4096)
def _bytes(problem: WeightOnlyProblem, sizes: tuple[int, ...]) -> float:
    return problem.work(sizes).nbytes


def _step_clocks(problem: WeightOnlyProblem, config: Config, block_m: int) -> float:
    """Clocks of one stage with products of block_m rows: of these in the tensor cores, and of the instructions of one
    scheduler. The longer of the two hides half of the other, and more where consumers queue by the ordered barrier."""
    p, c = problem, config
    pieces = c.block_n / 64 * c.block_k / 128  # of 64 x 128 weights
    products = 4.0 * block_m
    if p.group_size == p.k or c.scale in _IN_UNPACKING:
        scaling = 0.0
    elif c.scale == "weight":
        scaling = 64.0
    else:
        scaling = block_m / 2 * max(1, 128 // p.group_size)
    # Zero points are summands of bfloat16's fused multiply-adds, and take subtractions of their own in float16.
    zeros = 0.0 if not p.has_zeros else 32.0 if p.dtype is torch.float16 else 8.0
    # Four consumers hide one another's waits better than two.
    of_stage = 200 if c.consumers == 2 else 176
    # Fused scales were timed with bytes that need no permutation, the others before that.
    issued = _UNPACKING[c.scale] + zeros + scaling + of_stage / pieces
    if c.ordered:
        return pieces * (products**1.5 + issued**1.5) ** (2 / 3)
    return pieces * (max(products, issued) + 0.55 * min(products, issued))
