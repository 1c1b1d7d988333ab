"""How well a tile suits a problem: a modelled time from geometry alone, to compare one problem with its neighbours.

    time = launch + hypot(waves of tiles x the longer of a tile's products and its loads from L2, bytes from memory)

It knows nothing of how good a kernel is; `transfer` uses only how the times of a tile differ from problem to problem.
Groups whose sizes only the device knows are taken to spread around their mean as random choices do.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from expertile.device import Device
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tuned import Features

# Share of the peak that a tile of 128x256 reaches, what smaller ones lose, bytes per clock that a multiprocessor gets
# from L2, share of memory bandwidth, how much of a whole wave the last one takes, launch in seconds.
_PRODUCTS, _SMALLER, _L2_BYTES_PER_CLOCK, _MEMORY, _LAST_WAVE, _LAUNCH_S = 0.83, 0.09, 72, 0.88, 0.85, 5.5e-6
# From that many waves on it is all the same which part of the last is full.
_MANY_WAVES = 8
# Rows that begin anywhere in L2's lines of 128 bytes take TMA so many times as long.
_UNALIGNED = 2.7


def load_rows(rows: float, columns: float, aligned: tuple[bool, bool]) -> float:
    """`rows` of a and `columns` of b, each counted as what its loads take."""
    return rows * (1 if aligned[0] else _UNALIGNED) + columns * (1 if aligned[1] else _UNALIGNED)


class Tile(NamedTuple):
    """What of a config the model reads. `alone` rows of a tile cost nothing where they are empty."""

    block_m: int
    block_n: int
    block_k: int
    alone: int
    per_sm: int


def tile_of(fields: Mapping[str, Any]) -> Tile | None:
    """The tile of a config with these fields, None where it has none."""
    height, width = fields.get("block_m"), fields.get("block_n")
    if not height or not width:
        return None
    alone = height // 2 if fields.get("mode") == "split" else height
    return Tile(height, width, fields.get("block_k", 64), alone, fields.get("blocks_per_sm", 1))


@lru_cache(maxsize=4096)
def modelled_logs(f: Features, tiles: frozenset[Tile], device: Device) -> Mapping[Tile, float]:
    """For each tile log(its modelled time / that of the best of `tiles`) on the problem of `f`; none for dtypes other
    than 16-bit, to whose times nothing was fitted."""
    if f.dtype != "16-bit":
        return {}
    rows_of = {height: _rows_of_tiles(f, height) for t in tiles for height in (t.block_m, t.alone)}
    logs = {t: _modelled_log(f, t, device, rows_of[t.block_m], rows_of[t.alone]) for t in tiles}
    best = min(logs.values(), default=0.0)
    return {t: log - best for t, log in logs.items()}


def _modelled_log(f: Features, tile: Tile, device: Device, down: float, worked_down: float) -> float:
    """`down`, `worked_down`: rows of tiles block_m and `alone` high."""
    block_m, block_n, block_k, alone, per_sm = tile
    products, memory = device.peak("bf16") or 1e15, device.memory_bps or 1e12
    worked = alone * worked_down
    ragged_k = f.layout == Layout.RAGGED_K
    depth = block_k * (_tiles(f.mean, block_k) if ragged_k else math.ceil(f.k / block_k))
    waves = down * math.ceil(f.n / block_n) / (device.sm_count * per_sm)
    whole = math.ceil(waves - 1e-9) if waves < _MANY_WAVES else waves + 0.5
    waves = max(1.0, _LAST_WAVE * whole + (1 - _LAST_WAVE) * waves)
    # Of one tile, on its share of a multiprocessor:
    loss = 1 + _SMALLER * (128 / block_m + 256 / block_n - 2) / 2
    multiply = 2 * worked / down * block_n * depth * loss / (products * _PRODUCTS)
    rows = f.groups * f.k if ragged_k else f.rows
    read = min(depth, max(1.0, f.mean)) if ragged_k else f.k  # what lies past a group's end is not loaded
    from_l2 = _L2_BYTES_PER_CLOCK * device.max_clock_hz * device.sm_count
    load = 2 * load_rows(min(block_m, rows / down), block_n, f.aligned) * read / from_l2
    compute = waves * per_sm * device.sm_count * max(multiply, load)
    return math.log(_LAUNCH_S + math.hypot(compute, 2 * f.elements / (memory * _MEMORY)))


def _rows_of_tiles(f: Features, height: int) -> float:
    """Rows of tiles in the result, of the groups that have any rows."""
    if f.layout == Layout.RAGGED_K:
        return f.groups * math.ceil(f.k / height)
    busy = max(1, min(f.groups, f.rows))
    if f.layout == Layout.BATCHED:
        return busy * math.ceil(f.mean / height)
    if f.skew == "one" and busy > 1:  # one group has most of the rows
        return _tiles(0.9 * f.rows, height) + (busy - 1) * _tiles(0.1 * f.rows / (busy - 1), height)
    return busy * _tiles(f.rows / busy, height)


def _tiles(mean: float, height: int) -> float:
    """Tiles of a group on average, its size anywhere within a standard deviation of a random choice's."""
    if mean <= 1:
        return 1.0
    low, high = max(1.0, mean - math.sqrt(mean)), mean + math.sqrt(mean)
    return (_tiles_up_to(high, height) - _tiles_up_to(low, height)) / (high - low)


def _tiles_up_to(size: float, height: int) -> float:
    """The integral of ceil(x / height) from 0 to `size`."""
    full, rest = divmod(size, height)
    return height * full * (full + 1) / 2 + (full + 1) * rest
