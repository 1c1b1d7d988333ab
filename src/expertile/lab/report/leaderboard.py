"""One score for each backend on each preset, with its interval.

The score is the geometric mean, over the workloads of the preset, of (time of the fastest) / (time of the backend), all
of one run. Its interval follows from those of the times, half of each in the logarithm, added in squares; it says
nothing about other workloads. Where a backend cannot run a workload, or computes it wrongly, its score is of fewer and
has no rank; how many are missing, and why, stands beside it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean

from rich.table import Table
from rich.text import Text

from expertile.lab.measure.stats import log_half_width, too_wide
from expertile.lab.race.record import BASELINES, Record
from expertile.lab.report.contest import Contest, Run, runs
from expertile.lab.report.rows import POLICY_NAMES, by
from expertile.lab.report.units import MISSING, cell, listed, markdown_table, percent

HEADER = ("rank", "backend", "score", "95 %", "of bound", "workloads")


@dataclass(frozen=True)
class Score:
    """The standing of one backend. `rank` is None where it lacks a workload, `speed` (the score, in (0, 1]) where it
    has none at all. `share`: the geometric mean of bound / time where every bound is known; `missing`: the workloads
    without a right time by their status."""

    backend: str
    rank: int | None
    speed: float | None
    ci95: tuple[float, float] | None
    share: float | None
    timed: int
    total: int
    missing: Mapping[str, int]


@dataclass(frozen=True)
class Board:
    """The scores of one operator of a preset under one policy in one run, best first."""

    preset: str
    op: str
    policy: str
    scores: tuple[Score, ...]

    @property
    def title(self) -> str:
        op = "" if self.op in ("grouped_mm", self.preset) else f", {self.op}"
        return f"{self.preset}{op}, {POLICY_NAMES.get(self.policy, self.policy)}"

    @property
    def able(self) -> tuple[Score, ...]:
        """Those with a right time of at least one workload."""
        return tuple(score for score in self.scores if score.timed)

    @property
    def absent(self) -> str:
        """One sentence on the others; empty for none."""
        found = [f"{score.backend} ({_reasons(score)})" for score in self.scores if not score.timed]
        return f"Without a right time: {listed(found)}." if found else ""


def boards(run: Run, policies: Sequence[str] | None = None) -> tuple[Board, ...]:
    """A board for each preset, operator and policy that has times of two rivals or more."""
    raced = (c for c in run.contests if c.ranked and c.policy in (run.policies if policies is None else policies))
    found = by(raced, lambda contest: (contest.preset, contest.sample.op, contest.policy))
    made = (Board(*key, _scores(contests)) for key, contests in found.items())
    return tuple(board for board in made if len(board.able) > 1)


def _scores(contests: Sequence[Contest]) -> tuple[Score, ...]:
    names = dict.fromkeys(row.backend for contest in contests for row in contest.rows if row.backend not in BASELINES)
    found = [_score(name, contests) for name in names]
    found.sort(key=lambda score: (-(score.speed or 0.0), score.backend))
    ranked: list[Score] = []
    place = 0
    for score in found:
        if score.timed < score.total:
            ranked.append(score)
            continue
        place += 1
        before = next((other for other in reversed(ranked) if other.rank), None)
        overlap = before and before.ci95 and score.ci95 and score.ci95[1] >= before.ci95[0]
        ranked.append(replace(score, rank=before.rank if before and overlap else place))
    return tuple(ranked)


def _score(name: str, contests: Sequence[Contest]) -> Score:
    pairs = [(contest.of(name), contest.ranked[0]) for contest in contests]
    timed = [(row, best) for row, best in pairs if row and row.timed]
    missing = Counter("not measured" if row is None else row.status for row, _ in pairs if not (row and row.timed))
    score = Score(name, None, None, None, None, len(timed), len(contests), missing)
    if not timed:
        return score
    mean = fmean(math.log(best.seconds / row.seconds) for row, best in timed)
    squares = sum(
        log_half_width(r.seconds, r.interval) ** 2 for row, best in timed if row is not best for r in (row, best)
    )
    half = math.sqrt(squares) / len(timed)
    interval = math.exp(mean - half), min(1.0, math.exp(mean + half))
    shares = [row.share for row, _ in timed if row.share]
    share = geometric_mean(shares) if len(shares) == len(timed) else None
    return replace(score, speed=math.exp(mean), ci95=interval, share=share)


def _reasons(score: Score) -> str:
    return ", ".join(f"{count} {status}" for status, count in score.missing.items())


def cells(board: Board, score: Score) -> list[str]:
    peers = [other for other in board.scores if other.rank == score.rank]
    unclear = any(other.speed and other.ci95 and too_wide(other.speed, other.ci95) for other in peers)
    alike = "" if len(peers) < 2 else "?" if unclear else "="
    low, high = score.ci95 or (0.0, 0.0)
    lacks = f": {_reasons(score)}" if score.missing else ""
    return [
        MISSING if score.rank is None else f"{alike}{score.rank}",
        score.backend,
        f"{score.speed:.3f}",
        f"{low:.3f}–{high:.3f}",
        percent(score.share),
        f"{score.timed} of {score.total}{lacks}",
    ]


NOTE = (
    "Score: geometric mean of the fastest backend’s time over this one’s. “=” shares a rank: the intervals overlap; "
    "“?” also, but one of them is too wide to tell. “–” has no rank, since workloads are missing."
)


def leaderboard(records: Iterable[Record]) -> list[Board]:
    """The boards of every run of `records`, in order, each under the run's first policy."""
    return [board for run in runs(records) for board in boards(run, run.policies[:1])]


def tables(found: Sequence[Board]) -> list[Table | Text]:
    """Renderables for a terminal of 80 columns: a title and a table for each board; nothing for none."""
    said: list[Table | Text] = []
    for board in found:
        said.append(Text(f"Leaderboard: {board.title}", style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in HEADER:
            table.add_column(name, justify="left" if name in ("backend", "workloads") else "right", overflow="fold")
        for score in board.able:
            table.add_row(*map(Text, cells(board, score)))
        # What is supported nowhere stands below the table of times already.
        failed = any(set(score.missing) != {"unsupported"} for score in board.scores if not score.timed)
        said += [table, *([Text(board.absent, style="dim")] if failed else [])]
    return [*said, Text(NOTE, style="dim")] if said else []


def markdown_boards(run: Run) -> list[str]:
    """Parts of a Markdown document: a heading, a table and what is missing, board by board."""
    parts = []
    for board in boards(run):
        body = [[cell(text) for text in cells(board, score)] for score in board.able]
        parts += [f"### Leaderboard: {cell(board.title)}", markdown_table(HEADER, body, left=2)]
        parts += [cell(board.absent)] if board.absent else []
    return [*parts, NOTE] if parts else []
