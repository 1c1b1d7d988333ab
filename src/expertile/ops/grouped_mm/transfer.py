"""From measured problems to an unmeasured one: the time that one backend and config should take there.

Every measured neighbour ranks the candidates by their slowdown, time / best time there. A candidate's expected slowdown
is the mean of its slowdowns over the neighbours, in logarithms, the nearer counting more: how candidates compare
carries over from problem to problem far better than how long each takes. What takes a problem as a whole is carried
over separately, in proportion to its bound by compute and memory.

No neighbour has quite the same number of tiles and waves. So a slowdown is carried over with part of what `tiling` says
has changed: how the tile's modelled time, over that of the best tile among the candidates, differs between the two
problems.

A candidate that a neighbour does not list counts as the best listed one that differs from it in what changes times
least (`tuned.loose_key`). Where there is none it was screened out, so it was slower than those listed; it counts with a
penalty. Only a neighbour that was measured before one of the candidate's fields existed says nothing of it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend, config_dict
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tiling import Tile, modelled_logs, tile_of
from expertile.ops.grouped_mm.tuned import Features, Measured, candidate_key, loose_key

# Added to a squared distance: how alike two problems at distance 0 still are.
_BLUR = 0.4
# What not being listed costs, in logarithms: _PENALTY more than its backend's best, or than _SCREENED_OUT if more.
_SCREENED_OUT, _PENALTY = 0.1, 0.08
# How much of a modelled difference is carried over.
_CARRIED = 0.7
# Of the neighbours' weights: where less of it ran a backend, they are too few or too far to say how it compares. Of our
# own backends less will do, on this GPU and not for groups of fewer rows than any of them: when `cuda_grouped` had
# joined 93 of the H200's problems, `auto` on each of them by the others rose from 0.947 of the best to 0.968.
_RAN, _OURS_RAN, _FEWER_ROWS = 0.5, 0.05, 0.8
# Shares of peak and bandwidth that a good kernel reaches, and what every launch costs in a CUDA graph, seconds.
_COMPUTE, _MEMORY, _LAUNCH_S = 0.62, 0.85, 3e-6


@dataclass(frozen=True)
class Rival:
    """A backend with one of its configs."""

    backend: Backend
    config: Any


class _Facts(NamedTuple):
    """How tables call a backend with a config, by all of the config (`exact`) and without what changes times least;
    the fields that are set, and the tile."""

    exact: str
    loose: str
    given: frozenset[str]
    tile: Tile | None


@lru_cache(maxsize=4096)
def _facts(backend: str, config: Any) -> _Facts:
    fields = config_dict(config)
    given = frozenset(k for k, v in fields.items() if v)
    return _Facts(candidate_key(backend, fields), loose_key(backend, fields), given, tile_of(fields))


def expected_seconds(
    rivals: Sequence[Rival], features: Features, near: Sequence[tuple[float, Measured]], device: Device
) -> list[float | None]:
    """For each rival the expected seconds on the problem of `features`; None where no neighbour ran its backend."""
    slowdowns = expected_slowdowns(rivals, features, near, device)
    level = total = 0.0
    for distance, measured in near:
        weight = 1.0 / (_BLUR + distance * distance)
        level += weight * math.log(measured.best / bound_seconds(measured.features, device))
        total += weight
    best = bound_seconds(features, device) * math.exp(level / total) if total else 0.0
    return [None if s is None else best * math.exp(s) for s in slowdowns]


def expected_slowdowns(
    rivals: Sequence[Rival], features: Features, near: Sequence[tuple[float, Measured]], device: Device
) -> list[float | None]:
    """For each rival the expected log(time / best time) on the problem of `features`: the weighted mean over the
    neighbours that ran its backend, or None where few did."""
    names = [r.backend.name for r in rivals]
    facts = [_facts(name, r.config) for name, r in zip(names, rivals, strict=True)]
    candidates = list(zip(range(len(rivals)), names, _comparable(names, facts), facts, strict=True))
    tiles = frozenset(f.tile for f in facts if f.tile is not None)
    here = modelled_logs(features, tiles, device)
    sums = [0.0] * len(rivals)
    weights = [0.0] * len(rivals)
    ran: dict[str, float] = defaultdict(float)
    here_ran: dict[str, float] = defaultdict(float)
    total = 0.0
    for distance, measured in near:
        weight = 1.0 / (_BLUR + distance * distance)
        total += weight
        enough_rows = features.mean >= _FEWER_ROWS * measured.features.mean
        for name in measured.backends:
            ran[name] += weight
            here_ran[name] += weight * (enough_rows and not measured.gpu)
        slowdowns, backends = measured.slowdowns, measured.backends
        there = modelled_logs(measured.features, tiles, device)
        differ: dict[Tile | None, float] = {tile: _CARRIED * (here[tile] - there[tile]) for tile in here}
        for i, name, key, (_, loose, given, tile) in candidates:
            log = slowdowns.get(key)
            if log is None:
                log = slowdowns.get(loose)
            if log is None:
                of_backend = backends.get(name)
                if of_backend is None or not given <= measured.fields[name]:
                    continue
                # By how much nobody knows, so what is modelled makes it no better.
                log = max(of_backend, _SCREENED_OUT) + _PENALTY + max(0.0, -differ.get(tile, 0.0))
            sums[i] += weight * (log + differ.get(tile, 0.0))
            weights[i] += weight
    known = {name for name, weight in ran.items() if weight >= _RAN * total}
    known |= {r.backend.name for r in rivals if not r.backend.peer and here_ran[r.backend.name] >= _OURS_RAN * total}
    return [s / w if w and name in known else None for name, s, w in zip(names, sums, weights, strict=True)]


def _comparable(names: Sequence[str], facts: Sequence[_Facts]) -> list[str]:
    """The key of each rival: the loose one, unless two configs of its backend differ in nothing that it tells."""
    counts = Counter(f.loose for f in facts)
    twice = {name for name, f in zip(names, facts, strict=True) if counts[f.loose] > 1}
    return [f.exact if name in twice else f.loose for name, f in zip(names, facts, strict=True)]


@lru_cache(maxsize=4096)
def bound_seconds(f: Features, device: Device) -> float:
    """About what a good kernel takes: a full machine at least, compute and memory partly overlapped, and a launch."""
    depth = f.mean if f.layout == Layout.RAGGED_K else f.k
    peak = device.peak("bf16" if f.dtype == "16-bit" else f.dtype) or device.peak("fp32") or 1e12
    compute = 2.0 * max(1, f.rows) * f.k * f.n / (peak * _COMPUTE)
    # One tile takes as long whether the other processors have one or not.
    compute = max(compute, 2.0 * 64 * 64 * depth * device.sm_count / (peak * _COMPUTE))
    memory = f.elements * (2 if f.dtype == "16-bit" else 4) / ((device.memory_bps or 1e12) * _MEMORY)
    return math.hypot(compute, memory) + _LAUNCH_S
