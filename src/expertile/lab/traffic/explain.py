"""One operator in numbers: its ways with their bytes, what bounds them, and what recorded runs achieved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expertile.device import Device
from expertile.lab.race.operator import Dims, Workload
from expertile.lab.race.record import Record, read, shown_files
from expertile.lab.traffic import formulas
from expertile.lab.traffic.grouped import grouped_ways
from expertile.lab.traffic.model import OURS, Way, call
from expertile.ops.grouped_mm.problem import Problem
from expertile.roofline import Bound, Work, bound


@dataclass(frozen=True)
class Achieved:
    """A recorded time of the same call on the same GPU."""

    backend: str
    policy: str
    time_s: float
    run: str
    date: str

    def share(self, limit: Bound) -> float:
        """Of the speed that the bound allows."""
        return limit.seconds / self.time_s


@dataclass(frozen=True)
class Explained:
    """A subject on a device: useful work, its bound, the ways to compute it, and recorded times, best first."""

    subject: Workload
    device: Device
    work: Work
    bound: Bound
    ways: tuple[Way, ...]
    achieved: tuple[Achieved, ...]

    def least_time_s(self, way: Way) -> float:
        """Seconds that `way` takes at least: its steps one after another, each bound by its own bytes or FLOPs."""
        return sum(bound(Work(s.flops, s.nbytes), self.device, self.subject.dtype).seconds for s in way.steps)

    def times_ours(self, way: Way) -> float:
        """Bytes of `way` over those of ours."""
        ours = next(w for w in self.ways if w.name == OURS)
        return way.total.nbytes / ours.total.nbytes if ours.total.nbytes else 1.0

    @property
    def fits_in_cache(self) -> bool:
        """Whether all that any step touches fits the last-level cache, where the next one finds what it left."""
        return all(step.nbytes <= self.device.l2_bytes for way in self.ways for step in way.steps)


def explain_subject(subject: Workload, device: Device, records: Iterable[Record] | None = None) -> Explained:
    """Explain a call of any operator but the grouped product; `records` are the shipped ones by default."""
    formula = formulas()[subject.op]
    work = formula.work(subject)
    return _explained(subject, device, work, formula.ways(subject, device), records)


def explain_grouped(
    problem: Problem, sizes: Sequence[int], device: Device, records: Iterable[Record] | None = None
) -> Explained:
    """The same for a grouped product with ragged rows, `sizes` of each group."""
    dims: Dims = (("group_sizes", tuple(sizes)), ("k", problem.k), ("n", problem.n))
    subject = call("grouped_mm", dims, problem.dtype_key)
    return _explained(subject, device, problem.work(sizes), grouped_ways(problem, sizes), records)


def _explained(
    subject: Workload, device: Device, work: Work, ways: tuple[Way, ...], records: Iterable[Record] | None
) -> Explained:
    limit = bound(work, device, subject.dtype)
    held = shipped() if records is None else records
    return Explained(subject, device, work, limit, ways, achieved(subject, device, held))


def shipped() -> list[Record]:
    """The shipped records that commands show."""
    return [r for path in shown_files() for r in read(path)]


def achieved(subject: Workload, device: Device, records: Iterable[Record]) -> tuple[Achieved, ...]:
    """Times of the very same call on `device`, of the latest run that has any, fastest first."""
    found = [
        r
        for r in records
        if r.status == "ok"
        and r.op == subject.op
        and r.dtype == subject.dtype
        and r.env.gpu == device.name
        and r.time_s is not None
        and r.backend not in ("copy", "dense")
        and subject.shape().items() <= r.shape.items()
    ]
    if not found:
        return ()
    latest = max(found, key=lambda r: r.date).run
    times = [Achieved(r.backend, r.policy, r.time_s, r.run, r.date) for r in found if r.run == latest and r.time_s]
    return tuple(sorted(times, key=lambda a: a.time_s))
