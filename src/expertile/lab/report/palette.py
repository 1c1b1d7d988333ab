"""One colour and one marker per backend, the same in every chart and report: Okabe and Ito's colour-blind-safe set
(jfly.uni-koeln.de/color, 2008) without yellow and black, which vanish on a page, plus three of Paul Tol's muted set."""

from collections.abc import Iterable, Mapping
from functools import partial

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
CARDS = {"light": "#ffffff", "dark": "#14171b"}
"""The page's background, on which the colours of backends are to be told apart."""
_CONTRAST = {"light": 3.0, "dark": 4.5}


def styles(backends: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) per rival backend; backends not known here take spare ones in name order."""
    names = sorted(set(backends) - set(BASELINES))
    unknown = [name for name in names if name not in _KNOWN]
    spare = {name: _SPARE[index % len(_SPARE)] for index, name in enumerate(unknown)}
    return {name: _KNOWN.get(name) or spare[name] for name in names}


def look(looks: Mapping[str, tuple[str, str]], backend: str) -> tuple[str, str]:
    """Of `styles`; a baseline's marker is a short stroke in the colour of text."""
    return looks.get(backend) or (LINES[backend][0], "stroke")


def theme_css(theme: str) -> str:
    """Custom properties for "light" or "dark": `--c0072B2` is the colour as the page can be read with it,
    `--t0072B2` that of text on it."""
    colours = dict.fromkeys(colour for colour, _ in (*_KNOWN.values(), *_SPARE))
    shown = {colour: readable(colour, CARDS[theme], _CONTRAST[theme]) for colour in colours}
    # Text is black or white, whichever contrasts more.
    texts = {colour: max("#000000", "#ffffff", key=partial(contrast, seen)) for colour, seen in shown.items()}
    return "".join(f"--c{name[1:]}:{seen};--t{name[1:]}:{texts[name]};" for name, seen in shown.items())


def readable(colour: str, card: str, least: float = 3.0) -> str:
    """`colour`, moved towards white or black until its contrast with `card` is at least `least` : 1."""
    target = 0 if _luminance(card) > 0.5 else 255
    channels = _channels(colour)
    for share in range(0, 101, 5):
        moved = [round(c + (target - c) * share / 100) for c in channels]
        text = "#" + "".join(f"{c:02x}" for c in moved)
        if contrast(text, card) >= least:
            break
    return text


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.1)."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
