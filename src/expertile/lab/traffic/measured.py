"""Traffic as counted on a GPU, beside the formula: one record for each way of a subject.

The record's value is the bytes read from and written to memory. Its details: "read", "written", "l2_read",
"l2_written", "time_s", "launches" as counted; "kernels", [name, read, written] of every launch; "model_read",
"model_written", "model_again", "model_launches" by formula. Figures that were not counted are null.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from expertile.lab.measure.env import Env, timestamp
from expertile.lab.race.operator import Workload, record_fields
from expertile.lab.race.record import MOVED_BYTES, Record
from expertile.lab.traffic import ncu
from expertile.lab.traffic.model import Way
from expertile.lab.traffic.runs import encode, runnable

Profiler = Callable[[Sequence[str]], ncu.Profile]
_CHILD = "expertile.lab.traffic.runs"
NO_GPU = "there is no CUDA GPU here"


def measure(
    subject: Workload,
    ways: Iterable[Way],
    env: Env,
    run: str,
    profiler: Profiler = ncu.profile,
    has_gpu: bool | None = None,
) -> Iterator[Record]:
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


def _record(subject: Workload, way: Way, found: ncu.Profile, env: Env, run: str) -> Record:
    kernels = found.kernels
    figures = ("read", "written", "l2_read", "l2_written", "time_s")
    counted: dict[str, Any] = {name: _total([getattr(k, name) for k in kernels]) for name in figures}
    value = _total([counted["read"], counted["written"]])
    listed = {"launches": len(kernels) or None, "kernels": [[k.name, k.read, k.written] for k in kernels]}
    model = {f"model_{name}": getattr(way.total, name) for name in ("read", "written", "again", "launches")}
    what: Any = {**record_fields(subject), "backend": way.name, "policy": "eager", "metric": MOVED_BYTES}
    how: Any = {"value": value, "details": counted | listed | model}
    if value is None:
        how |= {"status": "unsupported", "reason": found.reason or "ncu counted nothing"}
    return Record(**what, **how, env=env, run=run, date=timestamp())


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None where one is missing, or all are."""
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None
