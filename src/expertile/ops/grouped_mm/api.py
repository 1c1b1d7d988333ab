"""grouped_mm of tensors: tensors -> Problem -> choose (both once for shapes seen before) -> backend.run; and
expertile::grouped_mm as a torch operator: what torch.compile, FakeTensor and opcheck see.

With backend="measure" the first call with a problem races the candidates (`ops.measure`) in place of choosing."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.formats.quantized import found
from expertile.ops import backend as backends
from expertile.ops.backend import AUTO, Request, planner
from expertile.ops.backend import device_of as _device
from expertile.ops.checks import check_own_memory, require_tensors
from expertile.ops.grouped_mm.autograd import Product, differentiable_mm, gradients
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.choose import choose, choose_invariant, promising, rounded
from expertile.ops.grouped_mm.problem import ALL_DTYPES, Problem, described, in_standard_form, tf32_allowed
from expertile.ops.grouped_mm.transfer import Rival
from expertile.ops.measure import MEASURE, winner
from expertile.ops.torch_op import Placements, define, meta_alone, no_options, traced
from expertile.timers import GraphTimer, sets_for


def grouped_mm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """`expertile.grouped_mm`, which says what the arguments are, where b is a tensor."""
    if batch_invariant and isinstance(b, Tensor) and b.dim() == 2:
        raise ValueError("batch_invariant: expected False unless b is 3-D and rows of a are tokens, got a 2-D b")
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or bias is not None:
        require_tensors({"bias": bias}, a=a, b=b)
    kind = "cuda" if a.is_cuda else a.device.type
    if out is not None or accumulate:
        out_dtype = _given_out(a, b, bias, out, accumulate, out_dtype)
    if kind != "meta" and torch.is_autocast_enabled(kind):
        a, b, bias = _autocast(a, b, bias)
    if traced(a, b, offs, bias):
        require_tensors({"offs": offs}, a=a)  # only here: what is no tensor is traced
        no_options(config=config, check=check)
        if meta_alone(a):  # no value to look at, but the shapes
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
        return differentiable_mm(product, over_rows, a, b, offs, bias, out_dtype)
    return product(a, b, offs=offs, bias=bias, out_dtype=out_dtype)


def _given_out(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None, accumulate: bool, out_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of `out`, which is to take the result; `forward` looks at its shape."""
    if out is None:
        raise ValueError("accumulate: expected a tensor `out` to add to, got None")
    if not isinstance(out, Tensor) or out.dtype not in ALL_DTYPES:
        raise ValueError(f"out: expected a tensor of one of {ALL_DTYPES}, got {found(out)}")
    if accumulate and not (a.dim() == 2 and b.dim() == 2):
        raise ValueError(f"accumulate: expected 2-D a and b (a weight gradient), got {a.dim()}-D and {b.dim()}-D")
    if traced(a, b, bias, out):
        raise ValueError("out: expected None under torch.compile and for meta tensors, got a tensor")
    inputs = (a, b, *(() if bias is None else (bias,)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, out)):
        raise ValueError("out: expected operands without gradients (torch.no_grad), got one that requires its gradient")
    if out_dtype is not None and out_dtype is not out.dtype:
        raise ValueError(f"out_dtype: expected that of out, {out.dtype}, or None, got {out_dtype}")
    return out.dtype


