"""One colour and one marker per backend, the same in every chart and report: Okabe and Ito's colour-blind-safe set
(jfly.uni-koeln.de/color, 2008) without yellow and black, which vanish on a page, plus three of Paul Tol's muted set.
`assets/report.css` has each as the page shows it, `assets/report.js` the markers."""

from collections.abc import Iterable, Mapping

from expertile.lab.race.record import BASELINES

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
    ("#CC6677", "octagon"),
    ("#5E8C31", "star-hexagon"),
)
LINES = {"dense": ("@fg", ""), "copy": ("@fg", "dot"), "bound": ("@accent", "")}
"""(colour of the page, dash) of the line of the bound or a speed of light."""


def styles(backends: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) per rival backend; backends not known here take spare ones in name order."""
    names = sorted(set(backends) - set(BASELINES))
    unknown = [name for name in names if name not in _KNOWN]
    spare = {name: _SPARE[index % len(_SPARE)] for index, name in enumerate(unknown)}
    return {name: _KNOWN.get(name) or spare[name] for name in names}


def look(looks: Mapping[str, tuple[str, str]], backend: str) -> tuple[str, str]:
    """Of `styles`; a baseline's marker is a short stroke in the colour of text."""
    return looks.get(backend) or (LINES[backend][0], "stroke")
