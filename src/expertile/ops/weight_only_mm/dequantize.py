"""expertile::int4_dequantize: the weights of an `Int4Weight` in 16 (or 32) bits, (q − zero) · scale.

packed uint8 [G, N, K/2], scales and zeros [G, K/group, N] -> [G, N, K]. Computed in float32 and rounded once, as
`Int4Weight.dequantize`, bit for bit. Bytes: half a byte read and two written for every value; that is what limits it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from expertile.formats.int4.packing import words
from expertile.formats.int4.weight import Int4Weight
from expertile.ops.launch.device import current_device
from expertile.ops.launch.versions import FP_FUSION
from expertile.ops.weight_only_mm.triton_unpack import in_order

_ROWS = 64


@triton.jit
def _dequantize_kernel(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K,
    HALF: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # One program: ROWS rows of one expert, BLOCKS packed blocks of each.
    group = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    keep = rows < N
    packed_rows = packed_ptr + (group * N + rows)[:, None] * (K // 8) + tl.arange(0, HALF // 4)[None, :]
    out_rows = out_ptr + (group * N + rows)[:, None] * K + tl.arange(0, HALF)[None, :]
    for i in range(BLOCKS):
        k = (tl.program_id(0) * BLOCKS + i) * 2 * HALF
        mask = keep & (k < K)
        q = tl.load(packed_rows + k // 8, mask=mask[:, None], other=0)
        for high in tl.static_range(2):
            first = k + high * HALF
            scale_at = (group * (K // GROUP_SIZE) + first // GROUP_SIZE) * N + rows
            scale = tl.load(scales_ptr + scale_at, mask=mask, other=0.0).to(tl.float32)
            v = q >> (4 * high)
            nibbles = in_order(v & 15, (v >> 16) & 15, (v >> 8) & 15, (v >> 24) & 15).to(tl.float32)
            if HAS_ZEROS:
                nibbles -= tl.load(zeros_ptr + scale_at, mask=mask, other=0.0).to(tl.float32)[:, None]
            else:
                nibbles -= 8.0
            w = (nibbles * scale[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_rows + first, w, mask=mask[:, None])


def dequantize_on_gpu(w: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """`w.dequantize(dtype)` in one launch on the current stream."""
    g, n, k = w.shape
    out = torch.empty(g, n, k, dtype=dtype, device=w.device)
    if out.numel() == 0:
        return out
    blocks = 4
    grid = (triton.cdiv(k, 2 * w.half * blocks), triton.cdiv(n, _ROWS), g)
    with current_device(w.device):
        _dequantize_kernel[grid](
            words(w.packed),
            w.scales,
            w.zeros,
            out,
            n,
            k,
            HALF=w.half,
            GROUP_SIZE=w.group_size,
            HAS_ZEROS=w.zeros is not None,
            ROWS=_ROWS,
            BLOCKS=blocks,
            **FP_FUSION,
        )
    return out


@torch.library.custom_op("expertile::int4_dequantize", mutates_args=())
def int4_dequantize(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """[G, N, K] in `dtype`; not differentiable. On any device."""
    w = Int4Weight(packed, scales, zeros, group_size)
    return dequantize_on_gpu(w, dtype) if w.packed.is_cuda else w.dequantize(dtype)


@int4_dequantize.register_fake
def _(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1], 2 * packed.shape[2]), dtype=dtype)
