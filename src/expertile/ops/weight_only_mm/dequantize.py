"""expertile::weight_only_dequantize: weights in few bits -> 16 (or 32) bits, [G, N, K] or a range of K.

Computed in float32 and rounded once, as `dequantize` of the weight's class, bit for bit. Bytes: about half a byte read
and two written for every value; that is what limits it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from expertile.formats.int4.packing import words
from expertile.formats.mxfp4 import BIAS
from expertile.formats.mxfp4_fp8 import UNIT
from expertile.formats.quantized import QuantizedWeight
from expertile.formats.weight_only import kernel_layout, weight_of
from expertile.ops.launch.device import current_device
from expertile.ops.launch.versions import FP_FUSION
from expertile.ops.torch_op import define
from expertile.ops.weight_only_mm.triton_mxfp4 import power_of_two, registers, value
from expertile.ops.weight_only_mm.triton_unpack import in_order

_ROWS = 64
_TO_E8M0 = tl.constexpr(BIAS - UNIT)  # from an exponent of mxfp4_fp8 to the byte of that power of two
RANGES = 128  # a range of K begins on a multiple of this


@triton.jit
def _mxfp4_fp8(packed_ptr, scales_ptr, group, rows, N, K, first, mask):
    """Values first to first + 31 of K, float32 [rows, 32]; `formats.mxfp4_fp8` says where the bits lie. Eight of them
    load one word."""
    place = tl.arange(0, 32)
    j, half = place % 4, place // 16
    words_of_block = (group * N + rows) * (K // 8) + first // 8
    q = tl.load(packed_ptr + words_of_block[:, None] + (place % 16 // 4)[None, :], mask=mask[:, None], other=0)
    magnitude, sign = q >> (16 * half + 4 * j)[None, :], q >> (8 * j + 7 - 4 * half)[None, :]
    w = value((magnitude & 7) << 6 | (sign & 1) << 15)
    words_of_row = tl.cdiv(K, 128) + 1
    of_block, of_row = first // 128, words_of_row - 1
    exponent = tl.load(
        scales_ptr + ((group * words_of_row + of_block) * N + rows) * 4 + first % 128 // 32, mask=mask, other=0
    )
    floats = scales_ptr.to(tl.pointer_type(tl.float32))
    scale = tl.load(floats + (group * words_of_row + of_row) * N + rows, mask=mask, other=0.0)
    return w * power_of_two(exponent.to(tl.int32) + _TO_E8M0)[:, None] * scale[:, None]


@triton.jit
def _dequantize_kernel(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K,
    K_FIRST,
    K_LAST,
    HALF: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # One program: ROWS rows of one expert, BLOCKS packed blocks of each.
    group = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    keep = rows < N
    words_of_row = tl.cdiv(K, 2 * HALF) * (HALF // 4)
    packed_rows = packed_ptr + (group * N + rows)[:, None] * words_of_row + tl.arange(0, HALF // 4)[None, :]
    out_rows = out_ptr + (group * N + rows)[:, None] * (K_LAST - K_FIRST) + tl.arange(0, HALF)[None, :]
    for i in range(BLOCKS):
        k = K_FIRST + (tl.program_id(0) * BLOCKS + i) * 2 * HALF
        mask = keep & (k < K_LAST)
        if FORMAT != "mxfp4_fp8":
            q = tl.load(packed_rows + k // 8, mask=mask[:, None], other=0)
        for high in tl.static_range(2):
            first = k + high * HALF
            if FORMAT == "mxfp4_fp8":
                mask = keep & (first < K_LAST)
                w = _mxfp4_fp8(packed_ptr, scales_ptr, group, rows, N, K, first, mask)
            elif FORMAT == "mxfp4":
                low_pair, high_pair = registers(q, high)
                w = in_order(value(low_pair), value(low_pair >> 16), value(high_pair), value(high_pair >> 16))
                word = (group * tl.cdiv(K, 128) + first // 128) * N + rows
                mask = mask & (first < K_LAST)
                scale = tl.load(scales_ptr + word * 4 + first % 128 // 32, mask=mask, other=0)
                w *= power_of_two(scale)[:, None]
            else:
                scale_at = (group * (K // GROUP_SIZE) + first // GROUP_SIZE) * N + rows
                scale = tl.load(scales_ptr + scale_at, mask=mask, other=0.0).to(tl.float32)
                v = q >> (4 * high)
                w = in_order(v & 15, (v >> 16) & 15, (v >> 8) & 15, (v >> 24) & 15).to(tl.float32)
                if HAS_ZEROS:
                    w -= tl.load(zeros_ptr + scale_at, mask=mask, other=0.0).to(tl.float32)[:, None]
                else:
                    w -= 8.0
                w *= scale[:, None]
            tl.store(out_rows + (first - K_FIRST), w.to(out_ptr.dtype.element_ty), mask=mask[:, None])


def dequantize_on_gpu(w: QuantizedWeight, dtype: torch.dtype, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Values first … last - 1 of K of `w.dequantize(dtype)` in one launch on the current stream; both multiples of
    RANGES, or `last` None or K."""
    g, n, k = w.shape
    last = k if last is None else last
    out = torch.empty(g, n, last - first, dtype=dtype, device=w.device)
    if out.numel() == 0:
        return out
    half, blocks = kernel_layout(w.format, k, w.group_size).half, 4
    grid = (triton.cdiv(last - first, 2 * half * blocks), triton.cdiv(n, _ROWS), g)
    with current_device(w.device):
        _dequantize_kernel[grid](
            words(w.packed),
            w.scales,
            w.zeros,
            out,
            n,
            k,
            first,
            last,
            HALF=half,
            GROUP_SIZE=w.group_size,
            HAS_ZEROS=w.zeros is not None,
            FORMAT=w.format,
            ROWS=_ROWS,
            BLOCKS=blocks,
            **FP_FUSION,
        )
    return out


def _range(k: int, dtype: torch.dtype, first: int = 0, last: int | None = None) -> tuple[int, torch.dtype, int, int]:
    return k, dtype, first, k if last is None else last


def _dequantize(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    """[G, N, last - first] in `dtype`; not differentiable. On any device."""
    format, group_size, *of_range = rest
    k, dtype, first, last = _range(*of_range)
    w = weight_of(packed, scales, zeros, format, group_size, k)
    if w.packed.is_cuda:
        return dequantize_on_gpu(w, dtype, first, last)
    experts = [w.part(e, e + 1).dequantize(dtype)[..., first:last] for e in range(w.shape[0])]
    return torch.cat(experts) if experts else packed.new_empty((0, packed.shape[1], k), dtype=dtype)[..., first:last]


def _fake(packed: torch.Tensor, *rest: Any) -> torch.Tensor:
    _, dtype, first, last = _range(*rest[4:])
    return packed.new_empty((*packed.shape[:2], last - first), dtype=dtype)


# What calls the operator, its arguments in the order of its schema.
weight_only_dequantize = define(
    "weight_only_dequantize",
    _dequantize,
    "(Tensor packed, Tensor scales, Tensor? zeros, str format, SymInt group_size, SymInt k, ScalarType dtype, "
    "SymInt first=0, SymInt? last=None) -> Tensor",
    fake=_fake,
)
