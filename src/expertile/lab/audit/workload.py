"""What was computed at a place in the report: the readings of its FLOPs and bytes, nearest stated sizes first."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.lab.audit import vocabulary
from expertile.lab.audit.dims import Shape
from expertile.lab.audit.report import Place, Report
from expertile.lab.audit.work import Reading, readings

_COMPUTE = ("gemm", "grouped_gemm", "moe", "attention")


@dataclass(frozen=True)
class Workload:
    """`readings` of one operation; `remote` says which far-off configuration they come from ("" if stated nearby)."""

    operation: str
    readings: tuple[Reading, ...]
    remote: str = ""

    @property
    def least_flops(self) -> Reading | None:
        """The reading with the fewest FLOPs."""
        counted = [r for r in self.readings if r.flops]
        return min(counted, key=lambda r: r.flops or 0.0) if counted else None

    @property
    def least_bytes(self) -> Reading:
        """The reading with the fewest bytes."""
        return min(self.readings, key=lambda r: r.nbytes)

    @property
    def standard(self) -> Reading:
        """The reading tried first."""
        return next((r for r in self.readings if r.standard), self.readings[0])


def itemsize(report: Report, place: Place, operation: str) -> tuple[float, bool]:
    """(bytes per value, whether the text says so): the narrowest format named, or the narrowest plausible one."""
    bits = [vocabulary.FORMAT_BITS[f] for f in report.formats(place)]
    if bits:
        return min(bits) / 8, True
    return (1.0 if operation in _COMPUTE else 2.0), False


def nearby(report: Report, place: Place) -> Workload | str:
    """The workload from sizes stated around `place`, or the reason there is none."""
    operation = report.operation(place)
    if operation is None:
        return "the text does not say which operation this is"
    size, _ = itemsize(report, place, operation)
    dims: dict[str, int] = {}
    shapes: tuple[Shape, ...] = ()
    reason = "no sizes are stated for it"
    guess: Workload | None = None
    for scope in report.scopes(place):
        dims = {**scope.dims, **dims}
        shapes = shapes or scope.shapes
        found = readings(operation, dims, shapes, size)
        if isinstance(found, str):
            reason = found
        elif all("(square)" in r.how for r in found):
            guess = Workload(operation, found)  # unless the text further out names the third size
        else:
            return Workload(operation, found)
    return guess or reason


def remote(report: Report, place: Place) -> list[Workload]:
    """The workloads of configurations stated elsewhere (tables of models, command lines), if the place has none."""
    operation = report.operation(place)
    if operation is None:
        return []
    size, _ = itemsize(report, place, operation)
    local: dict[str, int] = {}
    for scope in report.scopes(place):
        local = {**scope.dims, **local}
    found = []
    for config in report.remote_configs:
        work = readings(operation, {**config.dims, **local}, config.shapes, size)
        if not isinstance(work, str):
            found.append(Workload(operation, work, config.why))
    return found
