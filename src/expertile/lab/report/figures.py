"""Charts of one preset under one policy, as plotly figure dictionaries: share of the bound, and time.

Colours that depend on the page's theme are tokens ("@fg", "@muted", "@grid", "@bg"), replaced in the browser. Workload
names stand above their rows, inside the plot, so that long names cost no width on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from expertile.lab.report.contest import Contest
from expertile.lab.report.palette import baseline_style, styles, text_on
from expertile.lab.report.rows import BASELINES, Row
from expertile.lab.report.units import micros, percent, rate, short, spread, times

Figure = dict[str, Any]

_LINE = 19  # pixels per line of bars or text
_MOST_BARS = 130  # more would be too long to scroll through; dots on one line per workload instead
_LABEL_CHARS = 46
_PITCH = 2.2  # lines per workload in a chart of dots: its name, its dots, and air


def share_figure(contests: Sequence[Contest]) -> Figure | None:
    """How near each backend comes to the bound, per workload; where no bound is known, to the fastest backend.

    Bars with 95 % whiskers, or dots where there are many workloads. None where nothing was timed.
    """
    contests = [contest for contest in contests if any(row.timed for row in contest.rows)]
    if not contests:
        return None
    bounded = any(row.share for contest in contests for row in contest.rows)
    value = _share if bounded else _relative
    bars = sum(len(contest.ranked) for contest in contests)
    figure = _bars(contests, value) if bars <= _MOST_BARS else _dots(contests, value)
    highest = max(value(contest, row) or 0 for contest in contests for row in contest.rows if row.timed)
    top = max(1.02, highest * 1.02) if highest > 0.5 else highest * 1.25
    figure["layout"]["xaxis"] |= {
        "range": [0, top],
        "tickformat": ".0%" if top > 0.08 else ".1%",
        "nticks": 6,
        "title": {
            "text": "share of the bound" if bounded else "speed relative to the fastest backend",
            "standoff": 6,
        },
    }
    if bounded and top > 1:
        low, high = figure["layout"]["yaxis"]["range"]
        figure["data"].insert(0, _line("bound", [(1, low), (1, high)], "@accent", "solid"))
    if bars <= _MOST_BARS:
        _bar_labels(figure, top)
    return figure


def time_figure(contests: Sequence[Contest]) -> Figure | None:
    """Times in µs on a logarithmic axis, one line per workload, with the bound as a mark. None where none was timed."""
    contests = [contest for contest in contests if any(row.timed for row in contest.rows)]
    if not contests:
        return None
    figure = _dots(contests, lambda _, row: row.time_s and row.time_s * 1e6)
    bounds = [(index, contest.sample.bound_s) for index, contest in enumerate(contests)]
    known = [(index, bound * 1e6) for index, bound in bounds if bound]
    if known:
        figure["data"].insert(0, _marks("bound", [(x, _dot_y(index)) for index, x in known], "@accent", "solid"))
        figure["data"][0]["hovertemplate"] = "bound %{x:.4~g} µs<extra></extra>"
    values = [x for _, x in known] + [
        row.time_s * 1e6 for contest in contests for row in contest.rows if row.timed and row.time_s
    ]
    figure["layout"]["xaxis"] |= {
        **log_axis(values),
        "title": {"text": "time, µs (logarithmic)", "standoff": 6},
    }
    return figure


def log_axis(values: Sequence[float]) -> Figure:
    """Range and at most six readable ticks (1, 2, 5 or powers of ten) of a logarithmic axis."""
    low, high = min(values) / 1.25, max(values) * 1.25
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 6:
            break
    while len(ticks) > 6:
        ticks = ticks[::2]
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:,.10g}" for tick in ticks],
    }


def base_layout(height: int, **more: Any) -> Figure:
    """What all charts share: transparent paper, theme tokens, no legend (the page has one for all charts)."""
    axis = {
        "gridcolor": "@grid",
        "zerolinecolor": "@grid",
        "linecolor": "@grid",
        "automargin": True,
        "fixedrange": True,
    }
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "@fg"},
        "margin": {"l": 8, "r": 14, "t": 40, "b": 12, "pad": 0},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "@bg",
            "bordercolor": "@grid",
            "font": {"color": "@fg", "size": 12},
            "align": "left",
        },
        "xaxis": dict(axis),
        "yaxis": dict(axis),
        **more,
    }


def hover(contest: Contest, row: Row) -> str:
    """The tooltip of one measurement; text from records is escaped."""
    lines = [
        f"<b>{escape(short(row.backend, 40))}</b>, {escape(row.policy)}",
        escape(short(contest.label, 60)),
        f"{micros(row.time_s)} µs {spread(row)} · {rate(row)}",
        f"{percent(contest.share(row))} of the bound ({escape(row.limiter)})",
        f"{times(contest.times_best(row))} the best time",
    ]
    config = [escape(short(row.config, 60))] if row.config else []
    return "<br>".join(lines + config)


def _share(contest: Contest, row: Row) -> float | None:
    return contest.share(row)


def _relative(contest: Contest, row: Row) -> float | None:
    ratio = contest.times_best(row)
    return 1 / ratio if ratio else None


def _bars(contests: Sequence[Contest], value: Callable[[Contest, Row], float | None]) -> Figure:
    colours = styles(row.backend for contest in contests for row in contest.rows)
    traces: dict[str, Figure] = {}
    lines: dict[str, list[tuple[float, float] | None]] = {name: [] for name in BASELINES}
    labels, y = [], 0.0
    for contest in contests:
        labels.append((y, contest.label))
        top = y + 0.55
        for row in contest.ranked:
            y += 1
            x = value(contest, row)
            if x is None:
                continue
            trace = traces.setdefault(row.backend, _bar_trace(row.backend, colours[row.backend][0]))
            trace["x"].append(x)
            trace["y"].append(y)
            trace["text"].append(escape(f"{short(row.backend, 22)}  {percent(x)}"))
            trace["hovertext"].append(hover(contest, row))
            _whisker(trace, contest, row, value)
        for row in contest.rows:
            light = value(contest, row) if row.is_baseline and row.timed else None
            if light is not None:
                lines[row.backend] += [(light, top), (light, y + 0.45), None]
        y += 1.55
    layout = base_layout(round(y * _LINE) + 56, bargap=0)
    layout["xaxis"] |= {"side": "top", "rangemode": "tozero"}
    layout["yaxis"] |= {"range": [y - 0.9, -0.7], "visible": False}
    layout["annotations"] = [_label(at, name) for at, name in labels]
    data = list(traces.values())
    for name, points in lines.items():
        if points:
            data.append(_line(name, points))
    return {"data": data, "layout": layout}


def _bar_trace(backend: str, colour: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape(backend),
        "meta": {"backend": backend},
        "x": [],
        "y": [],
        "text": [],
        "hovertext": [],
        "hoverinfo": "text",
        "width": 0.84,
        "marker": {"color": colour},
        "textangle": 0,
        "constraintext": "none",
        "insidetextanchor": "start",
        "insidetextfont": {"color": text_on(colour), "size": 11},
        "error_x": _whiskers("@fg"),
    }


def _whiskers(colour: str) -> Figure:
    style = {"color": colour, "thickness": 1.2, "width": 3}
    return {"type": "data", "symmetric": False, "array": [], "arrayminus": [], **style}


def _whisker(trace: Figure, contest: Contest, row: Row, value: Callable[[Contest, Row], float | None]) -> None:
    """Adds the 95 % interval of the time, seen through `value`."""
    ends = [value(contest, replace(row, time_s=end)) or 0 for end in row.interval or ()]
    middle = value(contest, row) or 0
    trace["error_x"]["array"].append(max(0, max(ends, default=middle) - middle))
    trace["error_x"]["arrayminus"].append(max(0, middle - min(ends, default=middle)))


def _bar_labels(figure: Figure, top: float) -> None:
    """Names go inside long bars, and to the right of the whisker of short ones, in the page's own text colour."""
    for trace in [trace for trace in figure["data"] if trace["type"] == "bar"]:
        inside = [x > 0.55 * top for x in trace["x"]]
        trace["textposition"] = ["inside" if within else "none" for within in inside]
        outside = [index for index, within in enumerate(inside) if not within]
        if outside:
            figure["data"].append(
                {
                    "type": "scatter",
                    "mode": "text",
                    "meta": trace["meta"],
                    "x": [trace["x"][index] + trace["error_x"]["array"][index] for index in outside],
                    "y": [trace["y"][index] for index in outside],
                    "text": [" " + trace["text"][index] for index in outside],
                    "textposition": "middle right",
                    "textfont": {"size": 11, "color": "@fg"},
                    "hoverinfo": "skip",
                    "cliponaxis": False,
                }
            )


