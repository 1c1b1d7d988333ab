"""choose(problem, device, backward) -> Choice: which backend, with which config, and one sentence why.

On the GPU where the backends were measured, and on others of its architecture, the highest rate expected (`rates`) of
those that can decides. Elsewhere nothing is known, and the first that can of a fixed order is taken.
"""

from functools import lru_cache

from expertile.device import Device
from expertile.ops.attention.backend import Backend
from expertile.ops.attention.backends import BACKENDS
from expertile.ops.attention.problem import Problem
from expertile.ops.attention.rates import DATE, LARGEST_HEAD_DIM, MEASURED_ON, length, rates
from expertile.ops.backend import Choice, Estimate, none_able

# Where nothing is measured: the order in which those able are taken.
_ORDER = ("gluon_hopper", "sdpa_fa2", "triton", "sdpa_cudnn", "reference")
# Peers must beat our own kernels by more than measurements repeat to.
_MARGIN = 1.01


@lru_cache(maxsize=4096)
def choose(problem: Problem, device: Device, backward: bool = False) -> Choice[Backend]:
    """The backend expected to be fastest of those that can. ValueError with every backend's reason where none can."""
    reasons = {b.name: b.direction(backward).supports(problem, device) for b in BACKENDS}
    able = [b for b in BACKENDS if reasons[b.name] is None]
    if not able:
        raise none_able(reasons.items())
    same_kind = device.kind == MEASURED_ON.kind and device.capability == MEASURED_ON.capability
    known = rates(problem, backward) if same_kind else {}  # of all backends, whether they can or not
    ranked = sorted((b for b in able if b.name in known), key=lambda b: -known[b.name])
    if ranked:
        best = ranked[0]
        own = next((b for b in ranked if not b.peer), None)
        if own is not None and known[best.name] <= _MARGIN * known[own.name]:
            best = own
        why = _measured(problem, device, known, best, ranked, reasons)
    else:
        best = min(able, key=lambda b: _ORDER.index(b.name))
        why = f"{best.name}: {_unmeasured(problem, device)}"
    flops = (problem.backward_work() if backward else problem.work()).flops
    estimates = tuple(_estimate(b, reasons[b.name], known.get(b.name), flops, problem, device) for b in BACKENDS)
    return Choice(best, best.direction(backward).configs(problem, device)[0], why, estimates)


def _source(device: Device) -> str:
    source = f"measured on {MEASURED_ON.name}, {DATE}"
    if device.name != MEASURED_ON.name:
        source += f"; not measured on {device.name}, of the same architecture"
    return source


def _measured(
    p: Problem,
    device: Device,
    known: dict[str, float],
    best: Backend,
    ranked: list[Backend],
    reasons: dict[str, str | None],
) -> str:
    """The sentence for a choice by rates: the figures, the next best, and what is faster but cannot."""
    rate = known[best.name]
    why = f"{best.name}: {rate:.0f} TFLOP/s at D={p.head_dim}, length {length(p):.0f}{', causal' if p.causal else ''}"
    others = [b for b in ranked if b is not best]
    if others:
        other = others[0]
        ahead = rate / known[other.name]
        why += f", {ahead:.2f}× {other.name}'s {known[other.name]:.0f}"
        if not best.peer and other.peer and ahead <= 1.0:
            why += " (ours is taken up to 1 % behind a peer)"
    why += f" ({_source(device)})"
    for name, reason in reasons.items():
        if reason is not None and known.get(name, 0.0) > _MARGIN * rate:
            why += f"; {name} would reach {known[name]:.0f} but {reason}"
    return why


def _estimate(
    backend: Backend, reason: str | None, rate: float | None, flops: float, problem: Problem, device: Device
) -> Estimate:
    if reason is not None:
        return Estimate(backend.name, None, reason)
    if rate is None:
        return Estimate(backend.name, None, f"can; {_nothing_known(problem, device)}")
    return Estimate(backend.name, flops / (rate * 1e12), f"{rate:.0f} TFLOP/s expected ({_source(device)})")


def _nothing_known(problem: Problem, device: Device) -> str:
    if device.capability == MEASURED_ON.capability and problem.head_dim > LARGEST_HEAD_DIM:
        return f"not measured at head dimension {problem.head_dim}"
    on_it = device.name == MEASURED_ON.name
    return "not measured for such problems" if on_it else f"not measured on {device.name}"


def _unmeasured(problem: Problem, device: Device) -> str:
    if device.kind != "cuda":
        return "on a CPU attention runs in torch, by its definition"
    return f"{_nothing_known(problem, device)}; the first of {', '.join(_ORDER)} that can"
