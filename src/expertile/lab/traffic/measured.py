"""Traffic as counted on a GPU, beside the formula: one record for each way of a subject.

One line of JSON: {"op", "shape", "dtype", "way", "read", "written", "l2_read", "l2_written", "time_s", "launches",
"kernels", "model_read", "model_written", "model_again", "model_launches", "reason", "env", "run", "date"}. Bytes;
`kernels` holds [name, read, written] of every launch; all figures are null, with a `reason`, where nothing was counted.
Files: `results/<gpu-slug>/traffic/<date>.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.env import Env, timestamp
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.race.record import append, object_of, read_lines, shipped_root
from expertile.lab.traffic import ncu
from expertile.lab.traffic.child import encode
from expertile.lab.traffic.model import Subject, Way
from expertile.lab.traffic.runs import runnable

Profiler = Callable[[Sequence[str]], ncu.Profile]
_CHILD = "expertile.lab.traffic.child"
NO_GPU = "there is no CUDA GPU here"


@dataclass(frozen=True)
class TrafficRecord:
    """Bytes of one way of one subject, counted and by formula. Raises ValueError naming the key."""

    op: str
    shape: dict[str, Any] = field(hash=False)
    dtype: str
    way: str
    read: float | None
    written: float | None
    l2_read: float | None
    l2_written: float | None
    time_s: float | None
    launches: int | None
    kernels: tuple[tuple[str, float | None, float | None], ...]
    model_read: float
    model_written: float
    model_again: float
    model_launches: int
    reason: str
    env: Env
    run: str
    date: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(tuple(kernel) for kernel in self.kernels))
        for name in ("op", "dtype", "way", "run", "date"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}: expected a non-empty string, got {getattr(self, name)!r}")
        if bool(self.kernels) == bool(self.reason):
            raise ValueError(f"reason: expected one where no kernel was counted, and only there, got {self.reason!r}")

    def to_json(self) -> str:
        """One line of JSON, without a newline."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(line: str) -> TrafficRecord:
        """Parse and validate one line."""
        return TrafficRecord(**object_of(line, [f.name for f in fields(TrafficRecord)]))


def measure(
    subject: Subject,
    ways: Iterable[Way],
    env: Env,
    run: str,
    profiler: Profiler = ncu.profile,
    has_gpu: bool | None = None,
) -> Iterator[TrafficRecord]:
    """Count every way that can be run; after the first that ncu may not count, the others get the same reason."""
    has_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    refused = "" if has_gpu else NO_GPU
    for way in ways:
        if way.name not in runnable(subject.op):
            continue
        found = ncu.Profile((), refused) if refused else profiler([_CHILD, encode(subject), way.name])
        if "ERR_NVGPUCTRPERM" in found.reason or "not installed" in found.reason:
            refused = found.reason
        yield _record(subject, way, found, env, run)


def collect(cases: Iterable[tuple[Subject, Sequence[Way]]], path: str | Path, profiler: Profiler = ncu.profile) -> int:
    """Count all `cases` on this machine, appending records to `path`; returns how many were counted."""
    env, run, counted = capture_env(Device.current()), new_run_id(), 0
    for subject, ways in cases:
        for record in measure(subject, ways, env, run, profiler):
            append(path, record)
            counted += bool(record.kernels)
    return counted


def read_traffic(path: str | Path) -> list[TrafficRecord]:
    """The records of a file, as `record.read` reads others."""
    return read_lines(path, TrafficRecord.from_json)


def traffic_path(slug: str, date: str, root: str | Path = "results") -> Path:
    """`root`/<gpu-slug>/traffic/<date>.jsonl; `date` is an ISO date or time, of which the day counts."""
    return Path(root) / slug / "traffic" / f"{date[:10]}.jsonl"


def shipped_traffic(slug: str, root: str | Path | None = None) -> tuple[TrafficRecord, ...]:
    """The newest shipped file of a GPU; nothing if there is none."""
    files = sorted(((shipped_root() if root is None else Path(root)) / slug / "traffic").glob("????-??-??.jsonl"))
    return tuple(read_traffic(files[-1])) if files else ()


def _record(subject: Subject, way: Way, found: ncu.Profile, env: Env, run: str) -> TrafficRecord:
    kernels = found.kernels
    return TrafficRecord(
        op=subject.op,
        shape=dict(subject.dims),
        dtype=subject.dtype,
        way=way.name,
        read=_total([k.read for k in kernels]),
        written=_total([k.written for k in kernels]),
        l2_read=_total([k.l2_read for k in kernels]),
        l2_written=_total([k.l2_written for k in kernels]),
        time_s=_total([k.time_s for k in kernels]),
        launches=len(kernels) or None,
        kernels=tuple((k.name, k.read, k.written) for k in kernels),
        model_read=way.read,
        model_written=way.written,
        model_again=way.again,
        model_launches=way.launches,
        reason=found.reason or ("" if kernels else "ncu counted nothing"),
        env=env,
        run=run,
        date=timestamp(),
    )


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None where one is missing, or all are."""
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None
