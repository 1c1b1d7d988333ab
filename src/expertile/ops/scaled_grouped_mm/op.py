"""expertile::scaled_grouped_mm as a torch operator: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

import torch

from expertile.ops.backend import Request
from expertile.ops.scaled_grouped_mm import run
from expertile.ops.torch_op import define


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return run.forward(a, b, scale_a, scale_b, offs=offs, bias=bias, out_dtype=out_dtype, request=Request(backend))


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    m, n = a.shape[0], b.shape[-1]
    if b.dim() == 3:
        return a.new_empty((m, n), dtype=out_dtype)
    if offs is None:
        raise ValueError("offs: expected an int32 tensor for a 2-D by 2-D product, got None")
    return a.new_empty((offs.shape[0], m, n), dtype=out_dtype)


# What calls the operator, its arguments in the order of its schema.
operator = define("scaled_grouped_mm", _kernel, fake=_fake)
