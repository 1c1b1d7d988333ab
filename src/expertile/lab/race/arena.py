"""What `run` needs to know to measure a workload, whichever operator it is of.

An arena is one workload on one device with everyone who computes it: it makes inputs, gates the rivals, and states the
work by which times are judged. `grouped_arena.GroupedArena` does so for grouped products, `operators.arena.OpArena` for
every other operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from expertile.device import Device
from expertile.lab.race.contestants import Contestant
from expertile.roofline import Work


class AnyWorkload(Protocol):
    """What every workload says about itself: `workloads.Workload` and `operators.base.OpWorkload` do."""

    @property
    def name(self) -> str: ...
    @property
    def preset(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def unsupported(self) -> str: ...

    def shape(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Site:
    """Where a run takes place: facts of the device, and the device itself."""

    device: Device
    torch_device: torch.device


class Arena(Protocol):
    """One workload and everyone who computes it."""

    @property
    def workload(self) -> AnyWorkload: ...

    @property
    def work(self) -> Work:
        """What one call must do at least."""

    @property
    def dtype_key(self) -> str:
        """The peak by which FLOPs are judged, a key of `Device.peak_flops`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Everyone who is to have a record, the baselines last."""

    @property
    def memory_needed(self) -> int:
        """Bytes that gating one rival takes."""

    def contestants(self, names: Collection[str], seed: int) -> Iterator[Contestant]:
        """Everyone in `names`, gated one after another on inputs of `seed`. May run out of memory."""

    def input_sets(self, seed: int) -> Sequence[Any]:
        """Sets of inputs, together larger than the cache, for the contestants' `bind`. May run out of memory."""

    def screen(self, contestants: list[Contestant], policy: str, seed: int) -> tuple[list[Contestant], dict[int, int]]:
        """Of contestants that share a name (configs of one backend) those worth a full measurement; and by `id` of
        the picked ones among how many configs they were."""


def record_name(workload: AnyWorkload) -> str:
    """How records call a workload: "preset/name"."""
    return f"{workload.preset}/{workload.name}" if workload.preset else workload.name
