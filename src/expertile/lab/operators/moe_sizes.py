"""Whole MoE layers beside torch's, as docs/results/moe.md shows them: part "sizes" of results/<gpu>/moe/.

Everyone is held against the float32 reference of `operators.moe` on the very operands, forward and with all gradients,
before any is timed; then they take turns, in eager calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch

from expertile.lab.measure.interleaved import Budget, Measurement, release
from expertile.lab.operators import operators
from expertile.lab.operators.moe import Size, layers, size, workload
from expertile.lab.race.case import Candidate, Case, Site
from expertile.lab.race.memory import peak_memory
from expertile.lab.race.parts import TimeLimit, figures
from expertile.lab.race.timing import time_on_sets
from expertile.roofline import bound

# What the record calls them (titles in tools/pages), and the lab's operators do. In the order of the latter.
WAYS: Mapping[str, str] = MappingProxyType(
    {
        "ours": "expertile",
        "eager-gather": "torch",
        "eager-add": "torch-index-add",
        "compile-gather": "torch.compile",
        "compile-add": "torch.compile-index-add",
    }
)
SIZES = tuple(size(w) for w in layers() if w.op == "moe" and w.name != "small")
_NO_TIME = "not reached within the time limit"
_SLOW_S = 10.0  # what a way that compiles may take until it is judged


def layer_part(shape: Size) -> dict[str, Any]:
    """What says which part it is."""
    return {"part": "sizes", **dict(zip("THIEk", shape, strict=True))}


def measure_layer(
    shape: Size, site: Site, limit: TimeLimit, budget: Budget, ways: Sequence[str] = tuple(WAYS)
) -> Iterator[dict[str, Any]]:
    """Yields the part twice: after the forward pass, "unfinished", and with forward and backward; "unfinished" also
    where time ran short, and nothing where there is none.

    "fwd", "both": seconds of each way, or the reason why it has none; "bound_s" of each. "peak_gib": allocated beyond
    the operands, forward and both. "rel_error": against float32, the largest of the outputs, forward and both. "err":
    relative Frobenius distance of the forward result from ours. RuntimeError if the device is left unusable.
    """
    part: dict[str, Any] = layer_part(shape) | {
        "flops": 0.0,
        "fwd": {},
        "both": {},
        "peak_gib": {},
        "err": {},
        "rel_error": {},
        "bound_s": {},
    }
    for name, train in (("fwd", False), ("both", True)):
        case = Case(workload("layer", "moe", shape, train), site, operators()["moe_train" if train else "moe"])
        ready, reasons = _judged(case, limit, ways)
        if not ready and limit.left <= _SLOW_S:
            return
        sets = case.input_sets(seed=0)
        found = _timed(case, ready, sets, limit, budget)
        part[name] = reasons | found.pop("seconds")
        part |= {f"{name}_{key}": values for key, values in found.items()}
        part["bound_s"][name] = bound(case.work, site.device, case.dtype_key).seconds
        ours: torch.Tensor | None = None
        for way, candidate in ready.items():
            if not isinstance(part[name][way], float):
                continue
            out, peak = _once_more(candidate, sets[0], site.torch_device)
            part["peak_gib"].setdefault(way, []).append(peak)
            part["rel_error"].setdefault(way, []).append(candidate.rel_error)
            ours = out if way == "ours" else ours
            if not train and ours is not None:
                part["err"][way] = _distance(out, ours)
        if not train:
            part["flops"] = case.work.flops
        del ready, sets, ours
        release(site.torch_device)
        unfinished = not train or _NO_TIME in (*part["fwd"].values(), *part["both"].values())
        yield {**part, "unfinished": True} if unfinished else part


def _judged(case: Case, limit: TimeLimit, ways: Sequence[str]) -> tuple[dict[str, Candidate], dict[str, str]]:
    """By way those that passed, and why others did not; where time runs short nobody else is judged."""
    way_of = {WAYS[way]: way for way in ways}
    reasons = dict.fromkeys(ways, _NO_TIME)
    ready: dict[str, Candidate] = {}
    gate = case.candidates(tuple(way_of), seed=0)
    slowest = 0.0
    while limit.left > max(slowest, _SLOW_S):
        start = perf_counter()
        candidate = next(gate, None)
        slowest = max(slowest, perf_counter() - start)
        if candidate is None:
            break
        if candidate.fatal:
            raise RuntimeError(f"{candidate.name}: {candidate.reason}")
        way = way_of[candidate.name]
        if candidate.status == "ok":
            ready[way] = candidate
            del reasons[way]
        else:
            reasons[way] = f"{candidate.status}: {candidate.reason}"
    return ready, reasons


def _timed(
    case: Case, ready: Mapping[str, Candidate], sets: Sequence[Any], limit: TimeLimit, budget: Budget
) -> dict[str, dict[str, Any]]:
    """`figures` of those that are ready."""
    least = bound(case.work, case.site.device, case.dtype_key).seconds
    budget = replace(budget, seconds=max(0.0, min(budget.seconds, limit.left)))
    outcomes = time_on_sets(list(ready.values()), sets, "eager", case.site.torch_device, budget)
    release(case.site.torch_device)
    return figures(
        {
            way: replace(outcome, bound_s=least) if isinstance(outcome, Measurement) else outcome
            for way, outcome in zip(ready, outcomes, strict=True)
        }
    )


def _once_more(candidate: Candidate, inputs: Any, device: torch.device) -> tuple[torch.Tensor, float]:
    """(out, GiB that a call allocates at its peak)."""
    assert candidate.bind is not None
    with torch.no_grad():
        call = candidate.bind(inputs, "eager")
        peak = peak_memory(call, device)
        return call()[0], round(peak / 2**30, 3)


def _distance(out: torch.Tensor, ours: torch.Tensor) -> float:
    return float((out.float() - ours.float()).norm() / ours.float().norm())
