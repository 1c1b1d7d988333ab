"""The cases that every backend of attention is held to, and the check of a result against the reference."""

import math
from dataclasses import dataclass, replace

import torch

from expertile.ops.attention import reference
from expertile.ops.attention.backend import Operands, Saved
from expertile.ops.attention.problem import Problem


@dataclass(frozen=True)
class Case:
    """`q_lens`, `k_lens`: one length, or those of packed sequences. `rows_first`: stored [B, L, H, D]."""

    name: str
    q_lens: int | tuple[int, ...]
    k_lens: int | tuple[int, ...]
    dim: int = 64
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    rows_first: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def packed(self) -> bool:
        return isinstance(self.q_lens, tuple)


CASES = (
    Case("one block", 64, 64),
    Case("causal", 150, 150, causal=True, batch=2),
    Case("grouped heads", 130, 200, heads=4, kv_heads=2, causal=True),
    Case("one key head", 70, 140, heads=3, kv_heads=1, rows_first=True),
    Case("more queries than keys", 200, 70, causal=True),
    Case("one query", 1, 77, causal=True),
    Case("one key", 33, 1),
    Case("packed", (100, 0, 37, 1, 130), (100, 3, 60, 0, 70), causal=True, heads=4, kv_heads=2),
    Case("packed, all keys", (5, 150), (140, 9), kv_heads=1),
    Case("fp16, own scale", 80, 80, dtype=torch.float16, scale=0.3),
    Case("D 40", 70, 70, dim=40, causal=True),
    Case("D 96", 70, 90, dim=96, causal=True),
    Case("D 128", 140, 140, dim=128, causal=True),
    Case("D 256", 66, 70, dim=256, causal=True),
)


@dataclass(frozen=True)
class Made:
    problem: Problem
    operands: Operands
    dout: torch.Tensor
    out: torch.Tensor  # float32 truth
    lse: torch.Tensor
    grads: tuple[torch.Tensor, ...]

    @property
    def saved(self) -> Saved:
        return Saved(self.out.to(self.problem.dtype), self.lse, self.dout)


def make(case: Case, device: str = "cpu", seed: int = 0) -> Made:
    """Operands, and what is right of them."""
    generator = torch.Generator().manual_seed(seed)

    def rand(lens: int | tuple[int, ...], heads: int) -> torch.Tensor:
        if isinstance(lens, tuple):
            x = torch.randn(sum(lens), heads, case.dim, generator=generator)
        elif case.rows_first:
            x = torch.randn(case.batch, lens, heads, case.dim, generator=generator)
        else:
            x = torch.randn(case.batch, heads, lens, case.dim, generator=generator)
        x = x.to(device=device, dtype=case.dtype)
        return x.transpose(1, 2) if case.rows_first else x

    q, dout = (rand(case.q_lens, case.heads) for _ in range(2))
    k, v = (rand(case.k_lens, case.kv_heads) for _ in range(2))
    cu_q = cu_k = max_q = max_k = None
    if isinstance(case.q_lens, tuple) and isinstance(case.k_lens, tuple):
        cu_q, cu_k = (torch.tensor((0, *lens)).cumsum(0).int().to(device) for lens in (case.q_lens, case.k_lens))
        max_q, max_k = max(case.q_lens), max(case.k_lens)
    problem = Problem.from_tensors(q, k, v, cu_q, cu_k, max_q, max_k, case.causal, case.scale)
    wide = Operands(*(x.float() for x in (q, k, v)), cu_q, cu_k)
    out, lse = reference.forward(problem, wide)
    grads = reference.backward(problem, wide, Saved(out, lse, dout.float()))
    return Made(problem, Operands(q, k, v, cu_q, cu_k), dout, out, lse, grads)


def on_gpu(problem: Problem) -> Problem:
    """The problem as it would be described on a GPU."""
    return replace(problem, device_type="cuda")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; infinite where anything is not finite."""
    got, want = got.float(), want.float()
    if not bool(torch.isfinite(got).all()):
        return math.inf
    norm = float(want.norm())
    return float((got - want).norm()) / norm if norm else float(got.norm())


def tolerance(dtype: torch.dtype) -> float:
    """P is rounded to the input's dtype before the second product: half a unit in its last place, and some."""
    return {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}.get(dtype, 1e-5)


def check_forward(made: Made, out: torch.Tensor, lse: torch.Tensor) -> None:
    assert out.dtype is made.problem.dtype and lse.dtype is torch.float32
    assert out.shape == made.operands.q.shape and lse.shape == made.lse.shape
    found = error(out, made.out)
    assert found < tolerance(made.problem.dtype), f"out is off by {found:.2e}"
    torch.testing.assert_close(lse, made.lse, atol=1e-4, rtol=1e-4)


def check_backward(made: Made, grads: tuple[torch.Tensor, ...], which: tuple[int, ...] = (0, 1, 2)) -> None:
    for name, got, want in zip(("dq", "dk", "dv")[which[0] :], grads, [made.grads[i] for i in which], strict=False):
        assert got.dtype is made.problem.dtype and got.shape == want.shape
        found = error(got, want)
        if float(want.norm()) < 1e-4 * want.numel() ** 0.5:
            # Zero but for rounding (dq and dk of a single key): what cancels has entries around one.
            found = float(got.float().norm()) / want.numel() ** 0.5
        assert found < tolerance(made.problem.dtype), f"{name} is off by {found:.2e}"
