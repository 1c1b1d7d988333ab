"""compare and report: commands that read records and measure nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from expertile.lab.race import compare as comparing
from expertile.lab.race.record import Record, read, shipped_root, shown_files
from expertile.lab.report import html, markdown, table, update_readme, verdict


def compare(
    old: Annotated[Path, typer.Argument(help="Records of the earlier run (JSONL).")],
    new: Annotated[Path, typer.Argument(help="Records of the later run (JSONL).")],
    min_effect: Annotated[float, typer.Option(help="Smallest change that counts, as a share.")] = 0.03,
    ties: Annotated[bool, typer.Option(help="List ties as well.")] = True,
) -> None:
    """Faster, slower or tie, with confidence; exit code 1 on a regression."""
    before, after = read(old), read(new)
    for path, held in ((old, before), (new, after)):
        if not held:
            raise ValueError(f"{path}: expected records, found none")
    rows = comparing.compare(before, after, min_effect)
    console = Console(emoji=False)
    for change in comparing.environment_changes(before, after):
        console.print(f"[yellow]{escape(change)}[/yellow]", highlight=False)
    comparing.render(rows, console, ties)
    raise typer.Exit(comparing.exit_code(rows))


def report(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Record files (JSONL); the shipped ones by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the HTML report.")] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the headline table between the markers of this file.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --readme: write nothing, exit 1 if it is out of date.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown summary.")] = False,
) -> None:
    """Verdict, table and HTML report from records; or the README's headline table."""
    if check and readme is None:
        raise ValueError("check: expected --readme with it")
    records = _records(files)
    if readme is not None:
        if not update_readme(readme, records, check=check) and check:
            print(f"{readme}: its figures are not what the records say; run expertile report", file=sys.stderr)
            raise typer.Exit(1)
        return
    if as_markdown:
        print(markdown(records))
        return
    console = Console(emoji=False)
    for sentence in verdict(records):
        console.print(f"[bold]•[/bold] {escape(sentence)}", highlight=False)
    console.print(table(records))
    if out is not None:
        console.print(f"Report:  {escape(str(html(records, out)))}", highlight=False)


def _records(files: list[Path] | None) -> list[Record]:
    """The records of `files`, or the shipped ones that commands show."""
    chosen = files or shown_files()
    records = [record for path in chosen for record in read(path)]
    if not records:
        raise ValueError(f"files: expected records, found none in {', '.join(map(str, chosen)) or shipped_root()}")
    return records
