"""What all rungs share: which problems they take. out[rows of g] = a[rows of g] @ b[g], weights stored [G, N, K]."""

from dataclasses import replace
from typing import Any

import torch

from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.problem import Layout, Problem


def takes(problem: Problem) -> str | None:
    """The reason why no rung computes `problem`, or None: the ladder is about bf16 and fp16 forward products."""
    if problem.layout is not Layout.RAGGED_M:
        return f"the ladder is about ragged rows (2-D x 3-D), not {problem.layout.value}"
    if problem.dtype not in (torch.bfloat16, torch.float16) or problem.out_dtype is not problem.dtype:
        return f"the ladder multiplies bf16 and fp16 and writes the same, not {problem.dtype} to {problem.out_dtype}"
    return "the rungs add no bias" if problem.has_bias else None


def rung(backend: Backend, name: str, **changes: Any) -> Backend:
    """`backend` as a rung, on what it takes of what the ladder takes."""
    return replace(
        backend,
        name=name,
        supports=lambda problem, device: takes(problem) or backend.supports(problem, device),
        **changes,
    )
