"""The routing weights' gradient from the row sums that a fused epilogue leaves, one column of tiles each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from expertile.ops.launch.kernels import launch

_BLOCK = 256


@triton.jit(do_not_specialize=["groups", "rows", "tiles"])
def _add_kernel(sums_ptr, slots_ptr, offs_ptr, dweights_ptr, groups, rows, tiles, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = r < tl.load(offs_ptr + groups - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(tiles):
        total += tl.load(sums_ptr + r, mask=used, other=0.0)
        sums_ptr += rows
    tl.store(dweights_ptr + tl.load(slots_ptr + r, mask=used, other=0), total, mask=used)


def add_row_sums(sums: torch.Tensor, slots: torch.Tensor, offs: torch.Tensor, dweights: torch.Tensor) -> None:
    """dweights[slots[r]] = Σ_n sums[n, r] for r < offs[-1], in order of n; sums [tiles, R] float32."""
    tiles, rows = sums.shape
    numbers = (offs.shape[0], rows, tiles)
    launch(_add_kernel, -(-rows // _BLOCK), (sums, slots, offs, dweights), numbers, (_BLOCK,), num_warps=4)
