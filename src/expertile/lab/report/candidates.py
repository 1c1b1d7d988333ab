"""What a race says of a user's own kernel: the first sentence after `bench --candidate`."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean
from typing import Any

from expertile.lab.report.contest import Contest, runs
from expertile.lab.report.rows import POLICY_NAMES, Row
from expertile.lab.report.units import listed, plural, short, times

_REASON = 200  # characters


def of_candidate(records: Iterable[Any], name: str) -> list[str]:
    """How candidate `name` did: a sentence for each policy, then one for each reason why it has no time."""
    said: list[str] = []
    for run in runs(records):
        for policy in run.policies:
            own = [(c, row) for c in run.contests_of(policy) if (row := c.of(name)) is not None]
            timed = [(c, row) for c, row in own if row.timed]
            if timed:
                said.append(f"{name}, {POLICY_NAMES.get(policy, policy)}: {_standing(timed, len(own))}.")
        reasons: dict[tuple[str, str], set[str]] = {}
        for contest in run.contests:
            row = contest.of(name)
            if row is not None and not row.timed:
                reasons.setdefault((row.fate, row.reason), set()).add(contest.label)
        for (status, reason), labels in reasons.items():
            said.append(f"{name} is {_STATUS.get(status, status)} on {_where(labels)}: {short(reason, _REASON)}.")
    return said or [f"{name} was not measured."]


_STATUS = {"failed": "without a result (failed)", "refused": "refused a time"}


def _standing(timed: list[tuple[Contest, Row]], asked: int) -> str:
    """ "right on 4 of 4 workloads; fastest on 1, tied on 2; 1.20× the time of the best of the others"."""
    won = sum(c.winner is row and len(c.ranked) > 1 for c, row in timed)
    unclear = sum(row in c.leaders and c.inconclusive for c, row in timed)
    tied = sum(row in c.leaders and len(c.leaders) > 1 for c, row in timed) - unclear
    counts = [f"{word} {n}" for word, n in (("fastest on", won), ("tied on", tied), ("inconclusive on", unclear)) if n]
    ratios = [
        (row.time_s or 1) / (others[0].time_s or 1)
        for c, row in timed
        if (others := [r for r in c.ranked if r.backend != row.backend])
    ]
    parts = [f"right on {len(timed)} of {plural(asked, 'workload')}", ", ".join(counts) or "fastest on none"]
    if ratios:
        mean = " in geometric mean" if len(ratios) > 1 else ""
        parts.append(f"{times(geometric_mean(ratios))} the time of the best other backend{mean}")
    return "; ".join(parts)


def _where(labels: set[str]) -> str:
    names = sorted(labels)
    return listed(names) if len(names) <= 2 else plural(len(names), "workload")
