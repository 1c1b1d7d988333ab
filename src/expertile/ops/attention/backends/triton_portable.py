"""triton: attention in plain Triton, forward and backward, on sm_80 and later; bfloat16 and float16.

Forward: one program for each block of queries and head; backward: three kernels (`_triton_kernels`), seven products
where five are useful, no atomics. Any strides with a contiguous last dimension, any head dimension to 256 (padded to a
power of two), packed sequences, grouped-query heads. Limited by the tensor cores, of which it leaves a good part idle
on Hopper: its products wait for each other there, as Triton's pipeliner does not run softmax beside them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.attention.backend import Backend, Direction, Operands, Saved, lse_strides, new_lse
from expertile.ops.attention.backends import _statistics
from expertile.ops.attention.backends._statistics import STAT_PAD
from expertile.ops.attention.backends._triton_kernels import Shape, dkdv_kernel, dq_kernel, forward_kernel
from expertile.ops.attention.problem import Problem, row_strides
from expertile.ops.launch.device import no_triton
from expertile.ops.launch.versions import FP_FUSION
from expertile.ragged import power_of_two

_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """block_m: queries, block_n: keys of a block, whichever a program holds and whichever it goes over."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class BackwardConfig:
    dkdv: Config
    dq: Config


def _block_d(problem: Problem) -> int:
    return power_of_two(problem.head_dim, 16)


def forward(problem: Problem, operands: Operands, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    p = problem
    q, k, v = operands.q, operands.k, operands.v
    out, lse = torch.empty_like(q), new_lse(p, q)
    grid = (-(-p.q_len // config.block_m), p.batch * p.heads)
    forward_kernel[grid](
        (q, k, v, out, lse),
        (operands.cu_seqlens_q, operands.cu_seqlens_k),
        (p.q_strides, p.k_strides, p.v_strides, row_strides(out, p.packed), lse_strides(p)),
        *(p.heads, p.group, p.q_len, p.k_len, p.scale * _LOG2E),
        **_options(p, config),
    )
    return out, lse


def backward(
    problem: Problem, operands: Operands, saved: Saved, config: BackwardConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = problem
    q, k, v, dout = operands.q, operands.k, operands.v, saved.dout
    cu = (operands.cu_seqlens_q, operands.cu_seqlens_k)
    stats = _statistics.compute(p, operands, saved)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    inputs = (p.q_strides, p.k_strides, p.v_strides, row_strides(dout, p.packed))
    stat_strides = (stats.stride_b, stats.stride_h)
    numbers = (p.group, p.q_len, p.k_len, p.scale, p.scale * _LOG2E)
    dkdv_kernel[(-(-p.k_len // config.dkdv.block_n), p.batch * p.kv_heads)](
        (q, k, v, dout, dk, dv, stats.nlse, stats.ndelta),
        cu,
        (*inputs, row_strides(dk, p.packed), row_strides(dv, p.packed), stat_strides),
        *(p.kv_heads, *numbers),
        **_options(p, config.dkdv),
    )
    dq_kernel[(-(-p.q_len // config.dq.block_m), p.batch * p.heads)](
        (q, k, v, dout, dq, stats.nlse, stats.ndelta),
        cu,
        (*inputs, row_strides(dq, p.packed), stat_strides),
        *(p.heads, *numbers),
        **_options(p, config.dq),
    )
    return dq, dk, dv


def _options(p: Problem, config: Config) -> dict[str, Any]:
    shape = Shape(p.head_dim, p.causal, p.packed, config.block_m, config.block_n, _block_d(p), STAT_PAD)
    return {"SHAPE": shape, "num_warps": config.num_warps, "num_stages": config.num_stages, **FP_FUSION}


def supports(problem: Problem, device: Device) -> str | None:
    """16-bit floats on a GPU of compute capability 8.0 or later, or under the Triton interpreter."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {problem.dtype}"
    if problem.scale <= 0:
        return f"takes a positive scale, not {problem.scale}"
    return no_triton(problem, device)


def forward_configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """Blocks that fit shared memory and registers, the one expected to be fastest first."""
    d = _block_d(problem)
    if device.smem_bytes and device.smem_bytes < 160 * 1024:  # sm_86, 89, 120
        return (Config(64, 64, 4, 2),) if d <= 64 else (Config(64, 32, 8 if d > 128 else 4, 2),)
    if not device.at_least(9):
        return (Config(128, 64, 8, 3),) if d <= 128 else (Config(64, 32, 8, 2),)
    if d <= 64:
        return (Config(128, 64, 4, 3), Config(128, 128, 8, 3), Config(128, 64, 8, 3))
    if d <= 128:
        return (Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 64, 4, 3))
    return (Config(128, 32, 8, 2), Config(64, 64, 8, 2))


def backward_configs(problem: Problem, device: Device) -> tuple[BackwardConfig, ...]:
    """Blocks that fit shared memory and registers, the one expected to be fastest first. Beyond a head dimension of 128
    they only have to fit: dK and dV of 64 keys fill half of a program's registers there."""
    d = _block_d(problem)
    if device.smem_bytes and device.smem_bytes < 160 * 1024:
        if d > 128:
            return (BackwardConfig(Config(16, 32, 4, 1), Config(32, 16, 4, 1)),)
        return (BackwardConfig(Config(32, 64, 4 if d <= 64 else 8, 2), Config(64, 32, 4, 2)),)
    if d > 128:
        return (BackwardConfig(Config(16, 64, 8, 1), Config(32, 16, 4, 1)),)
    if d > 64:
        keys = 128 if device.capability == (9, 0) else 64
        return (BackwardConfig(Config(32, keys, 8, 2), Config(128, 32, 8, 2)),)
    if device.capability == (9, 0):
        return (
            BackwardConfig(Config(64, 128, 8, 2), Config(128, 64, 8, 2)),
            BackwardConfig(Config(32, 128, 8, 2), Config(128, 32, 8, 2)),
        )
    return (BackwardConfig(Config(32, 128, 8, 2), Config(128, 32, 8, 2)),)


BACKEND = Backend(
    name="triton",
    summary="Triton, pointers and masks: any strides, lengths and head dimensions to 256 (sm_80+)",
    forward=Direction(supports, forward_configs, forward),
    backward=Direction(supports, backward_configs, backward),
)
