"""What the audit says of a report, and in which voice."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.audit.quantity import Quantity

IMPOSSIBLE, INCONSISTENT, QUESTION, UNCHECKED = VERDICTS = ("impossible", "inconsistent", "question", "unchecked")
ACCUSATIONS = (IMPOSSIBLE, INCONSISTENT)


@dataclass(frozen=True)
class Finding:
    """`impossible` and `inconsistent` accuse: they follow from one row or one stated peak. `question` ties distant
    lines together and asks. `unchecked` says what a check lacks. `lines` are all that the arithmetic used."""

    verdict: str
    rule: str
    line: int
    quote: str
    message: str
    lines: tuple[int, ...] = ()

    @property
    def all_lines(self) -> tuple[int, ...]:
        return tuple(sorted({self.line, *self.lines}))


def finding(
    verdict: str, rule: str, message: str, q: Quantity, *beside: Quantity, lines: tuple[int, ...] = ()
) -> Finding:
    """A finding about the figure `q`, which stands `beside` others."""
    figures = (q, *beside)
    quote = ", ".join(dict.fromkeys(f.text for f in figures))
    return Finding(verdict, rule, q.line, quote, message, (*(f.line for f in figures), *lines))


def si(value: float, unit: str) -> str:
    """Four digits with the prefix that reads best: si(4.5e-3, "s") -> "4.5 ms"."""
    steps = [(1.0, unit)]
    if unit == "s":
        steps = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")]
    elif unit in ("FLOP/s", "FLOP", "B/s", "B"):
        steps = [(10.0**p, f"{prefix}{unit}") for p, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k"), (0, ""))]
    scale, name = next(((s, n) for s, n in steps if value >= 0.9995 * s), steps[-1])
    return f"{value / scale:.4g} {name}".strip()


UNIT_OF = {"time": "s", "rate": "FLOP/s", "bandwidth": "B/s", "bytes": "B", "tokens_per_s": "tokens/s",
           "items_per_s": "per s", "s_per_token": "s"}  # fmt: skip
