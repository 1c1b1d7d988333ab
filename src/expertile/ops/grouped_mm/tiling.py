"""How well a tile suits a problem: a modelled time from geometry alone, to compare one problem with its neighbours.

    time = launch + hypot(waves of tiles x the longer of a tile's products and its loads from L2, bytes from memory)

It knows nothing of how good a kernel is; `transfer` uses only how the times of a tile differ from problem to problem.
Groups whose sizes only the device knows are taken to spread around their mean as random choices do.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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


Floats = npt.NDArray[np.float64]


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


def modelled_logs(problems: Sequence[Features], tiles: Sequence[Tile], device: Device) -> Floats:
    """[problems, tiles]: log(the tile's modelled time / that of the best of `tiles`). `problems` have one layout and
    dtype; 0 for dtypes other than 16-bit, to whose times nothing was fitted."""
    if not tiles or problems[0].dtype != "16-bit":
        return np.zeros((len(problems), len(tiles)))
    block_m, block_n, block_k, alone, per_sm = np.array(tiles, float).T
    of_rows = [(load_rows(1, 0, f.aligned), load_rows(0, 1, f.aligned), f.skew == "one") for f in problems]
    columns = [(f.rows, f.groups, f.k, f.n, f.elements, *of) for f, of in zip(problems, of_rows, strict=True)]
    rows, groups, k, n, elements, of_a, of_b, one = np.array(columns, float).T[:, :, None]
    products, memory = device.peak("bf16") or 1e15, device.memory_bps or 1e12
    layout, mean = problems[0].layout, rows / np.maximum(1, groups)
    ragged_k = layout == Layout.RAGGED_K
    if ragged_k:
        rows = groups * k
        down, worked = (groups * np.ceil(k / height) for height in (block_m, alone))
        depth = block_k * _tiles(mean, block_k)
        read = np.minimum(depth, np.maximum(1.0, mean))  # what lies past a group's end is not loaded
    else:
        down, worked = (_rows_of_tiles(rows, groups, height, layout, one) for height in (block_m, alone))
        depth, read = block_k * np.ceil(k / block_k), k
    waves = down * np.ceil(n / block_n) / (device.sm_count * per_sm)
    whole = np.where(waves < _MANY_WAVES, np.ceil(waves - 1e-9), waves + 0.5)
    waves = np.maximum(1.0, _LAST_WAVE * whole + (1 - _LAST_WAVE) * waves)
    # Of one tile, on its share of a multiprocessor:
    loss = 1 + _SMALLER * (128 / block_m + 256 / block_n - 2) / 2
    multiply = 2 * alone * worked / down * block_n * depth * loss / (products * _PRODUCTS)
    from_l2 = _L2_BYTES_PER_CLOCK * device.max_clock_hz * device.sm_count
    load = 2 * (np.minimum(block_m, rows / down) * of_a + block_n * of_b) * read / from_l2
    compute = waves * per_sm * device.sm_count * np.maximum(multiply, load)
    logs = np.log(_LAUNCH_S + np.hypot(compute, 2 * elements / (memory * _MEMORY)))
    return logs - logs.min(1, keepdims=True)


def _rows_of_tiles(rows: Floats, groups: Floats, height: Floats, layout: str, one: Floats) -> Floats:
    """Rows of tiles in the result, of the groups that have any rows. `one`: one group has most of them."""
    busy = np.maximum(1, np.minimum(groups, rows))
    if layout == Layout.BATCHED:
        return busy * np.ceil(rows / groups / height)
    rest = np.maximum(1, busy - 1)
    uneven = _tiles(0.9 * rows, height) + rest * _tiles(0.1 * rows / rest, height)
    return np.where((one > 0) & (busy > 1), uneven, busy * _tiles(rows / busy, height))


def _tiles(mean: Floats, height: Floats) -> Floats:
    """Tiles of a group on average, its size anywhere within a standard deviation of a random choice's."""
    mean = np.maximum(1.0, mean)
    low, high = np.maximum(1.0, mean - np.sqrt(mean)), mean + np.sqrt(mean)
    return np.where(mean <= 1, 1.0, (_tiles_up_to(high, height) - _tiles_up_to(low, height)) / (high - low))


def _tiles_up_to(size: Floats, height: Floats) -> Floats:
    """The integral of ceil(x / height) from 0 to `size`."""
    full = np.floor(size / height)
    return height * full * (full + 1) / 2 + (full + 1) * (size - full * height)
