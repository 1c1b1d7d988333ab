"""What all pages share: their templates, style and script, the legend, and the packed data that the script draws."""

import json
import zlib
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader

from expertile.lab.report import sections
from expertile.lab.report.palette import styles
from expertile.lab.report.rows import Row
from expertile.lab.report.units import micros, plural, sentence_case

_POLICY_BUTTONS = (
    ("graph", "CUDA graph", "times of a call replayed from a CUDA graph: what the GPU takes"),
    ("eager", "Eager", "times of a call from Python: what the host takes to launch is part of it"),
    ("both", "Both", "the two side by side"),
)
_STROKES = {
    "dense": ("stroke", "speed of light: the same rows against one weight"),
    "copy": ("stroke dotted", "speed of light: the same bytes moved"),
    "bound": ("stroke bound", "what the hardware's peak or bandwidth allows"),
}
ASSETS = ("report.css", "report.js")
"""What every page of a folder shares."""


@cache
def _templates() -> Environment:
    """Those of `assets`; all text that comes from records is escaped."""
    found = Environment(
        loader=PackageLoader("expertile.lab.report", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    found.filters |= {"micros": micros, "plural": plural, "sentence_case": sentence_case}
    return found


def asset(name: str) -> str:
    """The text of one of `ASSETS`."""
    return (files("expertile.lab.report") / "assets" / name).read_text("utf-8")


def page(template: str, title: str, shared: bool = False, **values: Any) -> str:
    """A page without charts. `values` are what the template shows; with `shared` style and script are the files
    `ASSETS` beside it."""
    style, script = ("", "") if shared else map(asset, ASSETS)
    found = _templates().get_template(template)
    return found.render(title=title, shared=shared, style=style, script=script, **values) + "\n"


def charted(
    template: str,
    title: str,
    figures: sections.Figures,
    names: Sequence[str],
    timed: Collection[str],
    policies: Collection[str] = (),
    policy: str = "graph",
    **values: Any,
) -> str:
    """A page with charts: legend and policy switch stick to the top of the window. Those of `names` that are `timed`
    have a chip; the switch, `policy` chosen, stands where `policies` are two."""
    looks, hint = styles(names), "show or hide in all charts"
    chips = [(name, looks[name], hint) for name in names if name in timed and name in looks]
    chips += [(name, ("", look), why) for name, (look, why) in _STROKES.items() if name in timed]
    own: dict[str, Any] = {"chips": chips, "buttons": _POLICY_BUTTONS, "packed": _packed(figures)}
    return page(template, title, charts=True, policies=policies, policy=policy, **own, **values)


def _packed(figures: sections.Figures) -> str:
    """What the script draws: records as texts, and charts, as compressed JSON in base64."""
    data = {
        "columns": [(name, kind) for name, kind, _ in sections.COLUMNS],
        "rows": figures.lines,
        "figures": [_plain(figure, figures.places) for figure in figures.items],
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
