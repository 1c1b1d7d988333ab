"""What makes a Python function a torch operator: who must call the operator, and how it is differentiated."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

PLAIN = (torch.Tensor, torch.nn.Parameter)
_transforms_active = torch._C._are_functorch_transforms_active  # looked up once: every call of an operator asks
_NO_SECOND = "expertile: this gradient has no derivative of its own; only the first derivative is there"


def traced(x: torch.Tensor, *beside: torch.Tensor | None) -> bool:
    """Whether x and what goes `beside` it must go to a registered operator: a compiler, a tensor subclass, torch.func
    or the meta device looks on, and there is no memory that a kernel could read (a DTensor's begins at 0)."""
    if is_compiling() or type(x) not in PLAIN or _transforms_active() or x.is_meta:
        return True
    for y in beside:  # noqa: SIM110 (any() takes twice as long, and every call asks)
        if y is not None and type(y) not in PLAIN:
            return True
    return False


def batched(x: torch.Tensor) -> bool:
    """Whether x stands for a batch of tensors and has no memory: torch.vmap's, or, of another kind, those of
    `torch.autograd.grad(…, is_grads_batched=True)`."""
    return torch._C._functorch.is_legacy_batchedtensor(x) or torch._C._functorch.is_batchedtensor(x)


def meta_alone(x: torch.Tensor) -> bool:
    """Whether x, which is `traced`, lies on the meta device and nothing else looks on: its sizes are numbers, and a
    description of it may ask for its address."""
    return x.is_meta and type(x) in PLAIN and not is_compiling() and not _transforms_active()


def no_options(**given: Any) -> None:
    """What is `traced` takes none of these options: ValueError for one that is neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected None or False under torch.compile, got another value")


def graph_is_kept() -> bool:
    """In a backward pass: whether its graph may be walked again (`retain_graph`), so that what it saved must stay.
    True under torch.compile, which does not tell, and where torch has no such question."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return is_compiling() or asked is None or bool(asked())


# (outputs' placements, inputs' placements) of one mesh dimension, as torch.distributed.tensor's register_sharding takes
# them: None for what is no tensor.
Placements = list[tuple[list[Any], list[Any]]]


def define(
    name: str,
    kernel: Callable[..., Any],
    schema: str | None = None,
    *,
    fake: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
    sharding: Callable[..., Placements] | None = None,
) -> Callable[..., Any]:
    """Register `kernel` as the operator expertile::`name` and return what calls it; `fake` makes empty results.

    `schema` may be left out where the kernel's annotations say it. `gradient(ctx, *grads)` and `setup(ctx, inputs,
    output)` are its autograd; without them it computes a gradient itself and has none. What calls it also works under
    torch.func.grad, vjp and vmap (an element at a time), for which torch's registration makes no formula (2.13).
    Gradients of gradients are those of the operators in `gradient`, or raise. `sharding(*arguments)` says how the
    operator may be split over DTensors; without, it works on whole tensors."""
    op: Any = torch.library.custom_op(f"expertile::{name}", kernel, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if gradient is None or setup is None:
        gradient, setup = _refusal(name), lambda ctx, inputs, output: None
    else:
        op.register_autograd(gradient, setup_context=setup)
    call = op._opoverload
    _shardings[call] = sharding
    functions = {
        "forward": staticmethod(lambda *arguments: call(*arguments)),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(gradient),
        "generate_vmap_rule": True,
    }
    transformed: Any = type(f"Transformed_{call._opname}", (torch.autograd.Function,), functions)

    def run(*arguments: Any) -> Any:
        _register_shardings()
        if not is_compiling() and _transforms_active():
            return transformed.apply(*arguments)
        return call(*arguments)

    return run


def row_shardings(*arguments: Any, make: Callable[..., tuple[list[Any], list[Any]]]) -> Placements:
    """The `sharding` of an operator on rows, the last dimension of its first argument: split along any other one, as
    `make(placement, *arguments)` places outputs and inputs then, or nothing is split."""
    from torch.distributed.tensor import Replicate, Shard

    return [make(Replicate(), *arguments), *(make(Shard(d), *arguments) for d in range(arguments[0].ndim - 1))]


def _refusal(name: str) -> Callable[..., Any]:
    """The gradient of an operator that has none, perhaps as it is one."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError(_NO_SECOND if name.endswith("_backward") else f"expertile: {name} has no gradient")

    return refuse


def without_gradient(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` in eager calls of the operator expertile::`name`, which has no gradient: on every device its result
    raises where one is asked for."""
    eager = differentiable_eagerly(forward, lambda ctx, inputs, output: None, _refusal(name))

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            for x in arguments:
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    return eager(*arguments)
        return forward(*arguments)

    return run


def differentiable_eagerly(
    forward: Callable[..., Any],
    setup: Callable[..., None],
    gradient: Callable[..., tuple[Any, ...]],
    second: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[..., Any]:
    """`forward`, differentiable in eager calls without the dispatch of an operator, with the operator's `gradient` and
    `setup`; they say how arguments may differ from the operator's. `second`, if given, takes the place of `gradient`
    where gradients are differentiated in turn."""

    def run(ctx: Any, *arguments: Any) -> Any:
        out = forward(*arguments)
        setup(ctx, arguments, out)
        return out

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (second if torch.is_grad_enabled() else gradient)(ctx, *grads)  # type: ignore[misc]

    functions = {"forward": staticmethod(run), "backward": staticmethod(gradient if second is None else backward)}
    eager: Any = type(f"Eager_{forward.__name__}", (torch.autograd.Function,), functions)
    return eager.apply  # type: ignore[no-any-return]


_shardings: dict[Any, Callable[..., Placements] | None] = {}  # of operators that DTensor does not know yet


def _register_shardings() -> None:
    """Tell DTensor of the operators, once it is imported: an import takes as long as importing torch."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    def whole(outputs: int, *arguments: Any) -> Placements:
        inputs = [Replicate() if hasattr(x, "placements") else None for x in arguments]
        return [([Replicate()] * outputs, inputs)]

    while _shardings:
        op, sharding = _shardings.popitem()
        register_sharding(op)(sharding or functools.partial(whole, len(op._schema.returns)))


# Run while a compiler traces, which guards nothing in here. torch.compiler.assume_constant_result sets the same, and
# imports all of torch._dynamo, which takes longer than importing torch.
_register_shardings._dynamo_marked_constant = True  # type: ignore[attr-defined]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the `backward` of an autograd.Function whose results have no history: differentiating them raises.

    torch's decorator of that name raises only if an incoming gradient has a history. That of `out.sum()` has none, and
    its second derivative would be silently wrong.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        saved = _Saved(ctx)
        with torch.no_grad():
            results = backward(saved, *grads)
        # Also of what they depend on: `torch.autograd.grad` goes no other way than to what it is asked for.
        sources = [x for x in (*saved.saved_tensors, *grads) if isinstance(x, torch.Tensor) and x.requires_grad]
        made = [g.detach().requires_grad_() for g in results if isinstance(g, torch.Tensor)]
        found = iter(_Once.apply(len(made), *made, *sources))
        return tuple(next(found) if isinstance(g, torch.Tensor) else g for g in results)

    return wrapper


class _Saved:
    """An autograd.Function's context whose tensors are asked for once: a checkpoint hands them out no second time."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(g.view_as(g) for g in inputs[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(_NO_SECOND)


def gradients_of(
    formula: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor | None, ...], grad: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `formula(*inputs)` for `grad`, which can be differentiated again where gradients are enabled;
    None for inputs without.

    For the backward pass of an autograd.Function under create_graph=True, or for a batch of gradients; `formula` is in
    differentiable operators.
    """
    with torch.enable_grad():
        # An input may have been made from another: only views of them keep their gradients apart.
        views = tuple(None if x is None else x.view_as(x) for x in inputs)
        out = formula(*views)
    wanted = [x for x in views if x is not None and x.requires_grad]
    if not out.requires_grad:  # nothing to sum: no token, no row
        return tuple(None if x is None else torch.zeros_like(x) for x in inputs)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled(), allow_unused=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in views)
