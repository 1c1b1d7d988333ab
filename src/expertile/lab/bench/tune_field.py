"""What is screened on a problem: all configs on a new machine, afterwards those that the table expects in front. Over
150 problems on an H200 (2026-11-21) 12 of about 29 pairs were left, with the fastest within 1 % among them on 97 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.choose import NEIGHBOURS
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.grouped_mm.transfer import Rival, expected_slowdowns
from expertile.ops.grouped_mm.tuned import features_of, load_tables, nearest

_EXPECTED = 10  # the best by the table
_WITHIN = 1.6  # and no slower than that, against the best of them
_AT_RANDOM = 2  # others, so that the table can be wrong and find out


@dataclass(frozen=True)
class Pair:
    """A backend with one of its configs."""

    backend: Backend
    config: Any

    @property
    def alone(self) -> Backend:
        """The backend with this config as its only one."""
        return replace(self.backend, configs=lambda problem, device: (self.config,))


def narrowed(pairs: Sequence[Pair], problem: Problem, device: Device, policy: str, seed: int) -> tuple[Pair, ...]:
    """Those of `pairs` worth timing, in their order; all of them where no table tells. Always in: every backend's
    default (its first config), and backends that the nearest problems did not run. Then those that are expected to be
    the fastest, and a few others drawn by `seed`."""
    table = next(iter(load_tables(device.slug)), None)
    features = features_of(problem)
    near = nearest(table.of(policy), features, NEIGHBOURS) if table is not None else []
    slowdowns = expected_slowdowns([Rival(e.backend, e.config) for e in pairs], features, near, device)
    known = {i: s for i, s in enumerate(slowdowns) if s is not None}
    names = [e.backend.name for e in pairs]
    keep = {names.index(name) for name in names} | (set(range(len(pairs))) - set(known))
    order = sorted(known, key=known.__getitem__)
    keep |= {i for i in order[:_EXPECTED] if known[i] <= known[order[0]] + math.log(_WITHIN)}
    rest = [i for i in order if i not in keep]
    keep |= set(random.Random(seed).sample(rest, min(_AT_RANDOM, len(rest))))
    return tuple(e for i, e in enumerate(pairs) if i in keep)
