"""Measured times by problem: what `expertile tune` writes, `tuned/<gpu-slug>.json`, and how the nearest are found.

A table holds, for each measured problem, the backends and configs that were timed and passed the gate, fastest first.
Those that are missing were slower in a first screening, or were expected to be. Two problems are compared by
`Features`: Euclidean distance in log2 of what decides which kernel is fast (`Features.point`), plus a step for another
memory order or another spread of rows.
"""

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from expertile.ops.grouped_mm.problem import LINE_BYTES, Layout, Problem

VERSION = 1
POLICIES = ("graph", "eager")

# What the axes of `Features.point` and the steps count.
_ROWS, _SUMMANDS, _TILES, _INTENSITY, _BYTES = 0.85, 0.5, 0.7, 0.5, 0.4
_OTHER_ORDER, _OTHER_SKEW = 0.3, 0.5
# For problems with rows that begin anywhere in L2's lines loads decide (`tiling`).
_OTHER_ALIGNMENT = 1.0
# The tile by which problems are compared.
_TILE = (128, 256)
# A problem of another table: of another GPU of the chip, or the package's beside the user's own.
_OTHER_GPU = 2.0
# Beyond that nothing measured is like the problem.
FAR = 5.0
_LOOSE = ("group_m", "num_stages", "store_parts")


@dataclass(frozen=True)
class Features:
    """What decides which measured problem is like another. `rows` is the ragged total (all rows for BATCHED), `k` and
    `n` the other two dimensions (those of the result for RAGGED_K). `orders` tells how a and b lie in memory."""

    layout: str
    orders: str  # "mk,nk": see lab/race/workloads.py
    dtype: str  # "16-bit", "tf32" or "fp32": bf16 and fp16 are alike to every kernel here
    skew: str
    rows: int
    groups: int
    k: int
    n: int

    @property
    def mean(self) -> float:
        """Rows per group."""
        return self.rows / max(1, self.groups)

    @property
    def tiles(self) -> int:
        """Tiles of _TILE in the result, for groups of mean size: how full the machine is."""
        height, width = _TILE
        down = self.k if self.layout == Layout.RAGGED_K else self.mean
        return max(1, self.groups * math.ceil(down / height) * math.ceil(self.n / width))

    @property
    def elements(self) -> int:
        """Elements read and written, each once; of weights those of as many groups as there are rows."""
        used = self.groups if self.layout == Layout.RAGGED_K else min(self.groups, self.rows)
        return max(1, self.rows * (self.k + self.n) + used * self.k * self.n)

    @cached_property
    def aligned(self) -> tuple[bool, bool]:
        """`Problem.aligned_rows` of operands without padding."""
        ragged_k, (a_order, b_order) = self.layout == Layout.RAGGED_K, self.orders.split(",")
        a_pitch = self.k if ragged_k or a_order == "mk" else self.rows
        b_pitch = self.k if b_order == "nk" else self.n
        line = LINE_BYTES // (2 if self.dtype == "16-bit" else 4)
        return a_pitch % line == 0, b_pitch % line == 0

    @cached_property
    def point(self) -> tuple[float, float, float, float, float]:
        """Where it lies: weighted log2 of rows per group (which tile), K, tiles (how many waves), products per element
        (compute or memory), and elements."""
        log2 = math.log2
        products = max(1, self.rows * self.k * self.n)
        return (
            _ROWS * log2(max(self.mean, 2.0**-4)),
            _SUMMANDS * log2(max(1, self.k)),
            _TILES * log2(self.tiles),
            _INTENSITY * log2(products / self.elements),
            _BYTES * log2(self.elements),
        )

    def __str__(self) -> str:
        arrow = "x" if self.layout == Layout.RAGGED_K else "->"
        return f"{self.layout} {self.groups}x{self.rows} {self.k}{arrow}{self.n}"


