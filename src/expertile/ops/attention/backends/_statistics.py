"""Row statistics that both backwards start from: -LSE / scale and -delta, each sequence's rows padded."""

from dataclasses import dataclass

import torch

from expertile.ops.attention.backend import Operands, Saved, lse_strides
from expertile.ops.attention.backends._triton_kernels import Shape, statistics_kernel
from expertile.ops.attention.problem import Problem, row_strides
from expertile.ops.launch.versions import FP_FUSION
from expertile.ragged import power_of_two

# A block of queries of any backward kernel divides it, so none needs a mask for its rows' statistics.
STAT_PAD = 128
_BLOCK_M = 64


@dataclass(frozen=True)
class Statistics:
    """Flat float32 tensors, read at batch * stride_b + head * stride_h + row (+ the padded start of a sequence)."""

    nlse: torch.Tensor
    ndelta: torch.Tensor
    stride_b: int
    stride_h: int


def compute(problem: Problem, operands: Operands, saved: Saved) -> Statistics:
    """Bytes: out, dout and LSE read once, two floats a row written. Limited by memory bandwidth."""
    p = problem
    if p.packed:
        rows = -(-(p.q_rows + p.batch * STAT_PAD) // STAT_PAD) * STAT_PAD
        stride_b, stride_h, total = 0, rows, p.heads * rows
    else:
        rows = -(-p.q_len // STAT_PAD) * STAT_PAD
        stride_b, stride_h, total = p.heads * rows, rows, p.batch * p.heads * rows
    nlse, ndelta = torch.empty(2, total, dtype=torch.float32, device=operands.q.device).unbind(0)
    grid = (-(-p.q_len // STAT_PAD) * (STAT_PAD // _BLOCK_M), p.batch * p.heads)
    strides = (row_strides(saved.out, p.packed), row_strides(saved.dout, p.packed), lse_strides(p))
    statistics_kernel[grid](
        (saved.out, saved.dout, saved.lse, saved.dlse, nlse, ndelta),
        (operands.cu_seqlens_q, operands.cu_seqlens_k),
        (*strides, (stride_b, stride_h)),
        *(p.heads, p.q_len, 1.0 / p.scale),
        SHAPE=Shape(p.head_dim, False, p.packed, _BLOCK_M, 0, power_of_two(p.head_dim, 16), STAT_PAD),
        num_warps=4 if p.head_dim <= 128 else 8,
        **FP_FUSION,
    )
    return Statistics(nlse, ndelta, stride_b, stride_h)
