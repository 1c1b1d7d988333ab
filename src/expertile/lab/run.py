"""Runs a bench: each workload is gated, then timed under each policy, and every record is written at once.

    workload -> gate every backend -> time those that passed, interleaved -> records -> JSONL

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
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.baselines import BASELINES
from expertile.lab.candidate import candidate_name, load, parse_spec
from expertile.lab.candidate_gate import CandidateGate
from expertile.lab.contestants import (
    Contestant,
    backend_contestants,
    baseline_contestant,
    candidate_contestant,
    make_bench,
    memory_needed,
)  # fmt: skip
from expertile.lab.environment import capture_env, new_run_id, same_machine, timestamp, with_clocks
from expertile.lab.measure import Budget, Failure, Measurement, device_alive, failure_of, release
from expertile.lab.operands import free_memory
from expertile.lab.record import Env, Record, append, rates, read
from expertile.lab.timers import POLICIES
from expertile.lab.timing import pick_configs, time_contestants
from expertile.lab.workloads import Workload
from expertile.ops.grouped_mm.backend import Backend
from expertile.roofline import bound

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
    device: Device
    torch_device: torch.device
    out_path: Path | None
    quick: bool
    tune_configs: bool
    seconds: float | None
    rounds: int | None
    run_id: str
    env: Env
    seed: int


_BASELINE_NAMES = tuple(b.name for b in BASELINES)

Key = tuple[str, str, str, str, str]  # workload, shape, dtype, backend, policy


def run(
    workloads: Sequence[Workload],
    backends: Sequence[Backend],
    *,
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
    """Measure `backends` (and `dense` and `copy` beside them) on `workloads`; yields records as they are
    made.

    - `policies`: "graph" and/or "eager". A CPU has eager alone.
    - `out_path`: JSONL file that every record is appended to. `resume` skips what that file already holds from
      this machine and software, and carries on under the same run id.
    - `candidates`: "FILE.py:FUNCTION", gated in a process of their own, `candidate_timeout_s` for each workload.
    - `tune_configs`: also screen every config of each backend, and measure the best beside the default; its
      record's config says how many were tried ("tried").
    - `seconds`: about how long the whole run may take; 75 on a CPU (25 if `quick`) and no limit on a GPU by default.
    - `rounds`: exactly so many timed rounds of each workload, however long they take.
    - `seed`: of the random operands; fresh ones by default.

    Raises ValueError at once for an unknown policy, the graph policy alone on a CPU, or a candidate that
    names no file.
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
    for spec in candidates:
        parse_spec(spec)
    facts = Device.current(torch_device)
    env = capture_env(facts)
    path = None if out_path is None else Path(out_path)
    run_id, finished = _resumed(path, env) if resume and path is not None else (new_run_id(), set())
    if seconds is None and torch_device.type != "cuda":
        seconds = _CPU_SECONDS[quick]
    settings = Settings(
        tuple(policies), facts, torch_device, path, quick, tune_configs, seconds, rounds, run_id, env,
        secrets.randbits(31) if seed is None else seed,
    )  # fmt: skip
    session = _Session(settings, tuple(backends), tuple(candidates), finished, on_event or (lambda event: None))
    return session.records(tuple(workloads), candidate_timeout_s)


