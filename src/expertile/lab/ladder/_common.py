"""What all rungs share: which problems they take. out[rows of g] = a[rows of g] @ b[g], weights stored [G, N, K]."""

from __future__ import annotations

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands, new_out
from expertile.ops.grouped_mm.problem import Layout, Problem


def takes(problem: Problem) -> str | None:
    """The reason why no rung computes `problem`, or None: the ladder is about bf16 and fp16 forward products."""
    if problem.layout is not Layout.RAGGED_M:
        return f"the ladder is about ragged rows (2-D x 3-D), not {problem.layout.value}"
    if problem.dtype not in (torch.bfloat16, torch.float16) or problem.out_dtype is not problem.dtype:
        return f"the ladder multiplies bf16 and fp16 and writes the same, not {problem.dtype} to {problem.out_dtype}"
    return "the rungs add no bias" if problem.has_bias else None


def takes_pointers(problem: Problem, device: Device) -> str | None:
    """`takes`, and what the pointer kernels need: an sm_80 or the interpreter, and k contiguous in both operands."""
    import triton  # there are no wheels outside Linux, where rungs one and two still run

    reason = takes(problem)
    if reason is not None:
        return reason
    if not triton.knobs.runtime.interpret and (problem.device_type != "cuda" or not device.at_least(8)):
        return "needs a CUDA GPU of compute capability 8.0 or later (or TRITON_INTERPRET=1)"
    if problem.a_strides[1] != 1 or problem.b_strides[1] != 1:
        return f"reads k contiguous in both operands; strides are {problem.a_strides} and {problem.b_strides}"
    if problem.groups == 0 or problem.groups > 4096:
        return f"finds its group among 1 to 4096, not {problem.groups}"
    return None


def takes_aligned(problem: Problem, device: Device) -> str | None:
    """`takes_pointers`, and rows of 16-byte pieces, which the hints promise to the compiler."""
    reason = takes_pointers(problem, device)
    if reason is not None:
        return reason
    strides = (problem.a_strides[0], problem.b_strides[0], problem.b_strides[2], problem.n)
    if not (problem.a_aligned and problem.b_aligned) or any(s % 8 for s in strides):
        return f"promises 16-byte pieces: bases aligned, strides and n multiples of 8; strides and n are {strides}"
    return None


def result_tensor(problem: Problem, operands: Operands, out: torch.Tensor | None) -> torch.Tensor:
    """`out` or a new tensor. ValueError for rows that are not contiguous 16-byte pieces, as the rungs store them."""
    out = new_out(problem, operands, out)
    if out.stride(1) != 1 or (problem.n % 8 == 0 and (out.stride(0) % 8 or out.data_ptr() % 16)):
        raise ValueError(f"out: expected contiguous rows on 16-byte boundaries, got strides {out.stride()}")
    return out
