"""Who won: rows of one run sorted into contests, one per workload and policy. A tie is two times whose 95 % intervals
overlap or that differ by less than 1 %. Rows of different runs never meet: clocks and temperature differ."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean

from expertile.lab.measure.stats import is_tie, too_wide
from expertile.lab.race.record import BASELINES, Record
from expertile.lab.report.rows import Row, by, config_text, rows

LIMITER = {"dense": "compute", "copy": "memory"}


@dataclass(frozen=True)
class Contest:
    """Every backend on one workload under one policy."""

    label: str
    policy: str
    rows: tuple[Row, ...]

    @cached_property
    def ranked(self) -> tuple[Row, ...]:
        """Right, timed, and not a baseline; fastest first."""
        return tuple(sorted((r for r in self.rows if r.timed and not r.is_baseline), key=lambda r: r.seconds))

    @cached_property
    def leaders(self) -> tuple[Row, ...]:
        """The fastest row and all that tie with it."""
        return tuple(row for row in self.ranked if tied(self.ranked[0], row))

    @property
    def best(self) -> Row | None:
        return self.ranked[0] if self.ranked else None

    @property
    def winner(self) -> Row | None:
        """The single fastest row; None where it ties or nothing ran."""
        return self.leaders[0] if len(self.leaders) == 1 else None

    @property
    def inconclusive(self) -> bool:
        """Whether the leaders share the front only because the interval of one of them is too wide to tell."""
        return len(self.leaders) > 1 and any(too_wide(r.seconds, r.interval) for r in self.leaders)

    @property
    def margin(self) -> float | None:
        """Time of the second over time of the first; None without a second."""
        if len(self.ranked) < 2:
            return None
        return self.ranked[1].seconds / self.ranked[0].seconds

    def times_best(self, row: Row) -> float | None:
        """Time over the fastest rival's time: 1 for the fastest, less than 1 only for a baseline."""
        return row.seconds / self.best.seconds if row.timed and self.best else None

    def place(self, row: Row) -> str:
        """Of a leader "fastest", "tie" or "inconclusive"; "" of any other."""
        if row not in self.leaders:
            return ""
        return "fastest" if len(self.leaders) == 1 else "inconclusive" if self.inconclusive else "tie"

    def near(self, row: Row, bounded: bool) -> float | None:
        """The share of the bound, or unless `bounded` the speed relative to the fastest rival."""
        if bounded:
            return self.share(row)
        ratio = self.times_best(row)
        return 1 / ratio if ratio else None

    def of(self, backend: str) -> Row | None:
        return next((row for row in self.rows if row.backend == backend), None)

    def timed(self, backend: str) -> Row | None:
        """The row of a backend or baseline that has a time."""
        row = self.of(backend)
        return row if row and row.timed else None

    def fastest(self, wanted: Callable[[Row], bool]) -> Row | None:
        """The fastest row of the `wanted` ones; never a baseline."""
        return next(filter(wanted, self.ranked), None)

    @property
    def second(self) -> Row | None:
        """The fastest row behind the leaders."""
        return self.fastest(lambda row: row not in self.leaders)

    @cached_property
    def sample(self) -> Row:
        """A row for what all rivals share (shape, bound, limiter); a timed one where there is one."""
        return self.best or next((row for row in self.rows if not row.is_baseline), self.rows[0])

    def share(self, row: Row) -> float | None:
        """The part of the bound that `row` reaches. A baseline is held against this workload's bound, and only where it
        is the speed of light: `dense` where compute limits (it reads one weight only), `copy` where memory does."""
        if not row.is_baseline:
            return row.share
        if not row.timed or not self.sample.bound_s:
            return None
        return self.sample.bound_s / row.seconds if self.limiter == LIMITER[row.backend] else None

    @property
    def preset(self) -> str:
        return self.sample.preset

    @property
    def limiter(self) -> str:
        return self.sample.limiter


@dataclass(frozen=True)
class Run:
    """All rows of one run: one machine, one sitting."""

    name: str
    rows: tuple[Row, ...]

    @cached_property
    def contests(self) -> tuple[Contest, ...]:
        names = _labels(self.rows)
        return tuple(
            Contest(names[key], policy, tuple(map(_chosen, by(members, lambda row: row.backend).values())))
            for (key, policy), members in by(self.rows, lambda row: (row.work, row.policy)).items()
        )

    @cached_property
    def policies(self) -> tuple[str, ...]:
        """Policies with at least one time, the graph first."""
        present = {row.policy for row in self.rows if row.timed} or {row.policy for row in self.rows}
        return tuple(sorted(present, key=lambda name: (name != "graph", name)))

    @cached_property
    def backends(self) -> tuple[str, ...]:
        """Backends, rivals in order of geometric mean (fastest first), then baselines."""
        found = {row.backend for row in self.rows}
        standing = relative_speed(self.contests_of(self.policies[0]))
        rivals = sorted(found - set(BASELINES), key=lambda name: (-standing.get(name, (0.0, 0))[0], name))
        return (*rivals, *(name for name in BASELINES if name in found))

    @cached_property
    def presets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.preset for row in self.rows))

    @property
    def workloads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(contest.label for contest in self.contests))

    @property
    def device(self) -> str:
        return self.rows[0].device

    @property
    def day(self) -> str:
        return min(row.day for row in self.rows)

    def contests_of(self, policy: str, preset: str | None = None) -> tuple[Contest, ...]:
        return tuple(
            contest
            for contest in self.contests
            if contest.policy == policy and (preset is None or contest.preset == preset)
        )


def runs(records: Iterable[Record]) -> tuple[Run, ...]:
    """Records split by run, in the order they came."""
    return tuple(Run(name, tuple(members)) for name, members in by(rows(records), lambda row: row.run).items())


def tied(first: Row, second: Row) -> bool:
    """True where the difference of two times means nothing: intervals overlap, or less than 1 % apart."""
    return is_tie(first.seconds, first.interval, second.seconds, second.interval)


def relative_speed(contests: Sequence[Contest]) -> dict[str, tuple[float, int]]:
    """Per rival: geometric mean of (fastest time / its time), and over how many contests."""
    ratios: dict[str, list[float]] = {}
    for contest in contests:
        for row in contest.ranked:
            ratios.setdefault(row.backend, []).append(1 / (contest.times_best(row) or 1))
    return {name: (geometric_mean(values), len(values)) for name, values in ratios.items()}


def _chosen(candidates: list[Row]) -> Row:
    """One row of several by one backend: the last of each configuration, then the fastest configuration."""
    last = {config_text(row.config): row for row in candidates}
    timed = [row for row in last.values() if row.timed]
    return min(timed, key=lambda row: row.seconds) if timed else candidates[-1]


def _labels(members: Sequence[Row]) -> dict[tuple[str, ...], str]:
    """A name per workload: without "preset/" where the run has one preset; dtype or a number tells namesakes apart."""
    keys = list(dict.fromkeys(row.work for row in members))
    prefixes = {row.preset for row in members}
    prefix = f"{prefixes.pop()}/" if len(prefixes) == 1 else ""
    names: dict[tuple[str, ...], str] = {}
    for key in keys:
        same = [other for other in keys if other[1] == key[1]]
        name = key[1].removeprefix(prefix) or key[1]
        if len(same) == 1:
            names[key] = name
        elif len({(other[0], other[2]) for other in same}) == len(same):
            names[key] = f"{name} [{key[0]} {key[2]}]"
        else:
            names[key] = f"{name} [{key[2]}, shape {same.index(key) + 1}]"
    return names