class _Session:
    """One run in progress: what is finished, what remains, and whom to tell."""

    def __init__(
        self,
        settings: Settings,
        backends: tuple[Backend, ...],
        candidates: tuple[str, ...],
        finished: set[Key],
        on_event: Callable[[Event], None],
    ) -> None:
        self.settings, self.backends, self.finished, self.on_event = settings, backends, finished, on_event
        self.specs = {candidate_name(spec): spec for spec in candidates}
        self.loaded: dict[str, Backend] = {}
        self.gates: dict[str, CandidateGate] = {}
        self.names = [*(b.name for b in backends), *self.specs, *(b.name for b in BASELINES)]
        self.started, self.done, self.total = time.monotonic(), 0, 0
        self.dead = ""  # why the device can no longer be used

    def records(self, workloads: tuple[Workload, ...], timeout_s: float) -> Iterator[Record]:
        todo = [(w, self._missing(w)) for w in workloads]
        self.total = sum(len(missing) for _, missing in todo)
        self._tell("start", text=self.settings.run_id)
        if self.finished:
            self._tell("note", text=f"resuming run {self.settings.run_id}: {len(self.finished)} records are there")
        with ExitStack() as stack:
            for name, spec in self.specs.items():
                gate = CandidateGate(spec, self.settings.torch_device, timeout_s)
                self.gates[name] = stack.enter_context(gate)
            for index, (workload, missing) in enumerate(todo):
                if missing:
                    yield from self._workload(workload, missing, sum(1 for _, m in todo[index:] if m))
        self._tell("end")

    def _missing(self, workload: Workload) -> set[tuple[str, str]]:
        """(backend, policy) pairs that still need a record."""
        return {
            (name, policy)
            for policy in self.settings.policies
            for name in self.names
            if _key(workload, name, policy) not in self.finished
        }

    def _workload(self, workload: Workload, missing: set[tuple[str, str]], workloads_left: int) -> Iterator[Record]:
        s = self.settings
        self._tell("workload", workload)
        reason = self.dead or workload.unsupported or self._too_large(workload)
        if reason:
            yield from self._reasons(workload, missing, reason)
            return
        try:
            contestants = self._contestants(workload, {name for name, _ in missing}, s.seed)
        except Exception as error:
            failure = failure_of(error, s.torch_device)
            self.dead = failure.reason if failure.kind == "fatal" else ""
            yield from self._reasons(workload, missing, failure.reason)
            return
        finally:
            release(s.torch_device)
        for place, policy in enumerate(s.policies):
            wanted = [c for c in contestants if (c.name, policy) in missing]
            left = workloads_left * len(s.policies) - place
            yield from self._policy(workload, policy, wanted, self._budget(left))
            release(s.torch_device)

    def _contestants(self, workload: Workload, names: set[str], seed: int) -> list[Contestant]:
        """Everyone in `names`, gated; candidates first, while the device's memory is still free for their
        process.
        """
        s = self.settings
        verdicts = {}
        for name in self.specs:
            if name in names:
                verdicts[name] = self.gates[name].check(workload, seed + 1)
                if verdicts[name].ok and name not in self.loaded:
                    self.loaded[name] = load(self.specs[name])
        bench = make_bench(workload, s.device, s.torch_device, seed)
        found: list[Contestant] = []
        for backend in self.backends:
            if backend.name not in names:
                continue
            for contestant in backend_contestants(bench, backend, s.tune_configs):
                found.append(contestant)
                self._tell("gate", workload, contestant.name, text=contestant.reason or "ok")
                if contestant.fatal:
                    self.dead = f"{contestant.name} left the device unusable ({contestant.reason})"
        for name, verdict in verdicts.items():
            found.append(candidate_contestant(bench, self.loaded.get(name), name, verdict))
            self._tell("gate", workload, name, text=verdict.reason or "ok")
        found += [baseline_contestant(bench, b) for b in BASELINES if b.name in names and not self.dead]
        return found

    def _policy(
        self, workload: Workload, policy: str, contestants: list[Contestant], budget: Budget
    ) -> Iterator[Record]:
        s = self.settings
        ready = [c for c in contestants if c.bind is not None and not self.dead]
        outcomes: dict[int, Measurement | Failure] = {}
        tried: dict[int, int] = {}
        try:
            if s.tune_configs:
                ready, tried = pick_configs(ready, workload, policy, s.device, s.torch_device, s.seed)
            timed = time_contestants(
                ready, workload, policy, s.device, s.torch_device, budget, s.seed,
                lambda i, medians: self._tell("round", workload, policy=policy, text=str(i), medians=_rivals(medians)),
            )  # fmt: skip
            outcomes = {id(c): outcome for c, outcome in zip(ready, timed, strict=True)}
        except Exception as error:  # operands that do not fit, or a device that died while they were made
            failure = failure_of(error, s.torch_device)
            outcomes = {id(c): failure for c in ready}
        if not self.dead and not device_alive(s.torch_device):
            self.dead = next(
                (f"{c.name}: {o.reason}" for c in ready if isinstance(o := outcomes[id(c)], Failure)),
                "the device stopped answering",
            )
        shown = {id(c) for c in ready}
        for contestant in contestants:
            if contestant.bind is not None and id(contestant) not in shown and not self.dead:
                continue  # a config that screening found slower
            outcome = outcomes.get(id(contestant))
            yield self._emit(self._record(workload, policy, contestant, outcome, tried.get(id(contestant))))

    def _record(
        self, workload: Workload, policy: str, contestant: Contestant, outcome: Measurement | Failure | None,
        tried: int | None,
    ) -> Record:  # fmt: skip
        s, work = self.settings, contestant.work
        problem = workload.problem(s.torch_device.type, torch.backends.cuda.matmul.allow_tf32)
        limit = bound(work, s.device, problem.dtype_key)
        time_s = ci95_s = tflops = gbps = None
        status, reason, env = contestant.status, contestant.reason, s.env
        if isinstance(outcome, Failure):
            status, reason = "unsupported", outcome.reason
        elif isinstance(outcome, Measurement):
            outcome = replace(outcome, bound_s=limit.seconds)
            time_s, ci95_s = outcome.time_s, outcome.ci95_s
            tflops, gbps = rates(work.flops, work.nbytes, time_s)
            env = with_clocks(env, outcome.clocks)
            if outcome.refused:
                status, reason = "refused", outcome.refused
        elif status == "ok":
            status, reason = "unsupported", f"not measured: {self.dead}"
        config = contestant.shown_config(policy)
        if tried:
            config["tried"] = tried
        return Record(
            workload.op, record_name(workload), workload.shape(), workload.dtype, contestant.name, config, policy,
            time_s, ci95_s, work.flops, work.nbytes, tflops, gbps, limit.seconds, limit.limiter,
            contestant.rel_error, contestant.max_error, status, reason, env, s.run_id, timestamp(),
        )  # fmt: skip

    def _reasons(self, workload: Workload, missing: set[tuple[str, str]], reason: str) -> Iterator[Record]:
        """One record with `reason` for everyone who was to run."""
        work = workload.problem(self.settings.torch_device.type).work(workload.group_sizes)
        self.total -= sum(1 for name, _ in missing if name in _BASELINE_NAMES)
        for policy in self.settings.policies:
            for name in self.names:
                if (name, policy) in missing and name not in _BASELINE_NAMES:
                    nobody = Contestant(name, work, status="unsupported", reason=reason)
                    yield self._emit(self._record(workload, policy, nobody, None, None))

    def _too_large(self, workload: Workload) -> str:
        need, free = memory_needed(workload), free_memory(self.settings.torch_device)
        if not free or need <= 0.95 * free:
            return ""
        return f"needs about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on {self.settings.device.name}"

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
        self, kind: str, workload: Workload | None = None, backend: str = "", policy: str = "", **more: Any
    ) -> None:
        eta = None
        if self.done and self.total:
            spent = time.monotonic() - self.started
            eta = spent / self.done * max(self.total - self.done, 0)
        name = record_name(workload) if workload else more["record"].workload if more.get("record") else ""
        self.on_event(
            Event(kind, name, backend, policy, done=self.done, total=max(self.total, self.done), eta_s=eta, **more)
        )


def _rivals(medians: Mapping[str, float]) -> dict[str, float]:
    """Without the baselines, which nobody has to beat."""
    return {name: seconds for name, seconds in medians.items() if name not in _BASELINE_NAMES}


def record_name(workload: Workload) -> str:
    """How records call a workload: "preset/name"."""
    return f"{workload.preset}/{workload.name}" if workload.preset else workload.name


def _key(workload: Workload, backend: str, policy: str) -> Key:
    shape = json.dumps(workload.shape(), sort_keys=True)
    return (record_name(workload), shape, workload.dtype, backend, policy)


def _resumed(path: Path, env: Env) -> tuple[str, set[Key]]:
    """The id of the last run on this machine in `path`, and what it has measured; a new id if there is
    none.
    """
    same = [r for r in read(path) if same_machine(r.env, env)] if path.is_file() else []
    if not same:
        return new_run_id(), set()
    run_id = same[-1].run
    keys = {
        (r.workload, json.dumps(r.shape, sort_keys=True), r.dtype, r.backend, r.policy) for r in same if r.run == run_id
    }
    return run_id, keys
