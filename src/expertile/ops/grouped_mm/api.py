"""grouped_mm of tensors. Tensors -> Problem -> choose (both once for shapes seen before) -> backend.run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from expertile.ops.backend import Request
from expertile.ops.backend import device_of as _device
from expertile.ops.grouped_mm.autograd import GroupedMM
from expertile.ops.grouped_mm.explain import Explanation, explain_problem
from expertile.ops.grouped_mm.problem import Problem, described
from expertile.ops.grouped_mm.run import forward, operator
from expertile.ops.torch_op import traced


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """`expertile.grouped_mm`, which says what the arguments are, where b is a tensor."""
    if batch_invariant and isinstance(b, torch.Tensor) and b.dim() == 2:
        raise ValueError("batch_invariant: expected False unless b is 3-D and rows of a are tokens, got a 2-D b")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or bias is not None:
        _require_tensors(a=a, b=b, bias=bias)
    kind = "cuda" if a.is_cuda else a.device.type
    if out is not None or accumulate:
        out_dtype = _given_out(a, b, bias, out, accumulate, out_dtype)
    if kind != "meta" and torch.is_autocast_enabled(kind):
        a, b, bias = _autocast(a, b, bias)
    if traced(a):
        if config is not None or check:
            raise ValueError("config, check: expected None and False under torch.compile, got other values")
        if a.is_meta:  # no value to look at, but the shapes
            Problem.from_descriptions(described(a), described(b), described(offs), described(bias), out_dtype)
        return operator(a, b, offs, bias, out_dtype, backend, batch_invariant)
    if check and kind == "cuda":  # on a CPU the values of offs are always checked
        Problem.from_tensors(a, b, offs, bias, out_dtype, check=True)
    product: Any = forward
    if backend != "auto" or config is not None or batch_invariant:
        product = partial(forward, request=Request(backend, config, batch_invariant))
    if out is not None:
        product = partial(product, out=out, accumulate=accumulate)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        over_rows = partial(forward, request=Request(backend, config)) if batch_invariant else product
        return GroupedMM.apply(product, over_rows, a, b, offs, bias, out_dtype)
    return product(a, b, offs=offs, bias=bias, out_dtype=out_dtype)


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Explanation:
    """Which backend `grouped_mm` would use for these operands, why, what bounds it, and what the others would take.

    Reads `offs` on the host (this waits for the GPU) to say how full the tiles are. Same errors as `grouped_mm`.
    """
    problem = Problem.from_tensors(a, b, offs, bias, out_dtype, check=True)
    return explain_problem(problem, _device(a.device.type, a.device.index))


def _require_tensors(**arguments: Any) -> None:
    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor) and (x is not None or name != "bias"):
            raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def _given_out(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """The dtype of `out`, which is to take the result; `forward` looks at its shape."""
    if out is None:
        raise ValueError("accumulate: expected a tensor `out` to add to, got None")
    if accumulate and not (a.dim() == 2 and b.dim() == 2):
        raise ValueError(f"accumulate: expected 2-D a and b (a weight gradient), got {a.dim()}-D and {b.dim()}-D")
    if traced(a):
        raise ValueError("out: expected None under torch.compile and for meta tensors, got a tensor")
    inputs = (a, b, *(() if bias is None else (bias,)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, out)):
        raise ValueError("out: expected operands without gradients (torch.no_grad), got one that requires its gradient")
    if out_dtype is not None and out_dtype is not out.dtype:
        raise ValueError(f"out_dtype: expected that of out, {out.dtype}, or None, got {out_dtype}")
    return out.dtype


def _autocast(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What torch.autocast does to a matrix product: floating operands in the autocast dtype."""
    dtype = torch.get_autocast_dtype(a.device.type)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x

    return cast(a), cast(b), None if bias is None else cast(bias)
