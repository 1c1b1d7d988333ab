"""What an audit says about one claim."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.device import Device

POSSIBLE = "possible"
IMPOSSIBLE = "impossible"
INCONSISTENT = "inconsistent"
NOT_CHECKABLE = "not checkable"
VERDICTS = (IMPOSSIBLE, INCONSISTENT, NOT_CHECKABLE, POSSIBLE)


@dataclass(frozen=True)
class Finding:
    """One claim and its verdict.

    `line` counts from 1; `quote` is the claim as printed; `explanation` shows the arithmetic. `value` is what the
    claim says or implies and `limit` what it is held against, both in `unit` ("TFLOP/s", "GB/s", "x", "%", "s", "B").
    """

    line: int
    quote: str
    verdict: str
    rule: str
    explanation: str
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    anchor: tuple[int, int] = (0, 0)  # line, column of the figure judged: which claim of the line this is

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict: expected one of {VERDICTS}, got {self.verdict!r}")


@dataclass(frozen=True)
class AuditResult:
    """All findings on one text, by line; the GPU its limits come from (None if the text names none we know)."""

    findings: tuple[Finding, ...]
    device: Device | None
    notes: tuple[str, ...] = ()

    def of(self, verdict: str) -> tuple[Finding, ...]:
        """The findings with that verdict, by line."""
        return tuple(f for f in self.findings if f.verdict == verdict)
