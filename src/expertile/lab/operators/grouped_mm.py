"""Grouped products: every backend is a rival, once with each of its configs, beside `dense`. Workloads are
`race/workloads.GroupedWorkload`, inputs (a, b, offs)."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.lab.race.candidate_gate import CandidateGate, UserCandidates, judge_again
from expertile.lab.race.operands import free_memory, make_operands
from expertile.lab.race.operator import Blocks, Call, Inputs, Operator, Rival, Verdict, Workload
from expertile.lab.race.record import DENSE
from expertile.lab.race.reference import limits_of, reference_for
from expertile.lab.race.workloads import OP, GroupedWorkload
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Backend, Operands, config_dict
from expertile.ops.grouped_mm.problem import Layout, Problem, tf32_allowed

# Rows past offs[-1] in the gate: enough to be noticed, a multiple of 64 so that no stride loses its alignment.
TAIL = 64


def grouped_mm(backends: Sequence[Backend], more: Sequence[Rival] = ()) -> Operator:
    """The operator whose rivals are `backends`, and `more`."""
    return Operator(
        OP,
        _inputs,
        _reference,
        lambda w: _typed(w).problem("cuda").work(),
        (*map(rival_of, backends), *more),
        lambda w: limits_of(_typed(w).problem("cuda", tf32_allowed()), _typed(w).group_sizes),
        (_DENSE,),
        memory_nbytes=memory_needed,
        set_nbytes=lambda w: _typed(w).memory_nbytes,
        gate_inputs=lambda w, device, seed: _inputs(w, device, seed, 0 if _typed(w).layout is Layout.BATCHED else TAIL),
        dtype_key=lambda w: _typed(w).problem("cuda", tf32_allowed()).dtype_key,
    )


def rival_of(backend: Backend) -> Rival:
    """`backend` as a rival."""

    def configs(w: Workload, device: Device) -> Iterable[Rival]:
        return (with_config(backend, config) for config in backend.configs(_problem(w, backend, device), device))

    def supports(w: Workload, device: Device) -> str | None:
        return backend.supports(_problem(w, backend, device), device)

    return Rival(backend.name, _without_config, supports, peer=backend.peer, configs=configs)


def rivals_of(users: UserCandidates) -> tuple[Rival, ...]:
    """The functions given on the command line: judged in processes of their own, and loaded when they have passed."""

    def rival(name: str, gate: CandidateGate) -> Rival:
        def configs(w: Workload, device: Device) -> Iterable[Rival]:
            backend = gate.backend
            assert backend is not None

            def again(w: Workload, inputs: Inputs, seed: int) -> Verdict:
                return judge_again(backend, _typed(w), inputs, seed)

            return (replace(with_config(backend, NoConfig()), check_again=again),)

        return Rival(name, _without_config, configs=configs, check=lambda w, seed: gate.check(_typed(w), seed))

    return tuple(rival(name, gate) for name, gate in users.gates.items())


def with_config(backend: Backend, config: Any) -> Rival:
    """`backend` with one of its configs. Group sizes are known where a caller would have them on the host: on a CPU;
    and in a CUDA graph for a backend that reads them there, since it could not be captured otherwise."""

    def calls(w: Workload, inputs: Inputs, on_host: bool) -> Callable[[Tensor | None], Tensor]:
        operands = Operands(*inputs)
        sizes = _typed(w).group_sizes if on_host or operands.a.device.type == "cpu" else None
        problem = Problem.from_tensors(operands.a, operands.b, operands.offs).with_sizes(sizes)
        return lambda out: backend.run(problem, operands, config, out)

    def bind(w: Workload, inputs: Inputs, on_host: bool = False) -> Call:
        run = calls(w, inputs, on_host)
        return lambda: (run(None),)

    reads = backend.reads_offs_on_host
    return Rival(
        backend.name,
        bind,
        peer=backend.peer,
        config=config_dict(config),
        bind_on_host=partial(bind, on_host=True) if reads else None,
        # One call on the path of each policy: a backend that reads offs on the host has two.
        bind_out=partial(calls, on_host=reads),
    )


def _without_config(w: Workload, inputs: Inputs) -> Call:
    raise AssertionError("a backend is bound with one of its configs")


def memory_needed(w: Workload) -> float:
    """Bytes that gating one backend takes: operands, two results, and the float32 blocks of the comparison."""
    return _typed(w).memory_nbytes + _typed(w).out_nbytes + 8 * (1 << 27)


def _typed(w: Workload) -> GroupedWorkload:
    assert isinstance(w, GroupedWorkload)
    return w


def _problem(w: Workload, backend: Backend, device: Device) -> Problem:
    """The problem of the timed operands, as `backend` is told of it in a CUDA graph."""
    known = device.kind == "cpu" or backend.reads_offs_on_host
    return _typed(w).problem(device.kind, tf32_allowed()).with_sizes(_typed(w).group_sizes if known else None)


def _inputs(w: Workload, device: torch.device, seed: int, tail: int = 0) -> Inputs:
    operands = make_operands(_typed(w), device, seed, tail)
    return tuple(x for x in (operands.a, operands.b, operands.offs) if x is not None)


def _reference(w: Workload, inputs: Inputs) -> Blocks:
    operands, sizes = Operands(*inputs), _typed(w).group_sizes
    problem = Problem.from_tensors(operands.a, operands.b, operands.offs)
    hold = 0.2 * free_memory(operands.a.device)
    return reference_for(problem, operands, sizes, hold, secrets.randbits(31))


def _dense_operands(w: Workload, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(x [rows, summands], w [summands, columns]) with the FLOPs of the grouped product."""
    a, b, total, layout = inputs[0], inputs[1], sum(_typed(w).group_sizes), _typed(w).layout
    if layout is Layout.RAGGED_M:
        return a[:total], b[0]
    if layout is Layout.RAGGED_N:
        return a[0], b[:, :total]
    if layout is Layout.RAGGED_K:
        return a[:, :total], b[:total]
    return a.reshape(-1, a.shape[-1]), b[0]


def _dense(w: Workload, inputs: Inputs) -> Call:
    left, right = _dense_operands(w, inputs)
    return lambda: (torch.mm(left, right),)


def _dense_problem(w: Workload) -> Problem:
    """The product of `_dense_operands` as one of a single group."""
    p, total = _typed(w).problem("cuda", tf32_allowed()), sum(_typed(w).group_sizes)
    rows, columns, summands = {
        Layout.RAGGED_M: (total, p.n, p.k),
        Layout.RAGGED_N: (p.m, total, p.k),
        Layout.RAGGED_K: (p.m, p.n, total),
        Layout.BATCHED: (p.groups * p.m, p.n, p.k),
    }[p.layout]
    return replace(
        p, layout=Layout.RAGGED_M, groups=1, m=rows, n=columns, k=summands, out_dtype=p.dtype, group_sizes=(rows,)
    )


def _dense_reference(w: Workload, inputs: Inputs) -> Blocks:
    left, right = _dense_operands(w, inputs)
    problem = replace(_dense_problem(w), device_type=left.device.type)
    return reference_for(problem, Operands(left, right[None]), (left.shape[0],))


_DENSE = Rival(
    DENSE,
    _dense,
    reference=_dense_reference,
    work=lambda w: _dense_problem(w).work(),
    tolerance=lambda w: limits_of(_dense_problem(w), (_dense_problem(w).m,)),
)
