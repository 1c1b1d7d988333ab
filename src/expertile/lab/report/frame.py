"""What all pages with charts share: the frame of the document, its style and script, legend and packed data."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from expertile.lab.race.record import BASELINES
from expertile.lab.report import sections
from expertile.lab.report.palette import styles, theme_css
from expertile.lab.report.rows import Row
from expertile.lab.report.svg import outlines

_POLICY_BUTTONS = (
    ("graph", "CUDA graph", "times of a call replayed from a CUDA graph: what the GPU takes"),
    ("eager", "Eager", "times of a call from Python: what the host takes to launch is part of it"),
    ("both", "Both", "the two side by side"),
)
ASSETS = ("report.css", "report.js")
"""What every page of a folder shares."""


def asset(name: str) -> str:
    """The text of one of `ASSETS`."""
    text = (files("expertile.lab.report") / "assets" / name).read_text("utf-8")
    if not name.endswith(".css"):
        return text
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{{theme_css('dark')}}} }}"
    return f":root {{{theme_css('light')}}}\n{dark}\n{text}"


def document(
    title: str,
    top: Sequence[str],
    body: Sequence[str],
    footer: str,
    figures: sections.Figures,
    policy: str = "graph",
    shared: bool = False,
) -> str:
    """A whole page. `top` stands above `body`; with `shared` style and script are the files `ASSETS` beside it."""
    style, script = map(asset, ASSETS)
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en" data-policy="{policy}">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Whatever a record holds, the page can load nothing.
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline' 'self' file:; script-src 'unsafe-inline' 'self' file:; img-src data: blob:\">",
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f'<link rel="stylesheet" href="{ASSETS[0]}">' if shared else f"<style>\n{style}</style>",
            "</head>\n<body>",
            *top,
            "<main>",
            *body,
            f"</main>\n<footer>{footer}</footer>",
            f'<script type="text/plain" id="data">{_packed(figures)}</script>',
            f'<script src="{ASSETS[1]}"></script>' if shared else f"<script>\n{script}</script>",
            "</body>\n</html>\n",
        ]
    )


def _packed(figures: sections.Figures) -> str:
    """What the script draws: records as texts, charts and markers, as compressed JSON in base64."""
    data = {
        "columns": sections.COLUMNS,
        "rows": figures.lines,
        "figures": [_plain(figure, figures.places) for figure in figures.items],
        "markers": outlines(),
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def _plain(value: Any, places: Mapping[int, int]) -> Any:
    """A record as its place, a number with five significant digits: more than a chart can show."""
    if isinstance(value, Row):
        return places[id(value)]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _plain(item, places) for name, item in value.items()}
    return [_plain(item, places) for item in value] if isinstance(value, (list, tuple)) else value


def controls(
    names: Sequence[str], timed: Collection[str], bounded: bool, policies: Collection[str] = (), policy: str = ""
) -> str:
    """Policy switch and legend for all charts; both stick to the top of the window. A backend of `names` has a chip if
    it is one of `timed`, and the bound if there is one; the switch, `policy` chosen, stands where `policies` are
    two."""
    looks = styles(names)
    rivals = [name for name in names if name in timed and name not in BASELINES]
    chips = [
        _chip(
            name,
            '<svg viewBox="-6 -6 12 12" aria-hidden="true" data-colour="{}" data-symbol="{}"/>'.format(*looks[name]),
        )
        for name in rivals
    ]
    strokes = {"dense": "stroke", "copy": "stroke dotted"}
    titles = {
        "dense": "speed of light: the same rows against one weight",
        "copy": "speed of light: the same bytes moved",
    }
    chips += [_chip(name, f'<i class="{strokes[name]}"></i>', titles[name]) for name in BASELINES if name in timed]
    if bounded:
        chips.append(_chip("bound", '<i class="stroke bound"></i>', "what the hardware's peak or bandwidth allows"))
    buttons = "".join(
        f'<button type="button" data-set-policy="{key}" aria-pressed="{str(key == policy).lower()}" title="{why}">'
        f"{text}</button>"
        for key, text, why in _POLICY_BUTTONS
    )
    switch = (
        f'<div class="switch" role="group" aria-label="Launch policy shown">{buttons}</div>'
        if len(policies) > 1
        else ""
    )
    return (
        f'<div class="controls">{switch}<div class="legend" role="group" aria-label="Backends shown in the charts">'
        f"{''.join(chips)}</div></div>"
    )


def _chip(name: str, mark: str, title: str = "") -> str:
    hint = title or "show or hide in all charts"
    return (
        f'<button type="button" class="chip" data-backend="{escape(name)}" aria-pressed="true" title="{escape(hint)}">'
        f"{mark}{escape(name)}</button>"
    )