def _autocast(a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What torch.autocast does to a matrix product: floating operands in the autocast dtype."""
    dtype = torch.get_autocast_dtype(a.device.type)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x

    return cast(a), cast(b), None if bias is None else cast(bias)


def select(problem: Problem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    # Working configs out takes longer than a call: they are kept for rounded problems.
    return backends.select(
        problem, device, request, by_name, choose_invariant if request.batch_invariant else choose, rounded
    )


_planned = planner(Problem.from_descriptions, select)


def forward(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    request: Request = AUTO,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    if measures := request.backend == MEASURE:
        if request.config is not None or request.batch_invariant:
            raise ValueError(
                "config, batch_invariant: expected None and False with backend='measure', got other values"
            )
        request = AUTO
    if request.batch_invariant:
        a = in_standard_form(a)
    if request.config is None and (offs is None or getattr(offs, "is_cuda", False)):
        tf32 = a.dtype is torch.float32 and tf32_allowed()
        fields = (described(a), described(b), described(offs), described(bias), out_dtype, tf32)
        problem, chosen, config = _planned(fields, a.device, request)
    else:  # the values of offs are part of the problem, or the caller names a config
        problem = Problem.from_tensors(a, b, offs, bias, out_dtype)
        chosen, config = select(problem, _device(a.device.type, a.device.index), request)
    if out is not None:
        if tuple(out.shape) != tuple(problem.out_shape) or out.device != a.device:
            expected = f"{list(problem.out_shape)} on {a.device}"
            raise ValueError(f"out: expected {expected}, got {list(out.shape)} on {out.device}")
        check_own_memory("out", out, a=a, b=b)
    if offs is not None and not offs.is_contiguous():
        offs = offs.contiguous()
    operands = Operands(a, b, offs, bias)
    if measures and a.is_cuda:
        fastest = raced(problem, operands, _device(a.device.type, a.device.index))
        chosen, config = fastest.backend, fastest.config
    if accumulate and out is not None:
        if chosen.add is None and request.backend == AUTO.backend:
            chosen, config = _adding(rounded(problem), _device(a.device.type, a.device.index)) or (chosen, config)
        if chosen.add is None:
            return out.add_(chosen.run(problem, operands, config, None))
        return chosen.add(problem, operands, config, out)
    return chosen.run(problem, operands, config, out)


@lru_cache(maxsize=1024)
def _adding(problem: Problem, device: Device) -> tuple[Backend, Any] | None:
    """What `auto` chooses of the backends that add as they store, or None."""
    able = tuple(b for b in BACKENDS if b.add is not None and b.supports(problem, device) is None)
    choice = choose(problem, device, able, quiet=True) if able else None
    return None if choice is None else (choice.backend, choice.config)


def raced(problem: Problem, operands: Operands, device: Device) -> Rival:
    """The fastest of what `promising` names, by a race on copies of these operands at the problem's first call."""

    def sets() -> list[Operands]:
        room = 0.5 * torch.cuda.mem_get_info(operands.a.device)[0]
        copies = sets_for(int(problem.work().nbytes), device.l2_bytes, room) - 1
        return [operands, *(replace(operands, a=_copy(operands.a), b=_copy(operands.b)) for _ in range(copies))]

    return winner(
        ("grouped_mm", rounded(problem), device),
        lambda: promising(problem, device),
        sets,
        lambda rival, given: rival.backend.run(problem, given, rival.config, None),
        GraphTimer(operands.a.device),
    )


def _copy(x: Tensor) -> Tensor:
    """x with its strides; itself where elements share memory."""
    return x if 0 in x.stride() else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _kernel(*arguments: Any) -> Tensor:
    a, b, offs, bias, out_dtype, name, batch_invariant = arguments
    return forward(a, b, offs, bias, out_dtype, Request(name, None, batch_invariant))


def _fake(a: Tensor, b: Tensor, offs: Any, bias: Any, out_dtype: torch.dtype | None, *_: Any) -> Any:
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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
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


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, offs, bias = ctx.saved_tensors

    def product(batch_invariant: bool) -> Product:
        return lambda x, y, offs, out_dtype: operator(x, y, offs, None, out_dtype, ctx.backend, batch_invariant)

    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    da, db, dbias = gradients(product(ctx.batch_invariant), grad, a, b, offs, bias, needs, product(False))
    return da, db, None, dbias, None, None, None


# What calls the operator, its arguments in the order of its schema.
operator = define(
    "grouped_mm",
    _kernel,
    "(Tensor a, Tensor b, Tensor? offs, Tensor? bias, ScalarType? out_dtype, str backend, bool batch_invariant)"
    " -> Tensor",
    fake=_fake,
    gradient=_backward,
    setup=_setup,
    sharding=_sharding,
)


def plain_product(a: Tensor, b: Tensor, *, offs: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """The operator for the backward pass of another one: no bias, nothing to choose."""
    return operator(a, b, offs, None, out_dtype, "auto", False)
