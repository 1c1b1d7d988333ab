"""What a CPU lets this process have, and what it reaches: cores, quota, load; bandwidth and peak, both measured, by a
large copy and a square product of each dtype. The fastest of several calls counts, since other work only ever slows
them."""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from expertile.device import Device
from expertile.lab.measure.clocks import ClockReader, Clocks

QUOTA = "cgroup_quota"  # the throttle reason of a CPU
_CGROUP = Path("/sys/fs/cgroup")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDE, _LITTLE = 1024, 256  # of the products: 12 MB of float32, 2 GFLOP; 33 MFLOP
_MOST_COPIED = 2**28  # bytes
_SECONDS, _LEAST_CALLS = 0.25, 3


def cpu_reader(cgroup: Path = _CGROUP) -> ClockReader:
    """Reads the load (runnable threads, mean of a minute), and whether the quota stopped this process since before."""
    seen = _stopped(cgroup)

    def read() -> Clocks:
        nonlocal seen
        before, seen = seen, _stopped(cgroup)
        return Clocks(throttle=(QUOTA,) if seen > before else (), load=load())

    return read


def load() -> float | None:
    """Runnable threads of the machine, mean of the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def quota(cgroup: Path = _CGROUP) -> float | None:
    """How many cores a cgroup grants this process, or None where it grants all."""
    words = _text(cgroup / "cpu.max").split()
    if not words:
        words = [_text(cgroup / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        granted = float(words[0]) / float(words[1])
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    return granted if granted > 0 else None


def with_measured_roofs(device: Device, dtypes: Collection[str]) -> Device:
    """`device`, a CPU, with the bandwidth of a copy and the peaks of a product as this process reaches them; peaks of
    dtypes other than fp32, bf16 and fp16, or of none of `dtypes`, are not known."""
    peaks = {key: _peak(_DTYPES[key]) for key in sorted(dtypes) if key in _DTYPES}
    return replace(device, memory_bps=_bandwidth(device.l2_bytes), peak_flops=MappingProxyType(peaks))


@cache
def _peak(dtype: torch.dtype) -> float:
    """Of the little product alone where the other would take too long: a CPU without instructions for the dtype."""
    little = _reached(_LITTLE, dtype, 0.0)
    return little if 2.0 * _SIDE**3 / little > _SECONDS else max(little, _reached(_SIDE, dtype, _SECONDS))


def _reached(side: int, dtype: torch.dtype, seconds: float) -> float:
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype)
    return 2.0 * side**3 / _fastest(lambda: torch.mm(a, b, out=out), seconds)


@cache
def _bandwidth(cache_bytes: int) -> float:
    source = torch.ones(min(4 * cache_bytes, _MOST_COPIED), dtype=torch.uint8)
    out = torch.zeros_like(source)
    return 2.0 * source.nbytes / _fastest(lambda: out.copy_(source), _SECONDS)


def _fastest(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call, of as many as fill `seconds`."""
    call()
    times: list[float] = []
    while len(times) < _LEAST_CALLS or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _stopped(cgroup: Path) -> int:
    """How often the quota has stopped this process's group."""
    for path in (cgroup / "cpu.stat", cgroup / "cpu" / "cpu.stat"):
        for line in _text(path).splitlines():
            name, _, count = line.partition(" ")
            if name == "nr_throttled":
                return int(count)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