def _dots(contests: Sequence[Contest], value: Callable[[Contest, Row], float | None]) -> Figure:
    looks = styles(row.backend for contest in contests for row in contest.rows)
    traces: dict[str, Figure] = {}
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in BASELINES}
    for index, contest in enumerate(contests):
        for row in contest.rows:
            x = value(contest, row) if row.timed else None
            if x is None:
                continue
            if row.is_baseline:
                lines[row.backend].append((x, _dot_y(index)))
                continue
            colour, symbol = looks[row.backend]
            trace = traces.setdefault(row.backend, marker_trace(row.backend, colour, symbol))
            trace["x"].append(x)
            trace["y"].append(_dot_y(index))
            trace["hovertext"].append(hover(contest, row))
            trace.setdefault("error_x", _whiskers(colour))
            _whisker(trace, contest, row, value)
    layout = base_layout(round(len(contests) * _PITCH * _LINE) + 60)
    layout["xaxis"] |= {"side": "top"}
    layout["yaxis"] |= {
        "range": [_PITCH * len(contests) - 0.5, -0.7],
        "tickvals": [_dot_y(index) for index in range(len(contests))],
        "showticklabels": False,
    }
    layout["annotations"] = [_label(_PITCH * index, contest.label) for index, contest in enumerate(contests)]
    marks = [_marks(name, points, *baseline_style(name)) for name, points in lines.items() if points]
    return {"data": [*marks, *traces.values()], "layout": layout}


