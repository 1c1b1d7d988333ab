"""Runs a bench: each workload is gated, then timed under each policy, and every record is written at once.

Nothing is lost: a backend that does not support a workload, is wrong, runs out of memory or crashes is a record with a
reason; an interrupted run keeps what it measured and `resume=True` goes on with the rest.
"""

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from expertile.lab.measure.cpu import with_measured_roofs
from expertile.lab.measure.env import Env
from expertile.lab.measure.environment import capture_env, new_run_id, same_machine
from expertile.lab.measure.interleaved import Budget, Failure, device_alive, failure_of, release
from expertile.lab.operators.grouped_mm import grouped_mm, rivals_of
from expertile.lab.race.candidate import candidate_name, parse_spec
from expertile.lab.race.candidate_gate import UserCandidates
from expertile.lab.race.case import Candidate, Case, Site
from expertile.lab.race.operands import free_memory
from expertile.lab.race.operator import Operator, Workload, record_name
from expertile.lab.race.record import BASELINES, SECONDS, Record, append, read
from expertile.lab.race.timing import pick_configs, time_on_sets
from expertile.lab.race.workloads import OP
from expertile.ops.grouped_mm.backend import Backend
from expertile.roofline import Bound, Work, bound
from expertile.timers import POLICIES, quick_collections

_CPU_SECONDS = {False: 75.0, True: 25.0}  # keyed by quick: a whole run on a CPU stays within a coffee
_GPU_BUDGET = {False: Budget(3.0), True: Budget(0.6, min_rounds=7, max_rounds=41, rel_ci=0.01)}


@dataclass(frozen=True)
class Event:
    """Progress for a display. `kind`:

    "start" (text: run id) · "workload" (begins) · "gate" (a candidate was judged; text: "ok" or the reason)
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


def run(
    workloads: Sequence[Workload],
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

    - `workloads`: grouped products (`GroupedWorkload`), computed by `backends` and `candidates`; and calls of other
      operators, computed by the rivals of the one in `operators`; beside their baselines and `copy`.
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
    given for, or a candidate that names no file or has no grouped product to compute; and before the first workload for
    a candidate that cannot be loaded.
    """
    site = Site.current(device)
    torch_device = site.torch_device
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"policies: expected graph or eager, got {policy!r}")
    if torch_device.type != "cuda":
        policies = tuple(p for p in policies if p != "graph")
    if not policies:
        raise ValueError("policies: the graph policy needs a CUDA device; use eager on this one")
    users = UserCandidates(candidates, torch_device, candidate_timeout_s)
    known = {OP: grouped_mm(backends, rivals_of(users)), **{o.name: o for o in operators}}
    for w in workloads:
        if w.op not in known:
            expected = ", ".join(o.name for o in operators) or "no operator"
            raise ValueError(f"workload {w.name!r}: op: expected one of those given ({expected}), got {w.op!r}")
    cases = [Case(w, site, known[w.op], tuple(policies), tune_configs) for w in workloads]
    if candidates and workloads and not any(w.op == OP for w in workloads):
        raise ValueError(f"candidates: expected grouped products for them to compute, got {workloads[0].op} alone")
    env = capture_env(site.device)
    path = None if out_path is None else Path(out_path)
    run_id, held = new_run_id(), list[Record]()
    if resume and path is not None:
        if candidates:
            _forget_edited(path, candidates)
        run_id, held = resumed(path, env)
    if seconds is None and torch_device.type != "cuda":
        seconds = _CPU_SECONDS[quick]
    session = _Session(
        policies=tuple(policies),
        site=site,
        out_path=path,
        quick=quick,
        tune_configs=tune_configs,
        seconds=seconds,
        rounds=rounds,
        run_id=run_id,
        env=env,
        seed=secrets.randbits(31) if seed is None else seed,
        finished={r.key for r in held},
        on_event=on_event or (lambda event: None),
    )
    return session.records(cases, users)


