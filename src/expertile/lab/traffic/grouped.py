"""Traffic of a grouped matrix product with ragged rows: a [M, K] times the weights b [G, K, N] of the rows' groups.

Weights of groups without rows are not read. torch's kernel as of PyTorch 2.11: aten/src/ATen/native/cuda/GroupMM.cu (a
kernel that writes the problems' addresses, and CUTLASS's grouped GEMM).
"""

from collections.abc import Sequence

from expertile.lab.traffic.model import OURS, TORCH, UNFUSED, Step, Way
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import tiles_per_group

PADDED = "padded bmm"
_BLOCK_M, _BLOCK_N = 128, 256


def grouped_ways(problem: Problem, sizes: Sequence[int]) -> tuple[Way, ...]:
    """A loop over groups, a padded batch, torch's kernel and ours, for a problem with those rows per group. ValueError
    unless it is RAGGED_M."""
    if problem.layout is not Layout.RAGGED_M:
        raise ValueError(f"layout: expected ragged_m, got {problem.layout.value}")
    size, k, n = problem.dtype.itemsize, problem.k, problem.n
    used = [rows for rows in sizes if rows]
    a, b, out = sum(used) * k * size, len(used) * k * n * size, sum(used) * n * problem.out_dtype.itemsize
    flops = 2.0 * sum(used) * k * n
    most = max(used, default=0)
    padded_a, padded_out = len(sizes) * most * k * size, len(sizes) * most * n * problem.out_dtype.itemsize
    padded_flops = 2.0 * len(sizes) * most * k * n
    whole_b = len(sizes) * k * n * size
    loop = Way(
        UNFUSED, (Step("torch.mm per group", a + b, out, flops, launches=len(used)),), note="group sizes on the host"
    )
    padded = Way(
        PADDED,
        (
            Step("pad rows", a, padded_a),
            Step("torch.bmm", padded_a + whole_b, padded_out, padded_flops),
            Step("take rows", out, out),
        ),
        note="every group as high as the highest",
    )
    again = _again(problem, sizes)
    fused = (Step("grouped GEMM", a + b, out, flops, again),)
    addresses = Step("prepare_grouped_gemm_data", 4.0 * len(sizes), 0.0)
    torch = Way(TORCH, (addresses, *fused), "aten/src/ATen/native/cuda/GroupMM.cu")
    ours = Way(OURS, fused, note=f"tiles of {_BLOCK_M} x {_BLOCK_N} read their rows and columns from L2")
    return loop, padded, torch, ours


def _again(problem: Problem, sizes: Sequence[int]) -> float:
    """Bytes that tiles read beyond the first time: each reads its rows of a and its columns of b whole."""
    across = -(-problem.n // _BLOCK_N)
    down = sum(tiles_per_group(sizes, _BLOCK_M))
    rows, groups = sum(sizes), sum(1 for rows in sizes if rows)
    extra_a = rows * problem.k * (across - 1)
    extra_b = (down - groups) * problem.k * problem.n
    return float((extra_a + extra_b) * problem.dtype.itemsize)
