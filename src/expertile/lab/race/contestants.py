"""Who takes part on one workload: every backend, config, candidate and baseline that passed the gate, and why
the others did not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import failure_of, release
from expertile.lab.measure.timers import POLICIES
from expertile.lab.race.baselines import Baseline
from expertile.lab.race.gate import Gate, Reference, gate_run, reference_for
from expertile.lab.race.operands import free_memory, make_operands
from expertile.lab.race.workloads import Workload
from expertile.ops.grouped_mm.backend import Backend, Operands, config_dict
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.roofline import Work

# Rows past offs[-1] in the gate: enough to be noticed, a multiple of 64 so that no stride loses its
# alignment.
TAIL = 64

Bind = Callable[[Any, str], Callable[[], Any]]  # (operands or inputs, policy) -> one call


@dataclass(frozen=True)
class Contestant:
    """A row of the table: either ready to be timed, or the reason why it has no time.

    `bind(operands, policy)` makes one call on those operands, under one of `policies`. `config` is what the
    record shows; under the graph policy a backend that needs the group sizes on the host is given them, and its
    config says so.
    """

    name: str
    work: Work
    config: Mapping[str, Any] = field(default_factory=dict)
    bind: Bind | None = None
    host_sizes: bool = False
    rel_error: float | None = None
    max_error: float | None = None
    status: str = "ok"
    reason: str = ""
    fatal: bool = False
    policies: tuple[str, ...] = POLICIES

    def shown_config(self, policy: str) -> dict[str, Any]:
        return {**self.config, "sizes": "host"} if self.host_sizes and policy == "graph" else dict(self.config)


@dataclass(frozen=True)
class Bench:
    """One workload on one device, with the operands and the reference that the gate uses."""

    workload: Workload
    device: Device
    torch_device: torch.device
    problem: Problem  # of the timed operands: no tail; sizes known
    gate_problem: Problem  # with a tail
    operands: Operands
    reference: Reference
    seed: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.workload.group_sizes

    def known_to(self, backend: Backend, problem: Problem, policy: str) -> Problem:
        """`problem` with the group sizes only where the caller of `backend` would have them on the host: on a
        CPU; and, so that it can be captured at all, for a backend that reads them there, under the graph
        policy.
        """
        given = self.torch_device.type == "cpu" or (backend.reads_offs_on_host and policy == "graph")
        return problem.with_sizes(self.sizes if given else None)

    @property
    def work(self) -> Work:
        return self.problem.work(self.sizes)


def make_bench(workload: Workload, device: Device, torch_device: torch.device, seed: int) -> Bench:
    """Operands and reference for gating `workload`. May run out of memory."""
    tail = 0 if workload.layout is Layout.BATCHED else TAIL
    operands = make_operands(workload, torch_device, seed, tail)
    gate_problem = Problem.from_tensors(operands.a, operands.b, operands.offs).with_sizes(workload.group_sizes)
    problem = workload.problem(torch_device.type, gate_problem.allow_tf32)
    hold = 0.2 * free_memory(torch_device)
    reference = reference_for(gate_problem, operands, workload.group_sizes, hold, seed)
    return Bench(workload, device, torch_device, problem, gate_problem, operands, reference, seed)


def memory_needed(workload: Workload) -> int:
    """Bytes that gating one backend takes: operands, two results, and the float32 blocks of the
    comparison.
    """
    return int(workload.a_nbytes + workload.b_nbytes + 2 * workload.out_nbytes + 8 * (1 << 27))


def backend_contestants(bench: Bench, backend: Backend, all_configs: bool = False) -> Iterator[Contestant]:
    """`backend` with its default config, gated; with `all_configs` its other configs as well, if the first
    passed.

    One contestant with a reason where the backend does not support the problem, is wrong, or fails.
    """
    work = bench.work
    try:
        problem = bench.known_to(backend, bench.problem, "graph")
        reason = backend.supports(problem, bench.device)
        configs = () if reason else backend.configs(problem, bench.device)
    except Exception as error:
        yield failed(backend.name, work, error, bench.torch_device)
        return
    if reason is not None:
        yield Contestant(backend.name, work, status="unsupported", reason=reason)
        return
    for index, config in enumerate(configs):
        if index and not all_configs:
            return
        contestant = _gated(bench, backend, config)
        yield contestant
        if contestant.fatal or (not index and contestant.status != "ok"):
            return


def baseline_contestant(bench: Bench, baseline: Baseline) -> Contestant:
    """A speed-of-light row, checked against what it claims to compute."""
    work = baseline.work(bench.problem, bench.sizes)
    try:
        verdict = baseline.verify(bench.gate_problem, bench.sizes, bench.operands)
    except Exception as error:
        return failed(baseline.name, work, error, bench.torch_device)

    problem, sizes = bench.problem, bench.sizes  # not `bench`: its operands must not outlive the gate

    def bind(operands: Operands, policy: str) -> Callable[[], Any]:
        run = baseline.prepare(problem, sizes, operands)
        return lambda: run(None)

    return judged(Contestant(baseline.name, work, baseline.config, bind), verdict)


def candidate_contestant(bench: Bench, backend: Backend | None, name: str, verdict: Gate) -> Contestant:
    """A candidate that a child process has judged; `backend` is None where it did not pass."""
    if backend is None or not verdict.ok:
        status = "wrong" if verdict.checked else "failed"
        return Contestant(
            name, bench.work, status=status, reason=verdict.reason,
            rel_error=_finite(verdict.rel_error), max_error=_finite(verdict.max_error),
        )  # fmt: skip
    config = backend.configs(bench.problem, bench.device)[0]
    return judged(_contestant(bench, backend, config), verdict)


def _gated(bench: Bench, backend: Backend, config: Any) -> Contestant:
    def run(out: torch.Tensor | None) -> Any:
        # One call on the path of each policy: a backend that reads offs on the host has two.
        problem = bench.known_to(backend, bench.gate_problem, "graph" if out is not None else "eager")
        return backend.run(problem, bench.operands, config, out)

    contestant = _contestant(bench, backend, config)
    try:
        with torch.no_grad():
            verdict = gate_run(run, bench.gate_problem, bench.sizes, bench.reference, bench.torch_device)
    except Exception as error:
        return replace(failed(backend.name, bench.work, error, bench.torch_device), config=contestant.config)
    finally:
        release(bench.torch_device)
    return judged(contestant, verdict)


def _contestant(bench: Bench, backend: Backend, config: Any) -> Contestant:
    problems = {policy: bench.known_to(backend, bench.problem, policy) for policy in POLICIES}

    def bind(operands: Operands, policy: str) -> Callable[[], Any]:
        problem = problems[policy]
        return lambda: backend.run(problem, operands, config, None)

    return Contestant(
        backend.name, bench.work, config_dict(config), bind,
        host_sizes=backend.reads_offs_on_host and bench.torch_device.type == "cuda",
    )  # fmt: skip


def judged(contestant: Contestant, verdict: Gate) -> Contestant:
    """`contestant` with its errors; without a call to time where it is wrong."""
    seen = replace(contestant, rel_error=_finite(verdict.rel_error), max_error=_finite(verdict.max_error))
    return seen if verdict.ok else replace(seen, bind=None, status="wrong", reason=verdict.reason)


def failed(name: str, work: Work, error: Exception, device: torch.device) -> Contestant:
    """A contestant that raised `error` in the gate."""
    failure = failure_of(error, device)
    return Contestant(
        name, work, status=failure.status, reason=f"in the gate: {failure.reason}", fatal=failure.kind == "fatal"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
