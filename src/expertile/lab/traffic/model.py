"""The nouns of memory traffic: a step reads and writes bytes, a way of computing an operator is a list of steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from expertile.device import Device
from expertile.lab.operators import operators
from expertile.lab.race.operator import Dims, Workload
from expertile.roofline import Work

UNFUSED, TORCH, OURS = "unfused", "torch", "expertile"


@dataclass(frozen=True)
class Step:
    """What one kernel (or `launches` of them) moves and computes. read, written: each tensor that it takes and makes
    once, as if nothing lay in a cache; again: further bytes that it asks for while they are still near, in L1 or L2."""

    name: str
    read: float
    written: float
    flops: float = 0.0
    again: float = 0.0
    launches: int = 1

    @property
    def nbytes(self) -> float:
        return self.read + self.written


@dataclass(frozen=True)
class Way:
    """ "unfused", "torch", "expertile", or a name of its own; `source`: files that the steps were read from; `note`:
    what the figures leave out."""

    name: str
    steps: tuple[Step, ...]
    source: str = ""
    note: str = ""

    @cached_property
    def total(self) -> Step:
        """All steps as one."""
        read, written, flops, again = (
            sum(getattr(s, name) for s in self.steps) for name in ("read", "written", "flops", "again")
        )
        return Step(self.name, read, written, flops, again, sum(s.launches for s in self.steps))


def call(op: str, dims: Dims, dtype: str) -> Workload:
    """A call whose traffic is counted; records name it by its dimensions."""
    return Workload(f"{op}-" + "x".join(str(value) for _, value in dims), "traffic", op, dims, dtype)


@dataclass(frozen=True)
class Formula:
    """How an operator's traffic is counted: its dimensions with defaults, and its ways, the most wasteful first."""

    op: str
    dims: Mapping[str, Any]
    ways: Callable[[Workload, Device], tuple[Way, ...]]
    check: Callable[[Workload], None] = lambda call: None
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")

    def work(self, call: Workload) -> Work:
        """Its useful work, as the lab's operator has it."""
        found = operators()[self.op].work(call)
        return Work(float(found.flops), float(found.nbytes))

    def subject(self, dtype: str, given: Mapping[str, Any]) -> Workload:
        """The call with `given` dimensions and defaults for the others. ValueError names what was expected and what
        came."""
        if dtype not in self.dtypes:
            raise ValueError(f"dtype: expected {', '.join(self.dtypes)} for {self.op}, got {dtype!r}")
        for key in given:
            if key not in self.dims:
                raise ValueError(f"{key}: expected {', '.join(self.dims)} for {self.op}, got {key}")
        made = call(self.op, tuple((key, given.get(key, default)) for key, default in self.dims.items()), dtype)
        for key, value in made.dims:
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{key}: expected 1 or more, got {value}")
        self.check(made)
        return made
