"""From measured problems to an unmeasured one: the time that one backend and config should take there.

Every measured neighbour ranks the candidates by their slowdown, time / best time there. A candidate's expected slowdown
is the mean of its slowdowns over the neighbours, in logarithms, the nearer counting more: how candidates compare
carries over from problem to problem far better than how long each takes. What takes a problem as a whole is carried
over separately, in proportion to its bound by compute and memory.

No neighbour has quite the same number of tiles and waves. So a slowdown is carried over with part of what `tiling` says
has changed: how the tile's modelled time, over that of the best tile among the candidates, differs between the two
problems. And a neighbour counts less, the more of that has changed.

A candidate that a neighbour does not list counts as the best listed one that differs from it in what changes times
least (`tuned.loose_key`). Where there is none it was screened out, so it was slower than those listed; it counts with a
penalty. Only a neighbour that was measured before one of the candidate's fields existed says nothing of it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend, config_dict
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tiling import Floats, Tile, modelled_logs, tile_of
from expertile.ops.grouped_mm.tuned import Features, Measured, candidate_key, loose_key

# Added to a cubed distance: how alike two problems at distance 0 still are. What a squared difference between modelled
# tiles adds to the squared distance.
_BLUR, _MODELLED = 1.5, 100.0
# What not being listed costs, in logarithms: _PENALTY more than its backend's best, or than _SCREENED_OUT if more.
_SCREENED_OUT, _PENALTY = 0.05, 0.08
# What a listed candidate that is only alike counts more, so that those that were timed themselves settle ties.
_ALIKE = 0.01
# How much of a modelled difference is carried over.
_CARRIED = 0.7
# Of the neighbours' weights: where less of it ran a backend, they are too few or too far to say how it compares. Of our
# own backends less will do, on this GPU and not for groups of fewer rows than any of them: with `cuda_grouped` on 30 of
# the H100's problems, `auto` is on these at 0.966 of the best, without the rule at 0.948.
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
    """For each rival the expected seconds on the problem of `features`; None where few neighbours ran its backend."""
    if not near:
        return [None] * len(rivals)
    slowdowns, weights = _expected(rivals, features, near, device)
    levels = [math.log(m.best / bound_seconds(m.features, device)) for _, m in near]
    best = bound_seconds(features, device) * math.exp(weights @ levels)
    return [None if s is None else best * math.exp(s) for s in slowdowns]


def expected_slowdowns(
    rivals: Sequence[Rival], features: Features, near: Sequence[tuple[float, Measured]], device: Device
) -> list[float | None]:
    """For each rival the expected log(time / best time) on the problem of `features`; None where few of the neighbours
    ran its backend."""
    return _expected(rivals, features, near, device)[0] if near else [None] * len(rivals)


def _expected(
    rivals: Sequence[Rival], features: Features, near: Sequence[tuple[float, Measured]], device: Device
) -> tuple[list[float | None], Floats]:
    """The slowdowns, and what each neighbour counts, 1 in all."""
    names = [r.backend.name for r in rivals]
    facts = [_facts(name, r.config) for name, r in zip(names, rivals, strict=True)]
    tiles = list(dict.fromkeys(f.tile for f in facts if f.tile is not None))
    modelled = modelled_logs([features, *(m.features for _, m in near)], tiles, device)
    changes = modelled[0] - modelled[1:]
    weights = _weights(features, near, changes)
    differ = np.column_stack((_CARRIED * changes, np.zeros(len(near))))  # the last: of what has no tile
    differ = differ[:, [len(tiles) if f.tile is None else tiles.index(f.tile) for f in facts]]
    keys = [(key, f.loose) for key, f in zip(_comparable(names, facts), facts, strict=True)]
    found = np.array([[_found(m, *key) for key in keys] for _, m in near])
    kinds = list(dict.fromkeys((name, f.given) for name, f in zip(names, facts, strict=True)))
    kind = [kinds.index((name, f.given)) for name, f in zip(names, facts, strict=True)]
    of_backend = np.array([[_of_backend(m, *k) for k in kinds] for _, m in near])[:, kind]
    # By how much nobody knows, so what is modelled makes it no better.
    unlisted = np.maximum(of_backend, _SCREENED_OUT) + _PENALTY + np.maximum(0.0, -differ)
    logs = np.where(np.isnan(found), unlisted, found) + differ
    known = ~np.isnan(logs)
    # A slowdown is over the best that ran there. What only some neighbours know counts over what all know.
    level = logs[:, known.all(0)].mean(1) if known.all(0).any() else np.zeros(len(near))
    total = weights @ known
    sums = weights @ np.where(known, logs - level[:, None], 0.0) + total * (weights @ level)
    ran = np.array([[name in m.backends for name in names] for _, m in near])
    like = [not m.gpu and features.mean >= _FEWER_ROWS * m.features.mean for _, m in near]
    enough = weights @ ran >= _RAN
    enough |= (weights * like @ ran >= _OURS_RAN) & [not r.backend.peer for r in rivals]
    return [
        s / t if t and ok else None for s, t, ok in zip(sums.tolist(), total.tolist(), enough, strict=True)
    ], weights


def _weights(features: Features, near: Sequence[tuple[float, Measured]], changes: Floats) -> Floats:
    """What each neighbour counts: less the farther it is, and the more the tiles compare otherwise by the model."""
    flat = ((np.array([m.features.point for _, m in near]) - features.point) ** 2).sum(1)
    aside = np.array([distance for distance, _ in near]) - np.sqrt(flat)
    otherwise = (changes**2).sum(1) - changes.sum(1) ** 2 / max(1, changes.shape[1])
    weights: Floats = 1.0 / (_BLUR + (flat + aside**2 + _MODELLED * otherwise) ** 1.5)
    return weights / weights.sum()


def _found(measured: Measured, key: str, loose: str) -> float:
    """The slowdown of a candidate that is listed there, or of the best that is like it; NaN where there is none."""
    found = measured.slowdowns.get(key)
    return measured.slowdowns.get(loose, math.nan) + _ALIKE if found is None else found


def _of_backend(measured: Measured, name: str, given: frozenset[str]) -> float:
    """What a config of the backend `name` has at least lost there that is not listed; NaN where it could not be."""
    best = measured.backends.get(name)
    return best if best is not None and given <= measured.fields[name] else math.nan


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
