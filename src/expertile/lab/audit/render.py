"""An audit for people (rich console) and for programs (JSON)."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from expertile.lab.audit.finding import IMPOSSIBLE, INCONSISTENT, NOT_CHECKABLE, POSSIBLE, AuditResult, Finding

_STYLE = {IMPOSSIBLE: "bold red", INCONSISTENT: "bold yellow", NOT_CHECKABLE: "dim", POSSIBLE: "green"}
_SIGN = {IMPOSSIBLE: "✗", INCONSISTENT: "≠", NOT_CHECKABLE: "?", POSSIBLE: "✓"}


def render(result: AuditResult, console: Console, *, everything: bool = True, quote_width: int = 100) -> None:
    """Print the verdict, then every impossible and inconsistent claim with its arithmetic, then the rest.

    With `everything` false the possible and not checkable claims are only counted.
    """
    for part in _parts(result, everything, quote_width):
        console.print(part, highlight=False)


def _parts(result: AuditResult, everything: bool, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [_verdict(result), _limits(result)]
    parts += [Text(note, style="dim") for note in result.notes]
    for verdict in (IMPOSSIBLE, INCONSISTENT):
        found = result.of(verdict)
        if found:
            parts.append(Text(f"\n{verdict} ({len(found)})", style=_STYLE[verdict]))
            parts += [_full(f, width) for f in found]
    for verdict in (POSSIBLE, NOT_CHECKABLE):
        found = result.of(verdict)
        if found and everything:
            parts.append(Text(f"\n{verdict} ({len(found)})", style=_STYLE[verdict]))
            parts += [_short(f, width) for f in found]
    return parts


def summary(result: AuditResult) -> str:
    """ "3 impossible, 2 inconsistent, 40 possible, 12 not checkable"."""
    return ", ".join(f"{len(result.of(v))} {v}" for v in (IMPOSSIBLE, INCONSISTENT, POSSIBLE, NOT_CHECKABLE))


def _verdict(result: AuditResult) -> Text:
    wrong = len(result.of(IMPOSSIBLE)) + len(result.of(INCONSISTENT))
    lead = (
        f"{wrong} of {len(result.findings)} findings are against the report"
        if wrong
        else "nothing found against the report"
    )
    return Text.assemble((lead, "bold red" if wrong else "bold green"), f": {summary(result)}")


def _limits(result: AuditResult) -> Text:
    if result.device is None:
        return Text("GPU: none known; limits of hardware are not checked", style="dim")
    d = result.device
    peaks = ", ".join(f"{key} {value / 1e12:.4g}" for key, value in d.peak_flops.items())
    memory = f"{d.memory_bps / 1e9:.4g} GB/s" if d.memory_bps else "bandwidth not stated"
    return Text(f"GPU: {d.name}: {memory}; dense TFLOP/s: {peaks}", style="dim")


def _full(finding: Finding, width: int) -> RenderableType:
    head = Text.assemble(
        (f"  {_SIGN[finding.verdict]} ", _STYLE[finding.verdict]),
        (f"line {finding.line}", "bold"),
        "  ",
        (_cut(finding.quote, width), "italic"),
        (f"  [{finding.rule}]", "dim"),
    )
    return Group(head, Padding(Text(finding.explanation), (0, 0, 0, 6)))


def _short(finding: Finding, width: int) -> Text:
    return Text.assemble(
        (f"  {_SIGN[finding.verdict]} ", _STYLE[finding.verdict]),
        f"line {finding.line}  ",
        (_cut(finding.quote, width // 2), "italic"),
        ("  " + finding.explanation, "dim"),
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def to_json(result: AuditResult, indent: int | None = 2) -> str:
    """The result as JSON: {"device", "counts", "notes", "findings": [{line, quote, verdict, rule, …}]}."""
    findings = []
    for finding in result.findings:
        entry = asdict(finding)
        entry["column"] = entry.pop("anchor")[1]
        findings.append(entry)
    data = {
        "device": result.device.name if result.device else None,
        "counts": {v: len(result.of(v)) for v in (IMPOSSIBLE, INCONSISTENT, POSSIBLE, NOT_CHECKABLE)},
        "notes": list(result.notes),
        "findings": findings,
    }
    return json.dumps(data, ensure_ascii=False, indent=indent)
