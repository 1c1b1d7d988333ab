"""Runs a bench: each workload is gated, then timed under each policy, and every record is written at once.

    workload -> arena -> gate everyone -> time those that passed, interleaved -> records -> JSONL

Nothing is lost on the way: a backend that does not support a workload, is wrong, runs out of memory or
crashes is a record with a reason; an interrupted run keeps what it measured and `resume=True` goes on with
the rest.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.environment import Env, capture_env, new_run_id, same_machine, timestamp, with_clocks
from expertile.lab.measure.interleaved import (
    Budget,
    Failure,
    Measurement,
    device_alive,
    failure_of,
    quick_collections,
    release,
)
from expertile.lab.measure.timers import POLICIES
from expertile.lab.operators.arena import OpArena
from expertile.lab.operators.base import Operator, OpWorkload
from expertile.lab.race.arena import AnyWorkload, Arena, Site, record_name
from expertile.lab.race.baselines import BASELINE_NAMES
from expertile.lab.race.contestants import Contestant
from expertile.lab.race.grouped_arena import Candidates, GroupedArena
from expertile.lab.race.operands import free_memory
from expertile.lab.race.record import Record, append, rates, read
from expertile.lab.race.timing import time_on_sets
from expertile.lab.race.workloads import Workload
from expertile.ops.grouped_mm.backend import Backend
from expertile.roofline import bound

__all__ = ["Event", "record_name", "run"]

_CPU_SECONDS = {False: 75.0, True: 25.0}  # keyed by quick: a whole run on a CPU stays within a coffee
_GPU_BUDGET = {False: Budget(3.0), True: Budget(0.6, min_rounds=7, max_rounds=41, rel_ci=0.01)}


@dataclass(frozen=True)
class Event:
    """Progress for a display. `kind`:

    "start" (text: run id) · "workload" (begins) · "gate" (a contestant was judged; text: "ok" or the reason)
    · "round" (text: round number; medians: seconds so far of each rival) · "record" (one was made) · "note" (text)
    · "end". `done` of `total` records are made; `eta_s` estimates the seconds left, None at the beginning.
    """

    kind: str
    workload: str = ""
    backend: str = ""
    policy: str = ""
    text: str = ""
    record: Record | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    done: int = 0
    total: int = 0
    eta_s: float | None = None


@dataclass(frozen=True)
class Settings:
    """How to run; see `run`."""

    policies: tuple[str, ...]
    site: Site
    out_path: Path | None
    quick: bool
    tune_configs: bool
    seconds: float | None
    rounds: int | None
    run_id: str
    env: Env
    seed: int


Key = tuple[str, str, str, str, str, str]  # op, workload, shape, dtype, backend, policy


def run(
    workloads: Sequence[AnyWorkload],
    backends: Sequence[Backend] = (),
    *,
    operators: Sequence[Operator] = (),
    policies: Sequence[str] = POLICIES,
    device: torch.device | str | None = None,
    out_path: str | Path | None = None,
    resume: bool = False,
    quick: bool = False,
    candidates: Sequence[str] = (),
    candidate_timeout_s: float = 180.0,
    tune_configs: bool = False,
    seconds: float | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Iterator[Record]:
    """Measure `workloads`, with speed-of-light baselines beside them; yields records as they are made.

    - `workloads`: grouped products (`Workload`), computed by `backends` and `candidates` beside `dense` and `copy`; and
      calls of other operators (`OpWorkload`), computed by the rivals of the one in `operators` beside `copy`.
    - `policies`: "graph" and/or "eager". A CPU has eager alone.
    - `out_path`: JSONL file that every record is appended to. `resume` skips what that file already holds from
      this machine and software, and carries on under the same run id.
    - `candidates`: "FILE.py:FUNCTION", gated in a process of their own, `candidate_timeout_s` for each workload.
    - `tune_configs`: also screen every config of each backend, and measure the best beside the default; its
      record's config says how many were tried ("tried").
    - `seconds`: about how long the whole run may take; 75 on a CPU (25 if `quick`) and no limit on a GPU by default.
    - `rounds`: exactly so many timed rounds of each workload, however long they take.
    - `seed`: of the random operands; fresh ones by default.

    Raises ValueError at once for an unknown policy, the graph policy alone on a CPU, a workload that no operator is
    given for, or a candidate that names no file or has no grouped product to compute; and before the first workload
    for a candidate that cannot be loaded.
    """
    torch_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", torch.cuda.current_device())
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"policies: expected graph or eager, got {policy!r}")
    if torch_device.type != "cuda":
        policies = tuple(p for p in policies if p != "graph")
    if not policies:
        raise ValueError("policies: the graph policy needs a CUDA device; use eager on this one")
    site = Site(Device.current(torch_device), torch_device)
    entered = Candidates(candidates, torch_device, candidate_timeout_s)
    arenas = [
        _arena(w, site, tuple(backends), entered, {o.name: o for o in operators}, tune_configs, tuple(policies))
        for w in workloads
    ]
    if candidates and workloads and not any(isinstance(a, GroupedArena) for a in arenas):
        raise ValueError(f"candidates: expected grouped products for them to compute, got {workloads[0].op} alone")
    env = capture_env(site.device)
    path = None if out_path is None else Path(out_path)
    run_id, finished = _resumed(path, env) if resume and path is not None else (new_run_id(), set())
    if seconds is None and torch_device.type != "cuda":
        seconds = _CPU_SECONDS[quick]
    settings = Settings(
        tuple(policies), site, path, quick, tune_configs, seconds, rounds, run_id, env,
        secrets.randbits(31) if seed is None else seed,
    )  # fmt: skip
    return _Session(settings, finished, on_event or (lambda event: None)).records(arenas, entered)


def _arena(
    workload: AnyWorkload,
    site: Site,
    backends: tuple[Backend, ...],
    candidates: Candidates,
    operators: Mapping[str, Operator],
    all_configs: bool,
    policies: tuple[str, ...],
) -> Arena:
    if isinstance(workload, Workload):
        return GroupedArena(workload, site, backends, candidates, all_configs)
    if not isinstance(workload, OpWorkload) or workload.op not in operators:
        known = ", ".join(operators) or "no operator"
        raise ValueError(f"workload {workload.name!r}: op: expected one of those given ({known}), got {workload.op!r}")
    return OpArena(workload, site, operators[workload.op], policies)


class _Session:
    """One run in progress: what is finished, what remains, and whom to tell."""

    def __init__(self, settings: Settings, finished: set[Key], on_event: Callable[[Event], None]) -> None:
        self.settings, self.finished, self.on_event = settings, finished, on_event
        self.device = settings.site.torch_device
        self.started, self.done, self.total = time.monotonic(), 0, 0
        self.dead = ""  # why the device can no longer be used

    def records(self, arenas: Sequence[Arena], candidates: Candidates) -> Iterator[Record]:
        todo = [(arena, self._missing(arena)) for arena in arenas]
        self.total = sum(len(missing) for _, missing in todo)
        self._tell("start", text=self.settings.run_id)
        if self.finished:
            self._tell("note", text=f"resuming run {self.settings.run_id}: {len(self.finished)} records are there")
        with quick_collections(), candidates:
            for index, (arena, missing) in enumerate(todo):
                if missing:
                    yield from self._workload(arena, missing, sum(1 for _, m in todo[index:] if m))
        self._tell("end")

    def _missing(self, arena: Arena) -> set[tuple[str, str]]:
        """(backend, policy) pairs that still need a record."""
        return {
            (name, policy)
            for policy in self.settings.policies
            for name in arena.names
            if _key(arena.workload, name, policy) not in self.finished
        }

    def _workload(self, arena: Arena, missing: set[tuple[str, str]], workloads_left: int) -> Iterator[Record]:
        s = self.settings
        self._tell("workload", arena.workload)
        reason = self.dead or arena.workload.unsupported or self._too_large(arena)
        if reason:
            yield from self._reasons(arena, missing, "unsupported", reason)
            return
        try:
            contestants = self._contestants(arena, {name for name, _ in missing})
        except Exception as error:
            failure = failure_of(error, self.device)
            self.dead = failure.reason if failure.kind == "fatal" else ""
            yield from self._reasons(arena, missing, failure.status, failure.reason)
            return
        finally:
            release(self.device)
        for place, policy in enumerate(s.policies):
            wanted = [c for c in contestants if (c.name, policy) in missing]
            left = workloads_left * len(s.policies) - place
            yield from self._policy(arena, policy, wanted, self._budget(left))
            release(self.device)

    def _contestants(self, arena: Arena, names: set[str]) -> list[Contestant]:
        """Everyone in `names`, gated."""
        found: list[Contestant] = []
        for contestant in arena.contestants(names, self.settings.seed):
            found.append(contestant)
            if contestant.name not in BASELINE_NAMES:
                self._tell("gate", arena.workload, contestant.name, text=contestant.reason or "ok")
            if contestant.fatal:
                self.dead = f"{contestant.name} left the device unusable ({contestant.reason})"
        return found

    def _policy(self, arena: Arena, policy: str, contestants: list[Contestant], budget: Budget) -> Iterator[Record]:
        s, workload = self.settings, arena.workload
        ready = [c for c in contestants if c.bind is not None and policy in c.policies and not self.dead]
        outcomes: dict[int, Measurement | Failure] = {}
        tried: dict[int, int] = {}
        screened_out: set[int] = set()

        def tell(index: int, medians: Mapping[str, float]) -> None:
            self._tell("round", workload, policy=policy, text=str(index), medians=_rivals(medians))

        try:
            if ready:
                kept, tried = arena.screen(ready, policy, s.seed)
                screened_out = {id(c) for c in ready} - {id(c) for c in kept}
                ready = kept
                timed = time_on_sets(ready, arena.input_sets(s.seed), policy, self.device, budget, tell)
                outcomes = {id(c): outcome for c, outcome in zip(ready, timed, strict=True)}
        except Exception as error:  # operands that do not fit, or a device that died while they were made
            failure = failure_of(error, self.device)
            outcomes = {id(c): failure for c in ready}
        if not self.dead and not device_alive(self.device):
            self.dead = next(
                (f"{c.name}: {o.reason}" for c in ready if isinstance(o := outcomes[id(c)], Failure)),
                "the device stopped answering",
            )
        for contestant in _without_slower_ways(contestants, outcomes):
            if id(contestant) not in screened_out:
                outcome = outcomes.get(id(contestant))
                yield self._emit(self._record(arena, policy, contestant, outcome, tried.get(id(contestant))))

    def _record(
        self, arena: Arena, policy: str, contestant: Contestant, outcome: Measurement | Failure | None,
        tried: int | None,
    ) -> Record:  # fmt: skip
        s, work, workload = self.settings, contestant.work, arena.workload
        limit = bound(work, s.site.device, arena.dtype_key)
        time_s = ci95_s = tflops = gbps = None
        status, reason, env = contestant.status, contestant.reason, s.env
        if isinstance(outcome, Failure):
            status, reason = outcome.status, outcome.reason
        elif isinstance(outcome, Measurement):
            outcome = replace(outcome, bound_s=limit.seconds)
            time_s, ci95_s = outcome.time_s, outcome.ci95_s
            tflops, gbps = rates(work.flops, work.nbytes, time_s)
            env = with_clocks(env, outcome.clocks)
            if outcome.refused:
                status, reason = "refused", outcome.refused
        elif status == "ok":
            why = "it cannot be captured in a CUDA graph" if policy not in contestant.policies else self.dead
            status, reason = "unsupported", f"not measured: {why}"
        config = contestant.shown_config(policy)
        if tried:
            config["tried"] = tried
        return Record(
            workload.op, record_name(workload), workload.shape(), workload.dtype, contestant.name, config, policy,
            time_s, ci95_s, work.flops, work.nbytes, tflops, gbps, limit.seconds, limit.limiter,
            contestant.rel_error, contestant.max_error, status, reason, env, s.run_id, timestamp(),
        )  # fmt: skip

    def _reasons(self, arena: Arena, missing: set[tuple[str, str]], status: str, reason: str) -> Iterator[Record]:
        """One record with `reason` for everyone who was to run."""
        self.total -= sum(1 for name, _ in missing if name in BASELINE_NAMES)
        for policy in self.settings.policies:
            for name in arena.names:
                if (name, policy) in missing and name not in BASELINE_NAMES:
                    nobody = Contestant(name, arena.work, status=status, reason=reason)
                    yield self._emit(self._record(arena, policy, nobody, None, None))

    def _too_large(self, arena: Arena) -> str:
        need, free = arena.memory_needed, free_memory(self.device)
        if not free or need <= 0.95 * free:
            return ""
        return f"needs about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on {self.settings.site.device.name}"

    def _budget(self, measurements_left: int) -> Budget:
        s = self.settings
        base = _GPU_BUDGET[s.quick]
        if s.rounds is not None:
            return replace(base, seconds=math.inf, min_rounds=s.rounds, max_rounds=s.rounds, rel_ci=0.0)
        if s.seconds is None:
            return base
        left = max(s.seconds - (time.monotonic() - self.started), 0.0)
        # Gating takes its part of a share, too.
        return replace(base, seconds=min(base.seconds, 0.7 * left / max(measurements_left, 1)))

    def _emit(self, record: Record) -> Record:
        if self.settings.out_path is not None:
            append(self.settings.out_path, record)
        self.done += 1
        self._tell("record", None, record.backend, record.policy, record=record)
        return record

    def _tell(
        self, kind: str, workload: AnyWorkload | None = None, backend: str = "", policy: str = "", **more: Any
    ) -> None:
        eta = None
        if self.done and self.total:
            spent = time.monotonic() - self.started
            eta = spent / self.done * max(self.total - self.done, 0)
        name = record_name(workload) if workload else more["record"].workload if more.get("record") else ""
        self.on_event(
            Event(kind, name, backend, policy, done=self.done, total=max(self.total, self.done), eta_s=eta, **more)
        )


def _without_slower_ways(
    contestants: Sequence[Contestant], outcomes: Mapping[int, Measurement | Failure]
) -> list[Contestant]:
    """`contestants`, but of each baseline its fastest way alone; the first if none has a time."""

    def seconds(contestant: Contestant) -> float:
        outcome = outcomes.get(id(contestant))
        return outcome.time_s if isinstance(outcome, Measurement) else math.inf

    ways = [[c for c in contestants if c.name == name] for name in BASELINE_NAMES]
    best = [min(group, key=seconds) for group in ways if group]
    return [c for c in contestants if c.name not in BASELINE_NAMES or any(c is b for b in best)]


def _rivals(medians: Mapping[str, float]) -> dict[str, float]:
    """Without the baselines, which nobody has to beat."""
    return {name: seconds for name, seconds in medians.items() if name not in BASELINE_NAMES}


def _key(workload: AnyWorkload, backend: str, policy: str) -> Key:
    shape = json.dumps(workload.shape(), sort_keys=True)
    return (workload.op, record_name(workload), shape, workload.dtype, backend, policy)


def _resumed(path: Path, env: Env) -> tuple[str, set[Key]]:
    """The id of the last run on this machine in `path`, and what it has measured; a new id if there is
    none.
    """
    same = [r for r in read(path) if same_machine(r.env, env)] if path.is_file() else []
    if not same:
        return new_run_id(), set()
    run_id = same[-1].run
    keys = {
        (r.op, r.workload, json.dumps(r.shape, sort_keys=True), r.dtype, r.backend, r.policy)
        for r in same
        if r.run == run_id
    }
    return run_id, keys
