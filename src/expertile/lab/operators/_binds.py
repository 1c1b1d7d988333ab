"""How a function becomes a rival's `bind`: called as it is, imported when it is bound, or by torch.compile, for one
workload's shapes alone, as if nothing else had ever been compiled."""

import types
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch

from expertile.lab.race.operator import Bind, Call, Inputs, Workload


def one(fn: Callable[..., Any], *dims: str) -> Bind:
    """`fn(*inputs, *values of dims)`, which gives one tensor."""

    def bind(w: Workload, inputs: Inputs) -> Call:
        given = (*inputs, *(w[key] for key in dims))
        return lambda: (fn(*given),)

    return bind


def several(fn: Callable[..., Any], *dims: str) -> Bind:
    """The same of a function that gives several tensors."""

    def bind(w: Workload, inputs: Inputs) -> Call:
        given = (*inputs, *(w[key] for key in dims))
        return lambda: tuple(fn(*given))

    return bind


def with_gradients(run: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], dy: torch.Tensor) -> Call:
    """Calls `run()`: what it gives, and from `dy` the gradients of `leaves`."""

    def call() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out = run()
            return (out.detach(), *torch.autograd.grad(out, leaves, dy))

    return call


def imported(module: str, name: str, call: Callable[..., Any], how: Callable[..., Bind] = one) -> Bind:
    """`call(function, *inputs)`, where the function is that of another package, imported when it is bound."""
    return lambda w, inputs: how(partial(call, getattr(import_module(module), name)))(w, inputs)


def compiled(fn: Callable[..., Any], *dims: str) -> Bind:
    """`fn(*inputs, *values of dims)` by `compiled_call`."""
    return lambda w, inputs: compiled_call(w, fn, *inputs, *(w[key] for key in dims))


@lru_cache(maxsize=16)
def compiled_for(workload: Workload, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a plain function without a closure, compiled with static shapes for `workload`. Dynamo counts the shapes
    that one code object has met and gives up after eight: every workload gets a code object of its own."""
    name = f"{fn.__name__}_{abs(hash(workload)):x}"
    own = types.FunctionType(fn.__code__.replace(co_name=name), fn.__globals__, name, fn.__defaults__)
    return torch.compile(own, dynamic=False, fullgraph=True)


def compiled_call(workload: Workload, fn: Callable[..., Any], *args: Any) -> Call:
    """Calls `fn(*args)`, compiled for `workload`, which gives one tensor or several; compiles now."""
    run = compiled_for(workload, fn)
    with torch.no_grad():
        single = isinstance(run(*args), torch.Tensor)
    return (lambda: (run(*args),)) if single else (lambda: tuple(run(*args)))
