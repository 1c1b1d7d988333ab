"""What the audit says of a report, and in which voice."""

from dataclasses import dataclass
from typing import Protocol

IMPOSSIBLE, INCONSISTENT, QUESTION = VERDICTS = ("impossible", "inconsistent", "question")
ACCUSATIONS = (IMPOSSIBLE, INCONSISTENT)
Lines = tuple[int, ...]
_PREFIX = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
UNIT_OF = {"time": "s", "rate": "FLOP/s", "bandwidth": "B/s", "bytes": "B", "energy": "J", "power": "W", "money": "USD"}
UNIT_OF |= {"tokens_per_s": "tokens/s", "items_per_s": "per s", "s_per_token": "s", "carbon": "g CO2"}
UNIT_OF |= {"gpu*s": "GPU-hours"}


@dataclass(frozen=True)
class Finding:
    """`impossible` and `inconsistent` accuse: they follow from one row or one stated peak. `question` ties distant
    lines together, or rests on what the text leaves open, and asks. `lines` are all that the arithmetic used."""

    verdict: str
    rule: str
    line: int
    quote: str
    message: str
    lines: Lines = ()

    @property
    def all_lines(self) -> Lines:
        return tuple(sorted({self.line, *self.lines}))


class Figure(Protocol):
    """What a finding is about: a quantity, or a figure that has a name alone."""

    @property
    def text(self) -> str: ...
    @property
    def line(self) -> int: ...


def finding(verdict: str, rule: str, message: str, q: Figure, *beside: Figure, lines: Lines = ()) -> Finding:
    """A finding about the figure `q`, which stands `beside` others."""
    figures = (q, *beside)
    quote = ", ".join(dict.fromkeys(f.text for f in figures))
    return Finding(verdict, rule, q.line, quote, message, (*(f.line for f in figures), *lines))


def si(value: float, unit: str) -> str:
    """Four digits with the prefix that reads best: si(4.5e-3, "s") -> "4.5 ms"."""
    if unit == "GPU-hours":
        return f"{round(value / 3600, 1):,.10g} {unit}"
    if unit == "J" and value >= 3.6e6:
        return f"{value / 3.6e6:,.5g} kWh"
    scaled = dict.fromkeys(("FLOP/s", "FLOP", "B/s", "B"), "TGMk") | {"s": ("", "m", "µ", "n"), "J": "GMk", "W": "Mk"}
    steps = [(_PREFIX[p], p) for p in (*scaled.get(unit, ""), "")]
    scale, prefix = next(((s, p) for s, p in steps if value >= 0.9995 * s), steps[-1 - (unit == "s")])
    return f"{value / scale:.4g} {prefix}{unit}".strip()
