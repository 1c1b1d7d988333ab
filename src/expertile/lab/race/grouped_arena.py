"""Grouped products on a device: every backend, the candidates of the command line, `dense` and `copy`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch

from expertile.lab.race.arena import Site
from expertile.lab.race.baselines import BASELINE_NAMES, BASELINES
from expertile.lab.race.candidate import candidate_name, load, parse_spec
from expertile.lab.race.candidate_gate import CandidateGate
from expertile.lab.race.contestants import (
    Contestant,
    backend_contestants,
    baseline_contestant,
    candidate_contestant,
    make_bench,
    memory_needed,
)  # fmt: skip
from expertile.lab.race.gate import Gate
from expertile.lab.race.timing import pick_configs, rotating_operands
from expertile.lab.race.workloads import Workload
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.problem import Problem, tf32_allowed
from expertile.roofline import Work


class Candidates:
    """The candidates of one run, each with a process that judges it. Use as a context manager.

    Entering waits until all are loaded: ValueError names the first that cannot be, before anything is measured.
    """

    def __init__(self, specs: Sequence[str], device: torch.device, timeout_s: float = 180.0) -> None:
        for spec in specs:
            parse_spec(spec)
        self.specs = {candidate_name(spec): spec for spec in specs}
        self._gates = {name: CandidateGate(spec, device, timeout_s) for name, spec in self.specs.items()}
        self._loaded: dict[str, Backend] = {}
        self._open = ExitStack()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.specs)

    def __enter__(self) -> Candidates:
        with ExitStack() as stack:
            for gate in self._gates.values():
                stack.enter_context(gate)
                gate.start()
            for gate in self._gates.values():
                gate.loaded()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def verdict(self, name: str, workload: Workload, seed: int) -> Gate:
        """The child's verdict; a candidate that passed is loaded into this process."""
        verdict = self._gates[name].check(workload, seed)
        if verdict.ok and name not in self._loaded:
            self._loaded[name] = load(self.specs[name])
        return verdict

    def loaded(self, name: str) -> Backend | None:
        """The backend of a candidate that has passed once."""
        return self._loaded.get(name)


@dataclass(frozen=True)
class GroupedArena:
    """One grouped product and the backends, candidates and baselines that compute it."""

    workload: Workload
    site: Site
    backends: tuple[Backend, ...]
    candidates: Candidates
    all_configs: bool = False

    @cached_property
    def _problem(self) -> Problem:
        return self.workload.problem(self.site.torch_device.type, tf32_allowed())

    @property
    def work(self) -> Work:
        return self._problem.work(self.workload.group_sizes)

    @property
    def dtype_key(self) -> str:
        return self._problem.dtype_key

    @property
    def names(self) -> tuple[str, ...]:
        return (*(b.name for b in self.backends), *self.candidates.names, *BASELINE_NAMES)

    @property
    def memory_needed(self) -> int:
        return memory_needed(self.workload)

    def contestants(self, names: Collection[str], seed: int) -> Iterator[Contestant]:
        # Candidates first: their processes need the memory that the operands would take.
        verdicts = {
            name: self.candidates.verdict(name, self.workload, seed + 1)
            for name in self.candidates.names
            if name in names
        }
        bench = make_bench(self.workload, self.site.device, self.site.torch_device, seed)
        dead = False
        for backend in self.backends:
            if backend.name in names:
                for contestant in backend_contestants(bench, backend, self.all_configs):
                    dead = dead or contestant.fatal
                    yield contestant
        for name, verdict in verdicts.items():
            yield candidate_contestant(bench, self.candidates.loaded(name), name, verdict)
        if not dead:
            yield from (baseline_contestant(bench, baseline) for baseline in BASELINES if baseline.name in names)

    def input_sets(self, seed: int) -> list[Operands]:
        return rotating_operands(self.workload, self.site.device, self.site.torch_device, seed)

    def screen(self, contestants: list[Contestant], policy: str, seed: int) -> tuple[list[Contestant], dict[int, int]]:
        if not self.all_configs:
            return contestants, {}
        return pick_configs(contestants, self.workload, policy, self.site.device, self.site.torch_device, seed)
