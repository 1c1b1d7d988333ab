"""The HTML report: one file that opens offline, verdict first. Sections of a run are in `sections.py`."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from expertile.lab.race.record import Record
from expertile.lab.report import sections
from expertile.lab.report.contest import Run, runs
from expertile.lab.report.leaderboard import html_boards
from expertile.lab.report.palette import styles, theme_css
from expertile.lab.report.rows import BASELINES, Row
from expertile.lab.report.svg import outlines
from expertile.lab.report.table import elsewhere
from expertile.lab.report.units import listed

_POLICY_BUTTONS = (
    ("graph", "CUDA graph", "times of a call replayed from a CUDA graph: what the GPU takes"),
    ("eager", "Eager", "times of a call from Python: what the host takes to launch is part of it"),
    ("both", "Both", "the two side by side"),
)
ASSETS = ("report.css", "report.js")
"""What every page of a folder shares."""


def html(records: Iterable[Any], path: str | Path, shipped: Iterable[Any] = (), shared: bool = False) -> Path:
    """Writes the report on `records` to `path` (folders are made) and returns it.

    `records` and `shipped` hold Record objects or mappings with the record's JSON keys. Every run has its own section;
    runs never share a chart. Runs of `shipped` follow under "Recorded elsewhere", each chart labelled with the GPU and
    date. Charts of peak memory stand before them. The file needs no network: style and script are inlined, or with
    `shared` are the files `ASSETS` beside the page.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records, shipped = list(records), list(shipped)
    memory = [record for record in (*records, *shipped) if isinstance(record, Record)]
    path.write_text(_page(runs(records), runs(shipped), memory, shared), encoding="utf-8")
    return path


def asset(name: str) -> str:
    """The text of one of `ASSETS`."""
    text = (files("expertile.lab.report") / "assets" / name).read_text("utf-8")
    if not name.endswith(".css"):
        return text
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{{theme_css('dark')}}} }}"
    return f":root {{{theme_css('light')}}}\n{dark}\n{text}"


def _page(here: Sequence[Run], shipped: Sequence[Run], memory: Sequence[Record], shared: bool) -> str:
    shipped = [run for run in shipped if run.name not in {own.name for own in here}]
    everything = [*here, *shipped]
    figures = sections.Figures([row for run in everything for row in run.rows])
    body = [_run(run, f"run-{index}", figures, "") for index, run in enumerate(here, start=1)]
    if not here:
        body.append(
            '<section class="run"><p class="lead">No records: nothing was measured on this machine.</p></section>'
        )
    body.append(sections.memory(memory))
    if shipped:
        body.append('<h1 class="elsewhere" id="elsewhere">Recorded elsewhere</h1>')
        body.append(
            "<p>Shipped records, for orientation. They come from other machines and other days: compare them with "
            "each other inside one run, not with the figures above.</p>"
        )
        body += [_run(run, f"shipped-{index}", figures, elsewhere(run)) for index, run in enumerate(shipped, start=1)]
    policy = next((run.policies[0] for run in everything), "graph")
    style, script = map(asset, ASSETS)
    title = f"expertile: {listed(list(dict.fromkeys(run.device for run in here))) or 'no records'}"
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
            _header(here, shipped),
            _controls(everything, policy),
            "<main>",
            *body,
            "</main>",
            "<footer>Times are medians with 95 % intervals. FLOPs count useful rows only; bytes count each input and "
            "each output once. × best is time over the fastest right backend’s time in the same run.</footer>",
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
    """A record as its place, a number with four significant digits: more than a chart can show."""
    if isinstance(value, Row):
        return places[id(value)]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _plain(item, places) for name, item in value.items()}
    return [_plain(item, places) for item in value] if isinstance(value, (list, tuple)) else value


def _header(here: Sequence[Run], shipped: Sequence[Run]) -> str:
    links = [(f"run-{index}", f"{run.device}: {', '.join(run.presets)}") for index, run in enumerate(here, start=1)]
    links += [
        (f"shipped-{index}", f"{run.device}, {run.day} (elsewhere): {', '.join(run.presets)}")
        for index, run in enumerate(shipped, start=1)
    ]
    items = "".join(f'<li><a href="#{target}">{escape(text)}</a></li>' for target, text in links)
    contents = f'<nav aria-label="Runs"><ul>{items}</ul></nav>' if len(links) > 1 else ""
    return f'<header class="top"><p class="brand">expertile <span>benchmark report</span></p>{contents}</header>'


def _controls(everything: Sequence[Run], policy: str) -> str:
    """Policy switch and legend for all charts; both stick to the top of the window."""
    names = list(dict.fromkeys(name for run in everything for name in run.backends))
    timed = {row.backend for run in everything for row in run.rows if row.timed}
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
    if any(row.bound_s for run in everything for row in run.rows):
        chips.append(_chip("bound", '<i class="stroke bound"></i>', "what the hardware's peak or bandwidth allows"))
    policies = {policy for run in everything for policy in run.policies}
    buttons = "".join(
        f'<button type="button" data-set-policy="{key}" aria-pressed="{str(key == policy).lower()}" title="{why}">'
        f"{text}</button>"
        for key, text, why in _POLICY_BUTTONS
    )
    switch = (
        f'<div class="switch" role="group" aria-label="Launch policy shown">{buttons}</div>'
        if {"graph", "eager"} <= policies
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


def _run(run: Run, anchor: str, figures: sections.Figures, label: str) -> str:
    badge = f'<p class="badge">{escape(sections.sentence_case(label))}</p>' if label else ""
    parts = [
        badge,
        sections.verdict(run, anchor),
        sections.environment(run),
        html_boards(run),
        sections.glance(run, anchor, figures, label),
        *(sections.preset(run, name, figures, label) for name in run.presets),
        sections.without_time(run),
        sections.all_records(run, figures),
    ]
    return f'<section class="run{" foreign" if label else ""}" id="{anchor}">{"".join(parts)}</section>'
