"""Operators as the lab measures them: a file for each family, which exports OPERATORS and PRESETS (see
`race/operator.py`); nothing else names it. `operators()` joins the families by operator, `presets()` by preset.
`grouped_mm` is not among them: its rivals are the backends that a run names."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType
from typing import TypeVar

from expertile.lab.operators import attention
from expertile.lab.race.operator import Operator, Rival, Workload
from expertile.lab.race.workloads import OP

__all__ = ["Operator", "Rival", "Workload", "for_cpu", "memory_workloads", "operators", "presets"]

W = TypeVar("W", bound=Workload)
Build = Callable[[], tuple[Workload, ...]]

CPU_NBYTES = 64e6  # a CPU moves that in some 10 ms
CPU_FLOPS = 5e9  # and computes that in some 100 ms

_MEMORY: Mapping[str, Build] = MappingProxyType({"attention": attention.memory_workloads})


@cache
def _families() -> tuple[ModuleType, ...]:
    files = (import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__) if file.name[0] != "_")
    return tuple(module for module in files if hasattr(module, "OPERATORS"))


@cache
def operators() -> Mapping[str, Operator]:
    """Every operator by its name, as `Workload.op` calls it."""
    return MappingProxyType({operator.name: operator for family in _families() for operator in family.OPERATORS})


@cache
def presets() -> Mapping[str, Build]:
    """The presets of all families; one that several families hold parts of lists the parts one after another."""
    parts: dict[str, list[Build]] = {}
    for family in _families():
        for name, build in family.PRESETS.items():
            parts.setdefault(name, []).append(build)
    return MappingProxyType({name: _joined(tuple(builders)) for name, builders in parts.items()})


def memory_workloads(preset: str, workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """What peak memory is measured on for `preset`: lengths that double where it has such a list, else `workloads`."""
    return _MEMORY[preset]() if preset in _MEMORY else tuple(workloads)


def for_cpu(workloads: Sequence[W]) -> tuple[W, ...]:
    """`workloads` without the calls of operators that take a CPU seconds: at most `CPU_NBYTES` to move and `CPU_FLOPS`
    to compute."""
    return tuple(w for w in workloads if w.op == OP or _light(w))


def _light(workload: Workload) -> bool:
    operator = operators()[workload.op]
    work = operator.work(workload)
    nbytes = work.nbytes if operator.set_nbytes is None else operator.set_nbytes(workload)
    return nbytes <= CPU_NBYTES and work.flops <= CPU_FLOPS


def _joined(builders: tuple[Build, ...]) -> Build:
    return lambda: tuple(workload for build in builders for workload in build())
