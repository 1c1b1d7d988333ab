"""Counts what torch operators move: every operator that makes a tensor reads its inputs once and writes it once."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Views in all but name: they hand on the same storage.
_VIEWS = {"aten::_unsafe_view", "aten::detach", "aten::alias"}
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::scalar_tensor"}


def _nbytes(x: torch.Tensor) -> int:
    """Of the elements that are there: an expanded dimension counts once."""
    sizes = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    return torch.Size(sizes).numel() * x.element_size()


@dataclass
class Moved:
    """`ops` in order, with bytes read and written by each."""

    ops: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def read(self) -> int:
        return sum(r for _, r, _ in self.ops)

    @property
    def written(self) -> int:
        return sum(w for _, _, w in self.ops)


class Counter(TorchDispatchMode):
    """Within the block, `moved` collects what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = Moved()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name in _VIEWS or name in _ALLOCATIONS:
            return result
        taken = {(x.data_ptr(), x.shape): _nbytes(x) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        made = [x for x in tree_leaves(result) if torch.is_tensor(x)]
        out = (kwargs or {}).get("out")
        if out is not None:
            taken.pop((out.data_ptr(), out.shape), None)
        self.moved.ops.append((name, sum(taken.values()), sum(map(_nbytes, made))))
        return result


def count(call: Any) -> Moved:
    """What `call()` moves."""
    with Counter() as counter:
        call()
    return counter.moved
