"""A backend joins a table that was measured without it: `expertile tune --add NAME`.

Each problem of the table again, as far as the backend takes it: its configs beside the fastest config that the table
has there. Their times join those of the table, scaled by what that one took over what it takes now. Group sizes, of
which a table keeps the spread alone, are drawn anew.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from expertile.lab.bench.precompile import Job, precompile
from expertile.lab.bench.tune import PRECOMPILE_SHARE, Say, Session, time_of, timed
from expertile.lab.bench.tune_problems import group_sizes, with_features
from expertile.lab.measure.interleaved import Budget, device_alive, failure_of, release
from expertile.lab.race.operator import record_name
from expertile.lab.race.record import Record, append
from expertile.lab.race.workloads import GroupedWorkload
from expertile.ops.grouped_mm.backend import Backend, config_dict
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.transfer import Rival
from expertile.ops.grouped_mm.tuned import Features, Measured, Table, candidate_key
from expertile.timers import quick_collections

# Nothing is scaled by a config that takes that much longer or shorter than it did: 12 of 600 on an H200, of which one
# made a time of 1.35 PFLOP/s.
_ALIKE = 1.2
_CLOSE = 1.2  # what is slower by more than that beside a backend's fastest is left out, as a screening would
_BUDGET = Budget(0.3, min_rounds=5, max_rounds=9, rel_ci=0.01)
_ROUTINGS = {"even": "uniform", "skewed": "zipf(1)", "one": "one"}


def workload_like(features: Features, name: str, seed: int) -> GroupedWorkload:
    """A problem of these features. The rows of its groups are drawn as its skew says."""
    f, routing = features, _ROUTINGS[features.skew]
    if f.layout == Layout.BATCHED:
        return with_features(f, name, (f.rows // f.groups,) * f.groups, routing="equal")
    return with_features(f, name, group_sizes(routing, f.rows, f.groups, seed), routing=f"{routing} seed={seed}")


def _key(rival: Rival) -> str:
    return candidate_key(rival.backend.name, config_dict(rival.config))


def _joined(measured: Measured, old: Rival, records: Sequence[Record]) -> Measured | None:
    """`measured` with the times of `records`, as if they had been made beside its own; None where `old` has none or one
    that is not _ALIKE."""
    key, times = _key(old), {candidate_key(t.backend, t.config): t for t in map(time_of, records)}
    now, before = times.pop(key, None), next(t for t in measured.times if candidate_key(t.backend, t.config) == key)
    if now is None or not times or not before.seconds / _ALIKE < now.seconds < before.seconds * _ALIKE:
        return None
    least = min(t.seconds for t in times.values())
    close = [t for t in times.values() if t.seconds <= _CLOSE * least]
    new = [replace(t, seconds=t.seconds * before.seconds / now.seconds) for t in close]
    kept = [t for t in measured.times if t.backend not in {t.backend for t in new}]
    return replace(measured, times=tuple(sorted((*kept, *new), key=lambda t: t.seconds)))


def _jobs(work: Sequence[tuple[GroupedWorkload, Sequence[Rival]]]) -> list[Job]:
    """What to compile ahead: each backend and config once for a kind of problem."""
    found: dict[Any, Job] = {}
    for w, rivals in work:
        for r in rivals:
            kind = (r, w.layout, w.dtype, w.a_layout, w.b_layout)
            found.setdefault(kind, Job(w, r.backend.name, r.config))
    return list(found.values())


def add(
    table: Table,
    backends: Sequence[Backend],
    path: Path,
    minutes: float,
    *,
    least_rows: float = 0.0,
    seed: int = 0,
    device: torch.device | str | None = None,
    say: Say = lambda text: None,
) -> Table:
    """`table` with times of `backends` on as many of its problems, in random order, as `minutes` allow: of those with
    `least_rows` rows a group or more that know none of them yet. Records are appended to `path` as they are made.
    ValueError for minutes that are not positive and for a table of another GPU."""
    if not minutes > 0:
        raise ValueError(f"minutes: expected more than 0, got {minutes}")
    end = time.monotonic() + minutes * 60
    others = tuple(b for b in BACKENDS if not b.peer and b not in backends)
    session, _ = Session.begin(None, device, seed=seed, backends=(*others, *backends), say=say)
    here = session.site.device
    if table.gpu != here.name:
        raise ValueError(f"table: expected one of {here.name}, got one of {table.gpu}")
    todo: list[tuple[int, GroupedWorkload, Rival, tuple[Rival, ...]]] = []
    names = {b.name for b in backends}
    for i, measured in enumerate(table.problems):
        if names & {*measured.backends} or measured.features.mean < least_rows or measured.policy != session.policy:
            continue
        w = workload_like(measured.features, f"add-{i:04d}", seed + i)
        pairs = {_key(r): r for r in session.pairs(w)}
        new = [r for r in pairs.values() if r.backend in backends]
        keys = (candidate_key(t.backend, t.config) for t in measured.times)  # the fastest first
        old = next((pairs[key] for key in keys if key in pairs), None)
        if new and old is not None:
            todo.append((i, w, old, (old, *new)))
    random.Random(seed).shuffle(todo)
    done = precompile(_jobs([(w, rivals) for _, w, _, rivals in todo]), PRECOMPILE_SHARE * minutes * 60)
    say(f"{len(todo)} problems of {len(table.problems)}; {len(done)} kernels compiled")
    problems, count = list(table.problems), 0
    with quick_collections() as freeze:
        for i, w, old, rivals in todo:
            if time.monotonic() > end or not device_alive(session.site.torch_device):
                break
            try:
                records = timed(w, session, rivals, _BUDGET)
            except Exception as error:
                say(f"{record_name(w)}: {failure_of(error, session.site.torch_device).reason}")
                continue
            finally:
                release(session.site.torch_device)
                freeze()
            append(path, *records)
            joined = _joined(problems[i], old, [r for r in records if r.status == "ok"])
            if joined is not None:
                problems[i], count = joined, count + 1
                wins = joined.times[0].backend in names
                say(f"{joined.features}: {joined.times[0].backend}" + (f", before {old.backend.name}" if wins else ""))
    say(f"{count} of {len(todo)} problems measured")
    return replace(table, problems=tuple(problems))
