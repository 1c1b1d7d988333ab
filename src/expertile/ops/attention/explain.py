"""Explanation: one attention in numbers, forward and backward, and why its backends were chosen."""

import math
from dataclasses import dataclass
from html import escape

from expertile.device import Device
from expertile.ops.attention.backend import Backend
from expertile.ops.attention.choose import choose
from expertile.ops.attention.problem import Problem
from expertile.ops.backend import Choice
from expertile.roofline import Bound, Work, bound


@dataclass(frozen=True)
class Explanation:
    """What bounds a problem on a device and which backends take it; `str()` gives the sentences."""

    problem: Problem
    device: Device
    forward_work: Work
    backward_work: Work
    forward_bound: Bound
    backward_bound: Bound
    forward: Choice[Backend]
    backward: Choice[Backend]
    unfused_bytes: float  # that matmul, softmax, matmul move: the scores written and read twice more

    @property
    def why(self) -> str:
        """The sentence about the forward."""
        return self.forward.why

    def __repr__(self) -> str:
        return f"<Explanation {self._problem()}: {self.forward.backend.name}, backward {self.backward.backend.name}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _problem(self) -> str:
        p = self.problem
        return (
            f"{'causal ' if p.causal else ''}attention: batch {p.batch}, heads {p.heads} over {p.kv_heads}, "
            f"{p.q_len} x {p.k_len}{' packed' if p.packed else ''}, D={p.head_dim}, {p.dtype_key} on {self.device.name}"
        )

    def __str__(self) -> str:
        lines = [self._problem()]
        for name, work, limit, choice in (
            ("forward", self.forward_work, self.forward_bound, self.forward),
            ("backward", self.backward_work, self.backward_bound, self.backward),
        ):
            lines.append(
                f"{name}: {work.flops / 1e9:.4g} GFLOP, {work.nbytes / 1e6:.4g} MB, {work.intensity:.0f} FLOP/byte; "
                f"bound {limit.seconds * 1e6:.4g} µs ({limit.limiter})"
            )
            lines.append(f"  {choice.why}")
            for c in choice.estimates:
                time = "" if c.seconds is None else f"{c.seconds * 1e6:.4g} µs, "
                lines.append(f"    {c.backend:<14} {time}{c.reason}")
        lines.append(f"unfused, the scores go through memory: {self.unfused_bytes / 1e6:.4g} MB")
        return "\n".join(lines)


def unfused_bytes(problem: Problem) -> float:
    """Bytes of matmul, softmax, matmul: what the fused forward moves, and the [Lq, Lk] scores of every head written and
    read by each of the two steps between (masked ones too)."""
    p = problem
    return p.work().nbytes + 4 * p.heads * p.batch * math.prod(p.mean_lengths) * p.dtype.itemsize


def explain_problem(problem: Problem, device: Device) -> Explanation:
    """Explain `problem` on `device`, which need not be present. ValueError where no backend takes it."""
    forward, backward = works = problem.work(), problem.backward_work()
    bounds = bound(forward, device, problem.dtype_key), bound(backward, device, problem.dtype_key)
    choices = choose(problem, device, False), choose(problem, device, True)
    return Explanation(problem, device, *works, *bounds, *choices, unfused_bytes(problem))
