"""Modelled time of one call of `gluon_int4`, by which its configs are put in order.

A unit takes as long as its stages, and a stage as long as the tensor cores and the schedulers need for its pieces of
64 x 128 weights. On an H200 (32 equal groups of 1 to 256 rows, 4096 x 7168, group 128) that is within 9 % of every
tile that was timed and not nearly empty.

Where rows of groups are on the device alone, a layer may meet equal groups, those of a router that prefers no expert,
or those of one that has favourites, so that groups stay empty. A config's rank is then how far it is, at worst, from
the config that is best for one of these routings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from expertile.device import Device
from expertile.ops.weight_only_mm.backends._gluon_config import IN_UNPACKING, UNPACKING
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem

if TYPE_CHECKING:
    from expertile.ops.weight_only_mm.backends._gluon_config import Config

_CLOCK = 1.75e9  # Hz, what 700 W leave of 1.98 GHz under products; the clocks below are of this length
_UNIT_CLOCKS = 1000  # before a unit's first stage and after its last one
_LAUNCH = 2.5e-6  # seconds, with the last wave's ends


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
    if p.group_size == p.k or c.scale in IN_UNPACKING:
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
    issued = UNPACKING[c.scale] + zeros + scaling + of_stage / pieces
    if c.ordered:
        return pieces * (products**1.5 + issued**1.5) ** (2 / 3)
    return pieces * (max(products, issued) + 0.55 * min(products, issued))
