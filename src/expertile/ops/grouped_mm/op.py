"""expertile::grouped_mm as a torch operator: what torch.compile, FakeTensor and opcheck see."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from expertile.ops.backend import Request
from expertile.ops.grouped_mm import run
from expertile.ops.grouped_mm.autograd import gradients
from expertile.ops.torch_op import Placements, define


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    backend: str,
    batch_invariant: bool,
) -> torch.Tensor:
    request = Request(backend, None, batch_invariant)
    return run.forward(a, b, offs=offs, bias=bias, out_dtype=out_dtype, request=request)


def _fake(a: torch.Tensor, b: torch.Tensor, offs: Any, bias: Any, out_dtype: torch.dtype | None, *_: Any) -> Any:
    m, n = a.shape[-2], b.shape[-1]
    if a.dim() == 3 and b.dim() == 3:
        shape: tuple[Any, ...] = (a.shape[0], m, n)
    elif a.dim() == 2 and b.dim() == 2:
        if offs is None:
            raise ValueError("offs: expected an int32 tensor for a 2-D by 2-D product, got None")
        shape = (offs.shape[0], m, n)
    else:
        shape = (m, n)
    return a.new_empty(shape, dtype=a.dtype if out_dtype is None else out_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, offs, bias, _, ctx.backend, ctx.batch_invariant = inputs
    ctx.save_for_backward(a, b, offs, bias)


def _sharding(a: Any, b: Any, offs: Any, bias: Any, out_dtype: Any, *_: Any) -> Placements:
    """How DTensors may be placed over one dimension of a mesh; `offs` is whole on every rank."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, ends = Replicate(), None if offs is None else Replicate()
    # (out, a, b, bias) of what splits the rows, the columns or the sum, by the dimensions of a and b.
    if a.ndim == 3 and b.ndim == 3:
        ways: list[tuple[Any, ...]] = [
            (Shard(0), Shard(0), Shard(0), Shard(0)),
            (Shard(1), Shard(1), whole, whole),
            (Shard(2), whole, Shard(2), Shard(1)),
        ]
    elif a.ndim == 2 and b.ndim == 2:
        ways = [(Shard(1), Shard(0), whole, None), (Shard(2), whole, Shard(1), None)]
    elif a.ndim == 2:
        ways = [(Shard(1), whole, Shard(2), Shard(1))]
    else:
        ways = [(Shard(0), Shard(1), whole, None)]
    ways.append((whole, whole, whole, whole))
    if bias is None:  # partial sums would each have it
        ways += [(Partial(), Partial(), whole, None), (Partial(), whole, Partial(), None)]
        if (a.ndim, b.ndim) != (2, 2):  # each rank would hold the rows of other groups
            ways.append((Partial(), Shard(a.ndim - 1), Shard(b.ndim - 2), None))
    return [([out], [x, y, ends, None if bias is None else z, None, None, None]) for out, x, y, z in ways]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b, offs, bias = ctx.saved_tensors

    def product(
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool = ctx.batch_invariant,
    ) -> torch.Tensor:
        return operator(x, y, offs, None, out_dtype, ctx.backend, batch_invariant)

    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    da, db, dbias = gradients(product, grad, a, b, offs, bias, needs, partial(product, batch_invariant=False))
    return da, db, None, dbias, None, None, None


# What calls the operator, its arguments in the order of its schema.
operator = define("grouped_mm", _kernel, fake=_fake, gradient=_backward, setup=_setup, sharding=_sharding)
