"""Charts of one preset under one policy: share of the bound, and time.

A figure is a dictionary that the page's script draws as SVG at the width of the window:

    {"height": px, "x": axis, "y": axis, "marks": [mark, …], "labels": [label, …]}
    axis   {"range": [first, last], "log": bool, "ticks": [[value, text], …], "title": text, "top": bool}
    mark   {"kind": "bar" | "dots" | "line" | "curve", "backend", "colour", "symbol", "dash", "x": […], "y": […]}, and
           "rows": the record of each point, which its tooltip tells, or "notes": the tooltips themselves;
           "low", "high": ends of the intervals; "text": names of bars. None in x and y breaks a line.
    label  {"y", "text"} at the left edge, with "full" as its tooltip; or at "x", with "anchor" "start" or "end"

Colours are values of CSS, which follow the page's theme.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from expertile.lab.race.record import BASELINES
from expertile.lab.report.contest import Contest
from expertile.lab.report.palette import LINES, styles
from expertile.lab.report.rows import Row
from expertile.lab.report.units import percent, short

Figure = dict[str, Any]

_LINE = 19  # pixels per line of bars or text
_MOST_BARS = 130  # more would be too long to scroll through; dots on one line per workload instead
_LABEL_CHARS = 46
_PITCH = 2.2  # lines per workload in a chart of dots: its name, its dots, and air
_MOST_TICKS = 6


def share_figure(contests: Sequence[Contest]) -> Figure | None:
    """How near each backend comes to the bound, per workload; where no bound is known, to the fastest backend. Bars
    with 95 % whiskers, or dots where there are many workloads. None where nothing was timed."""
    contests = [contest for contest in contests if any(row.timed for row in contest.rows)]
    if not contests:
        return None
    bounded = any(row.share for contest in contests for row in contest.rows)

    def value(contest: Contest, row: Row) -> float | None:
        return contest.near(row, bounded)

    bars = sum(len(contest.ranked) for contest in contests)
    figure = _bars(contests, value) if bars <= _MOST_BARS else _dots(contests, value)
    highest = max(value(contest, row) or 0 for contest in contests for row in contest.rows if row.timed)
    top = max(1.02, highest * 1.02) if highest > 0.5 else highest * 1.25
    title = "share of the bound" if bounded else "speed relative to the fastest backend"
    figure["x"] = {"range": [0, top], "ticks": _percents(top), "title": title, "top": True}
    if bounded and top > 1:
        low, high = figure["y"]["range"]
        figure["marks"].insert(0, line("bound", [(1, low), (1, high)]))
    return figure


def time_figure(contests: Sequence[Contest]) -> Figure | None:
    """Times in µs on a logarithmic axis, one line per workload, with the bound as a mark. None where none was timed."""
    contests = [contest for contest in contests if any(row.timed for row in contest.rows)]
    if not contests:
        return None
    figure = _dots(contests, lambda _, row: row.seconds * 1e6, of_time=True)
    bounds = [(index, contest.sample.bound_s) for index, contest in enumerate(contests)]
    known = [(index, bound * 1e6) for index, bound in bounds if bound]
    if known:
        figure["marks"].insert(0, _strokes("bound", [(x, _dot_y(index)) for index, x in known]))
    values = [x for _, x in known] + [row.seconds * 1e6 for contest in contests for row in contest.rows if row.timed]
    figure["x"] = log_axis(values, "time, µs (logarithmic)") | {"top": True}
    return figure


def log_axis(values: Sequence[float], title: str) -> Figure:
    """A logarithmic axis around `values` with at most six readable ticks: 1, 2, 5 or powers of ten."""
    low, high = min(values) / 1.25, max(values) * 1.25
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    while len(ticks) > _MOST_TICKS:
        ticks = ticks[::2]
    return {"log": True, "range": [low, high], "ticks": [[t, f"{t:,.10g}"] for t in ticks], "title": title}


def _percents(top: float) -> list[list[Any]]:
    """Ticks from 0 to `top`, a share."""
    steps = (step * 10.0**decade for decade in range(-6, 2) for step in (1, 2, 5))
    step = next(step for step in steps if top / step < _MOST_TICKS)
    digits = max(0, -math.floor(math.log10(step)) - 2)
    return [[i * step, f"{i * step * 100:.{digits if i else 0}f} %"] for i in range(math.floor(top / step) + 1)]


def _bars(contests: Sequence[Contest], value: Callable[[Contest, Row], float | None]) -> Figure:
    looks = styles(row.backend for contest in contests for row in contest.rows)
    marks: dict[str, Figure] = {}
    lights: dict[str, list[tuple[float, float] | None]] = {name: [] for name in BASELINES}
    labels, y = [], 0.0
    for contest in contests:
        labels.append(row_label(y, contest.label))
        top = y + 0.55
        for row in contest.ranked:
            y += 1
            x = value(contest, row)
            if x is None:
                continue
            mark = marks.setdefault(row.backend, new_mark("bar", row.backend, looks[row.backend]) | {"text": []})
            add(mark, x, y, row)
            mark["text"].append(f"{short(row.backend, 22)}  {percent(x)}")
            _interval(mark, x, row)
        for row in contest.rows:
            light = value(contest, row) if row.is_baseline and row.timed else None
            if light is not None:
                lights[row.backend] += [(light, top), (light, y + 0.45), None]
        y += 1.55
    # The strokes of dense and copy under the bars: neither hides a figure.
    strokes = [line(name, points) for name, points in lights.items() if points]
    return {
        "height": round(y * _LINE) + 56,
        "y": {"range": [y - 0.9, -0.7]},
        "labels": labels,
        "marks": [*strokes, *marks.values()],
    }


def _interval(mark: Figure, x: float, row: Row, of_time: bool = False) -> None:
    """Adds the 95 % interval of a figure x that is proportional to the time, or else to its inverse."""
    ratios = [end / row.seconds for end in row.interval if end]  # of few samples it may reach down to 0
    ends = [x * ratio if of_time else x / ratio for ratio in ratios]
    mark.setdefault("low", []).append(min([x, *ends]))
    mark.setdefault("high", []).append(max([x, *ends]))


def _dots(contests: Sequence[Contest], value: Callable[[Contest, Row], float | None], of_time: bool = False) -> Figure:
    looks = styles(row.backend for contest in contests for row in contest.rows)
    marks: dict[str, Figure] = {}
    lights: dict[str, list[tuple[float, float]]] = {name: [] for name in BASELINES}
    for index, contest in enumerate(contests):
        for row in contest.rows:
            x = value(contest, row) if row.timed else None
            if x is None:
                continue
            if row.is_baseline:
                lights[row.backend].append((x, _dot_y(index)))
                continue
            mark = marks.setdefault(row.backend, new_mark("dots", row.backend, looks[row.backend]))
            add(mark, x, _dot_y(index), row)
            _interval(mark, x, row, of_time)
    strokes = [_strokes(name, points) for name, points in lights.items() if points]
    return {
        "height": round(len(contests) * _PITCH * _LINE) + 60,
        "y": {
            "range": [_PITCH * len(contests) - 0.5, -0.7],
            "ticks": [[_dot_y(index), ""] for index in range(len(contests))],
        },
        "labels": [row_label(_PITCH * index, contest.label) for index, contest in enumerate(contests)],
        "marks": [*strokes, *marks.values()],
    }


def _dot_y(index: int) -> float:
    return _PITCH * index + 0.9


def new_mark(kind: str, backend: str, look: tuple[str, str]) -> Figure:
    """A mark without points yet, in the backend's colour and marker."""
    return {"kind": kind, "backend": backend, "colour": look[0], "symbol": look[1], "x": [], "y": []}


