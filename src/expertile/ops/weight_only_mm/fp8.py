"""FP8 activations times 4-bit weights: what `scaled_grouped_mm` calls where b is a quantised weight.

Its torch operator, expertile::fp8_weight_only_mm, has no gradient, as that of `scaled_grouped_mm`.
"""

from typing import Any

import torch

from expertile.formats.quantized import QuantizedWeight
from expertile.formats.weight_only import weight_of
from expertile.ops.backend import AUTO, Request, by_backend
from expertile.ops.torch_op import define, meta_alone, no_options, traced, without_gradient
from expertile.ops.weight_only_mm.api import forward
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem


def fp8_weight_only_mm(
    a: torch.Tensor,
    w: QuantizedWeight,
    scale_a: torch.Tensor,
    *,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
) -> torch.Tensor:
    """out[rows of group g] = (a ∘ scale_a)[rows of group g] @ ŵ[g]ᵀ (+ bias[g]), [M, N]; see `scaled_grouped_mm`."""
    if traced(a, w.packed, bias):
        no_options(config=config, check=check)
        if meta_alone(a):  # no value to look at, but the shapes
            WeightOnlyProblem.of(a, w, offs, bias, out_dtype, scale_a=scale_a)
        return operator(a, scale_a, *w.parts, offs, bias, out_dtype, backend)
    if check:
        WeightOnlyProblem.of(a, w, offs, bias, out_dtype, check=True, scale_a=scale_a)
        infinite = int((~torch.isfinite(scale_a)).sum())
        if infinite:
            raise ValueError(f"scale_a: expected finite scales, got {infinite} that are NaN or infinite")
    request = AUTO if backend == "auto" and config is None else Request(backend, config)
    return _eager(a, w, offs, bias, out_dtype, request, scale_a)


def _kernel(a: torch.Tensor, scale_a: torch.Tensor, *rest: Any) -> torch.Tensor:
    *parts, offs, bias, out_dtype, request = rest
    return forward(a, weight_of(*parts), offs, bias, out_dtype, request, scale_a)


def _fake(a: torch.Tensor, scale_a: torch.Tensor, packed: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, out_dtype, _backend = rest
    return a.new_empty((a.shape[0], packed.shape[1]), dtype=out_dtype)


_eager = without_gradient("fp8_weight_only_mm", forward)
# What calls the operator, its arguments in the order of its schema.
operator = define(
    "fp8_weight_only_mm",
    by_backend(_kernel),
    "(Tensor a, Tensor scale_a, Tensor packed, Tensor scales, Tensor? zeros, str format, SymInt group_size, SymInt k, "
    "Tensor? offs, Tensor? bias, ScalarType out_dtype, str backend) -> Tensor",
    fake=_fake,
)
