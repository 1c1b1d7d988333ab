"""weight_only_mm: the public call. Tensors -> WeightOnlyProblem (checked once) -> choose -> backend.run."""

from __future__ import annotations

from typing import Any

import torch

from expertile.formats.quantized import QuantizedWeight
from expertile.formats.weight_only import NAMES, AnyQuantizedWeight
from expertile.ops.backend import AUTO, Request
from expertile.ops.torch_op import traced
from expertile.ops.weight_only_mm import run
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem


def weight_only_mm(
    a: torch.Tensor,
    w: QuantizedWeight,
    *,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
) -> torch.Tensor:
    """Products of 16-bit activations with 4-bit weights: out[rows of group g] = a[rows of group g] @ ŵ[g]ᵀ (+ bias[g]).

    ŵ = `w.dequantize()` is made in registers, tile by tile, and never stored. The backend "dequant" alone stores it;
    `auto` takes that for many hundreds of rows per group, where it is faster. No group needs padding. Differentiable in
    a and bias; the weights are not trainable, and the gradient of a dequantises a part of them at a time.

    Args:
        a: [M, K] bfloat16 or float16, the rows of each group together. Under torch.autocast it is cast to the dtype of
            w's scales, to autocast's where these are no floating-point numbers.
        w: `Int4Weight` [G, N, K], with scales of a's dtype, or `Mxfp4Weight` [G, N, K].
        offs: [G] int32 on a's device: the END row of each group. Empty groups are allowed; rows past offs[-1] of the
            result are left as they come, and their gradient is zero.
        bias: [G, N], added to every row of its group.
        out_dtype: bfloat16, float16 or float32; that of a by default. Products accumulate in float32 always.
        backend: "auto", or a backend's name.
        config: a config of that backend (one of its `configs`); its default otherwise.
        check: also check the values of `offs`, and scales and zero points (`w.check_numbers`), which waits for the GPU.

    Returns:
        [M, N].

    Raises:
        ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    if not isinstance(w, AnyQuantizedWeight):
        raise ValueError(f"w: expected an {NAMES}, got {type(w).__name__}")
    for name, x in (("a", a), ("offs", offs), ("bias", bias)):
        if not isinstance(x, torch.Tensor) and (x is not None or name == "a"):
            raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if w.scales.requires_grad or (w.zeros is not None and w.zeros.requires_grad):
        raise ValueError("w: expected weights that need no gradient, got scales or zeros with requires_grad")
    if a.device.type != "meta" and torch.is_autocast_enabled(a.device.type):
        scales = w.scales.dtype
        a = a.to(scales if scales.is_floating_point else torch.get_autocast_dtype(a.device.type))
    if traced(a):
        if config is not None or check:
            raise ValueError("config, check: expected None and False under torch.compile, got other values")
        return run.operator(
            a, w.packed, w.scales, w.zeros, w.format, w.group_size, w.shape[2], offs, bias, out_dtype, backend
        )
    if check:
        WeightOnlyProblem.of(a, w, offs, bias, out_dtype, check=True)
    request = AUTO if backend == "auto" and config is None else Request(backend, config)
    if torch.is_grad_enabled() and (a.requires_grad or (bias is not None and bias.requires_grad)):
        return run.differentiable_mm(a, w, offs, bias, out_dtype, request)
    return run.forward(a, w, offs, bias, out_dtype, request)


int4_grouped_mm = weight_only_mm  # as it was called when INT4 was the only format
