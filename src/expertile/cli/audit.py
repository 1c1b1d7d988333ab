"""audit: its options for the overview and the reference; `expertile.cli.main` runs the command without typer."""

from pathlib import Path
from typing import Annotated

import typer

from expertile.audit.command import HELP, run
from expertile.audit.finding import INCONSISTENT


def audit(
    files: Annotated[list[str], typer.Argument(help=HELP["files"])],
    shape: Annotated[str, typer.Option(help=HELP["--shape"])] = "",
    gpu: Annotated[str, typer.Option(help=HELP["--gpu"])] = "",
    dtype: Annotated[str, typer.Option(help=HELP["--dtype"])] = "",
    form: Annotated[str, typer.Option("--format", help=HELP["--format"])] = "text",
    out: Annotated[Path | None, typer.Option(help=HELP["--out"])] = None,
    fail_on: Annotated[str, typer.Option(help=HELP["--fail-on"])] = INCONSISTENT,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["--json"])] = False,
) -> None:
    """Check somebody's benchmark report against arithmetic and hardware limits; exit 1 if a claim fails."""
    if not run(files, "json" if as_json else form, out, fail_on, gpu=gpu, dtype=dtype, shape=shape):
        raise typer.Exit(1)
