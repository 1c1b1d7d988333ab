"""gluon_hopper: our warp-specialised Gluon kernel for sm_90a (H100, H200); bf16 and fp16 with float32 accumulation.

    RAGGED_M  out[rows of g] = a[rows of g] @ b[g]          a [M_tot, K], b [G, K, N] in either memory order
    RAGGED_K  out[g] = a[:, cols of g] @ b[rows of g]       a [M, K_tot] stored [K_tot, M], b [K_tot, N]
    BATCHED   out[g] = a[g] @ b[g]

Every tile of `a` and `b` arrives by TMA, every tile of `out` leaves by TMA; groups need no padding. `offs` is read on
the device only, so a call never synchronises and a captured CUDA graph follows new offsets. Limits: tensor cores (and
the power they draw) for large groups; HBM for small ones, where each group's weights are read once; see `_gluon_kernel`
for how the work is laid out on the chip.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from expertile.device import Device
from expertile.ops.backend import Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, Pair, rows_are_tokens
from expertile.ops.grouped_mm.backends._gluon_launch import prepared
from expertile.ops.grouped_mm.backends._tma import unloadable_groups
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.grouped_mm.tail import filled
from expertile.ops.grouped_mm.tiling import load_rows
from expertile.ops.hopper.limits import refusal, wide_tiles_pay

_DTYPES = (torch.bfloat16, torch.float16)
QUEUE_BYTES = 2048  # tile numbers of the dynamic scheduler, on their way to the consumers


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule.

    mode: "cooperative": one consumer of block_m rows (64 rows for each of its warpgroups).
          "split": two consumers, one warpgroup each, with half of the tile's rows each, running freely.
          "pingpong": two consumers of one warpgroup each, taking tiles in turn.
    group_m: rows of tiles that share one pass over a group's weights.
    store_parts, store_slots: the output tile leaves in `store_parts` pieces through `store_slots` buffers. With
        "pingpong" the other consumer multiplies meanwhile: stores that wait for one another cost nothing.
    lag: steps by which the second consumer of "split" starts late.
    dynamic: a dynamic tile scheduler, with a counter in memory; else program p of P takes p, p + P, p + 2P, …
    small_m: only rows that the group has are loaded, 16 at a time (block_m 64, block_k 64, not "split", ragged M).
        All programs of a group ask L2 for the same rows at the same time, and most of 64 would be other groups'.

    ValueError for `small_m` with another tile or mode, whose rows do not lie as 16 at a time bring them.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 3
    mode: str = "split"
    group_m: int = 16
    store_parts: int = 1
    store_slots: int = 1
    lag: int = 1
    dynamic: bool = False
    small_m: bool = False

    def __post_init__(self) -> None:
        if self.small_m and (self.block_m, self.block_k, self.mode == "split") != (64, 64, False):
            got = f"{self.block_m}, {self.block_k} and {self.mode}"
            raise ValueError(f"small_m: expected block_m 64, block_k 64 and a mode other than split, got {got}")

    @property
    def consumers(self) -> int:
        return 1 if self.mode == "cooperative" else 2

    @property
    def rows(self) -> int:
        """Rows of the tile that one consumer multiplies."""
        return self.block_m // 2 if self.mode == "split" else self.block_m

    @property
    def box(self) -> int:
        """Rows of `a` that one load brings, where a group may have fewer than a tile."""
        return 16 if self.small_m else self.rows

    @property
    def num_warps(self) -> int:
        """Warps of one consumer."""
        return 8 if self.mode == "cooperative" and self.block_m == 128 else 4

    def smem_bytes(self, itemsize: int, out_itemsize: int) -> int:
        """Shared memory of one program, bytes (the barriers and alignment rounded up to 1 KiB)."""
        ring = self.num_stages * (self.block_m + self.block_n) * self.block_k * itemsize
        store = self.consumers * self.store_slots * self.rows * (self.block_n // self.store_parts) * out_itemsize
        return ring + store + 1024 + QUEUE_BYTES * self.dynamic


def supports(problem: Problem, device: Device) -> str | None:
    p = problem
    if reason := refusal(p, device):
        return reason
    if p.dtype not in _DTYPES:
        return f"multiplies bfloat16 and float16, not {p.dtype}"
    if p.out_dtype not in (*_DTYPES, torch.float32):
        return f"writes bfloat16, float16 and float32, not {p.out_dtype}"
    if p.layout is Layout.RAGGED_N:
        return "a ragged last dimension of the output cannot be stored by TMA (its strides must be 16-byte multiples)"
    if p.has_bias and p.layout is Layout.RAGGED_K:
        return "no bias when K is ragged"
    return unloadable_groups(p)


def _fitted(config: Config, problem: Problem, device: Device) -> Config:
    """`config`, its result stored in more and smaller parts where 4-byte elements leave no room for large ones."""
    while config.smem_bytes(problem.dtype.itemsize, problem.out_dtype.itemsize) > device.smem_bytes:
        config = replace(config, store_parts=2 * config.store_parts)
    return config


_PINGPONG = Config(mode="pingpong", block_n=128, num_stages=6, store_parts=4)
_BANDS_OF_2, _BANDS_OF_4, _BANDS_OF_8 = (replace(_PINGPONG, group_m=rows) for rows in (2, 4, 8))
_COOPERATIVE = Config(mode="cooperative", num_stages=4, store_parts=2)
_SHARED = Config(block_n=128, num_stages=6)
_DYNAMIC = Config(num_stages=4, store_parts=2, dynamic=True)
_HIGH_64 = Config(mode="pingpong", block_m=64, num_stages=5, store_parts=4)
_DECODE = Config(mode="cooperative", block_m=64, block_n=128, block_k=128, num_stages=4)
_WIDE_DECODE = Config(mode="cooperative", block_m=64, num_stages=4)
_STORING = Config(mode="pingpong", block_n=128, num_stages=3, store_slots=2, group_m=8)

_SMALL_M = Config(mode="cooperative", block_m=64, block_n=128, num_stages=8, small_m=True)

# Each wins some problem.
_CANDIDATES = (
    _BANDS_OF_4,
    _DYNAMIC,
    _COOPERATIVE,
    _SHARED,
    _HIGH_64,
    _DECODE,
    _WIDE_DECODE,
    _PINGPONG,
    _BANDS_OF_8,
    _BANDS_OF_2,
    _STORING,
    Config(),
)


def _rows(p: Problem) -> float:
    """Rows of the result that belong to a group, on average."""
    return p.mean_group if p.layout is Layout.RAGGED_M else p.m


def _tiles(p: Problem, height: int = 128, width: int = 128) -> int:
    """Tiles in the result, for groups of mean size."""
    return p.groups * math.ceil(_rows(p) / height) * math.ceil(p.n / width)


def _waves(p: Problem, device: Device, height: int = 128, width: int = 128) -> float:
    """Waves of tiles, the last a whole one; a dozen even out."""
    part = _tiles(p, height, width) / device.sm_count
    return part if part > 12 else math.ceil(part)


def _default(problem: Problem, device: Device) -> Config:
    """The schedule for a problem. What its rules rest on: docs/notes/grouped_mm.md, "The schedule's rules".

    On an H100, from a wave of them on, tiles of 128x256 for both consumers, which read a quarter less from L2."""
    chosen = _h200_default(problem, device)
    full = _rows(problem) > 128 and _tiles(problem, 128, 256) >= device.sm_count
    if wide_tiles_pay(device) and full and chosen.mode == "pingpong":
        return _COOPERATIVE
    return chosen


def _h200_default(problem: Problem, device: Device) -> Config:
    """The schedule for a problem on an H200."""
    p = problem
    if not all(p.aligned_rows) and _rows(p) > 48:
        return _load_bound_default(p, device)
    if p.layout is Layout.RAGGED_K:
        return _wgrad_default(p)
    rows, tiles = _rows(p), _tiles(p)
    full_tiles = p.groups * rows * p.n / 128**2  # as many as there would be if none had rows or columns to spare
    weights_mb = 2e-6 * p.groups * p.k * p.n
    k_contiguous = p.b_strides[-2] == 1
    if rows <= 48:
        if p.layout is Layout.RAGGED_M:
            return _SMALL_M
        return _WIDE_DECODE if p.groups * math.ceil(p.n / 256) >= 4 * device.sm_count else _DECODE
    # Not even one wave of 128x128, and not so many bytes of weights that memory limits.
    few = tiles <= device.sm_count and weights_mb <= 100
    if few and tiles <= device.sm_count // 2:  # half a wave
        return _DECODE
    if rows <= 111:
        # 128 rows of tiles and two consumers, one of which drops out where a group has less than 65.
        return _DYNAMIC if weights_mb > 658 else _SHARED
    if few:
        return _SHARED  # two consumers on each of the few tiles
    # Of tiles of 64x256, which have as many products: above 1 where fewer idle rows save more than idle columns cost.
    gain = _waves(p, device) / _waves(p, device, 64, 256)
    if gain >= 1.03 and p.k >= 512 and tiles > device.sm_count and weights_mb <= 7500:
        return _HIGH_64
    # With K as long the stores are hidden. Few tiles of ragged M are faster in bands.
    few_rows = gain >= 1 and p.k >= 1024 and (_wins_low(p, tiles, weights_mb) or p.layout is Layout.BATCHED)
    if few_rows and 175 < rows <= (724 if k_contiguous else 362) and tiles > 272 and weights_mb <= 7500:
        return _HIGH_64  # groups that are not alike have fewer rows to spare
    if p.n > 7663 and rows <= 1536 and weights_mb > 222:
        return _DYNAMIC
    if full_tiles <= 222:
        return _COOPERATIVE
    if tiles <= 272:
        return _SHARED
    if rows <= 222:
        if p.k > 2896:
            return _BANDS_OF_4 if rows > 175 else _COOPERATIVE
        # Groups of one or two rows of tiles differ in work, which a dynamic scheduler evens out over many waves.
        return _DYNAMIC if tiles > 4 * device.sm_count else _HIGH_64 if few_rows else _PINGPONG
    # With a dynamic scheduler large weights are read from memory fewer times.
    if weights_mb > 7500 or (weights_mb > 3520 and not k_contiguous and _fits_256(p)):
        return _DYNAMIC
    return _HIGH_64 if few_rows and k_contiguous and p.k >= 4096 and p.n >= 1024 else _BANDS_OF_4


def _fits_256(p: Problem) -> bool:
    """Whether tiles of 256 columns have few to spare."""
    return 256 * math.ceil(p.n / 256) <= 1.03 * p.n


def _wins_low(p: Problem, tiles: int, weights_mb: float) -> bool:
    """Whether tiles of 64x256 gain by large weights what they lose by loading more for each product."""
    many = tiles > 1024 and _fits_256(p) and p.n >= 1024
    return many and (_rows(p) > 362 or (p.k >= 2048 and p.n >= 2048 and weights_mb > 1800))


def _load_bound_default(p: Problem, device: Device) -> Config:
    """Where rows begin anywhere in L2's lines their loads take longest: the tile with the fewest in all its waves."""

    def loads(c: Config) -> float:
        return _waves(p, device, c.block_m, c.block_n) * load_rows(c.block_m, c.block_n, p.aligned_rows)

    return min((_DYNAMIC, _SHARED, _DECODE), key=loads)


