"""The commands by name. The module of a command is imported when the command is called: most need torch, which takes
more than a second; the overview (`expertile --help`) and `audit` do not."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from expertile.version import __version__, commit

# Each by name, with its line in the overview, the first of its docstring.
COMMANDS = {
    "doctor": "What this machine can run: the GPU, its limits, and each backend with ✓ or the reason it can't.",
    "bench": "Measure workloads: every backend is checked against a float32 reference, then all are timed in turns.",
    "explain": "One workload in numbers: FLOPs, bytes, bound, waves, padding, launch share; which backend, and why.",
    "audit": "Check somebody's benchmark report against arithmetic and hardware limits; exit 1 if a claim fails.",
    "compare": "Faster, slower or tie, with confidence; exit code 1 on a regression.",
    "tune": 'Measure every backend and config on many problems, and write the table that backend="auto" reads.',
    "report": "Verdict, table and HTML report from records; of the shipped ones an index with a page for each run.",
    "impact": "Time saved in a forward pass and GPU-hours in a day, from records alone, with the arithmetic shown.",
}
_READERS = ("compare", "report")  # in `records`; any other command in a module of its name
_LOOK: dict[str, Any] = {
    "pretty_exceptions_show_locals": False,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Plain:
    """Help that names no type of a flag: "--json <bool>" looks as if it wanted an argument."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _OneCommand(_Plain, TyperCommand):
    pass


class _Commands(_Plain, TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and _command(str(name)), rest


def function(name: str) -> Any:
    """What a command calls."""
    return getattr(import_module(f"expertile.cli.{'records' if name in _READERS else name}"), name)


def _command(name: str) -> Any:
    """The command itself, with its options."""
    alone = typer.Typer(**_LOOK)
    alone.command(name, cls=_OneCommand)(function(name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="expertile",
    help="Grouped matrix products of Mixture-of-Experts models: measure them, explain them, check figures.",
    cls=_Commands,
    **{**_LOOK, "add_completion": True},
)


def _print_version(asked: bool) -> None:
    if asked:
        held = commit()
        print(f"expertile {__version__}" + (f" ({held})" if held else ""))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="The version and commit.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)