@dataclass(kw_only=True)
class _Session:
    """One run in progress: how to run (see `run`), what is finished, what remains, and where to report it."""

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
    finished: set[tuple[str, ...]]
    on_event: Callable[[Event], None]

    def __post_init__(self) -> None:
        self.device, self.facts = self.site.torch_device, self.site.device  # facts: by which bounds are reckoned
        self.started, self.done, self.total = time.monotonic(), 0, 0
        self.dead = ""  # why the device can no longer be used

    def records(self, cases: Sequence[Case], users: UserCandidates) -> Iterator[Record]:
        todo = [(case, self._missing(case)) for case in cases]
        self.total = sum(len(missing) for _, missing in todo)
        self._tell("start", text=self.run_id)
        if self.finished:
            self._tell("note", text=f"resuming run {self.run_id}: {len(self.finished)} records are there")
        with quick_collections(), users:
            if self.device.type == "cpu":
                self.facts = with_measured_roofs(self.facts, {case.dtype_key for case in cases})
            for index, (case, missing) in enumerate(todo):
                if missing:
                    yield from self._workload(case, missing, sum(1 for _, m in todo[index:] if m))
        self._tell("end")

    def _missing(self, case: Case) -> set[tuple[str, str]]:
        """(backend, policy) pairs that still need a record."""
        return {
            (name, policy)
            for policy in self.policies
            for name in case.names
            if _key(case.workload, name, policy) not in self.finished
        }

    def _workload(self, case: Case, missing: set[tuple[str, str]], workloads_left: int) -> Iterator[Record]:
        self._tell("workload", case.workload)
        reason = self.dead or case.workload.unsupported or self._too_large(case)
        if reason:
            yield from self._reasons(case, missing, Failure("limit", reason))
            return
        try:
            candidates = self._candidates(case, {name for name, _ in missing})
        except Exception as error:
            failure = failure_of(error, self.device)
            self.dead = failure.reason if failure.kind == "fatal" else ""
            yield from self._reasons(case, missing, failure)
            return
        finally:
            release(self.device)
        for place, policy in enumerate(self.policies):
            rows = [c for c in candidates if (c.name, policy) in missing]
            if not self.dead and any(c.ready(policy) for c in rows):
                rows = self._timed(case, policy, rows, self._budget(workloads_left * len(self.policies) - place))
            if not self.dead and not device_alive(self.device):
                failed = (f"{c.name}: {c.outcome.reason}" for c in rows if isinstance(c.outcome, Failure))
                self.dead = next(failed, "the device stopped answering")
            rows = _without_slower_ways(rows)
            for row, limit in zip(rows, self._limits(case, rows), strict=True):
                yield self._emit(self._record(case, policy, row, limit))
            release(self.device)

    def _candidates(self, case: Case, names: set[str]) -> list[Candidate]:
        """The candidates of `names`, gated."""
        found: list[Candidate] = []
        for candidate in case.candidates(names, self.seed):
            found.append(candidate)
            if candidate.name not in BASELINES:
                self._tell("gate", case.workload, candidate.name, text=candidate.reason or "ok")
            if candidate.fatal:
                self.dead = f"{candidate.name} left the device unusable ({candidate.reason})"
        return found

    def _timed(self, case: Case, policy: str, rows: list[Candidate], budget: Budget) -> list[Candidate]:
        """`rows` with the outcomes of those that are ready, without configs that are not worth a full measurement."""

        def tell(index: int, medians: Mapping[str, float]) -> None:
            rivals = {name: seconds for name, seconds in medians.items() if name not in BASELINES}
            self._tell("round", case.workload, policy=policy, text=str(index), medians=rivals)

        try:
            sets = case.input_sets(self.seed)
            if self.tune_configs:
                rows = pick_configs(rows, sets, policy, self.device)
            unseen = self.seed + len(sets)
            timed = time_on_sets(rows, sets, policy, self.device, budget, tell)
            del sets[1:]  # makes room
            return [c.judged_again(sets[0], unseen) for c in timed]
        except Exception as error:  # operands that do not fit, or a device that died while they were made
            failure = failure_of(error, self.device)
            return [replace(c, outcome=failure) if c.ready(policy) else c for c in rows]

    def _limits(self, case: Case, rows: Sequence[Candidate]) -> list[Bound]:
        """The bound of each row. The roofs of a CPU are what it reached, not what it can do: where a call is faster,
        the bound of its workload is as far below the roofs as that call. A time that no processor of this kind can
        reach is refused by the safe bound."""
        safe = [bound(c.work, self.site.device, case.dtype_key) for c in rows]
        if self.facts is self.site.device:
            return safe
        reached = [self._reached(c.work, case.dtype_key) for c in rows]
        possible = [c.time_s >= least.seconds for c, least in zip(rows, safe, strict=True)]
        scale: dict[str, float] = {}
        for row, limit, ok in zip(rows, reached, possible, strict=True):
            if ok and limit.seconds:
                share = row.time_s / limit.seconds * (1 - 1e-9)  # rounding must not leave the bound above the time
                scale[limit.limiter] = min(scale.get(limit.limiter, 1.0), share)
        scaled = [replace(b, seconds=b.seconds * scale.get(b.limiter, 1.0)) for b in reached]
        return [b if ok else least for b, ok, least in zip(scaled, possible, safe, strict=True)]

    def _reached(self, work: Work, dtype_key: str) -> Bound:
        """By the roofs that are known; of a product whose peak is not known, nothing."""
        if work.flops and not self.facts.peak(dtype_key):
            return Bound(0.0, "unknown")
        return bound(work, self.facts, dtype_key)

    def _record(self, case: Case, policy: str, candidate: Candidate, limit: Bound) -> Record:
        why = "it cannot be captured in a CUDA graph" if policy not in candidate.policies else self.dead
        unmeasured = f"not measured: {why}"
        return case.record(candidate, policy, limit, env=self.env, run=self.run_id, unmeasured=unmeasured)

    def _reasons(self, case: Case, missing: set[tuple[str, str]], why: Failure) -> Iterator[Record]:
        """One record for each candidate that was to run."""
        self.total -= sum(1 for name, _ in missing if name in BASELINES)
        limit = self._reached(case.work, case.dtype_key)
        for policy in self.policies:
            for name in case.names:
                if (name, policy) in missing and name not in BASELINES:
                    yield self._emit(self._record(case, policy, Candidate(name, case.work, verdict=why), limit))

    def _too_large(self, case: Case) -> str:
        need, free = case.memory_needed, free_memory(self.device)
        if not free or need <= 0.95 * free:
            return ""
        return f"needs about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on {self.site.device.name}"

    def _budget(self, measurements_left: int) -> Budget:
        base = _GPU_BUDGET[self.quick]
        if self.rounds is not None:
            return replace(base, seconds=math.inf, min_rounds=self.rounds, max_rounds=self.rounds, rel_ci=0.0)
        if self.seconds is None:
            return base
        left = max(self.seconds - (time.monotonic() - self.started), 0.0)
        # Gating takes its part of a share, too.
        return replace(base, seconds=min(base.seconds, 0.7 * left / max(measurements_left, 1)))

    def _emit(self, record: Record) -> Record:
        if self.out_path is not None:
            append(self.out_path, record)
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


