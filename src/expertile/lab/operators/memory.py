"""Memory cases of operators: every rival on every workload that it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from expertile.lab.race.case import Site
from expertile.lab.race.memory import MemoryCase
from expertile.lab.race.operator import Operator, Rival, Workload, record_name


def memory_cases(
    workloads: Sequence[Workload], operators: Mapping[str, Operator], site: Site, seed: int = 0
) -> Iterator[MemoryCase]:
    """One case for each rival of each workload, unless it says that it can't. What `bind` allocates does not count.

    Formulas are those of the GPU's kernels; on a CPU others compute, and there is none.
    """
    for workload in workloads:
        operator = operators[workload.op]
        for rival in operator.rivals if not workload.unsupported else ():
            if rival.supports(workload, site.device) is None:
                formula = rival.peak_nbytes if site.device.kind == "cuda" else None
                yield MemoryCase(
                    workload.op,
                    record_name(workload),
                    workload.shape(),
                    workload.dtype,
                    rival.name,
                    _preparing(workload, operator, rival, site.torch_device, seed),
                    None if formula is None else formula(workload),
                )


def _preparing(
    workload: Workload, operator: Operator, rival: Rival, device: torch.device, seed: int
) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        inputs = operator.make_inputs(workload, device, seed)
        with torch.enable_grad():
            return rival.bind(workload, inputs)

    return prepare