def _wgrad_default(p: Problem) -> Config:
    if _tiles(p) > 7094:
        # Little but stores, or groups that differ in work: all programs stay side by side in memory.
        if p.mean_group <= (262 if _fits_256(p) else 128):
            return _DYNAMIC
        return _BANDS_OF_4 if p.m <= 2896 else _BANDS_OF_2
    if p.mean_group <= 128:
        # So few products that each tile's stores are most of its time: small tiles, which overlap them.
        return _SHARED
    if p.n <= 1774 or p.mean_group <= 362:
        return _BANDS_OF_2
    return _COOPERATIVE if p.mean_group <= 512 and p.m > 2896 else _BANDS_OF_4


@lru_cache(maxsize=1024)
def configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    few = problem.layout is Layout.RAGGED_M and problem.mean_group <= 64
    ordered = (_default(problem, device), *_CANDIDATES, *((_SMALL_M,) if few else ()))
    return tuple(dict.fromkeys(_fitted(c, problem, device) for c in ordered))


def invariant(problem: Problem, device: Device) -> tuple[Config, ...]:
    """All configs: each adds the products of an element 16 at a time (the K of a wgmma), in the order of k, to one
    float32 sum. What a step past the end of K adds is zero."""
    return configs(problem, device) if rows_are_tokens(problem) else ()


