"""Measure every backend and config on many problems, and turn the records into the table that `auto` reads.

    problem -> narrow the field by the table so far -> screen it in a short measurement
            -> gate the finalists -> time them interleaved -> records -> table (`ops/grouped_mm/tuned.py`)

The screening's times go nowhere. Only backends that `auto` may choose take part: on a GPU none that reads group sizes
on the host.
"""

import math
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch

from expertile.device import Device
from expertile.lab.bench.precompile import Job, precompile
from expertile.lab.bench.run import resumed
from expertile.lab.bench.tune_problems import problems, seed_of
from expertile.lab.measure.env import Env
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import Budget, Measurement, device_alive, failure_of, release, time_interleaved
from expertile.lab.operators.grouped_mm import grouped_mm, memory_needed
from expertile.lab.race.case import Candidate, Case, Site
from expertile.lab.race.operands import free_memory, make_operands
from expertile.lab.race.operator import record_name
from expertile.lab.race.record import Record, append
from expertile.lab.race.timing import time_on_sets
from expertile.lab.race.workloads import GroupedWorkload, grouped
from expertile.lab.report.rows import by
from expertile.lab.report.units import byte_rate, flop_rate, micros
from expertile.ops.grouped_mm.backend import Backend, Operands, config_dict
from expertile.ops.grouped_mm.backends import BACKENDS, CPU_ORDER
from expertile.ops.grouped_mm.choose import NEIGHBOURS, auto_configs, promising
from expertile.ops.grouped_mm.model import synchronises
from expertile.ops.grouped_mm.problem import Layout, Problem, tf32_allowed
from expertile.ops.grouped_mm.transfer import Rival, expected_slowdowns
from expertile.ops.grouped_mm.tuned import Measured, Table, Timed, features_of, load_tables
from expertile.roofline import bound
from expertile.timers import GraphTimer, HostTimer, Timer, quick_collections, sets_for

PRECOMPILE_SHARE = 0.5  # of the time, at most
_CLOSE = 1.10  # a config within that of the fastest in the screening is a finalist
_FINALISTS = 6  # besides the best of each backend
_EAGER_BELOW_S = 30e-6  # below that bound an eager call is mostly launch, and is measured as well
_SCREENING = Budget(0.4, min_rounds=3, max_rounds=3, rel_ci=1.0)
# Enough for intervals of 1 %: median and 95 % interval of 9 samples or more.
_FINAL = Budget(0.6, min_rounds=9, max_rounds=15, rel_ci=0.01)
_MEMORY_SHARE = 0.4
_SCREENING_SETS = 32
_EXPECTED = 10  # the best by the table
_WITHIN = 1.6  # and no slower than that, against the best of them
_AT_RANDOM = 2  # others, so that the table can be wrong and find out

Say = Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """Where a run measures and what, and who is told of it."""

    site: Site
    env: Env
    run_id: str
    seed: int = 0
    backends: tuple[Backend, ...] = BACKENDS
    say: Say = lambda text: None
    races: bool = False  # also what backend="measure" would race

    @classmethod
    def begin(
        cls, path: Path | None, device: torch.device | str | None = None, **more: Any
    ) -> tuple[Self, list[Record]]:
        """The last run of this machine and software in `path`, and its records; else a new one."""
        site = Site.current(device)
        env = capture_env(site.device)
        run_id, old = (new_run_id(), []) if path is None else resumed(path, env)
        return cls(site, env, run_id, **more), old

    @property
    def policy(self) -> str:
        """What `auto` goes by: graph replay, which a CPU does not have."""
        return "graph" if self.site.device.kind == "cuda" else "eager"

    def case(self, workload: GroupedWorkload, rivals: Sequence[Rival]) -> Case:
        """`workload` and these pairs of backend and config, without baselines."""
        return Case(workload, self.site, grouped_mm([alone(r) for r in rivals]))

    def problem(self, workload: GroupedWorkload) -> Problem:
        """What the library would see of `workload`: on a GPU no group sizes."""
        kind = self.site.device.kind
        return workload.problem(kind, tf32_allowed()).with_sizes(workload.group_sizes if kind == "cpu" else None)

    def pairs(self, workload: GroupedWorkload) -> tuple[Rival, ...]:
        """All that `auto` may choose for `workload`, in the order in which ties are settled."""
        problem, device = self.problem(workload), self.site.device
        found = []
        for backend in self.backends:
            interpreted = device.kind != "cuda" and backend in BACKENDS and backend.name not in CPU_ORDER
            if interpreted or synchronises(backend, problem, device) or backend.supports(problem, device) is not None:
                continue
            found += [Rival(backend, config) for config in auto_configs(backend, problem, device)]
        return tuple(found)

    def field(self, workload: GroupedWorkload) -> tuple[Rival, ...]:
        """Those of `pairs` that are screened on `workload`; the same at every call."""
        seed = zlib.crc32(f"{self.seed} {record_name(workload)}".encode())
        problem, device = self.problem(workload), self.site.device
        found = narrowed(self.pairs(workload), problem, device, self.policy, seed)
        return tuple(dict.fromkeys((*found, *promising(problem, device)))) if self.races else found


