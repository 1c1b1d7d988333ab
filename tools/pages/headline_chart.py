"""README's chart: for each job our speed as a bar beside the best rival's, which is 1, with the span over workloads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = {
    "light": {"fg": "#1f2328", "muted": "#59636e", "grid": "#d1d9e0", "ours": "#0b6e4f", "rival": "#8c959f"},
    "dark": {"fg": "#e6edf3", "muted": "#9aa4af", "grid": "#3d444d", "ours": "#3fb68b", "rival": "#6e7681"},
}
_WIDTH, _LEFT, _RIGHT, _TOP, _STEP, _BAR = 760, 170, 80, 60, 54, 18
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Bar:
    """A job: our speed over the best rival's (geometric mean), and the least and the greatest over its workloads."""

    title: str
    rival: str
    mean: float
    worst: float
    best: float


def chart(bars: Sequence[Bar], gpu: str, note: str, theme: str) -> str:
    """The SVG text for `theme` "light" or "dark", `note` below the title; its background is the page's own."""
    ink = _COLOURS[theme]
    limit = math.ceil(max((bar.best for bar in bars), default=1.0) * 2) / 2
    width, bottom = _WIDTH - _LEFT - _RIGHT, _TOP + _STEP * len(bars)

    def x(value: float) -> float:
        return _LEFT + width * value / limit

    body = []
    for tick in (i / 2 for i in range(int(limit * 2) + 1)):
        body.append(_line(x(tick), _TOP - 8, x(tick), bottom, ink["grid"], 1))
        body.append(_text(x(tick), bottom + 18, f"{tick:g}×", ink["muted"], "middle", 12))
    for index, bar in enumerate(bars):
        y = _TOP + index * _STEP
        body.append(_text(_LEFT - 12, y + _BAR + 3, bar.title, ink["fg"], "end", 14))
        body.append(_rect(x(0), y, x(bar.mean) - x(0), ink["ours"]))
        body.append(_rect(x(0), y + _BAR + 2, x(1) - x(0), ink["rival"]))
        body.append(_line(x(bar.worst), y + _BAR / 2, x(bar.best), y + _BAR / 2, ink["fg"], 1.5))
        for end in (bar.worst, bar.best):
            body.append(_line(x(end), y + 5, x(end), y + _BAR - 5, ink["fg"], 1.5))
        body.append(_text(_WIDTH - _RIGHT + 14, y + 14, f"{bar.mean:.2f}×", ink["fg"], "start", 14, bold=True))
        body.append(_text(x(1) + 8, y + 2 * _BAR - 2, f"{bar.rival}, 1×", ink["muted"], "start", 12))
    body.append(_line(x(1), _TOP - 8, x(1), bottom, ink["fg"], 1))
    head = [
        _text(24, 20, f"Speed against the best rival of each workload, {gpu}", ink["fg"], "start", 15, bold=True),
        _text(24, 38, note, ink["muted"], "start", 12),
    ]
    said = "; ".join(f"{bar.title} {bar.mean:.2f} times {bar.rival}" for bar in bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 30}" width="{_WIDTH}" '
        f'height="{bottom + 30}" role="img" font-family="{_FONT}">\n<title>{escape(said)}</title>\n'
        + "\n".join([*head, *body])
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, fill: str, anchor: str, size: int, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {place}{weight}>{escape(text)}</text>"


def _rect(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{fill}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width:g}"/>'