def takes_more(problem: Problem, config: Config) -> bool:
    """Whether `run` takes a second pair of operands: M is ragged, and the second pair starts a step of K."""
    p = problem
    return p.layout is Layout.RAGGED_M and p.a_strides[-1] == 1 and p.k > 0 and p.k % config.block_k == 0


def run(
    problem: Problem,
    operands: Operands,
    config: Config,
    out: torch.Tensor | None,
    add: bool = False,
    more: Pair | None = None,
) -> torch.Tensor:
    """Compute into `out` (rows past offs[-1] are left alone; or `add` to it) or a new tensor; queues one kernel, waits
    for nothing.

    `more`: a second pair of operands, u [M, r] and b [G, r, N] laid out as b is, r a multiple of 8, both without gaps:
    u @ b[g] is added to the product, in the same accumulators."""
    if add and out is not None and problem.k == 0:
        return out

    def queue(target: torch.Tensor) -> None:
        launch, device, tensors, pointers = prepared(problem, operands, config, target, add, more)
        launch.run(device, tensors, pointers)

    return filled(problem, operands, out, queue)


BACKEND = Backend(
    name="gluon_hopper",
    summary="warp-specialised Gluon kernel for Hopper: TMA ring, wgmma, stores overlapped with products",
    supports=supports,
    configs=configs,
    run=run,
    add=partial(run, add=True),
    invariant=invariant,
    speed=Speed(0.705, 0.925, 2e-6, stores=0.755),
)
