"""sum_rows: the transpose of a gather. out[t] = Σ over r < offs[-1] with rows[r] = t of d[r], in order of r.

d [R, K] and out [T, K] of one dtype, the sum in float32; no atomics, so the same bits every time. Rows are brought into
the order of their tokens by a stable sort of R indices, and a program sums the run of one token. Bytes: d once, out
once, and some 40 bytes a row for the sort: memory limits it. Where the place of every token's rows is known
(`Permutation.positions`), `combine` does the same without a sort.
"""

import torch
import triton
import triton.language as tl

from expertile.ops.launch.device import current_device, on_kernels
from expertile.ops.launch.versions import FP_FUSION
from expertile.ops.torch_op import define
from expertile.ragged import power_of_two


@triton.jit(do_not_specialize=["d_stride"])
def _sum_rows_kernel(d_ptr, order_ptr, starts_ptr, out_ptr, K, d_stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """One program for BLOCK columns of a token. K and d_stride are given in units of UNIT elements."""
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < K * UNIT
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)):
        row = tl.load(order_ptr + i).to(tl.int64)
        acc += tl.load(d_ptr + row * d_stride * UNIT + cols, mask=inside, other=0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * K * UNIT + cols, out, mask=inside)


def _sum_rows(d: torch.Tensor, rows: torch.Tensor, offs: torch.Tensor, tokens: int) -> torch.Tensor:
    """[tokens, K] from d [R, K], rows [R] int32 and offs [E] int32; rows past offs[-1] take no part."""
    count, k = d.shape
    key = torch.where(torch.arange(count, device=d.device) < offs[-1], rows, tokens) if count else rows
    if not on_kernels(d):
        out = torch.zeros((tokens + 1, k), dtype=torch.float32, device=d.device)
        return out.index_add_(0, key, d.float())[:tokens].to(d.dtype)
    out = d.new_empty((tokens, k))
    if tokens == 0 or k == 0:
        return out
    ordered, order = key.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(tokens + 1, device=d.device, dtype=rows.dtype), out_int32=True)
    d = d if d.stride(1) == 1 else d.contiguous()
    unit = 16 if k % 16 == 0 and d.stride(0) % 16 == 0 else 1
    block = min(1024, power_of_two(k, 128))
    with current_device(d.device):
        _sum_rows_kernel[(tokens, triton.cdiv(k, block))](
            d, order, starts, out, k // unit, d.stride(0) // unit, UNIT=unit, BLOCK=block, num_warps=4, **FP_FUSION
        )
    return out


sum_rows = define("sum_rows", _sum_rows, fake=lambda d, rows, offs, tokens: d.new_empty((tokens, d.shape[1])))
