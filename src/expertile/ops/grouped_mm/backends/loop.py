"""One `torch.mm` per group: what a library without a grouped kernel does, done as well as PyTorch can.

    out[rows of g] = a[rows of g] @ b[g] (+ bias[g])          and the same for the other three layouts

The products are written straight into views of `out`: nothing is copied or concatenated, empty groups cost nothing,
and a bias of the operands' dtype rides in the product (`torch.addmm`). Where PyTorch cannot write the wanted dtype
itself, a float32 product is rounded once.

Bytes moved: each group reads its rows and its own b[g] and writes its rows, so the total is the algorithmic minimum.
What limits it: G launches one after another, each far smaller than the chip when groups are small; the host must
know the group sizes.

On a CPU `RowByRow` makes rows that do not depend on their batch: one `torch.mv` per row, of operands that always have
the same shape, strides and alignment, as BLAS libraries choose the order of a sum by those. Far slower.
"""

from dataclasses import dataclass

import torch

from expertile.ops.backend import NoConfig, Speed
from expertile.ops.grouped_mm.backend import Backend, Operands, new_out, rows_are_tokens
from expertile.ops.grouped_mm.problem import Layout, Problem

# What torch.mm and bmm(..., out_dtype=...) round to by themselves; it exists on CUDA only (torch 2.11).
_WIDER = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
_ALIGNMENT = 64  # bytes, of every tensor that torch allocates on a CPU


@dataclass(frozen=True)
class RowByRow:
    """Each row alone, on a CPU: the same bits whatever the other rows are, as long as the number of threads stays."""


def multiply(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [m, n] = x [m, k] @ y [k, n] + bias [n]; or of stacks of them, [G, …] each."""
    if out.numel() == 0:
        return
    product, with_bias = (torch.mm, torch.addmm) if x.dim() == 2 else (torch.bmm, torch.baddbmm)
    bias = bias[:, None] if bias is not None and bias.dim() == 2 else bias
    if out.dtype is x.dtype and bias is None:
        product(x, y, out=out)
    elif out.dtype is x.dtype and bias is not None and bias.dtype is x.dtype:
        with_bias(bias, x, y, out=out)
    elif x.is_cuda and (x.dtype, out.dtype) in _WIDER:
        product(x, y, out_dtype=out.dtype, out=out)
        if bias is not None:
            out += bias
    else:
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        found = product(x.to(dtype), y.to(dtype))
        out.copy_(found if bias is None else found + bias)


def _multiply_rows(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `multiply`, a row at a time."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    weight = y.t().to(dtype).contiguous()
    if weight.data_ptr() % _ALIGNMENT:
        weight = weight.clone()
    for row, target in zip(x.unbind(0), out.unbind(0), strict=True):
        product = torch.mv(weight, row.new_empty(row.shape, dtype=dtype).copy_(row))
        target.copy_(product if bias is None else product + bias)


def _groups(
    problem: Problem, operands: Operands, out: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Views (a of g, b of g, out of g) for every group g."""
    a, b = operands.a, operands.b
    if problem.layout is Layout.BATCHED:
        return a.unbind(0), b.unbind(0), out.unbind(0)
    lengths = list(problem.sizes(operands.offs))
    used = sum(lengths)

    def split(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        return x.narrow(dim, 0, used).split(lengths, dim)

    if problem.layout is Layout.RAGGED_M:
        return split(a, 0), b.unbind(0), split(out, 0)
    if problem.layout is Layout.RAGGED_N:
        return a.unbind(0), split(b, 1), split(out, 1)
    return split(a, 1), split(b, 0), out.unbind(0)


def _run(problem: Problem, operands: Operands, config: NoConfig | RowByRow, out: torch.Tensor | None) -> torch.Tensor:
    out = new_out(problem, operands, out)
    bias = operands.bias
    product = _multiply_rows if isinstance(config, RowByRow) else multiply
    for g, (x, y, z) in enumerate(zip(*_groups(problem, operands, out), strict=True)):
        if z.numel() == 0:
            continue
        if x.shape[1] == 0 and bias is None:
            z.zero_()
        else:
            product(x, y, None if bias is None else bias[g], z)
    return out


BACKEND = Backend(
    name="loop",
    summary="one torch.mm per group, written in place",
    run=_run,
    reads_offs_on_host=True,
    invariant=lambda p, device: (RowByRow(),) if device.kind == "cpu" and rows_are_tokens(p) else (),
    speed=Speed(0.72, 0.92, 1e-6, per_group_s=3.5e-6, tile=(128, 256)),
    cpu_place=lambda problem: 3,  # starting a product costs more in Python than in torch_grouped's C++
)
