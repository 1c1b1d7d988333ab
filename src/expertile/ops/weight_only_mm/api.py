"""int4_grouped_mm: the public call. Tensors -> WeightOnlyProblem (checked once) -> choose -> backend.run."""

from __future__ import annotations

from typing import Any

import torch

from expertile.formats.int4.weight import Int4Weight
from expertile.ops.backend import AUTO, Request
from expertile.ops.torch_op import traced
from expertile.ops.weight_only_mm import op
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem
from expertile.ops.weight_only_mm.run import forward


def int4_grouped_mm(
    a: torch.Tensor,
    w: Int4Weight,
    *,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
) -> torch.Tensor:
    """Products of 16-bit activations with 4-bit weights: out[rows of group g] = a[rows of group g] @ ŵ[g]ᵀ (+ bias[g]).

    ŵ = (q − zero) · scale is made in registers, tile by tile, and never stored (except by the backend "dequant", which
    `auto` takes for many hundreds of rows per group, where it is faster). No group needs padding. Differentiable in a
    and bias; the weights are not trainable, and the gradient of a dequantises them all.

    Args:
        a: [M, K] bfloat16 or float16, the rows of each group together. Under torch.autocast it is cast to w's dtype.
        w: `Int4Weight` [G, N, K], with scales of a's dtype.
        offs: [G] int32 on a's device: the END row of each group. Empty groups are allowed; rows past offs[-1] of the
            result are left as they come, and their gradient is zero.
        bias: [G, N], added to every row of its group.
        out_dtype: bfloat16, float16 or float32; that of a by default. Products accumulate in float32 always.
        backend: "auto", or a backend's name.
        config: a config of that backend (one of its `configs`); its default otherwise.
        check: also check the values of `offs`, that scales are below 2^27 in magnitude and zero points finite, which
            waits for the GPU.

    Returns:
        [M, N].

    Raises:
        ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    if not isinstance(w, Int4Weight):
        raise ValueError(f"w: expected an Int4Weight, got {type(w).__name__}")
    for name, x in (("a", a), ("offs", offs), ("bias", bias)):
        if not isinstance(x, torch.Tensor) and (x is not None or name == "a"):
            raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if w.scales.requires_grad or (w.zeros is not None and w.zeros.requires_grad):
        raise ValueError("w: expected weights that need no gradient, got scales or zeros with requires_grad")
    if a.device.type != "meta" and torch.is_autocast_enabled(a.device.type):
        a = a.to(w.dtype)
    if traced(a):
        if config is not None or check:
            raise ValueError("config, check: expected None and False under torch.compile, got other values")
        return op.operator(a, w.packed, w.scales, w.zeros, w.group_size, offs, bias, out_dtype, backend)
    if check:
        WeightOnlyProblem.of(a, w, offs, bias, out_dtype, check=True)
    request = AUTO if backend == "auto" and config is None else Request(backend, config)
    if torch.is_grad_enabled() and (a.requires_grad or (bias is not None and bias.requires_grad)):
        return op.differentiable_mm(a, w, offs, bias, out_dtype, request)
    return forward(a, w, offs, bias, out_dtype, request)