def features_of(problem: Problem) -> Features:
    """The features of `problem`; rows that only the device knows are taken to be spread evenly."""
    p = problem
    rows, k, n = {
        Layout.RAGGED_M: (p.m, p.k, p.n),
        Layout.RAGGED_K: (p.k, p.m, p.n),
        Layout.RAGGED_N: (p.n, p.k, p.m),
        Layout.BATCHED: (p.groups * p.m, p.k, p.n),
    }[p.layout]
    a_order = "mk" if p.a_strides[-1] == 1 else "km"
    b_order = "nk" if p.b_strides[-2] == 1 and p.b_strides[-1] != 1 else "kn"
    key = p.dtype_key
    dtype = "16-bit" if key in ("bf16", "fp16") else key
    return Features(p.layout.value, f"{a_order},{b_order}", dtype, skew_class(p.group_sizes), rows, p.groups, k, n)


def skew_class(sizes: Sequence[int] | None) -> str:
    """ "even", "skewed", or "one" where one group of several has more than half; None is "even".

    Evenness is the number of groups that matter, (sum s)^2 / sum s^2, over what a uniform random choice of groups
    gives: with m rows per group on average, m / (m + 1) of them.
    """
    if not sizes or len(sizes) < 2 or not sum(sizes):
        return "even"
    total, mean = sum(sizes), sum(sizes) / len(sizes)
    if len(sizes) > 2 and max(sizes) > total / 2:
        return "one"
    matter = total * total / sum(s * s for s in sizes) / len(sizes)
    return "even" if matter > 0.75 * mean / (mean + 1) else "skewed"


@dataclass(frozen=True)
class Timed:
    """One backend with one config on one problem."""

    backend: str
    config: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Measured:
    """One problem under one policy; `times` fastest first, at least one. `gpu`: where another table has it from."""

    features: Features
    policy: str
    times: tuple[Timed, ...]
    gpu: str = ""

    @property
    def best(self) -> float:
        return self.times[0].seconds

    @cached_property
    def slowdowns(self) -> Mapping[str, float]:
        """Log of time / best time by `candidate_key`, and of the best by `loose_key`."""
        found: dict[str, float] = {}
        for t in self.times:
            log = math.log(t.seconds / self.best)
            found.setdefault(candidate_key(t.backend, t.config), log)
            found.setdefault(loose_key(t.backend, t.config), log)
        return found

    @cached_property
    def backends(self) -> Mapping[str, float]:
        """Log of time / best time of each backend's best config."""
        return {t.backend: math.log(t.seconds / self.best) for t in reversed(self.times)}

    @cached_property
    def fields(self) -> Mapping[str, frozenset[str]]:
        """The fields that each backend's configs had then."""
        return {t.backend: frozenset(t.config) for t in self.times}


class Problems(tuple[Measured, ...]):
    """Measured problems, and where they lie by layout and dtype, worked out once."""

    @cached_property
    def places(self) -> Mapping[tuple[str, str], tuple[Any, ...]]:
        """(layout, dtype) -> their places in the tuple, points [n, 5], orders, skews, whether all rows are aligned,
        whether another GPU was measured."""
        found: dict[tuple[str, str], list[int]] = {}
        for i, m in enumerate(self):
            found.setdefault((m.features.layout, m.features.dtype), []).append(i)
        return {
            kind: (
                at,
                np.array([self[i].features.point for i in at]),
                np.array([self[i].features.orders for i in at]),
                np.array([self[i].features.skew for i in at]),
                np.array([all(self[i].features.aligned) for i in at]),
                np.array([bool(self[i].gpu) for i in at]),
            )
            for kind, at in found.items()
        }

    def nearest(self, f: Features, most: int) -> list[tuple[float, Measured]]:
        """Up to `most` problems of the same layout and dtype by their distance from `f`; none where the nearest is at
        FAR or beyond."""
        if (f.layout, f.dtype) not in self.places:
            return []
        at, points, orders, skews, aligned, elsewhere = self.places[f.layout, f.dtype]
        steps = _OTHER_ORDER * (orders != f.orders) + _OTHER_SKEW * (skews != f.skew)
        steps += _OTHER_ALIGNMENT * (aligned != all(f.aligned)) + _OTHER_GPU * elsewhere
        distances = np.sqrt(((points - np.array(f.point)) ** 2).sum(1)) + steps
        found = [(float(distances[i]), self[at[i]]) for i in np.argsort(distances, kind="stable")[:most]]
        return found if found[0][0] < FAR else []


