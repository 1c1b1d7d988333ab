"""Peak memory of one call, measured beside what a formula says: for what must not grow with the square of a length."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from expertile.lab.measure.env import timestamp
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import failure_of, release
from expertile.lab.race.case import Site
from expertile.lab.race.operator import Operator, Rival, Workload, record_fields
from expertile.lab.race.record import PEAK_BYTES, Record

FORMULA = "formula_nbytes"  # in a record's details: what the call should allocate at its peak


def measure_memory(workloads: Sequence[Workload], operators: Mapping[str, Operator], site: Site) -> Iterator[Record]:
    """Peak memory of every rival on every workload that it supports, of its second call: bytes allocated above what was
    there before, outputs included. A failure, out of memory included, is a record with the reason. Formulas are those
    of the GPU's kernels; on a CPU there is none."""
    device = site.torch_device
    made = partial(Record, policy="eager", metric=PEAK_BYTES, env=capture_env(site.device), run=new_run_id())
    for w in workloads:
        for rival in operators[w.op].rivals if not w.unsupported else ():
            if rival.supports(w, site.device) is not None:
                continue
            value, status, reason = None, "ok", ""
            try:
                value = _second_call(w, operators[w.op], rival, device)
            except Exception as error:
                failure = failure_of(error, device)
                status, reason = failure.status, failure.reason
            finally:
                release(device)
            formula = rival.peak_nbytes if site.device.kind == "cuda" else None
            found: Any = {"value": value, "status": status, "reason": reason}
            found["details"] = {} if formula is None else {FORMULA: formula(w)}
            yield made(**record_fields(w), backend=rival.name, date=timestamp(), **found)


def _second_call(w: Workload, operator: Operator, rival: Rival, device: torch.device) -> int:
    inputs = operator.make_inputs(w, device, 0)
    with torch.enable_grad():
        call = rival.bind(w, inputs)
    with torch.no_grad():
        call()  # compiles, and fills whatever is kept
        return peak_memory(call, device)


def peak_memory(fn: Callable[[], Any], device: torch.device | str) -> int:
    """Bytes that `fn()` holds at its peak above what was allocated before, its result included: by the caching
    allocator (blocks of 512 bytes), on a CPU by torch's profiler, which sees what torch allocates."""
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
