"""audit: somebody's benchmark report against arithmetic and hardware limits. Needs neither torch nor Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expertile.audit.command import FAIL_ON, run
from expertile.audit.render import FORMATS


def audit(
    files: Annotated[list[str], typer.Argument(help="Markdown, HTML, CSV, JSON, notebooks, logs; - is stdin.")],
    shape: Annotated[str, typer.Option(help="The shape that the text leaves out: MxNxK.")] = "",
    gpu: Annotated[str, typer.Option(help="The GPU that the text leaves out.")] = "",
    dtype: Annotated[str, typer.Option(help="The format that the text leaves out: bf16, fp16, fp32, fp8 …")] = "",
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "text",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
    fail_on: Annotated[str, typer.Option(help="inconsistent (or worse), impossible, never: exit 1.")] = next(
        iter(FAIL_ON)
    ),
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Check somebody's benchmark report against arithmetic and hardware limits; exit 1 if a claim fails."""
    form = "json" if as_json else form
    if not run(files, form, out, fail_on, gpu=gpu, dtype=dtype, shape=shape):
        raise typer.Exit(1)
