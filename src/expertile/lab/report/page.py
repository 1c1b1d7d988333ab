"""The HTML report: one file that opens offline, verdict first. Sections of a run are in `sections.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from expertile.lab.race.record import Record
from expertile.lab.report import sections
from expertile.lab.report.contest import Run, runs
from expertile.lab.report.palette import styles
from expertile.lab.report.rows import BASELINES
from expertile.lab.report.table import elsewhere
from expertile.lab.report.units import listed

_POLICY_BUTTONS = (("graph", "Graph"), ("eager", "Eager"), ("both", "Side by side"))


def html(
    records: Iterable[Any],
    path: str | Path,
    shipped: Iterable[Any] = (),
) -> Path:
    """Writes the report on `records` to `path` (folders are made) and returns it.

    `records` and `shipped` hold Record objects or mappings with the record's JSON keys. Every run has its own section;
    runs never share a chart. Runs of `shipped` follow under "Recorded elsewhere", each chart labelled with the GPU and
    date. Charts of peak memory stand before them. The file needs no network: plotly's script is inlined once.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records, shipped = list(records), list(shipped)
    memory = [record for record in (*records, *shipped) if isinstance(record, Record)]
    path.write_text(_page(runs(records), runs(shipped), memory), encoding="utf-8")
    return path


def _page(here: Sequence[Run], shipped: Sequence[Run], memory: Sequence[Record]) -> str:
    from plotly.offline import get_plotlyjs  # a third of a second; only a report needs it

    shipped = [run for run in shipped if run.name not in {own.name for own in here}]
    figures = sections.Figures()
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
    data = json.dumps(_rounded(figures.items), separators=(",", ":"), allow_nan=False)
    assets = files("expertile.lab.report") / "assets"
    everything = [*here, *shipped]
    title = f"expertile: {listed(list(dict.fromkeys(run.device for run in here))) or 'no records'}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en" data-policy="graph">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Whatever a record holds, the page can load nothing.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'; img-src data: blob:\">",
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{(assets / 'report.css').read_text('utf-8')}</style>",
            "</head>\n<body>",
            _header(here, shipped),
            _controls(everything),
            "<main>",
            *body,
            "</main>",
            "<footer>Times are medians with 95 % intervals. FLOPs count useful rows only; bytes count each input and "
            "each output once. × best is time over the fastest right backend’s time in the same run.</footer>",
            # "<" is escaped so that no text of a record can close the element.
            f'<script type="application/json" id="figures">{data.replace("<", chr(92) + "u003c")}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>\n{(assets / 'report.js').read_text('utf-8')}</script>",
            "</body>\n</html>\n",
        ]
    )


def _rounded(value: Any) -> Any:
    """Five significant digits: more than a chart can show, half the size."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _header(here: Sequence[Run], shipped: Sequence[Run]) -> str:
    links = [(f"run-{index}", f"{run.device}: {', '.join(run.presets)}") for index, run in enumerate(here, start=1)]
    links += [
        (f"shipped-{index}", f"{run.device}, {run.day} (elsewhere): {', '.join(run.presets)}")
        for index, run in enumerate(shipped, start=1)
    ]
    items = "".join(f'<li><a href="#{target}">{escape(text)}</a></li>' for target, text in links)
    contents = f'<nav aria-label="Runs"><ul>{items}</ul></nav>' if len(links) > 1 else ""
    return f'<header class="top"><p class="brand">expertile <span>benchmark report</span></p>{contents}</header>'


def _controls(everything: Sequence[Run]) -> str:
    """Policy switch and legend for all charts; both stick to the top of the window."""
    names = list(dict.fromkeys(name for run in everything for name in run.backends))
    timed = {row.backend for run in everything for row in run.rows if row.timed}
    looks = styles(names)
    rivals = [name for name in names if name in timed and name not in BASELINES]
    chips = [
        _chip(name, f'<svg viewBox="-6 -6 12 12" aria-hidden="true">{_symbol(*looks[name])}</svg>') for name in rivals
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
        f'<button type="button" data-set-policy="{key}" aria-pressed="{str(key == "graph").lower()}">{text}</button>'
        for key, text in _POLICY_BUTTONS
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


def _symbol(colour: str, symbol: str) -> str:
    """The legend's drawing of a plotly marker."""
    shapes = {
        "square": "-4,-4 4,-4 4,4 -4,4",
        "diamond": "0,-5.5 5.5,0 0,5.5 -5.5,0",
        "triangle-up": "0,-5 5,4 -5,4",
        "triangle-down": "0,5 5,-4 -5,-4",
        "cross": "-1.7,-5 1.7,-5 1.7,-1.7 5,-1.7 5,1.7 1.7,1.7 1.7,5 -1.7,5 -1.7,1.7 -5,1.7 -5,-1.7 -1.7,-1.7",
        "pentagon": "0,-5 4.8,-1.5 2.9,4.1 -2.9,4.1 -4.8,-1.5",
        "hexagon": "-2.5,-4.5 2.5,-4.5 5,0 2.5,4.5 -2.5,4.5 -5,0",
        "bowtie": "-5,-4 0,0 5,-4 5,4 0,0 -5,4",
        "hourglass": "-4,-5 4,-5 0,0 4,5 -4,5 0,0",
    }
    if symbol == "circle":
        return f'<circle r="4.6" fill="{colour}"/>'
    if symbol == "x":
        return f'<path d="M-4-4 4 4M4-4-4 4" stroke="{colour}" stroke-width="3"/>'
    star = "0,-5.5 1.5,-1.7 5.5,-1.7 2.3,0.8 3.4,4.8 0,2.5 -3.4,4.8 -2.3,0.8 -5.5,-1.7 -1.5,-1.7"
    return f'<polygon points="{shapes.get(symbol, star)}" fill="{colour}"/>'


def _run(run: Run, anchor: str, figures: sections.Figures, label: str) -> str:
    badge = f'<p class="badge">{escape(sections.sentence_case(label))}</p>' if label else ""
    parts = [
        badge,
        sections.verdict(run, anchor),
        sections.environment(run),
        sections.glance(run, label),
        *(sections.preset(run, name, figures, label) for name in run.presets),
        sections.without_time(run),
        sections.all_records(run),
    ]
    return f'<section class="run{" foreign" if label else ""}" id="{anchor}">{"".join(parts)}</section>'