def _without_slower_ways(rows: Sequence[Candidate]) -> list[Candidate]:
    """`rows`, but of each baseline its fastest way alone; the first if none has a time."""
    ways = [[c for c in rows if c.name == name] for name in BASELINES]
    best = [min(group, key=lambda c: c.time_s) for group in ways if group]
    return [c for c in rows if c.name not in BASELINES or any(c is b for b in best)]


def _key(workload: Workload, backend: str, policy: str) -> tuple[str, ...]:
    """`Record.key` of a time that is still to be measured."""
    shape = json.dumps(workload.shape(), sort_keys=True)
    return (workload.op, record_name(workload), shape, workload.dtype, SECONDS, policy, backend)


def _forget_edited(path: Path, candidates: Sequence[str]) -> None:
    """Take from `path` the records of candidates whose files were written since."""
    edited = {candidate_name(spec): parse_spec(spec)[0].stat().st_mtime for spec in candidates}
    records = list(read(path)) if path.is_file() else []
    kept = [r for r in records if datetime.fromisoformat(r.date).timestamp() >= edited.get(r.backend, 0.0)]
    if len(kept) < len(records):
        path.unlink()
        append(path, *kept)


def resumed(path: Path, env: Env) -> tuple[str, list[Record]]:
    """The id of the last run on this machine in `path`, and its records; a new id if there is none."""
    same = [r for r in read(path) if same_machine(r.env, env)] if path.is_file() else []
    run_id = same[-1].run if same else new_run_id()
    return run_id, [r for r in same if r.run == run_id]
