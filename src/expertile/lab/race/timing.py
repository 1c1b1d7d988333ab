"""From gated candidates to measurements: timed in turns on the same input sets, and the screening of configs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from expertile.lab.measure.interleaved import Budget, release, time_interleaved
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
) -> list[Candidate]:
    """`candidates` in order; those that are ready for `policy` with their outcomes, all timed in turns on `sets`."""
    calls = {f"{c.name}#{i}": _over_sets(c, sets, policy) for i, c in enumerate(candidates) if c.ready(policy)}

    def tell(index: int, medians: Mapping[str, float]) -> None:
        if on_round is not None:
            on_round(index, {name.rpartition("#")[0]: seconds for name, seconds in medians.items()})

    found = time_interleaved(
        calls, policy=policy, device=torch_device, num_sets=len(sets), budget=budget, on_round=tell
    )
    return [replace(c, outcome=found.get(f"{c.name}#{i}")) for i, c in enumerate(candidates)]


def pick_configs(
    candidates: Sequence[Candidate], sets: Sequence[Any], policy: str, torch_device: torch.device
) -> list[Candidate]:
    """Screen candidates that share a name (configs of one backend) in a short measurement. Returns those that go on:
    the default (the first) of each name, the fastest other where that is faster, baselines in all their ways, and what
    is not ready: a record says why."""
    keep: list[Candidate] = []
    for name in dict.fromkeys(c.name for c in candidates):
        group = [c for c in candidates if c.name == name]
        ready = [c for c in group if c.ready(policy)]
        if len(ready) < 2 or name in BASELINES:
            keep += group
            continue
        budget = Budget(_SCREENING_S * len(ready), min_rounds=5, max_rounds=9, rel_ci=0.02)
        times = [c.time_s for c in time_on_sets(ready, sets, policy, torch_device, budget)]
        release(torch_device)
        best = times.index(min(times))
        slower = [c for i, c in enumerate(ready) if i not in (0, best)]
        faster = ready[best] if best else None
        keep += [replace(c, tried=len(ready)) if c is faster else c for c in group if not any(c is s for s in slower)]
    return keep


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
