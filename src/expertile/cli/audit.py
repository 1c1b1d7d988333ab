"""audit: somebody's benchmark report against arithmetic. It needs no torch, so a reviewer has the answer at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from expertile.lab.audit import audit_file, render, to_json


def audit(
    file: Annotated[Path, typer.Argument(help="A benchmark report: Markdown or plain text.")],
    shape: Annotated[list[str], typer.Option(help="A shape that the text leaves out, e.g. 16384x14336x4096 (M x N x K).")] = [],  # noqa: B006, E501
    dtype: Annotated[str, typer.Option(help="The dtype that the text leaves out: bf16, fp16, fp32, fp8 …")] = "",
    gpu: Annotated[str, typer.Option(help="The GPU that the text leaves out.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:  # fmt: skip
    """Check somebody's benchmark report against arithmetic and hardware limits; exit 1 if a claim fails."""
    result = audit_file(file, shapes=tuple(shape), dtype=dtype or None, gpu=gpu or None)
    if as_json:
        print(to_json(result))
    else:
        render(result, Console(emoji=False))
    if any(f.verdict in ("impossible", "inconsistent") for f in result.findings):
        raise typer.Exit(1)
