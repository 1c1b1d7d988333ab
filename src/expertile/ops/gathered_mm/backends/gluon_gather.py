"""gluon_gather: our warp-specialised Gluon kernel for sm_90a (H100, H200) with gathered rows and fused epilogues.

    MM     out[r] = a[rows[r]] @ b[g] (+ bias[g])
    GATED  pre[r] = a[rows[r]] @ b[g] (+ bias[g]), act[r] = f(gate, up)

bf16 and fp16, float32 accumulation. Rows are gathered inside by cp.async, 16 bytes a thread, or come by TMA where
`rows` is None; b comes by TMA and all results leave by TMA, so groups need no padding. The activation is that of the
rounded pre-activation, whether that is kept or not. `offs` and `rows` are read on the device only: a call never
synchronises, and a captured CUDA graph follows new routings. Limits: tensor cores (and the power they draw) for long
groups; HBM for small ones, where each expert's weights are read once. See `_gluon_kernel` for how the work is laid out
on the chip.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs
from expertile.ops.gathered_mm.backends._gluon_kernel import Shape, gathered_mm_kernel
from expertile.ops.gathered_mm.backends._hopper import refusal, second_pair
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.grouped_mm.backend import Pair
from expertile.ops.grouped_mm.backends.gluon_hopper import QUEUE_BYTES
from expertile.ops.hopper.context import options_of, shape_of
from expertile.ops.hopper.limits import MAX_ROWS, wide_tiles_pay
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.counter import tile_counter
from expertile.ops.launch.device import torch_device
from expertile.ops.launch.launch import Launch


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule.

    block_n: columns of the product's tile (half of them gate, half up, where it is gated).
    group_m: rows of tiles that share one pass over an expert's weights.
    store_parts: pieces in which a result of half a tile's width leaves.
    store_slots: buffers, of a piece each, through which each of the two consumers stores.
    split: both consumers share a tile, half of its rows each; else each takes every other tile.
    dynamic: a dynamic tile scheduler, with a counter in memory; else program p of P takes p, p + P, p + 2P, …
    masked: rows of a tile past the end of its group are filled with zeros; else the group's last row is read for them.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_stages: int = 5
    group_m: int = 8
    store_parts: int = 1
    store_slots: int = 2
    split: bool = False
    dynamic: bool = False
    masked: bool = False

    @property
    def rows(self) -> int:
        """Rows of a tile that one consumer multiplies."""
        return self.block_m // 2 if self.split else self.block_m

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one program, bytes (the barriers and alignment rounded up to 1 KiB)."""
        ring = self.num_stages * (self.block_m + self.block_n) * self.block_k * 2
        store = 2 * self.store_slots * self.rows * (self.block_n // 2 // self.store_parts) * 2
        return ring + store + 1024 + QUEUE_BYTES * self.dynamic


def supports(problem: GatherProblem, device: Device) -> str | None:
    p = problem
    if reason := refusal(p, device):
        return reason
    if p.product is Product.BACKWARD:
        return "computes no backward pass of an activation"
    if p.m > MAX_ROWS:
        return f"at most {MAX_ROWS} rows (the ragged descriptors' limit), not {p.m}"
    if p.groups > 1024:
        return f"at most 1024 experts (their prefix sum is kept in registers), not {p.groups}"
    if p.product is Product.GATED and not p.interleaved and p.b_strides[1] != 1:
        return "gate and up in halves are loaded together, for which b must be stored [E, 2I, K]"
    return None


_LARGE_M = Config()
_SPLIT = Config(block_n=256, num_stages=4, store_slots=1, split=True)
_DYNAMIC = replace(_SPLIT, dynamic=True)
_LARGE_M_ONE_OUTPUT = Config(num_stages=6, store_slots=1)
_SMALL_M = Config(block_m=64, num_stages=8)
# Widest first; as many stages as shared memory takes.
_DECODE = tuple(Config(64, n, 64, stages, masked=True) for n, stages in ((128, 8), (64, 12), (32, 16)))
_VECTOR = 8  # elements of a 16-byte copy
_TILE_COLUMNS = 8  # what a tile costs beside its weights: plan, first load and store, in columns of weights
# As wide as _SPLIT, so as few gathered bytes; in turn, so that stores are hidden; the small buffer makes a fifth stage.
_HIGH_64 = Config(block_m=64, block_n=256, num_stages=5, group_m=16, store_parts=2, store_slots=1)
# FLOP/s of whole tiles with gathered rows, by (block_m, block_n), of those of 128x256. What lowers it is what crosses
# from L2 (docs/notes/grouped_mm.md, "Gathered products").
_RATES = {(128, 256): 1.0, (64, 256): 0.99, (128, 128): 0.86, (64, 128): 0.69}
_H100_RATES = {(128, 256): 1.0, (64, 256): 0.89, (128, 128): 0.65, (64, 128): 0.5}
_CANDIDATES = (_LARGE_M, _SPLIT, _DYNAMIC, _LARGE_M_ONE_OUTPUT, _SMALL_M, _HIGH_64, Config(num_stages=4, store_slots=3))


@lru_cache(maxsize=1024)
def configs(problem: GatherProblem, device: Device) -> tuple[Config, ...]:
    decode = (_decode(problem, device),) if problem.gathered and problem.mean_group <= 64 else ()
    candidates = (_default(problem, device), *decode, *_CANDIDATES)
    fitting = (c for c in candidates if c.smem_bytes <= device.smem_bytes)
    return tuple(dict.fromkeys(fitting))


def invariant(problem: GatherProblem, device: Device) -> tuple[Config, ...]:
    """All configs: each adds the products of an element 16 at a time (the K of a wgmma), in the order of k, to one
    float32 sum."""
    return configs(problem, device)


def _default(problem: GatherProblem, device: Device) -> Config:
    """The schedule of an up-projection or plain product. Where rows are gathered, the one of least `_cost`."""
    p = problem
    if p.gathered and p.mean_group <= 16:
        return _decode(p, device)
    if not p.gathered:  # a dynamic scheduler gains nothing
        return _SMALL_M if p.mean_group <= 400 else _LARGE_M
    offered = [_SMALL_M, _LARGE_M]
    if not p.interleaved or p.b_strides[1] == 1:  # else wide tiles spill in the epilogue
        tiles = p.groups * math.ceil(p.mean_group / 128) * math.ceil(p.n / 256)
        offered.append(_DYNAMIC if tiles >= 8 * device.sm_count else _SPLIT)
        if p.product is Product.GATED and p.mean_group >= 48:  # of fewer rows it was not faster
            offered.append(_HIGH_64)
    return min(offered, key=lambda c: _cost(p, device, c))  # of equals the first


def _cost(problem: GatherProblem, device: Device, config: Config) -> float:
    """Time of a product with gathered rows, in the time that one row takes with one column at the rate of 128x256.

    Counted: the rows that fill up a group's last tile, half a tile on average, the columns that fill up the last one,
    and half a round of tiles at the end, when some multiprocessors are done. Beside a tile's products stands its share
    of reading the weights, once for all tiles of the group. Steps of K are the same for all."""
    p, c = problem, config
    tiles_m = max(1.0, p.mean_group / c.block_m + 0.5)
    tiles = p.groups * tiles_m * math.ceil(p.n / c.block_n)
    ridge = (device.peak(p.dtype_key) or 0.0) / (device.memory_bps or math.inf)  # rows multiplied in a weight's time
    rate = (_H100_RATES if wide_tiles_pay(device) else _RATES)[c.block_m, c.block_n]
    return (tiles / device.sm_count + 0.5) * c.block_n * math.hypot(c.block_m / rate, ridge / tiles_m)


def _decode(problem: GatherProblem, device: Device) -> Config:
    """The schedule for tiles that are mostly empty, where the bytes of the weights are what counts: the width with
    which the busiest multiprocessor reads least, for the experts that a uniform routing is expected to touch."""
    p = problem
    taken = min(p.groups, p.m / max(1, p.tokens))  # experts of a token
    touched = max(1.0, p.groups * (1 - (1 - taken / p.groups) ** p.tokens))

    def columns(c: Config) -> int:
        tiles = round(touched) * math.ceil(p.n / c.block_n)
        return math.ceil(tiles / device.sm_count) * (c.block_n + _TILE_COLUMNS)

    return min(_DECODE, key=columns)  # of equals the first


def takes_more(problem: GatherProblem, config: Config) -> bool:
    """Whether `run` takes a second pair of operands: rows of a are gathered, and its own start a step of K."""
    return problem.gathered == "a" and problem.k % config.block_k == 0


def _ragged_halves(inner: int, stride: int, box: tuple[int, int]) -> Blocks:
    """`ragged` rows of two halves of `inner` columns each: a box lies in one half, and ends where that ends."""
    rows = ragged(inner, stride, box)
    return Blocks((*rows.shape[:3], 2, inner), (*rows.strides[:3], inner, 1), (1, 1, box[0], 1, box[1]))


def _halved(p: GatherProblem) -> bool:
    """Whether a tile of an up-projection has gate columns to the left and up columns to the right. Where K is
    contiguous in b, TMA brings them so from either order of the rows."""
    return p.product is Product.GATED and (p.b_strides[1] == 1 or not p.interleaved)


def _weights(p: GatherProblem, config: Config) -> Blocks:
    expert, k, n = p.b_strides
    bn, bk = config.block_n, config.block_k
    if _halved(p):
        half, step = (n, 2 * n) if p.interleaved else (p.n // 2 * n, n)
        return Blocks((p.groups, 2, p.n // 2, p.k), (expert, half, step, 1), (1, 2, bn // 2, bk))
    if k == 1:
        return Blocks((p.groups, p.n, p.k), (expert, n, 1), (1, bn, bk))
    return Blocks((p.groups, p.k, p.n), (expert, k, 1), (1, bk, bn))


@lru_cache(maxsize=1024)
def _launch(p: GatherProblem, config: Config, bias_dtype: torch.dtype, device: int, rank: int = 0) -> Launch:
    """The launch of `gathered_mm_kernel` on GPU number `device` for this problem, with a second pair of operands of
    `rank` columns."""
    gathered = p.gathered != ""
    box = (config.rows, config.block_n // 2 // config.store_parts)
    rows = p.tokens if gathered else p.m
    inner = p.intermediate
    more_a = more_b = None
    more = -(-rank // config.block_k)
    a = Blocks((rows, p.k), (p.a_strides[0], 1), (config.block_m, config.block_k))
    b = _weights(p, config)
    if rank:
        more_a = Blocks((p.m, rank), (rank, 1), a.box)
        more_b = _weights(second_pair(p, rank), config)
    out = pre = ragged(inner, inner, box)
    if p.product is Product.GATED and p.save_pre:
        pre = ragged(2 * inner, 2 * inner, box) if p.interleaved else _ragged_halves(inner, 2 * inner, box)
    shape = shape_of(
        Shape,
        config,
        p,
        LAYOUT="ragged_m",
        PRODUCT=p.product.value,
        HALVED=_halved(p),
        B_K_MAJOR=p.b_strides[1] == 1,
        MORE=more,
    )
    # PDL for few rows, where the launch is a good part of the time (`launch.device.wants_pdl`).
    options = options_of(shape, 2, (208, 88) if gathered else (232, 40), pdl=config.masked)
    i32 = torch.int32
    blocks, pointers = (a, b, out, pre, more_a, more_b), (p.dtype, i32, i32, bias_dtype, i32)
    numbers = (p.groups, p.m, p.n, p.k + more * config.block_k, p.a_strides[0] // _VECTOR)
    programs = Device.current(torch_device(device)).sm_count
    return Launch(gathered_mm_kernel, blocks, (p.dtype,) * 6, pointers, numbers, options, programs)


def prepared(
    p: GatherProblem, operands: Operands, config: Config, outputs: Outputs, more: Pair | None = None
) -> tuple[Launch, int, tuple[Any, ...], tuple[Any, ...]]:
    """The launch, and what it runs with: the device, the tensors of its descriptors, and those of its pointers (any
    others for what is absent). `more`: `run`'s."""
    o, device = operands, operands.a.get_device()
    rank, pair = (0, (o.a, o.b)) if more is None else (more[0].shape[1], more)
    launch = _launch(p, config, p.dtype if o.bias is None else o.bias.dtype, device, rank)
    rows, bias = o.offs if o.rows is None else o.rows, o.a if o.bias is None else o.bias
    counter = tile_counter(config.dynamic, o.offs)
    out, pre = (*outputs, None)[:2]
    pre = out if pre is None else pre
    return launch, device, (o.a, o.b, out, pre, *pair), (o.a, rows, o.offs, bias, counter)


def run(problem: GatherProblem, operands: Operands, config: Config, outputs: Outputs, more: Pair | None = None) -> None:
    """Compute into `outputs` (rows past offs[-1] are left alone); queues a kernel.

    `more`: a second pair of operands, u [R, r] with rows in order and b [E, r, N] laid out as b is, r a multiple of 8,
    both without gaps: u[row] @ b[g] is added to the product, in the same accumulators."""
    launch, device, tensors, pointers = prepared(problem, operands, config, outputs, more)
    launch.run(device, tensors, pointers)


BACKEND = Backend(
    name="gluon_gather",
    summary="warp-specialised Gluon kernel for Hopper: rows gathered by cp.async, gated activation in the epilogue",
    supports=supports,
    configs=configs,
    run=run,
    invariant=invariant,
)
