"""choose(problem, device) -> Choice[Backend]: which backend, with which config, and one sentence why.

On a GPU that `expertile tune` has measured, the times of the nearest measured problems decide (`tuned`, `transfer`); on
another one of the same chip the same times, scaled (`relatives`). Anywhere else, and for problems that nothing measured
is like, an analytic model does (`model`).

`auto` never waits for the GPU: backends that would read `offs` there are chosen only where nothing else runs. Nor does
it choose configs that tune themselves at the first call with each new shape.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from expertile.device import Device
from expertile.ops.backend import Choice, Estimate, invariantly, none_able
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.model import estimate, synchronises
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.grouped_mm.relatives import table_for
from expertile.ops.grouped_mm.transfer import Rival, expected_seconds
from expertile.ops.grouped_mm.tuned import Measured, Table, features_of

# What this and the constants of `transfer`, `tuned` and `tiling` rest on: docs/notes/grouped_mm.md, "Constants".
NEIGHBOURS = 24
# Our backends keep what no peer is expected to do that much faster.
TRUST = 0.05


@lru_cache(maxsize=4096)
def choose(
    problem: Problem, device: Device, backends: Sequence[Backend] = BACKENDS, policy: str = "graph", quiet: bool = False
) -> Choice[Backend]:
    """The backend of `backends` with the smallest expected time.

    Ragged totals whose groups only the device knows are rounded to the nearest of 32 steps per doubling. So row counts
    that change from call to call cost microseconds. `policy` says which measurements count: "graph" (the GPU's time) or
    "eager" (launch included). A chip without measurements, or a problem far from all of them, is warned of once per
    process, unless `quiet`. Raises ValueError with every backend's reason when none supports the problem.
    """
    return _choose(rounded(problem), device, backends, policy, quiet)


@lru_cache(maxsize=4096)
def _choose(problem: Problem, device: Device, backends: Sequence[Backend], policy: str, quiet: bool) -> Choice[Backend]:
    reasons = {b.name: b.supports(problem, device) for b in backends}
    able = [b for b in backends if reasons[b.name] is None]
    if not able:
        raise none_able(reasons.items())
    waiting = {b.name for b in able if synchronises(b, problem, device)}
    eligible = [b for b in able if b.name not in waiting] or able
    table = table_for(device)
    near = [] if table is None else table.of(policy).nearest(features_of(problem), NEIGHBOURS)
    choice = by_measurement(problem, device, eligible, near, table) if table is not None and near else None
    if choice is None:
        choice = _by_model(problem, device, eligible)
        if device.kind == "cuda" and not quiet:
            _say_miss(device.name, table is not None)
    said = {e.backend: e for e in choice.estimates}
    estimates = tuple(said.get(b.name) or _left_out(b, problem, device, reasons[b.name]) for b in backends)
    return replace(choice, estimates=estimates)


@lru_cache(maxsize=4096)
def choose_invariant(problem: Problem, device: Device) -> Choice[Backend]:
    """`choose` for batch-invariant products. One backend serves all numbers of rows: the last that takes the problem,
    as our own kernels come last; measurements or the model choose among its batch-invariant configs. Raises ValueError
    when there is none."""
    like = rounded(problem)
    for backend in map(invariantly, reversed(BACKENDS)):
        if backend.supports(like, device) is None:
            return _choose(like, device, (backend,), "graph", True)
    raise ValueError(
        f"batch_invariant: no backend multiplies {problem.dtype} on {device.name} in one order for all numbers of rows"
    )


def promising(problem: Problem, device: Device) -> tuple[Rival, ...]:
    """What is worth racing on a problem, at most 24, `auto`'s own choice first.

    Then each backend's default and, where measured neighbours give their times, all configs expected within 1.3 times
    the best. None waits for the GPU, nor tunes itself while it runs, unless `auto` has nothing else."""
    like = rounded(problem)
    choice = choose(like, device, quiet=True)
    able = [b for b in BACKENDS if b.supports(like, device) is None and not synchronises(b, like, device)]
    rivals = [Rival(b, c) for b in able for c in auto_configs(b, like, device)]
    table = table_for(device)
    features = features_of(like)
    near = [] if table is None else table.of("graph").nearest(features, NEIGHBOURS)
    expected = expected_seconds(rivals, features, near, device)
    least = min((s for s in expected if s is not None), default=0.0)
    usual = {b.name: Rival(b, auto_configs(b, like, device)[0]) for b in able}
    timed = [(s, r) for s, r in zip(expected, rivals, strict=True) if s is not None and s <= 1.3 * least]
    ordered = [r for _, r in sorted(timed, key=lambda pair: pair[0])] if timed else rivals
    return tuple(dict.fromkeys([Rival(choice.backend, choice.config), *usual.values(), *ordered]))[:24]


def auto_configs(backend: Backend, problem: Problem, device: Device) -> tuple[Any, ...]:
    """The configs that `auto` may use, the default first: those that do not tune themselves while they run."""
    return tuple(c for c in backend.configs(problem, device) if not getattr(c, "tuned", False))


def _left_out(backend: Backend, problem: Problem, device: Device, reason: str | None) -> Estimate:
    """What is said of a backend that could not be chosen."""
    if reason is not None:
        return Estimate(backend.name, None, reason)
    modelled = estimate(backend, problem, device)
    if synchronises(backend, problem, device):
        return Estimate(backend.name, modelled.seconds, f"{modelled.reason}; not for auto: it waits for the GPU")
    return modelled


def by_measurement(
    problem: Problem, device: Device, backends: Sequence[Backend], near: Sequence[tuple[float, Measured]], table: Table
) -> Choice[Backend] | None:
    """The rival with the smallest expected time, by measured problems `near` and their distances, of `table`; where one
    of them is this very problem, by it alone. None if no neighbour ran any of these backends."""
    features = features_of(problem)
    near = [(d, m) for d, m in near if m.features == features and not m.gpu] or near
    known = {name for _, measured in near for name in measured.backends}
    rivals = [Rival(b, c) for b in backends if b.name in known for c in auto_configs(b, problem, device)]
    seconds = expected_seconds(rivals, features, near, device)
    timed = [(s, r) for s, r in zip(seconds, rivals, strict=True) if s is not None]
    if not timed:
        return None
    least = min(s for s, _ in timed)
    ours = [(s, r) for s, r in timed if not r.backend.peer]
    chosen = ours if any(s <= least * (1 + TRUST) for s, _ in ours) else timed
    best_s, best = min(chosen, key=lambda pair: pair[0])
    of_backend: dict[str, float] = {}
    for s, r in timed:
        of_backend[r.backend.name] = min(s, of_backend.get(r.backend.name, math.inf))
    of_backend[best.backend.name] = best_s
    how = f"{table.gpu}'s times, scaled" if table.relative else "measured on problems like this"
    estimates = tuple(Estimate(name, s, how) for name, s in of_backend.items())
    where = ", ".join(f"{m.features}{m.gpu and f' on {m.gpu}'}" for _, m in near[:1])
    more = f" and {len(near) - 1} more" if len(near) > 1 else ""
    triton = dict(table.versions).get("triton")
    also = f", a GPU of the same chip; times scaled to {device.name}" if table.relative else ""
    text = (
        f"{best.backend.name}: measured on {table.gpu} {table.date} with Triton {triton}{also}: nearest {where}{more}"
    )
    why = text + _next(estimates, best.backend.name, best_s)
    return Choice(best.backend, best.config, why, estimates, not table.relative)


def _by_model(problem: Problem, device: Device, backends: Sequence[Backend]) -> Choice[Backend]:
    """The backend with the smallest modelled time, in its default config."""
    estimates = tuple(estimate(b, problem, device) for b in backends)
    able = [(e.seconds, b) for e, b in zip(estimates, backends, strict=True) if e.seconds is not None]
    # min is stable: the earlier backend keeps a tie. Without any modelled backend the first one runs.
    best_s, best = min(able, key=lambda pair: pair[0]) if able else (None, backends[0])
    config = next(iter(auto_configs(best, problem, device)))
    return Choice(best, config, _why_model(best, best_s, estimates, problem, device), estimates)


def _why_model(
    best: Backend, seconds: float | None, estimates: Sequence[Estimate], problem: Problem, device: Device
) -> str:
    name = best.name
    if device.kind != "cuda":
        return f"{name}: on a CPU {best.cpu_why}"
    if seconds is None:
        return f"{name}: the only kind of backend that runs here"
    work = problem.work()
    compute = work.flops / (device.peak(problem.dtype_key) or 1e12)
    memory = work.nbytes / (device.memory_bps or 1e12)
    limit = "memory limits" if memory > compute else "compute limits"
    text = f"{name}: by the model, not measured on {device.name}: {limit} ({work.intensity:.0f} FLOP/byte, mean group "
    return f"{text}{problem.mean_group:.0f}), {seconds * 1e6:.0f} µs" + _next(estimates, name, seconds)


def _next(estimates: Sequence[Estimate], best: str, seconds: float) -> str:
    others = [(e.seconds, e.backend) for e in estimates if e.backend != best and e.seconds is not None]
    if not others:
        return ""
    second, name = min(others)
    return f"; next best {name} at {second / seconds:.2f}×"


def rounded(problem: Problem) -> Problem:
    """`problem` with a ragged total that has no known sizes rounded to the nearest of 32 steps per doubling.

    No fewer, as a few rows decide how many waves of tiles there are."""
    total = problem.ragged_total
    if problem.group_sizes is not None or total <= 64 or problem.layout is Layout.RAGGED_N:
        return problem  # the columns of a ragged N decide the alignment of the result
    step = 1 << (total.bit_length() - 6)
    total = (total + step // 2) // step * step
    return replace(problem, m=total) if problem.layout is Layout.RAGGED_M else replace(problem, k=total)


@cache
def _say_miss(gpu: str, far: bool) -> None:
    """Once per process and kind of miss."""
    what = "no problem like this one has been measured" if far else "nothing has been measured"
    warnings.warn(
        f"grouped_mm: {what} on {gpu}, so backend='auto' follows a model; `expertile tune` measures", stacklevel=4
    )
