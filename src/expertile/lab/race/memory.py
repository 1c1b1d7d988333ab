"""Peak memory of one call, measured beside what a formula says: for what must not grow with the square of a length.

    MemoryCase -> measure_memory -> MemoryRecord -> results/<gpu-slug>/<date>-<preset>-memory.jsonl

One line of JSON for each record: {"op", "workload", "shape", "dtype", "backend", "peak_nbytes", "formula_nbytes",
"reason", "env", "run", "date"}, of which op to dtype, env, run and date mean what they mean in `record.Record`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.env import Env, timestamp
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import failure_of, release
from expertile.lab.race.record import MEMORY_SUFFIX, append, object_of, read_lines, shipped_files


@dataclass(frozen=True)
class MemoryCase:
    """One call to measure. `prepare()` makes inputs and everything else that is there before, and returns the call.

    `formula_nbytes` is what the call should allocate at its peak, outputs included; None where nobody worked it out.
    """

    op: str
    workload: str
    shape: Mapping[str, Any]
    dtype: str
    backend: str
    prepare: Callable[[], Callable[[], Any]]
    formula_nbytes: float | None = None


@dataclass(frozen=True)
class MemoryRecord:
    """What one call allocates at its peak, in bytes, above what was there before it; None with a `reason` where it
    failed. Raises ValueError naming the key, what was expected and what came."""

    op: str
    workload: str
    shape: Mapping[str, Any] = field(hash=False)
    dtype: str
    backend: str
    peak_nbytes: int | None
    formula_nbytes: float | None
    reason: str
    env: Env
    run: str
    date: str

    def __post_init__(self) -> None:
        for name in ("op", "workload", "dtype", "backend", "run", "date"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}: expected a non-empty string, got {getattr(self, name)!r}")
        if not isinstance(self.shape, Mapping):
            raise ValueError(f"shape: expected an object, got {self.shape!r}")
        for name in ("peak_nbytes", "formula_nbytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
                raise ValueError(f"{name}: expected a number of bytes, 0 or more, or null; got {value!r}")
        if (self.peak_nbytes is None) != bool(self.reason):
            raise ValueError(f"reason: expected one where there is no peak_nbytes, and only there, got {self.reason!r}")

    def to_json(self) -> str:
        """One line of JSON, without a newline."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(line: str) -> MemoryRecord:
        """Parse and validate one line."""
        return MemoryRecord(**object_of(line, [f.name for f in fields(MemoryRecord)]))


def read_memory(path: str | Path) -> list[MemoryRecord]:
    """The records of a `-memory.jsonl` file, as `record.read` reads others."""
    return read_lines(path, MemoryRecord.from_json)


def shipped_memory(preset: str, slug: str | None = None, root: str | Path | None = None) -> tuple[MemoryRecord, ...]:
    """The newest shipped memory records of `preset` for each GPU (or for `slug` alone)."""
    files = shipped_files(preset + MEMORY_SUFFIX.removesuffix(".jsonl"), slug, root)
    return tuple(record for path in files for record in read_memory(path))


def memory_path(path: str | Path) -> Path:
    """Where the memory records lie that belong to the record file `path`."""
    path = Path(path)
    return path.with_name(path.stem + MEMORY_SUFFIX)


def measure_memory(
    cases: Iterable[MemoryCase], device: torch.device | str | None = None, out_path: str | Path | None = None
) -> Iterator[MemoryRecord]:
    """Measure every case on its second call; records are appended to `out_path` (JSONL) as they are made.

    A case that fails, out of memory included, is a record with the reason.
    """
    torch_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    env, run_id = capture_env(Device.current(torch_device)), new_run_id()
    for case in cases:
        peak, reason = None, ""
        try:
            peak = _second_call(case, torch_device)
        except Exception as error:
            reason = failure_of(error, torch_device).reason
        finally:
            release(torch_device)
        record = MemoryRecord(
            op=case.op,
            workload=case.workload,
            shape=case.shape,
            dtype=case.dtype,
            backend=case.backend,
            peak_nbytes=peak,
            formula_nbytes=case.formula_nbytes,
            reason=reason,
            env=env,
            run=run_id,
            date=timestamp(),
        )
        if out_path is not None:
            append(out_path, record)
        yield record


def _second_call(case: MemoryCase, device: torch.device) -> int:
    call = case.prepare()
    with torch.no_grad():
        call()  # compiles, and fills whatever is kept
        return peak_memory(call, device)


def peak_memory(fn: Callable[[], Any], device: torch.device | str) -> int:
    """Bytes that `fn()` holds at its peak above what was allocated before, its result included.

    On a GPU the caching allocator counts (blocks are rounded up to 512 bytes); on a CPU torch's profiler does, and sees
    what torch allocates.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return _peak_on_cpu(fn)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = fn()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return peak - before


def _peak_on_cpu(fn: Callable[[], Any]) -> int:
    with _quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        result = fn()
    del result
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that the profiler's library writes to the standard error of the process."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
