"""The router's product."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.moe import _few
from expertile.moe.expert_weights import autocasts
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.torch_op import batched, traced


def router_logits(x: Tensor, router: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Tensor:
    """logits [T, E] = x [T, H] @ router [E, H]^T (+ bias [E]), in x's dtype: what `route` chooses from.

    `torch.nn.functional.linear`, gradients included; without them, for few tokens on a GPU, a kernel that takes half of
    its time there (H200, one token of Qwen3-30B-A3B, with the choice: 3.6 µs against 7.3). Raises what `linear` does.

    `batch_invariant`: a token's logits do not depend on its batch; a grouped product of one group, as `grouped_mm` has
    it, and its errors.
    """
    if batch_invariant:
        return _invariant(x, router, bias, None)
    if _few.reads_router(x, router, bias):
        return _few.logits(x, router, bias)
    return F.linear(x, router, bias)


def router_logits_and_x(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    overwrite_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """(`router_logits` of these arguments, x), for experts that read x beside the router.

        logits, x = router_logits_and_x(x, router)

    The gradient dx [T, H] that comes back to this x is added inside the product dlogits @ router, where autograd would
    take a pass over three tensors of [T, H]. The values are the same; the sum is rounded once instead of twice. With
    `batch_invariant`, under torch.autocast, torch.compile or torch.func: x itself. Raises what `router_logits` does.

    `overwrite_gradient`: the sum is written over the gradient that comes back, for which nobody else must hold that
    tensor: this x goes to `moe_mlp` alone, and has no hooks. Else cuBLAS copies it first, 2 T·H elements more to move.
    """
    fused = not batch_invariant and torch.is_grad_enabled() and x.requires_grad
    if fused and not traced(x) and not traced(router) and not autocasts(x):
        return _Beside.apply(x, router, bias, overwrite_gradient)  # type: ignore[no-any-return]
    return router_logits(x, router, bias, batch_invariant=batch_invariant), x


class _Beside(torch.autograd.Function):
    """x @ router^T + bias, and x. Its backward pass can be differentiated itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor, bias: Tensor | None, overwrite: bool) -> Any:  # type: ignore[override]
        ctx.save_for_backward(x, router)
        ctx.overwrite = overwrite
        ctx.set_materialize_grads(False)
        return F.linear(x, router, bias), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, router = ctx.saved_tensors
        if dlogits is None:
            return dx, None, None, None
        of_x, of_router, of_bias, _ = ctx.needs_input_grad
        drouter = dlogits.t() @ x if of_router else None
        dbias = dlogits.sum(0) if of_bias else None
        if not of_x:
            return None, drouter, dbias, None
        if dx is None:
            return dlogits @ router, drouter, dbias, None
        # A gradient of gradients would still need dx.
        over = dx if ctx.overwrite and not torch.is_grad_enabled() and not batched(dx) else None
        return torch.addmm(dx, dlogits, router, out=over), drouter, dbias, None


def invariant_logits_in(dtype: torch.dtype, x: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
    """Batch-invariant logits in `dtype`. 16-bit x and router stay what they are if it is float32: their products are
    exact in float32, where they are summed."""
    if not (dtype is torch.float32 and x.dtype is router.dtype and x.dtype in (torch.bfloat16, torch.float16)):
        x, router = x.to(dtype), router.to(dtype)
    return _invariant(x, router, None if bias is None else bias.to(dtype), dtype)


def _invariant(x: Tensor, router: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    bias = None if bias is None else bias[None]
    return grouped_mm(x[None], router.t()[None], bias=bias, out_dtype=dtype, batch_invariant=True)[0]
