"""audit: its options for the overview and the reference; `expertile.cli.main` runs the command without typer."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from expertile.audit.command import HELP, run
from expertile.audit.finding import INCONSISTENT


def audit(
    files: Annotated[list[str], Argument(help=HELP["files"])],
    shape: Annotated[str, Option(help=HELP["--shape"])] = "",
    gpu: Annotated[str, Option(help=HELP["--gpu"])] = "",
    dtype: Annotated[str, Option(help=HELP["--dtype"])] = "",
    form: Annotated[str, Option("--format", help=HELP["--format"])] = "text",
    out: Annotated[Path | None, Option(help=HELP["--out"])] = None,
    fail_on: Annotated[str, Option(help=HELP["--fail-on"])] = INCONSISTENT,
    as_json: Annotated[bool, Option("--json", help=HELP["--json"])] = False,
) -> None:
    """Check somebody's benchmark report against arithmetic and hardware limits; exit 1 if a claim fails."""
    if not run(files, "json" if as_json else form, out, fail_on, gpu=gpu, dtype=dtype, shape=shape):
        raise typer.Exit(1)
