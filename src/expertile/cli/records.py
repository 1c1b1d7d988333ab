"""compare and report: commands that read records and measure nothing."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from expertile.cli.output import check_file, check_folder, print_json
from expertile.lab.flashinfer import write as write_traces
from expertile.lab.race import compare as comparing
from expertile.lab.race.record import Record, read, shipped_root, shown_files
from expertile.lab.report.history import history as history_of
from expertile.lab.report.history import history_page, show_history
from expertile.lab.report.leaderboard import leaderboard, tables
from expertile.lab.report.markdown import markdown
from expertile.lab.report.page import html, site, summary
from expertile.lab.report.table import table
from expertile.lab.report.verdict import verdict


def compare(
    old: Annotated[Path | None, Argument(help="Records of the earlier run (JSONL).")] = None,
    new: Annotated[Path | None, Argument(help="Records of the later run (JSONL).")] = None,
    history: Annotated[
        Path | None, Option(help="Instead of two files a folder: each workload over its runs and commits.")
    ] = None,
    only: Annotated[
        list[str], Option(help="With --history: workloads whose names match, 'models/*' (again for more).")
    ] = [],
    out: Annotated[Path | None, Option(help="With --history: an HTML file with a chart for each.")] = None,
    min_effect: Annotated[float, Option(help="Smallest change that counts, as a share.")] = 0.03,
    ties: Annotated[bool, Option(help="List ties as well.")] = True,
    across_devices: Annotated[
        bool, Option("--across-devices", help="Compare records of different devices, which are refused else.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Faster, slower or tie, with confidence; exit code 1 on a regression."""
    if history is not None:
        if old or new:
            raise ValueError(f"history: expected a folder and no files, got {old or new} as well")
        _history(history, only, out, as_json)
        return
    for name, given in (("only", only), ("out", out)):
        if given:
            raise ValueError(f"{name}: expected with --history, got it without")
    if old is None or new is None:
        raise ValueError("compare: expected OLD and NEW, two files of records, or --history FOLDER")
    before, after = read(old), read(new)
    for path, held in ((old, before), (new, after)):
        if not held:
            raise ValueError(f"{path}: expected records, found none")
    devices = [sorted({r.env.gpu for r in held}) for held in (before, after)]
    if devices[0] != devices[1] and not across_devices:
        was, now = (" and ".join(names) for names in devices)
        raise ValueError(
            f"compare: expected records of one device, got {was} and {now}; --across-devices compares them"
        )
    rows = comparing.compare(before, after, min_effect)
    changes = comparing.environment_changes(before, after)
    if as_json:
        print_json({"environment_changes": changes, "rows": rows})
    else:
        console = Console(emoji=False)
        for change in changes:
            console.print(f"[yellow]{escape(change)}[/yellow]", highlight=False)
        comparing.render(rows, console, ties)
    if all(row.alone for row in rows):
        raise typer.Exit(2)  # a gate must not pass because it was given the wrong file
    raise typer.Exit(comparing.exit_code(rows))


def _history(folder: Path, only: list[str], out: Path | None, as_json: bool) -> None:
    """Prints, and with `out` draws, the workloads that two runs or more have measured; exits with 2 without any."""
    if out is not None:
        check_file("out", out)
    found = history_of(folder, only)
    if as_json:
        print_json(found)
    elif found:
        console = Console(emoji=False)
        show_history(found, console, every=bool(only))
        if out is not None:
            console.print(f"History: {escape(str(history_page(found, out)))}", highlight=False)
    else:
        print(f"history: no workload in {folder} has been measured in two runs")
    if not found:
        raise typer.Exit(2)


def report(
    files: Annotated[list[Path] | None, Argument(help="Record files (JSONL); the shipped ones by default.")] = None,
    out: Annotated[
        Path | None, Option(help="Where to write the HTML report: a file, or without FILES a folder.")
    ] = None,
    as_markdown: Annotated[bool, Option("--markdown", help="Print a Markdown summary.")] = False,
    traces: Annotated[
        Path | None, Option(help="Folder for definitions, solutions and traces that flashinfer-bench reads.")
    ] = None,
) -> None:
    """Verdict, table and HTML report from records; of the shipped ones an index with a page for each run."""
    wanted = {"out": out is not None, "markdown": as_markdown, "traces": traces is not None}
    if sum(wanted.values()) > 1:
        raise ValueError(
            f"{', '.join(name for name, given in wanted.items() if given)}: expected one of them, got more"
        )
    if out is not None:
        check_file("out", out) if files else check_folder("out", out)
    console = Console(emoji=False)
    if traces is not None:
        written = write_traces(check_folder("traces", traces), _records(files))
        print(f"Traces: {written.traces} new in {traces}, of {', '.join(written.definitions) or 'no definition'}")
        for why, count in written.left_out.items():
            print(f"Left out: {count} {why}")
        return
    if not files and not as_markdown:
        found = {f"{path.parent.name}-{path.name.split('.')[0]}": list(read(path)) for path in shown_files()}
        if not found:
            raise ValueError(f"files: expected records, found none in {shipped_root()}")
        for name, held in found.items():
            console.print(f"[bold]{escape(name)}[/bold]\n  {escape(summary(held))}", highlight=False)
        if out is None:
            console.print("expertile report --out FOLDER writes a page for each, and an index.", highlight=False)
        else:
            console.print(f"Report:  {escape(str(site(found, out)))}", highlight=False)
        return
    records = _records(files)
    if as_markdown:
        print(markdown(records))
        return
    for sentence in verdict(records):
        console.print(f"[bold]•[/bold] {escape(sentence)}", highlight=False)
    console.print(table(records), *tables(leaderboard(records)), sep="\n")
    if out is not None:
        console.print(f"Report:  {escape(str(html(records, out)))}", highlight=False)


def _records(files: list[Path] | None) -> list[Record]:
    """The records of `files`, each once, or the shipped ones that commands show."""
    chosen = list({path.resolve(): path for path in files or shown_files()}.values())
    records = [record for path in chosen for record in read(path)]
    if not records:
        raise ValueError(f"files: expected records, found none in {', '.join(map(str, chosen)) or shipped_root()}")
    return records