def alone(rival: Rival) -> Backend:
    """Its backend with its config as the only one."""
    return replace(rival.backend, configs=lambda problem, device: (rival.config,))


def narrowed(pairs: Sequence[Rival], problem: Problem, device: Device, policy: str, seed: int) -> tuple[Rival, ...]:
    """Those of `pairs` worth timing, in their order: on a new machine all, afterwards those that the table expects in
    front. Over 150 problems on an H200 (2026-11-21) 12 of about 29 were left, with the fastest within 1 % among them on
    97 %. Always in: every backend's default (its first config), and backends that the nearest problems did not run.
    Then those that are expected to be the fastest, and a few others drawn by `seed`."""
    table = next(iter(load_tables(device.slug)), None)
    features = features_of(problem)
    near = table.of(policy).nearest(features, NEIGHBOURS) if table is not None else []
    slowdowns = expected_slowdowns(pairs, features, near, device)
    known = {i: s for i, s in enumerate(slowdowns) if s is not None}
    names = [e.backend.name for e in pairs]
    keep = {names.index(name) for name in names} | (set(range(len(pairs))) - set(known))
    order = sorted(known, key=known.__getitem__)
    keep |= {i for i in order[:_EXPECTED] if known[i] <= known[order[0]] + math.log(_WITHIN)}
    rest = [i for i in order if i not in keep]
    keep |= set(random.Random(seed).sample(rest, min(_AT_RANDOM, len(rest))))
    return tuple(e for i, e in enumerate(pairs) if i in keep)


def tune(
    minutes: float,
    path: Path,
    *,
    resume: bool = False,
    seed: int = 0,
    backends: Sequence[Backend] = BACKENDS,
    workloads: Iterator[GroupedWorkload] | None = None,
    most: int | None = None,
    device: torch.device | str | None = None,
    say: Say = lambda text: None,
) -> list[Record]:
    """Measure `workloads` (by default `tune_problems.problems`) for about `minutes`, at most `most` of them. Every
    record is appended to `path` as it is made and all of this run's are returned; `resume` goes on with the last run
    that `path` holds from this machine and software. ValueError for minutes that are not positive."""
    if not minutes > 0:
        raise ValueError(f"minutes: expected more than 0, got {minutes}")
    end = time.monotonic() + minutes * 60
    session, old = Session.begin(path if resume else None, device, seed=seed, backends=tuple(backends), say=say)
    if old:
        say(f"resuming run {session.run_id}: {len({r.workload for r in old})} problems are there")
    source = workloads if workloads is not None else problems(session.site.device, seed)
    todo = take(source, old, most if most is not None else max(4, round(60 * minutes)))
    records = list(old)
    for workload in in_time(todo, session, end):
        made = measure(workload, session, session.field(workload))
        append(path, *made)
        records += made
    return records


def in_time(todo: Sequence[GroupedWorkload], session: Session, end: float) -> Iterator[GroupedWorkload]:
    """`todo`, those first whose kernels could be compiled in a part of the time, until `end` (time.monotonic) or until
    the device stops answering."""
    ready = compile_all(todo, session, PRECOMPILE_SHARE * (end - time.monotonic()))
    with quick_collections() as freeze:
        for done, workload in enumerate(sorted(todo, key=lambda w: record_name(w) not in ready)):
            if time.monotonic() > end:
                session.say(f"time is up after {done} of {len(todo)} problems; --resume goes on")
                return
            yield workload
            if not device_alive(session.site.torch_device):
                session.say("the device stopped answering; --resume goes on with the next problem")
                return
            freeze()


