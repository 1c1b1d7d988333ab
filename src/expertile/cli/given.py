"""Which options a user has typed, so that a default does not override what a file says."""

from __future__ import annotations

from typing import Any

import typer


def given(ctx: typer.Context) -> dict[str, Any]:
    """The options and arguments that stand on the command line, by their names in Python."""
    return {name: value for name, value in ctx.params.items() if _typed(ctx, name)}


def _typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
