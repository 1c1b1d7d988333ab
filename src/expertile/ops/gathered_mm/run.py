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

_T = torch.Tensor


def select(problem: GatherProblem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    auto = partial(choose, batch_invariant=request.batch_invariant)
    return backends.select(problem, device, request, by_name, auto)


_planned = backends.planner(lambda product, fields, options: describe(product, *fields, **dict(options)), select)


def compute(
    product: Product, operands: Operands, request: Request = AUTO, overwrite_pre: bool = False, **options: Any
) -> Outputs:
    """Check, plan and run: the outputs of `product` in the order of `problem`'s table. `options`: those of `describe`;
    `overwrite_pre`: of `new_outputs`."""
    o = operands
    if request.batch_invariant and isinstance(o.a, torch.Tensor) and o.a.dim() == 2:
        o = replace(o, a=in_standard_form(o.a))
    if o.a.dtype is torch.float32:
        options["allow_tf32"] = tf32_allowed()
    tensors = (o.a, o.b, o.offs, o.rows, o.bias, o.slots, o.weights, o.pre)
    fields = tuple([None if x is None else described(x) for x in tensors])
    problem, chosen, config = _planned((product, fields, tuple(options.items())), o.a.device, request)
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


def gated_backward(
    dy: _T, down: _T, rows: _T | None, slots: _T, weights: _T, pre: _T, offs: _T, *, request: Request, **options: Any
) -> Outputs:
    """BACKWARD of a down-projection [E, I, H]."""
    if down.dim() != 3:
        raise ValueError(f"down: expected 3 dimensions, got shape {list(down.shape)}")
    operands = Operands(dy, down.transpose(1, 2), offs, rows, None, slots, weights, pre)
    return compute(Product.BACKWARD, operands, request, names=("dy", "down"), **options)


def wgrad(x: _T, rows: _T | None, d: _T, offs: _T, gather_b: bool, request: Request) -> _T:
    how: dict[str, Any] = {"gather_b": bool(gather_b) and rows is not None, "names": ("x", "d")}
    out: _T = compute(Product.WGRAD, Operands(x, d, offs, rows), request, **how)[0]
    return out


def copies_rows(x: torch.Tensor, rows: torch.Tensor, columns: int, offs: torch.Tensor) -> bool:
    """Whether `wgrad` of x's gathered rows with others of `columns` columns copies x into expert order first."""
    other = ((rows.shape[0], columns), (columns, 1), x.dtype, x.device, True)
    fields = (described(x), other, described(offs), described(rows), None, None, None, None)
    options = (("gather_b", False), ("names", ("x", "d")))
    return _planned((Product.WGRAD, fields, options), x.device, AUTO)[1].name == "composed"
