"""Peak memory against a length, from records of one run each: a chart for each operator and dtype over the one
dimension that varies, and the words beside it."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertile.lab.race.memory import FORMULA
from expertile.lab.race.record import PEAK_BYTES, Record
from expertile.lab.report.figures import Figure, add, line, log_axis, new_mark, two_axes
from expertile.lab.report.rows import by
from expertile.lab.report.units import cell, significant

LEAST_POINTS = 3
MIB = 2.0**20


@dataclass(frozen=True)
class MemoryChart:
    """Peaks of one operator in one dtype over dimension `x`, all else equal. `points`: backend -> records, smallest x
    first; those without a peak say why."""

    op: str
    dtype: str
    x: str
    fixed: tuple[tuple[str, Any], ...]
    points: Mapping[str, tuple[Record, ...]]

    @property
    def title(self) -> str:
        """ "attention, bf16, batch 4, heads 8"."""
        return ", ".join([self.op, self.dtype, *(f"{name} {value}" for name, value in self.fixed)])

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(self.points)

    @property
    def first(self) -> Record:
        return next(iter(self.points.values()))[0]

    def measured(self, backend: str) -> tuple[tuple[float, float], ...]:
        """(x, peak in MiB) of a backend."""
        return tuple((float(r.shape[self.x]), r.value / MIB) for r in self.points[backend] if r.value)

    def formula(self, backend: str) -> tuple[tuple[float, float], ...]:
        """(x, formula in MiB) of a backend."""
        rows = self.points[backend]
        return tuple((float(r.shape[self.x]), r.details[FORMULA] / MIB) for r in rows if r.details.get(FORMULA))

    def power(self, backend: str) -> float | None:
        """The exponent by which the peak grows between the largest two lengths measured; 1 is linear, 2 quadratic."""
        found = self.measured(backend)
        if len(found) < LEAST_POINTS:
            return None
        (x0, y0), (x1, y1) = found[-2:]
        return math.log(y1 / y0) / math.log(x1 / x0)


def memory_charts(records: Iterable[Record]) -> list[MemoryChart]:
    """Of the records of peak memory: a chart for each run, operator, dtype and set of fixed dimensions that has
    `LEAST_POINTS` lengths or more, of which one was measured."""
    families = by((r for r in records if r.metric == PEAK_BYTES), lambda record: (record.run, record.op, record.dtype))
    charts = (chart for family in families.values() for chart in _charts(family))
    return [chart for chart in charts if any(map(chart.measured, chart.points))]


def figure(chart: MemoryChart, looks: Mapping[str, tuple[str, str]]) -> Figure:
    """Measured peaks as curves, formulas as dotted lines of the same colour, on two logarithmic axes."""
    marks: list[Figure] = []
    for backend in chart.points:
        found, formula = chart.measured(backend), chart.formula(backend)
        if formula:
            marks.append(line("bound", formula) | {"backend": backend, "colour": looks[backend][0], "dash": "dot"})
        if found:
            marks.append(new_mark("curve", backend, looks[backend]))
            for x, y in found:
                add(marks[-1], x, y, f"{backend}\n{chart.x} {x:g}\n{significant(y)} MiB")
    xs, ys = ([value for mark in marks for value in mark[axis]] for axis in "xy")
    return two_axes(log_axis(xs, f"{chart.x} (logarithmic)"), log_axis(ys, "MiB (logarithmic)"), marks)


def sentences(chart: MemoryChart) -> list[str]:
    """How each peak grows with the length, how near its formula it is, and what did not fit."""
    said = []
    for backend, rows in chart.points.items():
        found, power = chart.measured(backend), chart.power(backend)
        if power is not None:
            (x0, y0), (x1, y1) = found[0], found[-1]
            text = (
                f"`{backend}`: {significant(y0)} MiB at {chart.x} {x0:g}, {significant(y1)} MiB at {x1:g}; at the end "
                f"it grows as {chart.x} to the power {power:.2f}"
            )
            ratios = [r.value / r.details[FORMULA] for r in rows if r.value and r.details.get(FORMULA)]
            if ratios:
                text += f"; {min(ratios):.2f} to {max(ratios):.2f} times its formula"
            said.append(f"{text}.")
        failed = [r for r in rows if r.value is None]
        if failed:
            said.append(f"`{backend}` fails from {chart.x} {failed[0].shape[chart.x]} on: {cell(failed[0].reason)}.")
    return said


def _charts(family: Sequence[Record]) -> list[MemoryChart]:
    """Charts of one run, operator and dtype."""
    names = list(dict.fromkeys(name for record in family for name in record.shape))
    covered = {name: _groups(family, name) for name in names}
    x = max(names, key=lambda name: sum(len(group) for group in covered[name]), default="")
    return [_chart(group, x, names) for group in covered.get(x, [])]


def _groups(family: Sequence[Record], x: str) -> list[list[Record]]:
    """Records that differ in dimension `x` (and those always equal to it, as the two lengths of self-attention) and in
    nothing else, at least `LEAST_POINTS` values of it."""
    twins = _twins(family, x)

    def rest(record: Record) -> str:
        return json.dumps({name: other for name, other in record.shape.items() if name not in twins}, sort_keys=True)

    sized = (r for r in family if type(r.shape.get(x)) is int and r.shape[x] > 0)
    return [group for group in by(sized, rest).values() if len({r.shape[x] for r in group}) >= LEAST_POINTS]


def _twins(records: Sequence[Record], x: str) -> set[str]:
    """`x` and the dimensions that have its value in every record."""
    names = {name for record in records for name in record.shape}
    return {name for name in names if all(record.shape.get(name) == record.shape.get(x) for record in records)}


def _chart(group: Sequence[Record], x: str, names: Sequence[str]) -> MemoryChart:
    points: dict[str, dict[int, Record]] = {}
    for record in group:
        points.setdefault(record.backend, {})[record.shape[x]] = record
    first = group[0]
    twins = _twins(group, x)
    fixed = tuple((name, first.shape[name]) for name in names if name not in twins and name in first.shape)
    rows = {backend: tuple(at[value] for value in sorted(at)) for backend, at in points.items()}
    return MemoryChart(first.op, first.dtype, x, fixed, rows)
