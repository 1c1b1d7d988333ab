"""What every partition of a warp-specialised kernel is handed: one aggregate, made from the annotations of a class."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any, TypeVar, dataclass_transform

from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate

T = TypeVar("T")


@dataclass_transform()
def context(cls: type[T]) -> type[T]:
    """The aggregate with the annotated fields of `cls`, constructed from their values in that order; a tuple of values
    stands for several fields."""
    fields = inspect.get_annotations(cls)
    constants = {name for name, kind in fields.items() if kind is gl.constexpr}

    def __init__(self: Any, *groups: Any) -> None:
        values = chain.from_iterable(v if isinstance(v, (tuple, gl.tuple)) else (v,) for v in groups)
        for name, value in zip(fields, values, strict=True):
            setattr(self, name, gl.constexpr(value) if name in constants else value)

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton looks for nothing in its source
    cls.__init__ = __init__  # type: ignore[method-assign]
    return _aggregate(cls)
