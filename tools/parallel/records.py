"""The records of expert parallelism: what a run on several GPUs has timed, and what it has not, and why.

    moe_parallel, moe_parallel_train   a way to compute a case, forward, or forward and backward; its config's "kind" is
                                       "step" (the whole) or a part of it alone, "compute" or "communication"
    all_to_all                         an all-to-all of equal parts alone, of which "leaving_nbytes" leave each rank

Times are of the slowest rank: medians over rounds. The shape says the sizes, "scaling" and the number of "gpus".
Details: "tokens_of_gpu"; "leaving_nbytes", of rows, the most of a rank; "errors" of each result against one GPU,
relative Frobenius, the worst rank's; "same_bits", whether out has the bits of one GPU; "rounds"; versions of what
communicates.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from expertile.device import Device
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import Measurement
from expertile.lab.race.record import Record, measured
from expertile.roofline import Bound, Work, bound
from tools.parallel.case import BOTH, Case, Job
from tools.parallel.team import Team
from tools.parallel.ways import ONE_GPU, OURS, STEP, Way

Emit = Callable[[Record], None]
OPS = ("moe_parallel", "moe_parallel_train")
_UNKNOWN = Bound(0.0, "unknown")


class Records:
    """Makes the records of a run and hands each to `emit`."""

    def __init__(self, team: Team, emit: Emit) -> None:
        self.emit, self.device, self.world = emit, Device.current(team.device), team.world
        self.env, self.run = capture_env(self.device), new_run_id()
        nccl: Any = torch.cuda.nccl.version() if team.device.type == "cuda" else None
        self.versions = {
            "collectives": dist.get_backend(),
            "nccl": ".".join(map(str, nccl)) if nccl else None,
            "nccl_nvls_enable": os.environ.get("NCCL_NVLS_ENABLE"),
        }

    def step(
        self,
        case: Case,
        works: Mapping[int, Mapping[str, Work]],
        way: Way,
        ranks: Sequence[Mapping[str, Any]],
        timings: Mapping[tuple[str, ...], Measurement],
        untimed: str = "not measured",
    ) -> None:
        """One way, of which each of `ranks` said how it went. works: `case.work` by the number of GPUs, worked out
        before: a record is made without a GPU, which may be lost by now. timings: by pass and kind; `untimed` is the
        reason of a right way that has none."""
        reason = "; ".join(dict.fromkeys(said["reason"] for said in ranks if said["reason"]))
        world = 1 if way.name == ONE_GPU else case.world
        worst = _worst(said["errors"] for said in ranks)
        errors = {name: error if math.isfinite(error) else None for name, error in worst.items()}
        leaving = _worst(said["leaving"] for said in ranks)
        details = {
            "tokens_of_gpu": case.job.tokens_of_rank(world),
            "errors": errors,
            "same_bits": all(said["bits"] for said in ranks),
        }
        rel_error = max((error for error in errors.values() if error is not None), default=None)
        for name in case.job.passes:
            work, away = works[world][name], leaving.get(name, 0)
            more = details | {"leaving_nbytes": away}
            kinds = {kind: timing for (of, kind), timing in timings.items() if of == name}
            if reason or not kinds:
                status = "failed" if "failed: " in reason else "wrong" if reason else "unsupported"
                self._way(case.job, way, name, STEP, work, None, more, status=status, reason=reason or untimed)
            for kind, timing in {} if reason else kinds.items():
                useful = Work(0.0, float(away)) if kind == "communication" else work
                self._way(case.job, way, name, kind, useful, timing, more, rel_error=rel_error)

    def all_to_all(self, case: Case, leaving_nbytes: int, timing: Measurement) -> None:
        """Of equal parts, alone."""
        shape = self._shape(case.job) | {"leaving_nbytes": leaving_nbytes}
        name = f"all-to-all-{self._name(case.job)}-{leaving_nbytes}"
        work = Work(0.0, float(leaving_nbytes))
        self._emit(name, timing, work, {}, op="all_to_all", shape=shape, backend=self.versions["collectives"])

    def skipped(self, job: Job, ways: Iterable[Way], reason: str) -> None:
        """What there was no time for, or what went wrong around it."""
        for way in ways:
            self._way(job, way, job.passes[0], STEP, Work(0.0, 0.0), None, {}, status="unsupported", reason=reason)

    def _way(
        self,
        job: Job,
        way: Way,
        name: str,
        kind: str,
        work: Work,
        timing: Measurement | None,
        details: Mapping[str, Any],
        **more: Any,
    ) -> None:
        config = {"combine": way.combine, "chunks": way.chunks, "fixed": way.fixed} if way.name == OURS else {}
        self._emit(
            self._name(job) + "-train" * (name == BOTH),
            timing,
            work,
            details,
            # Parts of a step have no bound that is known.
            limit=bound(work, self.device, "bf16") if kind == STEP else _UNKNOWN,
            op=OPS[name == BOTH],
            shape=self._shape(job),
            backend=way.backend if kind == STEP else f"{way.backend}: {kind} alone",
            policy="graph" if way.graph else "eager",
            config={"kind": kind, **config},
            **more,
        )

    def _emit(self, name: str, timing: Measurement | None, work: Work, details: Mapping[str, Any], **more: Any) -> None:
        if timing:
            details = {**details, "rounds": len(timing.samples)}
        fields: dict[str, Any] = {"policy": "eager", "limit": _UNKNOWN, "workload": f"parallel/{name}"} | more
        fields |= {"details": {**self.versions, **details}, "run": self.run, "dtype": "bf16"}
        self.emit(measured(work=work, outcome=timing, env=self.env, **fields))

    def _name(self, job: Job) -> str:
        return f"{job.size}-{job.scaling}-{self.world}-gpus"

    def _shape(self, job: Job) -> dict[str, Any]:
        return asdict(job.size) | {"scaling": job.scaling, "gpus": self.world}


def _worst(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for of_rank in values:
        for name, value in of_rank.items():
            found[name] = max(value, found.get(name, value))
    return found
