"""audit: somebody's benchmark report against arithmetic and hardware limits. Needs neither torch nor Triton."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from expertile.audit import ACCUSATIONS, Audit, audit_text
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT
from expertile.audit.render import FORMATS, render


def audit(
    files: Annotated[list[str], typer.Argument(help="Markdown, HTML, CSV, JSON, notebooks, logs; - is stdin.")],
    shape: Annotated[str, typer.Option(help="The shape that the text leaves out: MxNxK.")] = "",
    gpu: Annotated[str, typer.Option(help="The GPU that the text leaves out.")] = "",
    dtype: Annotated[str, typer.Option(help="The format that the text leaves out: bf16, fp16, fp32, fp8 …")] = "",
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "text",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
    fail_on: Annotated[str, typer.Option(help="inconsistent (or worse), impossible, never: exit 1.")] = INCONSISTENT,
    everything: Annotated[bool, typer.Option("--all", help="Show also what could not be checked.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Check somebody's benchmark report against arithmetic and hardware limits; exit 1 if a claim fails."""
    failing = {IMPOSSIBLE: (IMPOSSIBLE,), INCONSISTENT: ACCUSATIONS, "never": ()}
    if fail_on not in failing:
        raise ValueError(f"fail-on: expected one of {', '.join(failing)}, got {fail_on!r}")
    audits = [_read(name, gpu, dtype, shape) for name in files]
    text = render(audits, "json" if as_json else form, everything)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
    if any(f.verdict in failing[fail_on] for a in audits for f in a.findings):
        raise typer.Exit(1)


def _read(name: str, gpu: str, dtype: str, shape: str) -> Audit:
    standard = name == "-"
    text = sys.stdin.read() if standard else Path(name).read_text(encoding="utf-8", errors="replace")
    return audit_text(text, "" if standard else name, gpu=gpu, dtype=dtype, shape=shape)
