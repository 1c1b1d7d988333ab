"""The gathered products as torch operators: what torch.compile, FakeTensor and opcheck see; and gradients of
`gathered_mm`, the one that has a derivative.

With out[r] = x[rows[r]] @ b[g] + bias[g] for row r of expert g:

    dx[t]    = Σ over rows r before offs[-1] with rows[r] = t of dout[r] @ b[g]ᵀ      a grouped product, then `sum_rows`
    db[g]    = Σ over rows r of g of x[rows[r]]ᵀ dout[r]                              gathered_wgrad
    dbias[g] = Σ over rows r of g of dout[r]                                          a ragged-K product with ones
"""

from functools import partial
from typing import Any

from torch import Tensor

from expertile.ops.backend import Request, by_backend
from expertile.ops.gathered_mm.backend import Operands
from expertile.ops.gathered_mm.problem import Product
from expertile.ops.gathered_mm.run import compute, gated_backward, wgrad
from expertile.ops.gathered_mm.sum_rows import sum_rows
from expertile.ops.grouped_mm.api import grouped_mm, plain_product
from expertile.ops.grouped_mm.autograd import bias_gradient, by_columns, laid_out
from expertile.ops.grouped_mm.tail import zero_tail
from expertile.ops.torch_op import define, differentiable_eagerly, gradients_of


def _rows_of(x: Tensor, rows: Tensor | None) -> Any:
    """R, the rows in expert order."""
    return x.shape[0] if rows is None else rows.shape[0]


def _mm(x: Tensor, b: Tensor, rows: Tensor | None, offs: Tensor, bias: Tensor | None, request: Request) -> Tensor:
    out: Tensor = compute(Product.MM, Operands(x, b, offs, rows, bias), request)[0]
    return out


def _gated(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, b, rows, offs, bias, activation, interleaved, save_pre, request = arguments
    form = {"activation": activation, "interleaved": interleaved, "save_pre": save_pre}
    act, pre = compute(Product.GATED, Operands(x, b, offs, rows, bias), request, **form)
    return act, x.new_empty((0, b.shape[-1])) if pre is None else pre


def _fake_gated(x: Tensor, b: Tensor, rows: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    r, n = _rows_of(x, rows), b.shape[-1]
    _offs, _bias, _activation, _interleaved, save_pre, _backend = rest
    return x.new_empty((r, n // 2)), x.new_empty((r if save_pre else 0, n))


def _gated_backward(*arguments: Any) -> Any:
    *tensors, activation, interleaved, request = arguments
    return gated_backward(*tensors, request=request, activation=activation, interleaved=interleaved)


def _fake_backward(
    dy: Tensor, down: Tensor, rows: Tensor | None, slots: Tensor, weights: Tensor, pre: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    r, inner = pre.shape[0], down.shape[1]
    return dy.new_empty((r, 2 * inner)), dy.new_empty((r, inner)), weights.new_empty(weights.shape)


call_gated = define(
    "gathered_gated_mm",
    by_backend(_gated),
    "(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str activation, bool interleaved, "
    "bool save_pre, str backend) -> (Tensor, Tensor)",
    fake=_fake_gated,
)
call_backward = define(
    "gated_backward_mm",
    by_backend(_gated_backward),
    "(Tensor dy, Tensor down, Tensor? rows, Tensor slots, Tensor weights, Tensor pre, Tensor offs, "
    "str activation, bool interleaved, str backend) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
call_wgrad = define(
    "gathered_wgrad",
    by_backend(wgrad),
    "(Tensor x, Tensor? rows, Tensor d, Tensor offs, bool gather_b, str backend) -> Tensor",
    fake=lambda x, rows, d, offs, *_: x.new_empty((offs.shape[0], x.shape[1], d.shape[1])),
)


def _formula(rows: Tensor | None, offs: Tensor, x: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """out [R, N], in operators that can be differentiated any number of times."""
    return grouped_mm(x if rows is None else x.index_select(0, rows), b, offs=offs, bias=bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, asked = inputs
    ctx.backend = asked.backend if isinstance(asked, Request) else asked
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """(dx, db, dbias) for `grad` [R, N] in the places of x, b and bias. In torch operators, all deterministic."""
    x, b, rows, offs, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad = laid_out(grad, x.dtype)
    dx = db = dbias = None
    if needs[0]:
        dx = plain_product(grad, b.transpose(-2, -1), offs=offs)
        dx = zero_tail(dx, offs, 0) if rows is None else sum_rows(dx, rows, offs, x.shape[0])
    if needs[1] and by_columns(b):
        db = call_wgrad(grad, rows, x, offs, True, ctx.backend).transpose(1, 2)
    elif needs[1]:
        db = call_wgrad(x, rows, grad, offs, False, ctx.backend)
    if needs[4] and bias is not None:
        dbias = bias_gradient(plain_product, grad, offs, bias)
    return dx, db, None, None, dbias, None


def _second(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """`_backward` of create_graph=True."""
    x, b, rows, offs, bias = ctx.saved_tensors
    dx, db, dbias = gradients_of(partial(_formula, rows, offs), (x, b, bias), grad)
    return dx, db, None, None, dbias, None


# What calls the operator; and gathered_mm in eager calls, with a request in place of the backend's name.
call_mm = define(
    "gathered_mm",
    by_backend(_mm),
    "(Tensor x, Tensor b, Tensor? rows, Tensor offs, Tensor? bias, str backend) -> Tensor",
    fake=lambda x, b, rows, *_: x.new_empty((_rows_of(x, rows), b.shape[-1])),
    gradient=_backward,
    setup=_setup,
)
differentiable_mm = differentiable_eagerly(_mm, _setup, _backward, _second)
