"""What a backend of attention is: one frozen value that says what it can do, with which configs, and runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.attention.problem import Problem
from expertile.ops.launch.device import wide_dtype


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `Problem.from_tensors`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


@dataclass(frozen=True)
class Saved:
    """What the backward needs besides the operands: the forward's results and their gradients."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None


Forward = Callable[[Problem, Operands, Any], tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[[Problem, Operands, Saved, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Supports = Callable[[Problem, Device], str | None]
Configs = Callable[[Problem, Device], tuple[Any, ...]]


@dataclass(frozen=True)
class Direction:
    """One direction of a backend. `supports` is pure: the reason why not, or None. `configs` lists those worth trying,
    the default first."""

    supports: Supports
    configs: Configs
    run: Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    forward.run(problem, operands, config) -> (out like q, LSE of `new_lse`'s shape and dtype);
    backward.run(problem, operands, saved, config) -> (dq, dk, dv). LSE is exchanged between backends, so the forward of
    one and the backward of another go together.
    """

    name: str
    summary: str
    forward: Direction
    backward: Direction
    peer: bool = False  # another library's kernel

    def direction(self, backward: bool) -> Direction:
        return self.backward if backward else self.forward


def new_lse(problem: Problem, like: torch.Tensor) -> torch.Tensor:
    """An uninitialised LSE, [B, H, Lq] or [H, total_q], float32 (float64 of float64 inputs)."""
    shape = (problem.heads, problem.q_rows) if problem.packed else (problem.batch, problem.heads, problem.q_len)
    return torch.empty(shape, dtype=wide_dtype(like), device=like.device)


def lse_strides(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of LSE."""
    return (0, problem.q_rows) if problem.packed else (problem.heads * problem.q_len, problem.q_len)
