"""From measured problems to an unmeasured one: the time that one backend and config should take there.

Every neighbour q of a problem p says  t(p) = t(q) x shape(p) / shape(q),  where `shape` is the time by geometry alone
of a kernel with that config's tiles: whole waves of tiles over the machine, or bytes. What the geometry leaves out
(how well the kernel runs) is thus taken from the measurement. The expected time is the mean over the neighbours, in
logarithms, the nearer counting more. Between candidates of equal tiles that is the mean of their measured slowdowns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend, config_dict
from expertile.ops.grouped_mm.model import SPEEDS
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tuned import CandidateKey, Features, Measured, candidate_key, loose_key

# Shares of peak and bandwidth that a good kernel reaches, and what every launch costs in a CUDA graph, seconds.
_COMPUTE, _MEMORY, _LAUNCH_S = 0.62, 0.85, 3e-6
# How far a last wave that is not full costs as much as a full one: the processors that remain run at a higher clock.
_WHOLE_WAVES = 0.25
# A candidate that a measured problem does not list was screened out there: it took at least so much more.
_SCREENED_OUT = 1.08
# Added to a squared distance: how alike two problems at distance 0 still are.
_BLUR = 0.05
_SPREAD = (-1.4, -0.5, 0.0, 0.5, 1.4)  # group sizes of a random choice, in standard deviations about their mean


@dataclass(frozen=True)
class Rival:
    """A backend with one of its configs."""

    backend: Backend
    config: Any

    @cached_property
    def key(self) -> CandidateKey:
        return candidate_key(self.backend.name, config_dict(self.config))

    @cached_property
    def loose(self) -> CandidateKey:
        return loose_key(self.key)

    @cached_property
    def tile(self) -> tuple[int, int, int]:
        """Rows and columns of a tile, blocks per processor."""
        speed = SPEEDS.get(self.backend.name)
        rows, cols = speed.tile if speed else (128, 256)
        c = self.config
        return getattr(c, "block_m", rows), getattr(c, "block_n", cols), getattr(c, "blocks_per_sm", 1)


def expected_seconds(
    rivals: Sequence[Rival], features: Features, near: Sequence[tuple[float, Measured]], device: Device
) -> list[float | None]:
    """For each rival the expected seconds on the problem of `features`; None where no neighbour ran its backend."""
    here = {tile: shape_seconds(features, tile, device) for tile in {r.tile for r in rivals}}
    sums = [0.0] * len(rivals)
    weights = [0.0] * len(rivals)
    for distance, measured in near:
        weight = 1.0 / (_BLUR + distance * distance)
        there = {tile: shape_seconds(measured.features, tile, device) for tile in here}
        for i, rival in enumerate(rivals):
            seconds = seconds_at(measured, rival)
            if seconds is not None:
                sums[i] += weight * math.log(seconds * here[rival.tile] / there[rival.tile])
                weights[i] += weight
    return [math.exp(s / w) if w else None for s, w in zip(sums, weights, strict=True)]


def seconds_at(measured: Measured, rival: Rival) -> float | None:
    """What `rival` took there, or at least would have taken; None if its backend was not there."""
    of_backend = measured.backends.get(rival.backend.name)
    if of_backend is None:
        return None
    found = measured.exact.get(rival.key) or measured.similar.get(rival.loose)
    return found if found is not None else max(measured.best, of_backend) * _SCREENED_OUT


def shape_seconds(f: Features, tile: tuple[int, int, int], device: Device) -> float:
    """Seconds by geometry for tiles of tile[0] rows and tile[1] columns, tile[2] programs on each processor."""
    rows, cols, blocks = tile
    groups, mean = max(1, f.groups), f.rows / max(1, f.groups)
    tiles: float
    depth: float
    itemsize = 2 if f.dtype == "16-bit" else 4
    if f.layout == Layout.RAGGED_K:
        tiles = groups * math.ceil(f.k / rows) * math.ceil(f.n / cols)
        depth = mean
        nbytes = (f.rows * (f.k + f.n) + groups * f.k * f.n) * itemsize
    else:
        along, across = (cols, rows) if f.layout == Layout.RAGGED_N else (rows, cols)
        tiles = groups * _tiles_along(f, mean, along) * math.ceil(f.n / across)
        depth = f.k
        used = min(groups, f.rows)
        nbytes = (f.rows * (f.k + f.n) + used * f.k * f.n) * itemsize
    programs = max(1, device.sm_count * blocks)
    waves = tiles / programs
    waves = max(1.0, (1 - _WHOLE_WAVES) * waves + _WHOLE_WAVES * math.ceil(waves))
    peak = device.peak("bf16" if f.dtype == "16-bit" else f.dtype) or device.peak("fp32") or 1e12
    compute = 2.0 * waves * programs * rows * cols * depth / (peak * _COMPUTE)
    memory = nbytes / ((device.memory_bps or 1e12) * _MEMORY)
    return math.hypot(compute * compute, memory * memory) ** 0.5 + _LAUNCH_S


def _tiles_along(f: Features, mean: float, height: int) -> float:
    """Mean tiles of a group in the ragged dimension, for groups that a random choice makes uneven."""
    if f.layout == Layout.BATCHED:
        return math.ceil(mean / height)
    spread = math.sqrt(mean)
    return sum(math.ceil(max(0.0, mean + z * spread) / height) for z in _SPREAD) / len(_SPREAD)
