"""How many operators and kernels a step of expert parallelism makes its host queue, counted on the CPU.

What a GPU runs in kernels of ours counts as their launches, whatever the formulas that stand in for them here do.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from expertile.moe import _parallel_mlp, _passes, dispatch, dispatch_formulas, permute

_TABLES = ("token_keys", "pack", "find", "unpack", "returned", "picked")
_PRODUCTS = ("gathered_gated_mm", "grouped_mm", "gated_backward_mm", "gathered_wgrad")
# More than 1024 slots are ordered in three launches (`permute`).
_OF_A_PERMUTATION = 3


class Operators(TorchDispatchMode):
    """Within the block: names of the operators that were dispatched, views, allocations and collectives among them, and
    how many kernels were launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.launches = 0
        self._within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._within:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def _kernels(self, call: Callable[..., Any], launches: int) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return call(*args, **kwargs)
            self.launches += launches
            self._within = True
            try:
                return call(*args, **kwargs)
            finally:
                self._within = False

        return counted


@contextmanager
def counted() -> Iterator[Operators]:
    """What is dispatched within, in this thread."""
    operators = Operators()
    tables = {name: operators._kernels(getattr(dispatch_formulas, name), 1) for name in _TABLES}
    combine = importlib.import_module("expertile.ops.gathered_mm.combine")
    parts: list[tuple[Any, str, int]] = [(permute, "_parts", _OF_A_PERMUTATION), (combine, "forward", 1)]
    parts += [(m, name, 1) for m in (_parallel_mlp, _passes) for name in _PRODUCTS if hasattr(m, name)]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dispatch, "_maker", lambda x: SimpleNamespace(**tables)))
        for module, name, launches in parts:
            stack.enter_context(mock.patch.object(module, name, operators._kernels(getattr(module, name), launches)))
        yield stack.enter_context(operators)
