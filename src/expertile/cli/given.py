"""Which options a user has typed, so that a default does not override what a file says."""

from typing import Any

import typer


def given(ctx: typer.Context) -> dict[str, Any]:
    """The options and arguments that stand on the command line, by their names in Python."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name: ctx.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