def add(mark: Figure, x: float, y: float, tip: Row | str) -> None:
    """Adds a point, whose tooltip tells a record or is a note."""
    mark["x"].append(x)
    mark["y"].append(y)
    mark.setdefault("rows" if isinstance(tip, Row) else "notes", []).append(tip)


def two_axes(x: Figure, y: Figure, marks: Sequence[Figure], labels: Sequence[Figure] = (), height: int = 320) -> Figure:
    """A figure of two axes."""
    return {"height": height, "x": x, "y": y, "marks": marks, "labels": labels}


def line(name: str, points: Sequence[tuple[float, float] | None]) -> Figure:
    """A reference line of "bound" or a baseline; None breaks it."""
    colour, dash = LINES[name]
    xs, ys = [p[0] if p else None for p in points], [p[1] if p else None for p in points]
    return {"kind": "line", "backend": name, "colour": colour, "dash": dash, "x": xs, "y": ys}


def _strokes(name: str, points: Sequence[tuple[float, float]]) -> Figure:
    ends: list[tuple[float, float] | None] = []
    for x, y in points:
        ends += [(x, y - 0.42), (x, y + 0.42), None]
    return line(name, ends)


def row_label(y: float, text: str) -> Figure:
    """A heading at the left edge above a row, with the whole of a long one as its tooltip."""
    return {"y": y, "text": short(text, _LABEL_CHARS), **({"full": text} if len(text) > _LABEL_CHARS else {})}
