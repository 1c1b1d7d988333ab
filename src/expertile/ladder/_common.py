"""What rungs share: which problems they take, and how the pointer kernels of rungs three to five start.

out[rows of g] = a[rows of g] @ b[g], weights stored [G, N, K]."""

from dataclasses import replace
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out
from expertile.ops.grouped_mm.persistent import tile_options, tiles_bound, tiles_of
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch.device import current_device, no_triton, program_count
from expertile.ops.launch.versions import FP_FUSION


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


def takes_pointers(problem: Problem, device: Device) -> str | None:
    """`takes`, and what the pointer kernels need: an sm_80 or the interpreter, and k contiguous in both operands."""
    if reason := takes(problem) or no_triton(problem, device):
        return reason
    if problem.a_strides[1] != 1 or problem.b_strides[1] != 1:
        return f"reads k contiguous in both operands; strides are {problem.a_strides} and {problem.b_strides}"
    if problem.groups == 0 or problem.groups > 4096:
        return f"finds its group among 1 to 4096, not {problem.groups}"
    return None


def takes_aligned(problem: Problem, device: Device) -> str | None:
    """`takes_pointers`, and rows of 16-byte pieces, which the hints promise to the compiler."""
    if reason := takes_pointers(problem, device):
        return reason
    strides = (problem.a_strides[0], problem.b_strides[0], problem.b_strides[2], problem.n)
    if not (problem.a_aligned and problem.b_aligned) or any(s % 8 for s in strides):
        return f"promises 16-byte pieces: bases aligned, strides and n multiples of 8; strides and n are {strides}"
    return None


def launch(
    kernel: Any, problem: Problem, operands: Operands, config: Any, out: torch.Tensor | None, **constants: Any
) -> torch.Tensor:
    """Run a pointer kernel, its tile sizes those of `config`, into `out` or a new tensor: a program for each tile, or
    with `config.blocks_per_sm` so many for each SM. `constants` are its others.

    ValueError for rows of `out` that are not contiguous 16-byte pieces, as the rungs store them.
    """
    out, p, device = new_out(problem, operands, out), problem, operands.a.device
    if out.stride(1) != 1 or (p.n % 8 == 0 and (out.stride(0) % 8 or out.data_ptr() % 16)):
        raise ValueError(f"out: expected contiguous rows on 16-byte boundaries, got strides {out.stride()}")
    tiles = tiles_of(p, config.block_m, config.block_n, config.block_k)
    programs, resident = tiles_bound(tiles, p.groups, p.m, p.n), vars(config)
    if "blocks_per_sm" in resident:
        programs = program_count(device, programs, resident["blocks_per_sm"])
    if p.m and p.n:
        with current_device(device):
            kernel[(programs,)](
                *(operands.a, operands.b, out, operands.offs, p.n, p.k, p.groups),
                *(p.a_strides[0], p.b_strides[0], p.b_strides[2], out.stride(0)),
                **tile_options(tiles, config),
                **constants,
                **FP_FUSION,
            )
    return out