def _dot_y(index: int) -> float:
    return _PITCH * index + 0.9


def marker_trace(backend: str, colour: str, symbol: str) -> Figure:
    """An empty scatter trace in the backend's colour and marker."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(backend),
        "meta": {"backend": backend},
        "x": [],
        "y": [],
        "hovertext": [],
        "hoverinfo": "text",
        "marker": {
            "color": colour,
            "symbol": symbol,
            "size": 10,
            "opacity": 0.9,
            "line": {"width": 1, "color": "@bg"},
        },
        "cliponaxis": False,
    }


def _marks(name: str, points: Sequence[tuple[float, float]], colour: str, dash: str) -> Figure:
    strokes: list[tuple[float, float] | None] = []
    for x, y in points:
        strokes += [(x, y - 0.42), (x, y + 0.42), None]
    return _line(name, strokes, colour, dash)


def _line(name: str, points: Sequence[tuple[float, float] | None], colour: str = "", dash: str = "") -> Figure:
    if name in BASELINES:
        colour, dash = baseline_style(name)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "meta": {"backend": name},
        "x": [point[0] if point else None for point in points],
        "y": [point[1] if point else None for point in points],
        "line": {"color": colour, "dash": dash, "width": 2},
        "hovertemplate": f"{name}{' (speed of light)' if name in BASELINES else ''}<extra></extra>",
    }


def row_label(y: float, text: str, full: str = "") -> Figure:
    """A heading (plotly markup) at the left edge above a row; `full` is its tooltip."""
    return {
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": y,
        "yanchor": "middle",
        "text": text,
        "showarrow": False,
        "font": {"size": 12, "color": "@fg"},
        "hovertext": full,
        "bgcolor": "@bg",
        "borderpad": 1,
    }


def _label(y: float, text: str) -> Figure:
    return row_label(y, f"<b>{escape(short(text, _LABEL_CHARS))}</b>", escape(text))
