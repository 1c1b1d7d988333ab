"""The block `memory` of docs/results/attention.md and its figures: peak memory against a length."""

from collections.abc import Iterable

from expertile.lab.race.record import Record
from expertile.lab.report.memory import MIB, MemoryChart, memory_charts, sentences
from expertile.lab.report.palette import styles
from expertile.lab.report.units import MISSING, cell, markdown_table, significant
from tools.pages.svg import Series, curves

_FORMULA_DASH = "2 3"


def memory_svg(records: Iterable[Record]) -> dict[str, str]:
    """SVG figures by name, "memory-<operator>" and a number where an operator has several."""
    found: dict[str, str] = {}
    for chart in memory_charts(records):
        name = f"memory-{chart.op}".replace("_", "-")
        count = sum(other == name or other.startswith(f"{name}-") for other in found)
        found[f"{name}-{count + 1}" if count else name] = _svg(chart)
    return found


def memory_text(records: Iterable[Record]) -> str:
    """Markdown: every figure with how the peaks grow, and a table. Empty where nothing makes a chart."""
    records = list(records)
    parts = []
    for name, chart in zip(memory_svg(records), memory_charts(records), strict=True):
        source = f"Recorded on {cell(chart.first.env.gpu)}, {chart.first.date[:10]}, run `{cell(chart.first.run)}`."
        said = "\n".join(f"- {sentence}" for sentence in sentences(chart))
        parts += [f"### {chart.title}", source, f"![{name}](figures/{name}.svg)", said, _table(chart)]
    return "\n\n".join(parts)


def _svg(chart: MemoryChart) -> str:
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


def _table(chart: MemoryChart) -> str:
    values = sorted({r.shape[chart.x] for rows in chart.points.values() for r in rows})
    at = {(backend, r.shape[chart.x]): r for backend, rows in chart.points.items() for r in rows}
    body = [[str(value), *(_cell_of(at.get((backend, value))) for backend in chart.points)] for value in values]
    return markdown_table([f"{chart.x}, MiB", *(f"`{cell(backend)}`" for backend in chart.points)], body)


def _cell_of(record: Record | None) -> str:
    if record is None:
        return MISSING
    return "fails" if record.value is None else significant(record.value / MIB)