def take(source: Iterator[GroupedWorkload], old: Sequence[Record], most: int) -> list[GroupedWorkload]:
    """The first `most` workloads of `source` of which there is no record."""
    finished = {r.workload for r in old}
    return list(islice((w for w in source if record_name(w) not in finished), most))


def compile_all(todo: Sequence[GroupedWorkload], session: Session, seconds: float) -> set[str]:
    """Compile our kernels for `todo` in parallel, for at most `seconds`; the names of the problems that are through."""
    if session.site.device.kind != "cuda":
        return set()
    jobs = {
        record_name(w): [
            Job(w, r.backend.name, r.config) for r in session.field(w) if not r.backend.peer and config_dict(r.config)
        ]
        for w in todo
    }
    flat = [job for of_workload in jobs.values() for job in of_workload]
    start = time.monotonic()
    done = precompile(flat, seconds)
    session.say(f"compiled {len(done)} of {len(flat)} pairs of problem and config in {time.monotonic() - start:.0f} s")
    return {name for name, of_workload in jobs.items() if done.issuperset(of_workload)}


def measure(
    workload: GroupedWorkload, session: Session, rivals: Sequence[Rival], always: Sequence[Rival] = ()
) -> list[Record]:
    """Records of the fastest of `rivals` (and of each backend's best, and of `always`) on `workload`, gated and timed.
    A rival that fails is a record with a reason. Where the whole problem cannot be measured nothing comes back."""
    start, device = time.monotonic(), session.site.torch_device
    try:
        need, free = memory_needed(workload), free_memory(device)
        if free and need > 0.9 * free:
            raise MemoryError(f"needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        finalists = _screen(workload, session, rivals, always)
        release(device)
        case = session.case(workload, finalists)
        candidates = list(case.candidates({r.backend.name for r in finalists}, session.seed + 1))
        release(device)
        records = _final(case, session, candidates, session.policy)
        limit = bound(case.work, session.site.device, case.dtype_key)
        if session.policy == "graph" and limit.seconds < _EAGER_BELOW_S:
            records += _final(case, session, candidates, "eager")
    except Exception as error:
        session.say(f"{record_name(workload)}: {failure_of(error, device).reason}")
        return []
    finally:
        release(device)
    ok = [r for r in records if r.status == "ok" and r.policy == session.policy]
    if ok:
        best = min(ok, key=lambda r: r.time_s or 0.0)
        session.say(
            f"{record_name(workload)}: {best.backend} {micros(best.time_s)} µs, {flop_rate(best.tflops)}, "
            f"{byte_rate(best.gbps)} ({len(rivals)} screened, {time.monotonic() - start:.1f} s)"
        )
    return records


def _screen(
    workload: GroupedWorkload, session: Session, rivals: Sequence[Rival], always: Sequence[Rival]
) -> list[Rival]:
    """The finalists: within _CLOSE of the fastest, and the best of each backend; `always` in any case."""
    device, problem = session.site.torch_device, session.problem(workload)
    room = _MEMORY_SHARE * free_memory(device)
    count = sets_for(workload.memory_nbytes, session.site.device.l2_bytes, room, _SCREENING_SETS)
    sets = [make_operands(workload, device, session.seed + i) for i in range(count)]
    cuda = session.policy == "graph"
    timer: Timer = GraphTimer(device, replay_s=2e-4, most=64) if cuda else HostTimer(most=3)
    outcomes = time_interleaved(
        {str(i): _call(r, problem, sets) for i, r in enumerate(rivals)},
        policy=session.policy,
        device=device,
        num_sets=count,
        budget=_SCREENING,
        timer=timer,
    )
    times = {r: o.time_s for r, o in zip(rivals, outcomes.values(), strict=True) if isinstance(o, Measurement)}
    order = sorted(times, key=times.__getitem__)
    close = [r for r in order if times[r] <= _CLOSE * times[order[0]]][:_FINALISTS]
    best_of = {r.backend.name: r for r in reversed(order)}
    keep = {*close, *best_of.values(), *always}
    # Backends whose every config failed are kept once: their record says why.
    keep |= {r for i, r in enumerate(rivals) if r.backend.name not in {x.backend.name for x in (*keep, *rivals[:i])}}
    return [r for r in rivals if r in keep] + [r for r in always if r not in rivals]


def _call(rival: Rival, problem: Problem, sets: Sequence[Operands]) -> Callable[[int], Any]:
    return lambda index: rival.backend.run(problem, sets[index], rival.config, None)


def timed(workload: GroupedWorkload, session: Session, rivals: Sequence[Rival], budget: Budget) -> list[Record]:
    """Records of all `rivals`, gated and timed. May run out of memory."""
    case = session.case(workload, rivals)
    candidates = list(case.candidates({r.backend.name for r in rivals}, session.seed + 1))
    return _final(case, session, candidates, session.policy, budget)


def _final(
    case: Case, session: Session, candidates: Sequence[Candidate], policy: str, budget: Budget = _FINAL
) -> list[Record]:
    rows = time_on_sets(candidates, case.input_sets(session.seed), policy, session.site.torch_device, budget)
    limits = [bound(c.work, session.site.device, case.dtype_key) for c in rows]
    return [
        case.record(c, policy, limit, env=session.env, run=session.run_id)
        for c, limit in zip(rows, limits, strict=True)
    ]


def workload_of(record: Record) -> GroupedWorkload:
    """The workload that a record of a grouped product was made on."""
    s = record.shape
    sizes, how = (s["group_sizes"], s["m"], s["n"], s["k"]), {x: s[x] for x in ("a_layout", "b_layout", "routing")}
    return grouped(record.workload, "", Layout(s["layout"]), *sizes, record.dtype, **how)


def time_of(record: Record) -> Timed:
    """The time of a record, as a table has it: its config without what tells how it was measured."""
    config = {k: v for k, v in record.config.items() if k not in ("tried", "sizes")}
    return Timed(record.backend, config, record.time_s or 0.0)


def table_of(records: Sequence[Record], backends: Sequence[Backend] = BACKENDS) -> Table:
    """The table of the records of one machine; ValueError where none has a time, or for several machines. Of a problem
    that several runs measured the one begun last alone counts; of several records of one backend and config in it, the
    last."""
    names = {b.name for b in backends}
    ok = [r for r in records if r.status == "ok" and r.backend in names]
    if not ok:
        raise ValueError("records: expected at least one with a time, got none")
    gpus = sorted({r.env.gpu for r in ok})
    if len(gpus) > 1:
        raise ValueError(f"records: expected those of one GPU, got {', '.join(gpus)}")
    begun: dict[str, str] = {}
    for r in ok:
        begun[r.run] = min(r.date, begun.get(r.run, r.date))
    ok.sort(key=lambda r: begun[r.run])

    def measured_problem(r: Record) -> tuple[str, ...]:
        """With dtype and shape, since a name is unique within a run only."""
        return r.workload, r.dtype, str(sorted(r.shape.items())), r.policy

    last = {measured_problem(r): r.run for r in ok}
    kind = "cpu" if ok[-1].env.driver is None and not any(r.policy == "graph" for r in ok) else "cuda"
    measured = []
    for (*_, policy), found in by((r for r in ok if last[measured_problem(r)] == r.run), measured_problem).items():
        times: dict[tuple[str, str], Timed] = {}
        for t in map(time_of, found):
            times[(t.backend, str(sorted(t.config.items())))] = t
        features = features_of(workload_of(found[0]).problem(kind))
        measured.append(Measured(features, policy, tuple(sorted(times.values(), key=lambda t: t.seconds))))
    env = ok[-1].env
    versions = {"torch": env.torch, "triton": env.triton, "expertile": env.expertile, "driver": env.driver}
    seeds = {seed for r in ok if (seed := seed_of(r.shape["routing"])) is not None}
    return Table(env.gpu, max(r.date for r in ok)[:10], versions, tuple(measured), tuple(sorted(seeds)))
