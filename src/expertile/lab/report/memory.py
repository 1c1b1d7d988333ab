"""Peak memory against a length, from records of one run each: a chart for each operator and dtype over the one
dimension that varies, and the words beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertile.lab.race.memory import FORMULA
from expertile.lab.race.record import PEAK_BYTES, Record
from expertile.lab.report.palette import styles
from expertile.lab.report.rows import by
from expertile.lab.report.svg import Series, curves
from expertile.lab.report.units import MISSING, cell, markdown_table, significant

LEAST_POINTS = 3
_MIB = 2.0**20
_FORMULA_DASH = "2 3"


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
    def first(self) -> Record:
        return next(iter(self.points.values()))[0]

    def measured(self, backend: str) -> tuple[tuple[float, float], ...]:
        """(x, peak in MiB) of a backend."""
        return tuple((float(r.shape[self.x]), r.value / _MIB) for r in self.points[backend] if r.value)

    def formula(self, backend: str) -> tuple[tuple[float, float], ...]:
        """(x, formula in MiB) of a backend."""
        rows = self.points[backend]
        return tuple((float(r.shape[self.x]), r.details[FORMULA] / _MIB) for r in rows if r.details.get(FORMULA))

    def power(self, backend: str) -> float | None:
        """The exponent by which the peak grows between the largest two lengths measured; 1 is linear, 2 quadratic."""
        found = self.measured(backend)
        if len(found) < LEAST_POINTS:
            return None
        (x0, y0), (x1, y1) = found[-2:]
        return math.log(y1 / y0) / math.log(x1 / x0)


def memory_charts(records: Iterable[Record]) -> list[MemoryChart]:
    """Of the records of peak memory: a chart for each run, operator, dtype and set of fixed dimensions that has
    `LEAST_POINTS` lengths or more."""
    families = by((r for r in records if r.metric == PEAK_BYTES), lambda record: (record.run, record.op, record.dtype))
    return [chart for family in families.values() for chart in _charts(family)]


def memory_svg(records: Iterable[Record]) -> dict[str, str]:
    """SVG figures by name, "memory-<operator>" and a number where an operator has several."""
    found: dict[str, str] = {}
    for chart in memory_charts(records):
        if any(chart.measured(backend) for backend in chart.points):
            name = f"memory-{chart.op}".replace("_", "-")
            count = sum(other == name or other.startswith(f"{name}-") for other in found)
            found[f"{name}-{count + 1}" if count else name] = chart_svg(chart)
    return found


def memory_text(records: Iterable[Record]) -> str:
    """Markdown: every figure with how the peaks grow, and a table. Empty where nothing makes a chart."""
    records = list(records)
    parts = []
    shown = [c for c in memory_charts(records) if any(c.measured(backend) for backend in c.points)]
    for name, chart in zip(memory_svg(records), shown, strict=True):
        source = f"Recorded on {cell(chart.first.env.gpu)}, {chart.first.date[:10]}, run `{cell(chart.first.run)}`."
        said = "\n".join(f"- {sentence}" for sentence in sentences(chart))
        parts += [f"### {chart.title}", source, f"![{name}](figures/{name}.svg)", said, _table(chart)]
    return "\n\n".join(parts)


def chart_svg(chart: MemoryChart) -> str:
    """Measured peaks as curves with markers, formulas as dotted lines, on two logarithmic axes."""
    looks = styles(chart.points)
    series = []
    for backend in chart.points:
        colour, symbol = looks[backend]
        if chart.measured(backend):
            series.append(Series(backend, chart.measured(backend), colour, symbol))
        if chart.formula(backend):
            series.append(Series(f"{backend}, formula", chart.formula(backend), colour, "", _FORMULA_DASH))
    title = f"{chart.title} ({chart.first.env.gpu})"
    return curves(title, f"{chart.x} (logarithmic)", "peak memory of a call, MiB (logarithmic)", series)


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


def _table(chart: MemoryChart) -> str:
    values = sorted({r.shape[chart.x] for rows in chart.points.values() for r in rows})
    at = {(backend, r.shape[chart.x]): r for backend, rows in chart.points.items() for r in rows}
    body = [[str(value), *(_cell_of(at.get((backend, value))) for backend in chart.points)] for value in values]
    return markdown_table([f"{chart.x}, MiB", *(f"`{cell(backend)}`" for backend in chart.points)], body)


def _cell_of(record: Record | None) -> str:
    if record is None:
        return MISSING
    return "fails" if record.value is None else significant(record.value / _MIB)
