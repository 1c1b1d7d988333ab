"""The command line: each command reads its arguments, calls one function of the lab, and prints the answer."""

from __future__ import annotations

import sys

import typer

from expertile.cli.audit import audit
from expertile.cli.bench import bench
from expertile.cli.impact import impact
from expertile.cli.inspect import doctor, explain
from expertile.cli.records import compare, report
from expertile.cli.tune import tune

app = typer.Typer(
    name="expertile",
    help="Grouped matrix products of Mixture-of-Experts models: measure them, explain them, check figures.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    add_completion=False,
)
for command in (doctor, bench, explain, audit, compare, tune, report, impact):
    app.command(command.__name__)(command)


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError, PermissionError, IsADirectoryError) as e:
        print(f"expertile: {e}", file=sys.stderr)
        raise SystemExit(2) from None
