"""The reader's side of a record: JSON lines or Record objects become plain, comparable rows. Files may come from other
versions and other people: a missing or malformed number becomes None and is shown as missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from expertile.lab.race.record import BASELINES, SECONDS

POLICY_NAMES = {"graph": "CUDA-graph replay", "eager": "eager calls"}

_LEAST_INTENSITY = 4.0  # FLOP per byte; every device of the last decade computes more than that in the same time
_RAGGED_DIMENSION = {"ragged_m": "m", "ragged_n": "n", "ragged_k": "k"}
T = TypeVar("T")
K = TypeVar("K")
_ROW_COUNTS = ("rows", "tokens", "total_rows")


@dataclass(frozen=True)
class Row:
    """One record, ready to print. Times in seconds, `flops` and `nbytes` per call, `gbps` in 1e9 bytes/s."""

    op: str
    workload: str
    shape: Mapping[str, Any]
    dtype: str
    backend: str
    config: str
    policy: str
    time_s: float | None
    ci95_s: tuple[float, float] | None
    flops: float | None
    nbytes: float | None
    tflops: float | None
    gbps: float | None
    bound_s: float | None
    limiter: str
    rel_error: float | None
    max_error: float | None
    status: str
    reason: str
    env: Mapping[str, Any]
    run: str
    date: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes two rows the same work: operator, name, dtype and exact shape."""
        return (self.op, self.workload, self.dtype, json.dumps(self.shape, sort_keys=True, default=str))

    @property
    def timed(self) -> bool:
        """True where the result was right and a time was accepted; only such rows are compared."""
        return self.status == "ok" and self.time_s is not None

    @property
    def fate(self) -> str:
        """How a row without a time is told: its status, and "refused" where only the time is missing."""
        return "refused" if self.status == "ok" else self.status

    @property
    def is_baseline(self) -> bool:
        return self.backend in BASELINES

    @property
    def share(self) -> float | None:
        """Bound divided by time, in (0, 1]; None where the bound is not known."""
        return self.bound_s / self.time_s if self.timed and self.bound_s and self.time_s else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the time, or the bare time where none was recorded."""
        if self.ci95_s is not None:
            return self.ci95_s
        return None if self.time_s is None else (self.time_s, self.time_s)

    @property
    def preset(self) -> str:
        named = self.shape.get("preset")
        if isinstance(named, str) and named:
            return named
        return self.workload.split("/", 1)[0] if "/" in self.workload else "workloads"

    @property
    def device(self) -> str:
        return str(self.env.get("gpu") or "unknown device")

    @property
    def day(self) -> str:
        return self.date[:10]

    @property
    def moves(self) -> bool:
        """True where bytes per second say more than FLOP per second: memory limits, nothing is computed, or so little
        that it would limit, if the bandwidth were known.
        """
        if self.limiter == "memory" or self.backend == "copy":
            return True
        return self.flops is not None and self.nbytes is not None and self.flops < _LEAST_INTENSITY * self.nbytes

    @property
    def tokens(self) -> int | None:
        """Total rows of the ragged dimension."""
        sizes = self.shape.get("group_sizes")
        if isinstance(sizes, (list, tuple)) and sizes:
            return int(sum(sizes))
        for name in (*_ROW_COUNTS, _RAGGED_DIMENSION.get(str(self.shape.get("layout")), "m")):
            if isinstance(self.shape.get(name), int):
                return int(self.shape[name])
        return None

    @property
    def family(self) -> tuple[Any, ...]:
        """Everything but the number of rows: rows of one family make a scaling plot."""
        ragged = _RAGGED_DIMENSION.get(str(self.shape.get("layout")), "m")
        fixed = tuple(
            (name, fixed_routing(value) if name == "routing" and isinstance(value, str) else value)
            for name, value in sorted(self.shape.items())
            if isinstance(value, (int, str)) and name not in (*_ROW_COUNTS, ragged, "name", "note")
        )
        return (self.op, self.dtype, self.preset, fixed)

    @property
    def throttle(self) -> tuple[str, ...]:
        """Throttle reasons the driver gave while this row was measured."""
        value = self.env.get("throttle")
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip().lower() not in ("", "none"))
        if isinstance(value, (list, tuple, set, frozenset)):
            return tuple(sorted(str(part) for part in value if str(part).lower() != "none"))
        return ("throttled",) if value is True else ()


def by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """`items` in lists by `key`, keys and items in the order they came."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def number(value: Any) -> float | None:
    """A number as a float; None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def rows(records: Iterable[Any]) -> tuple[Row, ...]:
    """Rows of those of `records` that are times: mappings with the record's JSON keys, or objects with attributes of
    those names."""
    found = (record if isinstance(record, Row) else _row(record) for record in records)
    return tuple(row for row in found if row is not None)


def _row(record: Any) -> Row | None:
    def get(name: str) -> Any:
        return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)

    if get("metric") != SECONDS:
        return None

    def figure(name: str, positive: bool = True) -> float | None:
        return _number(get(name), positive)

    time_s, flops, nbytes = figure("value"), figure("flops", False), figure("nbytes", False)
    return Row(
        op=_text(get("op")),
        workload=_text(get("workload")) or "unnamed",
        shape=_mapping(get("shape")),
        dtype=_text(get("dtype")),
        backend=_text(get("backend")) or "unnamed",
        config=config_text(get("config")),
        policy=_text(get("policy")) or "eager",
        time_s=time_s,
        ci95_s=_interval(get("ci95")),
        flops=flops,
        nbytes=nbytes,
        tflops=flops / time_s / 1e12 if flops is not None and time_s else None,
        gbps=nbytes / time_s / 1e9 if nbytes is not None and time_s else None,
        bound_s=figure("bound"),
        limiter=_text(get("limiter")) or "unknown",
        rel_error=figure("rel_error", False),
        max_error=figure("max_error", False),
        status=_text(get("status")) or "refused",
        reason=_text(get("reason")),
        env={name: value for name, value in _mapping(get("env")).items() if value is not None},
        run=_text(get("run")) or "unnamed run",
        date=_text(get("date")),
    )


def fixed_routing(routing: str) -> str:
    """A routing's name without its number of tokens: `zipf(1) tokens=8192 seed=0` -> `zipf(1) seed=0`."""
    return " ".join(word for word in routing.split() if not word.startswith("tokens="))


def config_text(config: Any) -> str:
    """`block_m=128 block_n=256`: a configuration in one line; empty for none."""
    if config is None or isinstance(config, str):
        return config or ""
    return " ".join(f"{name}={value}" for name, value in _mapping(config).items())


def shape_text(shape: Mapping[str, Any]) -> str:
    """A shape in one line; group sizes as their count, sum and range."""
    parts = []
    for name, value in shape.items():
        if name in ("preset", "name", "note") or value in (None, "", [], ()):
            continue
        if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
            parts.append(f"{name}={len(value)} groups, {sum(value)} in all, {min(value)} to {max(value)}")
        else:
            parts.append(f"{name}={value}")
    return " · ".join(parts)


def _text(value: Any) -> str:
    if value is None:
        return ""
    value = getattr(value, "value", value)
    # Control characters would reach terminals and tables; names come from users' files.
    return "".join(char if char.isprintable() else " " for char in str(value)).strip()


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return {}


def _number(value: Any, positive: bool) -> float | None:
    found = number(value)
    return (
        found if found is not None and math.isfinite(found) and (found > 0 or (not positive and found == 0)) else None
    )


def _interval(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = (_number(end, True) for end in value)
    return None if low is None or high is None else (min(low, high), max(low, high))
