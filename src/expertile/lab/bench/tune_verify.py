"""Does `auto` keep its promise? On problems that no table has seen, its choice is timed beside every rival."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import torch

from expertile.device import Device
from expertile.lab.bench.tune import Say, Session, in_time, measure, take
from expertile.lab.bench.tune_problems import mixed, with_features
from expertile.lab.measure.interleaved import failure_of
from expertile.lab.race.operands import make_operands
from expertile.lab.race.operator import record_name
from expertile.lab.race.record import Record, append
from expertile.lab.race.workloads import GroupedWorkload
from expertile.lab.report.rows import by
from expertile.ops.grouped_mm.api import raced
from expertile.ops.grouped_mm.backend import Backend, config_dict
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.choose import NEIGHBOURS, by_measurement, choose, rounded
from expertile.ops.grouped_mm.model import synchronises
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.grouped_mm.relatives import table_for
from expertile.ops.grouped_mm.transfer import Rival, expected_slowdowns
from expertile.ops.grouped_mm.tuned import Features, Problems, Table, features_of
from expertile.ops.measure import MEASURE

AUTO = "auto"
PROMISE = 0.97
# Far from the seeds of `tune`; those that are in the table already are passed over.
FIRST_SEED = 20011


@dataclass(frozen=True)
class Verdict:
    """`auto`, or "measure", on one problem: `share` is the best time over its own, 1 where it is the best."""

    workload: str
    backend: str
    share: float
    best: str
    why: str


def verify(
    count: int,
    path: Path,
    minutes: float,
    *,
    resume: bool = False,
    seed: int | None = None,
    backends: Sequence[Backend] = BACKENDS,
    workloads: Iterator[GroupedWorkload] | None = None,
    device: torch.device | str | None = None,
    say: Say = lambda text: None,
) -> list[Record]:
    """Time `auto` against every rival on `count` random problems, as far as `minutes` go.

    The records of each problem are those of the finalists and one more with backend "auto", the measurement of the
    rival it chose, with the reason; on a GPU, where no backend is left out, one with backend "measure" as well, of what
    its race took. Appended to `path`; `resume` keeps what is there. `seed` draws the problems, by default the first
    from FIRST_SEED on that drew none in this GPU's table. ValueError for a seed that is in the table, and for a count
    or minutes that are not positive."""
    if count < 1:
        raise ValueError(f"verify: expected 1 problem or more, got {count}")
    if not minutes > 0:
        raise ValueError(f"minutes: expected more than 0, got {minutes}")
    end = time.monotonic() + minutes * 60
    session, old = Session.begin(path if resume else None, device, backends=tuple(backends), say=say)
    here = session.site.device
    session = replace(session, seed=_fresh_seed(here, seed), races=here.kind == "cuda" and session.backends == BACKENDS)
    say(f"problems drawn by seed {session.seed}")
    source = workloads if workloads is not None else _unseen(here, session.seed)
    todo = take(source, old, max(0, count - len({r.workload for r in old})))
    records = list(old)
    for workload in in_time(todo, session, end):
        choice = choose(session.problem(workload), here, session.backends, session.policy, True)
        taken = {AUTO: (Rival(choice.backend, choice.config), choice.why)}
        if session.races and (fastest := _raced(workload, session)) is not None:
            taken[MEASURE] = (fastest, "raced on operands of its own")
        found = measure(workload, session, session.field(workload), always=[rival for rival, _ in taken.values()])
        made = [r for r in found if r.policy == session.policy]
        made += [_as(name, r, why) for name, (rival, why) in taken.items() for r in made if _is(r, rival)]
        append(path, *made)
        records += made
    return records


def _raced(workload: GroupedWorkload, session: Session) -> Rival | None:
    """What backend="measure" takes; None where the race fails."""
    operands = make_operands(workload, session.site.torch_device, session.seed - 1)
    try:
        return raced(session.problem(workload), operands, session.site.device)
    except Exception as error:
        session.say(f"{record_name(workload)}: {failure_of(error, session.site.torch_device).reason}")
        return None


def _is(record: Record, rival: Rival) -> bool:
    config = {k: v for k, v in record.config.items() if k != "sizes"}
    return record.backend == rival.backend.name and config == config_dict(rival.config)


def _as(name: str, record: Record, why: str) -> Record:
    config = {"backend": record.backend, **record.config}
    return replace(record, backend=name, config=config, reason=record.reason or why)


def _fresh_seed(device: Device, seed: int | None) -> int:
    """`seed`, or one of our own, that is not among those that drew problems of the table that `auto` reads here."""
    table = table_for(device)
    seen = table.seeds if table is not None else ()
    if seed is None:
        return next(s for s in itertools.count(FIRST_SEED) if s not in seen)
    if seed in seen:
        raise ValueError(f"seed: expected one that drew no problem of the table, got {seed} (there are {list(seen)})")
    return seed


def _unseen(device: Device, seed: int) -> Iterator[GroupedWorkload]:
    """Designed problems that are not in the table that `auto` reads here."""
    table = table_for(device)
    seen = {m.features for m in table.problems} if table else set()
    drawn = mixed(device, seed, any_count=True)
    return (replace(w, preset=AUTO) for w in drawn if features_of(w.problem(device.kind)) not in seen)


def verdicts(records: Sequence[Record], name: str = AUTO) -> list[Verdict]:
    """One for each problem on which `name` and another have a time, the worst first; a share of 0 where it has none
    although a rival has. Of "measure" only problems on which it raced."""
    found = []
    for workload, of_problem in by(records, lambda r: r.workload).items():
        rivals = [r for r in of_problem if r.status == "ok" and r.backend not in (AUTO, MEASURE)]
        own = next((r for r in of_problem if r.backend == name), None)
        if not rivals or (name == MEASURE and own is None):
            continue
        best = min(rivals, key=lambda r: r.time_s or math.inf)
        time_s = own.time_s if own is not None and own.status == "ok" else None
        share = (best.time_s or 0.0) / time_s if time_s else 0.0
        backend, why = ("", "no time") if own is None else (str(own.config.get("backend", "")), own.reason)
        found.append(Verdict(workload, backend, share, _named(best.backend, best.config), why))
    return sorted(found, key=lambda v: v.share)


def _named(backend: str, config: Mapping[str, object]) -> str:
    return " ".join([backend, *(f"{k}={v}" for k, v in config.items())])


def summary(found: Sequence[Verdict], name: str = AUTO, worst: int = 10) -> list[str]:
    """Sentences: how often `name` keeps within PROMISE, the geometric mean, and the worst problems with the reason."""
    if not found:
        return [f"{name}: nothing was measured"]
    kept = sum(v.share >= PROMISE for v in found)
    mean = geometric_mean(max(v.share, 1e-3) for v in found)
    lines = [
        f"{name} is at {PROMISE:.2f} or more of the best on {kept} of {len(found)} problems ({kept / len(found):.1%}); "
        f"geometric mean {mean:.4f}, worst {found[0].share:.3f}"
    ]
    for v in found[:worst]:
        if v.share < 1.0:
            lines.append(f"{v.share:.3f} {v.workload}: best is {v.best}; {name} took {v.why or 'nothing'}")
    return lines


def left_out(table: Table, device: Device, backends: Sequence[Backend] = BACKENDS) -> list[Verdict]:
    """`auto`'s choice among those of `backends` that run here, on each problem that `table` has of its own GPU, by all
    others; worst first. No GPU is needed, and nothing is measured: the choice's time stands in the table. A choice
    that the table does not list for the problem was screened out there, and counts as `transfer` counts such a one: 8 %
    slower than its backend's best or than 1.05 times the best. A problem counts where its measurement knew the chosen
    config's flags, and where it has neighbours."""
    return sorted(_verdicts(table, device, backends, table.of("graph")), key=lambda v: v.share)


