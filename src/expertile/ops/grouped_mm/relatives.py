"""What was measured on other GPUs of the same chip, as this GPU's memory and clock allow: its table where it has none,
else more neighbours, at some distance, for problems that its own table has nothing like.

The same chip has the same compute capability and as many multiprocessors: the same tensor cores, shared memory and
waves of tiles, so that backends and configs compare as they did there wherever memory does not limit. An H100 NVL, H800
or GH200 takes the H100 SXM's table, then the H200's. An H100 PCIe does not: 114 multiprocessors have other waves, which
decide between tiles, and 350 W another clock under load.

A measured time is taken for  launch + hypot(compute, memory)  as in `model`, with memory the bytes at the share of
bandwidth that good kernels reach, and compute what is left of the time. Memory then takes as much longer as bandwidth
is smaller, and compute as the clock is lower. No order on a measured problem changes. But where memory limits, two
backends come nearer to each other, as what one lost to its products hides behind a slower memory; and neighbours are
compared by the bound that holds here.
"""

import math
from dataclasses import replace
from functools import lru_cache

from expertile.device import Device, known_devices
from expertile.ops.grouped_mm.tuned import Features, Measured, Table, load_tables

# H200: the share of bandwidth that the fastest backend reaches on three of four products with 4 to 16 even rows a group
# and 0.1 ms of bytes or more (41), and what every launch costs in a CUDA graph.
_MEMORY, _LAUNCH_S = 0.93, 2e-6


@lru_cache(maxsize=16)
def table_for(device: Device) -> Table | None:
    """The table of `device`, the user's own before the package's, else that of the GPU of its chip whose bandwidth is
    nearest, its times `scaled`; then the problems of all other tables of the chip. None if there is none."""

    def apart(d: Device) -> tuple[bool, float]:
        ratio = (d.memory_bps or 1.0) / (device.memory_bps or 1.0)
        return d.slug != device.slug, abs(math.log(ratio))

    chip = (device.kind, device.capability, device.sm_count)
    alike = {d.slug: d for d in known_devices() if device.kind == "cuda" and (d.kind, d.capability, d.sm_count) == chip}
    near = sorted((alike | {device.slug: device}).values(), key=apart)
    tables = [table if d is device else scaled(table, d, device) for d in near for table in load_tables(d.slug)]
    if not tables:
        return None
    first, *others = tables
    more = (replace(m, gpu=table.gpu) for table in others for m in table.problems)
    seeds = {seed for table in tables for seed in table.seeds}
    return replace(first, problems=(*first.problems, *more), seeds=tuple(sorted(seeds)))


def scaled(table: Table, there: Device, here: Device) -> Table:
    """`table`, measured on `there`, with the times that are to be expected `here`, and `relative`."""
    slower = there.max_clock_hz / here.max_clock_hz

    def problem(m: Measured) -> Measured:
        was, now = (_memory_seconds(m.features, d.memory_bps) for d in (there, here))
        if not was or not now:  # a bandwidth that nobody states
            was = now = 0.0
        times = (replace(t, seconds=_seconds(t.seconds, slower, was, now)) for t in m.times)
        return replace(m, times=tuple(sorted(times, key=lambda t: t.seconds)))

    return replace(table, problems=tuple(map(problem, table.problems)), relative=True)


def _memory_seconds(f: Features, memory_bps: float | None) -> float:
    """What reading and writing everything once takes at least; 0 where the bandwidth is not known."""
    return f.elements * (2 if f.dtype == "16-bit" else 4) / (memory_bps * _MEMORY) if memory_bps else 0.0


def _seconds(seconds: float, slower: float, was: float, now: float) -> float:
    """A time whose memory part was `was` and is `now`; the rest is compute, and takes `slower` times as long."""
    launch = min(seconds, _LAUNCH_S)
    busy = seconds - launch
    if busy <= was:  # memory alone
        return launch + busy * now / was
    return launch + math.hypot(slower * math.sqrt(busy * busy - was * was), now)
