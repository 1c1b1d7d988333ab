"""From gated candidates to measurements: timed in turns on the same input sets, and the screening of configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from expertile.lab.measure.interleaved import Budget, Measurement, Outcome, TimedCall, release, time_interleaved
from expertile.lab.race.case import Candidate
from expertile.lab.race.record import BASELINES

_SCREENING_S = 0.05  # per config

OnRound = Callable[[int, Mapping[str, float]], None]


def time_on_sets(
    candidates: Sequence[Candidate],
    sets: Sequence[Any],
    policy: str,
    torch_device: torch.device,
    budget: Budget,
    on_round: OnRound | None = None,
) -> list[Outcome]:
    """One outcome per candidate, in order, all timed in turns on the same input sets."""
    if not candidates:
        return []
    names = [f"{c.name}#{i}" for i, c in enumerate(candidates)]

    def tell(index: int, medians: Mapping[str, float]) -> None:
        if on_round is not None:
            on_round(index, {name.rpartition("#")[0]: seconds for name, seconds in medians.items()})

    outcomes = time_interleaved(
        [TimedCall(name, _over_sets(c, sets, policy)) for name, c in zip(names, candidates, strict=True)],
        policy=policy,
        device=torch_device,
        num_sets=len(sets),
        budget=budget,
        on_round=tell,
    )
    return [outcomes[name] for name in names]


def pick_configs(
    candidates: Sequence[Candidate], sets: Sequence[Any], policy: str, torch_device: torch.device
) -> tuple[list[Candidate], dict[int, int]]:
    """Screen candidates that share a name (configs of one backend) in a short measurement. Returns those that go on:
    the default (the first) of each name, the fastest other where that is faster, and baselines in all their ways; and
    by `id` of those others how many configs were tried."""
    keep: list[Candidate] = []
    tried: dict[int, int] = {}
    for name in dict.fromkeys(c.name for c in candidates):
        group = [c for c in candidates if c.name == name]
        if len(group) == 1 or name in BASELINES:
            keep += group
            continue
        keep.append(group[0])
        budget = Budget(_SCREENING_S * len(group), min_rounds=5, max_rounds=9, rel_ci=0.02)
        outcomes = time_on_sets(group, sets, policy, torch_device, budget)
        release(torch_device)
        times = {index: outcome.time_s for index, outcome in enumerate(outcomes) if isinstance(outcome, Measurement)}
        best = min(times, key=times.__getitem__, default=0)
        if best:
            keep.append(group[best])
            tried[id(group[best])] = len(group)
    return keep, tried


def _over_sets(candidate: Candidate, sets: Sequence[Any], policy: str) -> Callable[[int], Any]:
    """Calls bound to each set when first used, so that what binding allocates fails as the candidate's own."""
    bind = candidate.bind
    assert bind is not None
    calls: dict[int, Callable[[], Any]] = {}

    def call(index: int) -> Any:
        if index not in calls:
            calls[index] = bind(sets[index], policy)
        return calls[index]()

    return call