def _verdicts(table: Table, device: Device, backends: Sequence[Backend], measured: Problems) -> Iterator[Verdict]:
    for left in measured:
        if left.gpu:
            continue
        problem = problem_of(left.features)
        able = [b for b in backends if b.supports(problem, device) is None and not synchronises(b, problem, device)]
        names = {b.name for b in able}
        ran = [t for t in left.times if t.backend in names]
        like = rounded(problem)
        around = measured.nearest(features_of(like), 2 * NEIGHBOURS)
        near = [(d, m) for d, m in around if m.features != left.features][:NEIGHBOURS]
        choice = by_measurement(like, device, able, near, table) if near and ran else None
        if choice is None:
            continue
        (log,) = expected_slowdowns([Rival(choice.backend, choice.config)], left.features, [(0.0, left)], device)
        if log is None:
            continue
        best, name = ran[0], choice.backend.name
        share = min(1.0, best.seconds / (left.best * math.exp(log)))
        where, why = f"{left.features} {left.features.skew}", _named(name, config_dict(choice.config))
        yield Verdict(where, name, share, _named(best.backend, best.config), why)


def problem_of(f: Features) -> Problem:
    """A problem with these features, bf16 for "16-bit", as a GPU's host sees it: sizes of ragged groups unknown."""
    base, extra = divmod(f.rows, max(1, f.groups))
    workload = with_features(f, "left-out", [base + (g < extra) for g in range(f.groups)])
    return workload.problem("cuda", f.dtype == "tf32").with_sizes(None)
