"""From gated contestants to measurements: input sets, and the screening of configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget, Candidate, Measurement, Outcome, release, time_interleaved
from expertile.lab.measure.timers import sets_for
from expertile.lab.race.baselines import BASELINE_NAMES
from expertile.lab.race.contestants import Contestant
from expertile.lab.race.operands import free_memory, operand_sets
from expertile.lab.race.workloads import Workload
from expertile.ops.grouped_mm.backend import Operands

# Share of the free memory for operands and results; the rest is for what backends allocate.
_MEMORY_SHARE = 0.4
_SCREENING_S = 0.05  # per config

OnRound = Callable[[int, Mapping[str, float]], None]


def time_contestants(
    contestants: Sequence[Contestant],
    workload: Workload,
    policy: str,
    device: Device,
    torch_device: torch.device,
    budget: Budget,
    seed: int,
    on_round: OnRound | None = None,
) -> list[Outcome]:
    """`time_on_sets` on operands of a grouped product."""
    if not contestants:
        return []
    sets = rotating_operands(workload, device, torch_device, seed)
    return time_on_sets(contestants, sets, policy, torch_device, budget, on_round)


def rotating_operands(workload: Workload, device: Device, torch_device: torch.device, seed: int) -> list[Operands]:
    """As many sets of operands as `set_count` says."""
    count = set_count(workload.memory_nbytes, device, torch_device)
    return operand_sets(workload, torch_device, count, seed)


def set_count(set_nbytes: int, device: Device, torch_device: torch.device) -> int:
    """How many sets of `set_nbytes` bytes, inputs and results, exceed the cache and leave room in the memory."""
    free = free_memory(torch_device) or 2 * set_nbytes
    return sets_for(set_nbytes, device.l2_bytes, _MEMORY_SHARE * free)


def time_on_sets(
    contestants: Sequence[Contestant],
    sets: Sequence[Any],
    policy: str,
    torch_device: torch.device,
    budget: Budget,
    on_round: OnRound | None = None,
) -> list[Outcome]:
    """One outcome per contestant, in order, all timed in turns on the same input sets."""
    names = [f"{c.name}#{i}" for i, c in enumerate(contestants)]

    def tell(index: int, medians: Mapping[str, float]) -> None:
        if on_round is not None:
            on_round(index, {name.rpartition("#")[0]: seconds for name, seconds in medians.items()})

    outcomes = time_interleaved(
        [Candidate(name, _over_sets(c, sets, policy)) for name, c in zip(names, contestants, strict=True)],
        policy=policy, device=torch_device, num_sets=len(sets), budget=budget, on_round=tell,
    )  # fmt: skip
    return [outcomes[name] for name in names]


def pick_configs(
    contestants: Sequence[Contestant],
    workload: Workload,
    policy: str,
    device: Device,
    torch_device: torch.device,
    seed: int,
) -> tuple[list[Contestant], dict[int, int]]:
    """Screen contestants that share a name (configs of one backend) in a short measurement.

    Returns those that go on, the default (the first) of each name and the fastest other where that is faster,
    and baselines in all their ways, in order; and by `id` of those others how many configs were tried.
    """
    keep: list[Contestant] = []
    tried: dict[int, int] = {}
    for name in dict.fromkeys(c.name for c in contestants):
        group = [c for c in contestants if c.name == name]
        if len(group) == 1 or name in BASELINE_NAMES:
            keep += group
            continue
        keep.append(group[0])
        budget = Budget(_SCREENING_S * len(group), min_rounds=5, max_rounds=9, rel_ci=0.02)
        outcomes = time_contestants(group, workload, policy, device, torch_device, budget, seed)
        release(torch_device)
        times = {index: outcome.time_s for index, outcome in enumerate(outcomes) if isinstance(outcome, Measurement)}
        best = min(times, key=times.__getitem__, default=0)
        if best:
            keep.append(group[best])
            tried[id(group[best])] = len(group)
    return keep, tried


def _over_sets(contestant: Contestant, sets: Sequence[Any], policy: str) -> Callable[[int], Any]:
    """Calls bound to each set when first used, so that what binding allocates fails as the contestant's
    own.
    """
    bind = contestant.bind
    assert bind is not None
    calls: dict[int, Callable[[], Any]] = {}

    def call(index: int) -> Any:
        if index not in calls:
            calls[index] = bind(sets[index], policy)
        return calls[index]()

    return call
