"""Static charts as SVG text, for documents: curves on two logarithmic axes, and dots on one. A chart is a card with its
own background, light or dark as the reader's system prefers. Every colour is moved until it stands out from the card by
at least 3 : 1 (WCAG 2.1, non-text contrast); markers differ too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tools.pages.colours import readable
from tools.pages.shapes import POLYGONS, SIZE, STROKES

_CARDS = {"light": "#ffffff", "dark": "#161b22"}
_INK = {
    "light": {"fg": "#1f2328", "muted": "#59636e", "grid": "#d8dee4"},
    "dark": {"fg": "#e6edf3", "muted": "#9aa4af", "grid": "#30363d"},
}
_FONT = "12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 66, 150, 44, 52
_PLOT_HEIGHT, _ROW = 330, 24
_MOST_TICKS = 9


@dataclass(frozen=True)
class Series:
    """One backend or reference line. `points`: (x, y) of a curve, both above 0; of dots (value, row index). `colour`
    "#rrggbb", or "" for the text colour; `symbol` a marker's name (`outlines`), or "" for none; `dash` an SVG dash
    pattern, or ""."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str = ""
    symbol: str = ""
    dash: str = ""


def curves(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """An SVG chart of `series` over two logarithmic axes; ticks of x at powers of 2. ValueError where there is no
    point, or one that no logarithm shows."""
    xs, ys = [x for s in series for x, _ in s.points], [y for s in series for _, y in s.points]
    _check(xs + ys)
    to_x = _scale(min(xs), max(xs), _LEFT + 10, _WIDTH - _RIGHT - 10)
    to_y = _scale(min(ys) / 1.2, max(ys) * 1.2, _TOP + _PLOT_HEIGHT, _TOP)
    bottom = _TOP + _PLOT_HEIGHT
    body = []
    for tick in ticks(min(ys) / 1.2, max(ys) * 1.2, 10):
        body.append(_rule(_LEFT, to_y(tick), _WIDTH - _RIGHT, to_y(tick)))
        body.append(_text(_LEFT - 8, to_y(tick) + 4, _number(tick), "end"))
    for tick in ticks(min(xs), max(xs), 2):
        body.append(_rule(to_x(tick), _TOP, to_x(tick), bottom))
        body.append(_text(to_x(tick), bottom + 18, _number(tick), "middle"))
    body.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 38, x_label, "middle", "m"))
    middle = _TOP + _PLOT_HEIGHT / 2
    body.append(_text(16, middle, y_label, "middle", "m", f' transform="rotate(-90 16 {middle:.0f})"'))
    for index, s in enumerate(series):
        at = [(to_x(x), to_y(y)) for x, y in sorted(s.points)]
        dash = f' stroke-dasharray="{s.dash}"' if s.dash else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        body.append(f'<polyline class="s{index} line" points="{path}"{dash}/>')
        body += [_marker(index, s.symbol, x, y) for x, y in at if s.symbol]
    # highest curve at the right end first, as the eye meets them
    order = sorted(range(len(series)), key=lambda i: -max(series[i].points)[1] if series[i].points else 0.0)
    return _document(title, bottom + _BOTTOM, series, [*body, *_legend(series, order)])


def dots(title: str, x_label: str, rows: Sequence[str], series: Sequence[Series], guides: Sequence[float]) -> str:
    """An SVG chart with one line of dots for each of `rows`, on a logarithmic axis with a stroke at each guide.
    ValueError where there is no point, or one that no logarithm shows."""
    values = [x for s in series for x, _ in s.points]
    _check(values)
    low, high = min([*values, *guides]) / 1.05, max([*values, *guides]) * 1.05
    left = _LEFT + 7 * max(len(row) for row in rows) - 20
    to_x = _scale(low, high, left + 10, _WIDTH - _RIGHT - 10)
    bottom = _TOP + _ROW * len(rows) + 8
    body = []
    for tick in ticks(low, high, 10):
        body.append(_rule(to_x(tick), _TOP, to_x(tick), bottom))
        body.append(_text(to_x(tick), bottom + 18, _number(tick), "middle"))
    for guide in guides:
        body.append(f'<line class="guide" x1="{to_x(guide):.1f}" y1="{_TOP}" x2="{to_x(guide):.1f}" y2="{bottom}"/>')
    for index, row in enumerate(rows):
        y = _TOP + _ROW * (index + 0.5) + 4
        body.append(_rule(left, y, _WIDTH - _RIGHT, y))
        body.append(_text(left - 8, y + 4, row, "end"))
    body.append(_text((left + _WIDTH - _RIGHT) / 2, bottom + 38, x_label, "middle", "m"))
    for index, s in enumerate(series):
        body += [_marker(index, s.symbol, to_x(x), _TOP + _ROW * (row + 0.5) + 4) for x, row in s.points]
    return _document(title, bottom + _BOTTOM, series, [*body, *_legend(series, range(len(series)))])


def ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of `base` from `low` to `high`, at most 9; with 2s and 5s between where base is 10 and there are few."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    found = [float(base) ** e for e in range(first, last + 1, step)]
    if base == 10 and len(found) < 3:
        digits = (1, 2, 5) if high / low > 2.5 else (1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 8)
        every = [d * 10.0**e for e in range(first - 1, last + 1) for d in digits]
        found = [tick for tick in every if low <= tick <= high]
    return found


def _check(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("series: expected at least one point, got none")
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"series: expected finite values above 0 on a logarithmic axis, got {value}")


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Value -> pixel, logarithmic; a single value stands in the middle."""
    if high <= low:
        return lambda value: (start + end) / 2
    span = math.log(high / low)
    return lambda value: start + (end - start) * math.log(value / low) / span


def _document(title: str, height: float, series: Sequence[Series], body: Sequence[str]) -> str:
    light, dark = (_rules(theme, series) for theme in ("light", "dark"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>text{{font:{_FONT}}}.t{{font-weight:600;font-size:14px}}.line{{fill:none;stroke-width:1.8}}"
        f".mark{{stroke-width:1.6}}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>\n"
        f'<rect class="card" width="{_WIDTH}" height="{height:.0f}" rx="6"/>\n'
        f"{_text(16, 26, title, 'start', 't')}\n" + "\n".join(body) + "\n</svg>\n"
    )


def _rules(theme: str, series: Sequence[Series]) -> str:
    card, ink = _CARDS[theme], _INK[theme]
    rules = [
        f".card{{fill:{card}}}text{{fill:{ink['fg']}}}.m{{fill:{ink['muted']}}}.grid{{stroke:{ink['grid']}}}"
        f".guide{{stroke:{ink['muted']};stroke-dasharray:4 3}}"
    ]
    for index, s in enumerate(series):
        colour = readable(s.colour, card) if s.colour else ink["fg"]
        rules.append(f".s{index}{{stroke:{colour}}}.f{index}{{fill:{colour}}}")
    return "".join(rules)


def _legend(series: Sequence[Series], order: Sequence[int]) -> list[str]:
    out = []
    x = _WIDTH - _RIGHT + 14
    for place, index in enumerate(order):
        s, y = series[index], _TOP + 10 + 20 * place
        if not s.symbol or s.dash:
            dash = f' stroke-dasharray="{s.dash}"' if s.dash else ""
            out.append(f'<line class="s{index} line" x1="{x - 6}" y1="{y}" x2="{x + 14}" y2="{y}"{dash}/>')
        if s.symbol:
            out.append(_marker(index, s.symbol, x + 4, y))
        out.append(_text(x + 20, y + 4, s.name, "start"))
    return out


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "", more: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.10g}"


def _marker(index: int, symbol: str, x: float, y: float) -> str:
    size = SIZE
    if symbol in STROKES:
        lines = " ".join(
            f"M{x - dx * size:.1f} {y - dy * size:.1f}L{x + dx * size:.1f} {y + dy * size:.1f}"
            for dx, dy in STROKES[symbol]
        )
        return f'<path class="s{index} mark" d="{lines}"/>'
    if symbol in POLYGONS:
        corners = " ".join(f"{x + dx * size:.1f},{y + dy * size:.1f}" for dx, dy in POLYGONS[symbol])
        return f'<polygon class="f{index}" points="{corners}"/>'
    return f'<circle class="f{index}" cx="{x:.1f}" cy="{y:.1f}" r="{size * 0.85:.1f}"/>'
