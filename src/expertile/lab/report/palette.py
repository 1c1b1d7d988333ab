"""One colour and one marker per backend, the same in every chart and every report.

Colours are Okabe and Ito's colour-blind-safe set (jfly.uni-koeln.de/color, 2008) without yellow and black, which vanish
on a light or a dark page, plus three of Paul Tol's muted set. Markers differ too: colour is never alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from expertile.lab.report.rows import BASELINES

_KNOWN = {
    "triton_tma": ("#0072B2", "circle"),
    "triton_pointer": ("#56B4E9", "square"),
    "torch_grouped": ("#D55E00", "diamond"),
    "cublas_grouped": ("#009E73", "triangle-up"),
    "quack": ("#CC79A7", "triangle-down"),
    "padded_bmm": ("#E69F00", "cross"),
    "loop": ("#8C8C8C", "x"),
    "gluon_hopper": ("#117733", "pentagon"),
    # Rivals of the other operators: they never share a chart with the above.
    "expertile": ("#0072B2", "circle"),
    "torch": ("#D55E00", "diamond"),
    "torch.compile": ("#009E73", "triangle-up"),
    "liger": ("#E69F00", "cross"),
    "sdpa_cudnn": ("#56B4E9", "square"),
    "sdpa_fa2": ("#117733", "pentagon"),
    "unfused": ("#8C8C8C", "x"),
}
_SPARE = (
    ("#AA4499", "star"),
    ("#999933", "hexagon"),
    ("#882255", "bowtie"),
    ("#44AA99", "hourglass"),
    ("#6F63BB", "star-triangle-up"),
    ("#B15928", "star-square"),
)
_BASELINE_STYLES = {"dense": ("@fg", "solid"), "copy": ("@fg", "dot")}


def styles(backends: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(colour, plotly marker symbol) per rival backend; backends not known here take spare ones in name order."""
    names = sorted(set(backends) - set(BASELINES))
    unknown = [name for name in names if name not in _KNOWN]
    spare = {name: _SPARE[index % len(_SPARE)] for index, name in enumerate(unknown)}
    return {name: _KNOWN.get(name) or spare[name] for name in names}


def baseline_style(name: str) -> tuple[str, str]:
    """(colour token, plotly dash) of a speed-of-light line."""
    return _BASELINE_STYLES[name]


def text_on(colour: str) -> str:
    """Black or white, whichever contrasts more with `colour` (relative luminance of WCAG 2.1)."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"