@dataclass(frozen=True)
class Table:
    """All measured problems of one GPU, with the versions they were measured with and the seeds that drew them.

    `relative`: the times are those of `gpu`, scaled to another GPU of its chip (`relatives`); not part of the file."""

    gpu: str
    date: str
    versions: Mapping[str, str | None]
    problems: tuple[Measured, ...]
    seeds: tuple[int, ...] = ()
    relative: bool = False

    def of(self, policy: str) -> Problems:
        """The problems measured under `policy`; all of them where none was."""
        return self._of_policy.get(policy) or self._all

    @cached_property
    def _all(self) -> Problems:
        return Problems(self.problems)

    @cached_property
    def _of_policy(self) -> Mapping[str, Problems]:
        return {p: Problems(m for m in self.problems if m.policy == p) for p in POLICIES}

    def to_json(self) -> str:
        """Compact JSON: candidates are listed once and named by their place; times are in µs."""
        places: dict[str, int] = {}
        rows = []
        for m in self.problems:
            times = [
                [places.setdefault(_compact([t.backend, dict(t.config)]), len(places)), float(f"{t.seconds * 1e6:.4g}")]
                for t in m.times
            ]
            f = m.features
            fields = [f.layout, f.orders, f.dtype, f.skew, f.rows, f.groups, f.k, f.n, m.policy]
            rows.append(_compact([*fields, times]))
        head = {"version": VERSION, "gpu": self.gpu, "date": self.date, "versions": dict(self.versions)}
        head["seeds"] = list(self.seeds)
        lines = [json.dumps(head)[:-1] + ",", '"candidates": [', ",\n".join(places), "],", '"problems": [']
        return "\n".join([*lines, ",\n".join(rows), "]}"]) + "\n"

    @staticmethod
    def from_json(text: str) -> "Table":
        """The inverse of `to_json`. Raises ValueError for another version or a damaged table."""
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError(f"table: expected version {VERSION}, got {data['version']!r}")
            candidates = data["candidates"]
            problems = []
            for *fields, policy, times in data["problems"]:
                timed = sorted(
                    (Timed(candidates[i][0], candidates[i][1], us / 1e6) for i, us in times), key=lambda t: t.seconds
                )
                if not timed or policy not in POLICIES:
                    raise ValueError(f"table: expected times under graph or eager, got {times!r} under {policy!r}")
                problems.append(Measured(Features(*fields), policy, tuple(timed)))
            return Table(data["gpu"], data["date"], data["versions"], tuple(problems), tuple(data.get("seeds", ())))
        except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
            raise ValueError(f"table: expected what `expertile tune` writes, got {error!r}") from None


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def candidate_key(backend: str, config: Mapping[str, Any]) -> str:
    """One string for a backend and a config: strings remember their hash.

    What is off or 0 is left out, so that a table from before the field existed still knows the config."""
    return f"{backend} {sorted((k, v) for k, v in config.items() if v)}"


def loose_key(backend: str, config: Mapping[str, Any]) -> str:
    """`candidate_key` without what changes times least: the height of the L2 raster panel, and how shared memory is
    divided into stages and the buffers of stores."""
    return candidate_key(backend, {k: v for k, v in config.items() if k not in _LOOSE})


def package_folder() -> Path:
    """The tables that come with the package."""
    return Path(__file__).with_name("tuned")


def user_folder() -> Path:
    """The tables that this user has measured; they go before those of the package."""
    return Path.home() / ".cache" / "expertile" / "tuned"


@cache
def load_tables(slug: str) -> tuple[Table, ...]:
    """The tables of a GPU by its slug: the user's own, then the package's, as far as there are such. Read once.

    A table that cannot be read (of another version, say) is passed over with a warning.
    """
    found = []
    for folder in (user_folder(), package_folder()):
        path = folder / f"{slug}.json"
        if path.is_file():
            try:
                found.append(Table.from_json(path.read_text(encoding="utf-8")))
            except ValueError as error:
                warnings.warn(f"{path} is not used: {error}; run expertile tune again, or remove it", stacklevel=2)
    return tuple(found)


def save_table(table: Table, path: Path) -> None:
    """Write in one step: an interruption leaves the old table or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(table.to_json(), encoding="utf-8")
    os.replace(part, path)
