"""An operator other than the grouped product on a device: its rivals, and `copy` of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertile.lab.measure.interleaved import release
from expertile.lab.measure.timers import POLICIES
from expertile.lab.operators.base import Operator, OpWorkload, Rival
from expertile.lab.operators.gate import judge
from expertile.lab.race.arena import Site
from expertile.lab.race.baselines import COPIES, COPY, Copy, copy_work
from expertile.lab.race.contestants import Contestant, failed, judged
from expertile.lab.race.timing import set_count
from expertile.roofline import Work

_CPU_INTENSITY, _CPU_SETS = 32.0, 3  # FLOP per byte
_REFERENCE_ITEMSIZE = 8  # float64 at most


@dataclass(frozen=True)
class OpArena:
    """One call of `operator` and the rivals that make it."""

    workload: OpWorkload
    site: Site
    operator: Operator
    policies: tuple[str, ...] = POLICIES  # wanted: who knows none of them is not even gated, which may take minutes

    @property
    def work(self) -> Work:
        return self.operator.work(self.workload)

    @property
    def dtype_key(self) -> str:
        return self.workload.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (*(r.name for r in (*self.operator.rivals, *self.operator.baselines)), COPY)

    @property
    def memory_needed(self) -> int:
        """Inputs, two results, a reference, and two steps of its computation; of FP8 operands, whose references are
        worked out group by group, as much as of 16-bit ones."""
        if self.operator.memory_nbytes is not None:
            return int(self.operator.memory_nbytes(self.workload))
        nbytes, itemsize = self.work.nbytes, max(self.workload.torch_dtype.itemsize, 2)
        return int(2 * nbytes + 3 * _REFERENCE_ITEMSIZE / 2 * nbytes / itemsize)

    def contestants(self, names: Collection[str], seed: int) -> Iterator[Contestant]:
        operator, workload = self.operator, self.workload
        inputs = operator.make_inputs(workload, self.site.torch_device, seed)
        reference: tuple[Tensor, ...] | None = None
        dead = False
        for rival in (*operator.rivals, *operator.baselines):
            if rival.name not in names:
                continue
            contestant = self._entered(rival)
            if contestant.status == "ok" and set(contestant.policies) & set(self.policies):
                if rival.reference is None and reference is None:
                    reference = operator.reference(workload, inputs)
                contestant = self._gated(contestant, rival, inputs, reference)
            dead = dead or contestant.fatal
            yield contestant
        if COPY in names and not dead:
            yield from map(self._copy, COPIES)

    def input_sets(self, seed: int) -> list[tuple[Tensor, ...]]:
        work = self.work
        count = set_count(int(work.nbytes), self.site.device, self.site.torch_device)
        if self.site.device.kind == "cpu" and work.intensity > _CPU_INTENSITY:
            count = min(count, _CPU_SETS)  # it computes so long that it does not notice where the inputs come from
        return [self.operator.make_inputs(self.workload, self.site.torch_device, seed + i) for i in range(count)]

    def screen(self, contestants: list[Contestant], policy: str, seed: int) -> tuple[list[Contestant], dict[int, int]]:
        return contestants, {}

    def _entered(self, rival: Rival) -> Contestant:
        """A contestant that has not been gated yet, or the reason why it can't be one."""
        try:
            reason = rival.supports(self.workload, self.site.device)
        except Exception as error:
            return failed(rival.name, self.work, error, self.site.torch_device)
        work = self.work if rival.work is None else rival.work(self.workload)
        if reason is not None:
            return Contestant(rival.name, work, status="unsupported", reason=reason)
        workload = self.workload

        def bind(inputs: tuple[Tensor, ...], policy: str) -> Callable[[], Any]:
            with torch.enable_grad():
                return rival.bind(workload, inputs)

        policies = POLICIES if rival.graph else tuple(p for p in POLICIES if p != "graph")
        return Contestant(rival.name, work, bind=bind, policies=policies)

    def _gated(
        self, contestant: Contestant, rival: Rival, inputs: tuple[Tensor, ...], reference: tuple[Tensor, ...] | None
    ) -> Contestant:
        try:
            if rival.reference is not None:
                reference = rival.reference(self.workload, inputs)
            assert reference is not None
            tolerance = (rival.tolerance or self.operator.tolerance)(self.workload)
            verdict = judge(rival, self.workload, inputs, reference, tolerance)
        except Exception as error:
            return failed(rival.name, self.work, error, self.site.torch_device)
        finally:
            release(self.site.torch_device)
        return judged(contestant, verdict)

    def _copy(self, copy: Copy) -> Contestant:
        nbytes, device = self.work.nbytes, self.site.torch_device
        work = copy_work(nbytes)

        def bind(inputs: tuple[Tensor, ...], policy: str) -> Callable[[], Any]:
            run = copy.run(nbytes, device)
            return lambda: run(None)

        try:
            verdict = copy.gate(nbytes, device)
        except Exception as error:
            return failed(COPY, work, error, device)
        return judged(Contestant(COPY, work, {"way": copy.way}, bind), verdict)
