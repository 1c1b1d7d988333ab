"""The gathered products without autograd: tensors -> GatherProblem (checked once) -> choose -> backend."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from expertile.device import Device
from expertile.ops import backend as backends
from expertile.ops.backend import AUTO, Request
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs, new_outputs
from expertile.ops.gathered_mm.backends import by_name
from expertile.ops.gathered_mm.choose import choose
from expertile.ops.gathered_mm.problem import GatherProblem, Product, describe
from expertile.ops.grouped_mm.problem import described, in_standard_form, tf32_allowed


def select(problem: GatherProblem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    auto = partial(choose, batch_invariant=request.batch_invariant)
    return backends.select(problem, device, request, by_name, auto)


_planned = backends.planner(lambda product, fields, options: describe(product, *fields, **dict(options)), select)


def _run(
    product: Product,
    operands: Operands,
    options: tuple[tuple[str, Any], ...],
    request: Request,
    overwrite_pre: bool = False,
) -> Outputs:
    """Check, plan and run."""
    o = operands
    if request.batch_invariant and isinstance(o.a, torch.Tensor) and o.a.dim() == 2:
        o = replace(o, a=in_standard_form(o.a))
    if o.a.dtype is torch.float32:
        options = (*options, ("allow_tf32", tf32_allowed()))
    tensors = (o.a, o.b, o.offs, o.rows, o.bias, o.slots, o.weights, o.pre)
    fields = tuple([None if x is None else described(x) for x in tensors])
    problem, chosen, config = _planned((product, fields, options), o.a.device, request)
    outputs = new_outputs(problem, o, overwrite_pre)
    if 0 in (problem.m, problem.n, problem.k, problem.groups):
        return _empty_sums(problem, o, outputs)
    chosen.run(problem, _contiguous(o), config, outputs)
    return outputs


def _contiguous(o: Operands) -> Operands:
    """The operands, indices, routing weights and pre-activation contiguous."""
    small = {"offs": o.offs, "rows": o.rows, "slots": o.slots, "weights": o.weights, "pre": o.pre}
    apart = {name: x.contiguous() for name, x in small.items() if x is not None and not x.is_contiguous()}
    return replace(o, **apart) if apart else o


def _empty_sums(problem: GatherProblem, operands: Operands, outputs: Outputs) -> Outputs:
    """Outputs where there is nothing to compute, or nothing to sum: products are zero."""
    if problem.product is Product.WGRAD:
        return tuple(None if out is None else out.zero_() for out in outputs)
    if problem.k == 0 and problem.m and problem.n and problem.groups:
        from expertile.ops.gathered_mm.reference import BACKEND

        BACKEND.run(problem, operands, None, outputs)
    return outputs


def mm(
    x: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    request: Request = AUTO,
) -> torch.Tensor:
    (out,) = _run(Product.MM, Operands(x, b, offs, rows, bias), (), request)
    assert out is not None
    return out


def gated(
    x: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    save_pre: bool,
    request: Request = AUTO,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    options = (("activation", activation), ("interleaved", bool(interleaved)), ("save_pre", bool(save_pre)))
    act, pre = _run(Product.GATED, Operands(x, b, offs, rows, bias), options, request)
    assert act is not None
    return act, pre


def backward(
    dy: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor | None,
    slots: torch.Tensor,
    weights: torch.Tensor,
    pre: torch.Tensor,
    offs: torch.Tensor,
    activation: str,
    interleaved: bool,
    request: Request = AUTO,
    overwrite_pre: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if down.dim() != 3:
        raise ValueError(f"down: expected 3 dimensions, got shape {list(down.shape)}")
    options = (("activation", activation), ("interleaved", bool(interleaved)), ("names", ("dy", "down")))
    operands = Operands(dy, down.transpose(1, 2), offs, rows, None, slots, weights, pre)
    dpre, act_w, dweights = _run(Product.BACKWARD, operands, options, request, overwrite_pre)
    assert dpre is not None and act_w is not None and dweights is not None
    return dpre, act_w, dweights


def wgrad(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    d: torch.Tensor,
    offs: torch.Tensor,
    gather_b: bool,
    request: Request = AUTO,
) -> torch.Tensor:
    options = (("gather_b", bool(gather_b) and rows is not None), ("names", ("x", "d")))
    (out,) = _run(Product.WGRAD, Operands(x, d, offs, rows), options, request)
    assert out is not None
    return out


def copies_rows(x: torch.Tensor, rows: torch.Tensor, columns: int, offs: torch.Tensor) -> bool:
    """Whether `wgrad` of x's gathered rows with others of `columns` columns copies x into expert order first."""
    other = ((rows.shape[0], columns), (columns, 1), x.dtype, x.device, True)
    fields = (described(x), other, described(offs), described(rows), None, None, None, None)
    options = (("gather_b", False), ("names", ("x", "d")))
    return _planned((Product.WGRAD, fields, options), x.device, AUTO)[1].name == "composed"
