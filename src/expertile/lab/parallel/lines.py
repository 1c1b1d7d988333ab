"""The lines of a record of expert parallelism: JSON objects, told apart by "part".

    environment   GPU and versions, how many GPUs, the date
    bandwidth     an all-to-all of equal parts alone: "leaving_bytes" of each rank, "seconds", "ci95_s"
    step          a way to compute a case, checked; see `step`
    skipped       what there was no time for, or what went wrong around it, and why

Times are of the slowest rank: medians over rounds, in seconds. "size" is [T, H, I, E, k], "world" the number of GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertile.device import Device
from expertile.lab.measure.env import timestamp
from expertile.lab.measure.environment import capture_env
from expertile.lab.parallel.case import Case, Job
from expertile.lab.parallel.team import Team, Timing
from expertile.lab.parallel.ways import ONE_GPU, Way
from expertile.roofline import Work

Emit = Callable[[dict[str, Any]], None]


def environment(team: Team) -> dict[str, Any]:
    """The first line of a file."""
    gpu = team.device.type == "cuda"
    nccl: Any = torch.cuda.nccl.version() if gpu else None
    return {
        "part": "environment",
        **asdict(capture_env(Device.current(team.device))),
        "world": team.world,
        "backend": dist.get_backend(),
        "nccl": ".".join(map(str, nccl)) if gpu else None,
        "nccl_nvls_enable": os.environ.get("NCCL_NVLS_ENABLE"),
        "date": timestamp(),
    }


def step(
    case: Case,
    work: Mapping[int, Mapping[str, Work]],
    way: Way,
    parts: Sequence[dict[str, Any]],
    timings: Mapping[Any, Timing],
) -> dict[str, Any]:
    """One way, of which each rank said `parts`. work: `case.work` by the number of GPUs, worked out before: a line is
    made without a GPU, which may be lost by now.

    status: ok, wrong, failed or untimed, and the reason. errors: against one GPU, relative Frobenius, the worst rank's;
    bits: whether out equals it bit for bit. leaving_bytes: of rows, by pass, the most of a rank. work: of the busiest
    rank, [FLOPs, bytes] by pass. seconds, ci95_s: by pass and kind.
    """
    reason = "; ".join(dict.fromkeys(part["reason"] for part in parts if part["reason"]))
    status = "failed" if "failed: " in reason else "wrong" if reason else "ok" if timings else "untimed"
    world = 1 if way.name == ONE_GPU else case.world
    seconds: dict[str, dict[str, float]] = {}
    intervals: dict[str, dict[str, Sequence[float]]] = {}
    for (name, kind), timing in timings.items():
        seconds.setdefault(name, {})[kind] = timing.seconds
        intervals.setdefault(name, {})[kind] = timing.ci95_s
    return {
        "part": "step",
        **_of(case.job),
        "world": world,
        "tokens": case.job.tokens_of_rank(world),
        "way": way.name,
        "chunks": way.chunks,
        "combine": way.combine,
        "fixed": way.fixed,
        "graph": way.graph,
        "status": status,
        "reason": reason,
        "bits": all(part["bits"] for part in parts),
        "errors": _worst(part["errors"] for part in parts),
        "leaving_bytes": _worst(part["leaving"] for part in parts),
        "work": {name: [one.flops, one.nbytes] for name, one in work[world].items()},
        "seconds": seconds,
        "ci95_s": intervals,
        **_race(next(iter(timings.values()), None)),
    }


def bandwidth(case: Case, leaving_nbytes: int, timing: Timing) -> dict[str, Any]:
    return {
        "part": "bandwidth",
        **_of(case.job),
        "world": case.world,
        "leaving_bytes": leaving_nbytes,
        "seconds": timing.seconds,
        "ci95_s": timing.ci95_s,
        **_race(timing),
    }


def skipped(job: Job, reason: str, way: str | None = None) -> dict[str, Any]:
    return {"part": "skipped", **_of(job), "way": way, "reason": reason}


def _worst(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for of_rank in values:
        for name, value in of_rank.items():
            found[name] = max(value, found.get(name, value))
    return found


def _race(timing: Timing | None) -> dict[str, Any]:
    """What all timings of a race share; SM clock, power and throttle reasons of rank 0's GPU."""
    return {"rounds": timing.rounds, **asdict(timing.clocks)} if timing else {"rounds": 0}


def _of(job: Job) -> dict[str, Any]:
    return {"size": list(astuple(job.size)), "scaling": job.scaling, "decode": job.decode}


def writer(path: Path) -> Emit:
    """Appends a line of JSON, on disk before it returns."""

    def emit(line: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return emit


def _finite(value: Any) -> Any:
    """`value` with None for numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and value - value != 0.0 else value
