"""What every partition of a warp-specialised kernel is handed: one aggregate, made from the annotations of a class."""

import inspect
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar, dataclass_transform

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate, constexpr

from expertile.ragged import power_of_two

T = TypeVar("T")


@dataclass_transform()
def context(cls: type[T]) -> type[T]:
    """The aggregate with the annotated fields of `cls`, constructed from their values in that order; a tuple of values
    stands for several fields. A field annotated with a NamedTuple stands for all fields of that, each a constant."""
    fields: dict[str, Any] = {}
    for name, kind in inspect.get_annotations(cls).items():
        fields |= dict.fromkeys(kind._fields, gl.constexpr) if hasattr(kind, "_fields") else {name: kind}
    constants = {name for name, kind in fields.items() if kind is gl.constexpr}

    def __init__(self: Any, *groups: Any) -> None:
        values = chain.from_iterable(map(_values, groups))
        for name, value in zip(fields, values, strict=True):
            setattr(self, name, gl.constexpr(value) if name in constants else value)

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton looks for nothing in its source
    cls.__annotations__ = fields
    cls.__init__ = __init__  # type: ignore[method-assign]
    return _aggregate(cls)


def context_of(descriptors: str, shared: str, tensors: str, constants: type) -> Any:
    """A `context` with fields of these names, in this order: TMA descriptors, shared memory, tensors and numbers, and
    those of the NamedTuple `constants`."""
    kinds = ((descriptors, tma.tensor_descriptor), (shared, gl.shared_memory_descriptor), (tensors, gl.tensor))
    fields = {name: kind for names, kind in kinds for name in names.split()}
    return context(type("Context", (), {"__annotations__": fields | {"shape": constants}}))


def shape_of(kind: Any, config: Any, problem: Any, **others: Any) -> Any:
    """The constants `kind` of a kernel: `others`, those of its ring and its plan, and for each other field the
    attribute of its name in small letters, of `config` or else of `problem`."""
    given = {"GROUPS_POW2": power_of_two(problem.groups, 32), "STAGES": config.num_stages} | others
    named = {name: name.lower() for name in kind._fields if name not in given}
    return kind(**given, **{name: getattr(config if hasattr(config, n) else problem, n) for name, n in named.items()})


def options_of(
    shape: Any, consumers: int, registers: tuple[int, int], num_warps: int = 4, pdl: bool = False
) -> dict[str, Any]:
    """A launch's options for a Shape: the `registers` of a consumer's thread and of the producer's; `pdl`: it may
    start while the kernel before it ends.

    At launch all have equal shares of the file of 65536, by warps in fours. The first consumer gets what the others and
    the producer leave: as many as they."""
    warps = -(-(num_warps * consumers + 1) // 4) * 4
    most = min(65536 // (32 * warps) // 8 * 8, 248)
    return {"SHAPE": shape, "REGISTERS": registers, "num_warps": num_warps, "maxnreg": most, "launch_pdl": pdl}


def _values(group: Any) -> Iterable[Any]:
    """Of one field or of several. A NamedTuple comes from a kernel's compile-time constant."""
    value = group.value if isinstance(group, constexpr) else group
    return value if isinstance(value, (tuple, gl.tuple)) else (group,)
