"""A record of a time as reports read it: what it is called, how it stands to its bound, what it is one of."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from expertile.lab.race.record import BASELINES, SECONDS, Record

POLICY_NAMES = {"graph": "CUDA-graph replay", "eager": "eager calls"}

_LEAST_INTENSITY = 4.0  # FLOP per byte; every device of the last decade computes more than that in the same time
_RAGGED_DIMENSION = {"ragged_m": "m", "ragged_n": "n", "ragged_k": "k"}
T = TypeVar("T")
K = TypeVar("K")
_ROW_COUNTS = ("rows", "tokens", "total_rows")
_TEXTS = ("op", "workload", "backend", "reason", "run")


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One record of a time, ready to print."""

    @property
    def work(self) -> tuple[str, str, str, str]:
        """What makes two rows the same work: operator, name, dtype and exact shape."""
        return (self.op, self.workload, self.dtype, json.dumps(self.shape, sort_keys=True, default=str))

    @property
    def timed(self) -> bool:
        """True where the result was right and a time was accepted; only such rows are compared."""
        return self.status == "ok"

    @property
    def seconds(self) -> float:
        """Its time; only of a row that is `timed`."""
        assert self.value is not None
        return self.value

    @property
    def is_baseline(self) -> bool:
        return self.backend in BASELINES

    @property
    def share(self) -> float | None:
        """Bound divided by time, in (0, 1]; None where the bound is not known."""
        return self.bound_s / self.seconds if self.timed and self.bound_s else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the time, or the bare time where none was recorded."""
        return self.ci95_s or (self.seconds, self.seconds)

    @property
    def preset(self) -> str:
        return self.workload.split("/", 1)[0] if "/" in self.workload else "workloads"

    @property
    def device(self) -> str:
        return self.env.gpu

    @property
    def day(self) -> str:
        return self.date[:10]

    @property
    def moves(self) -> bool:
        """True where bytes per second say more than FLOP per second: memory limits, nothing is computed, or so little
        that it would limit, if the bandwidth were known."""
        if self.limiter == "memory" or self.backend == "copy":
            return True
        return self.flops < _LEAST_INTENSITY * self.nbytes

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
        return tuple(filter(None, map(str.strip, (self.env.throttle or "").split(","))))


def by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """`items` in lists by `key`, keys and items in the order they came."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def rows(records: Iterable[Record]) -> tuple[Row, ...]:
    """Those of `records` that are times, as rows. Names come from users' files: no control character of theirs reaches
    a terminal or a table."""
    timed = (vars(record) for record in records if record.metric == SECONDS)
    return tuple(Row(**fields | {name: _printable(fields[name]) for name in _TEXTS}) for fields in timed)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()


def fixed_routing(routing: str) -> str:
    """A routing's name without its number of tokens: `zipf(1) tokens=8192 seed=0` -> `zipf(1) seed=0`."""
    return " ".join(word for word in routing.split() if not word.startswith("tokens="))


def config_text(config: Mapping[str, Any]) -> str:
    """`block_m=128 block_n=256`: a configuration in one line; empty for none."""
    return " ".join(f"{name}={value}" for name, value in config.items())


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
