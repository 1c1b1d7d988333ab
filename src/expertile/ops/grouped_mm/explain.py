"""Explanation: one problem in numbers, and why a backend was chosen for it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from expertile.device import Device
from expertile.ops.backend import Choice, Estimate
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.choose import choose
from expertile.ops.grouped_mm.model import group_sizes_or_even
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import tile_waste, tiles_per_group
from expertile.roofline import Bound, Work, bound

# A launch that a CUDA graph does not hide; measured on an H200 by `expertile bench --preset diagnose`.
EAGER_LAUNCH_S = 5e-6


@dataclass(frozen=True)
class Explanation:
    """What bounds a problem on a device and which backend takes it; `str()` gives the sentences."""

    problem: Problem
    device: Device
    work: Work
    bound: Bound
    choice: Choice[Any] | None  # None when no backend can run here
    refusal: str
    block_m: int
    block_n: int
    tiles: int
    waves: float
    padding: float  # share of tile rows that hold no useful row
    launch_share: float  # of an eager call that runs at the bound

    def __repr__(self) -> str:
        chosen = self.refusal if self.choice is None else self.choice.backend.name
        return (
            f"<Explanation {self._problem()}: {chosen}, bound {self.bound.seconds * 1e6:.4g} µs ({self.bound.limiter})>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _problem(self) -> str:
        p = self.problem
        return f"{p.layout.value}: {p.groups} groups, M={p.m} N={p.n} K={p.k}, {p.operands} on {self.device.name}"

    def __str__(self) -> str:
        w = self.work
        unit = "FLOP/byte"
        lines = [
            self._problem(),
            f"work: {w.flops / 1e9:.4g} GFLOP, {w.nbytes / 1e6:.4g} MB, {w.intensity:.1f} {unit}",
            f"bound: {self.bound.seconds * 1e6:.4g} µs ({self.bound.limiter})"
            if self.device.kind != "cpu"
            else f"bound: {self.bound.seconds:.3g} s by FLOPs; expertile bench measures this CPU's peak and memory",
        ]
        if self.device.kind == "cuda":
            lines += [
                f"tiles of {self.block_m}x{self.block_n}: {self.tiles}, {self.waves:.2f} waves over "
                f"{self.device.sm_count} SMs, {self.padding:.1%} padding",
                f"launch: {self.launch_share:.1%} of an eager call at the bound",
            ]
        if self.choice is None:
            return "\n".join([*lines, f"backend: none ({self.refusal})"])
        lines.append(f"backend: {self.choice.why}")
        able = [e for e in self.choice.estimates if e.seconds is not None]
        lines += [f"  {e.backend:<16} {self._time(e):>12}  {e.reason}" for e in able]
        reasons: dict[str, list[str]] = {}
        for e in self.choice.estimates:
            if e.seconds is None:
                reasons.setdefault(re.split(r"[(:;]", e.reason)[0].strip(), []).append(e.backend)
        told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
        return "\n".join([*lines, *([f"  cannot: {told}"] if told else [])])

    def _time(self, estimate: Estimate) -> str:
        # On a CPU a rule gives the order of preference, and no time is modelled.
        seconds = estimate.seconds or 0.0
        return f"{seconds * 1e6:.4g} µs" if self.device.kind == "cuda" else "can"


def _choose(problem: Problem, device: Device) -> Choice[Backend]:
    return choose(problem, device, quiet=True)


def explain_problem(
    problem: Problem, device: Device, choose: Callable[[Any, Device], Choice[Any]] = _choose
) -> Explanation:
    """Explain `problem` on `device`, which need not be present; `choose` is that of its operator.

    The choice is the one that `grouped_mm` makes: on a GPU it does not know the group sizes, even where `problem` does.
    """
    work = problem.work()
    limit = bound(work, device, problem.dtype_key)
    choice, refusal = None, ""
    try:
        choice = choose(problem.with_sizes(None) if device.kind == "cuda" else problem, device)
    except ValueError as e:
        refusal = str(e)
    config = choice.config if choice is not None else None
    block_m, block_n = getattr(config, "block_m", 128), getattr(config, "block_n", 128)
    sizes = group_sizes_or_even(problem)
    if problem.layout is Layout.RAGGED_K:
        sizes = (problem.m,) * problem.groups
    across = problem.m if problem.layout is Layout.RAGGED_N else problem.n
    tiles = sum(tiles_per_group(sizes, block_m)) * -(-across // block_n)
    launch = EAGER_LAUNCH_S if device.kind == "cuda" else 0.0
    share = launch / (launch + limit.seconds) if launch else 0.0
    geometry = (block_m, block_n, tiles, tiles / device.sm_count, tile_waste(sizes, block_m))
    return Explanation(problem, device, work, limit, choice, refusal, *geometry, share)
