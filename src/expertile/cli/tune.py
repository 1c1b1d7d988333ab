"""tune: measure this machine, write the table that `backend="auto"` reads; or check what `auto` makes of it."""

import datetime
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from typer import Option

from expertile.cli.complete import backends
from expertile.cli.output import check_folder, print_json
from expertile.device import Device
from expertile.lab.bench.tune import table_of
from expertile.lab.bench.tune import tune as run_tune
from expertile.lab.bench.tune_add import add
from expertile.lab.bench.tune_verify import left_out, summary, verdicts, verify
from expertile.lab.race.record import read, results_path
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.relatives import table_for
from expertile.ops.grouped_mm.tuned import Table, load_tables, save_table, user_folder
from expertile.ops.measure import MEASURE


def tune(
    minutes: Annotated[float, Option(help="About how long to measure.")] = 8.0,
    verify_count: Annotated[
        int, Option("--verify", help="Measure no table: time auto against every rival on so many random problems.")
    ] = 0,
    left_out_gpu: Annotated[
        str, Option("--left-out", help="Measure nothing: auto on each problem of this GPU's table, by the others.")
    ] = "",
    add_backend: Annotated[
        list[str],
        Option(
            "--add", help="Measure this backend alone on the table's problems, and add it.", autocompletion=backends
        ),
    ] = [],
    least_rows: Annotated[float, Option(help="For --add: only problems with so many rows a group.")] = 0.0,
    backend: Annotated[list[str], Option(help="Only these backends (again for more).", autocompletion=backends)] = [],
    problems: Annotated[
        int, Option(help="At most so many problems; by default as many as the time allows.", min=0)
    ] = 0,
    resume: Annotated[bool, Option("--resume", help="Go on with today's records.")] = False,
    seed: Annotated[
        int | None, Option(help="Seed of the problems and operands; for --verify one that is not in the table.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for the records (JSONL); out/ by default.")] = None,
    tables: Annotated[
        Path | None, Option(help="Folder for the table; by default this user's, which is read first.")
    ] = None,
    from_records: Annotated[list[Path], Option(help="Measure nothing: make the table from these record files.")] = [],
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure every backend and config on many problems, and write the table that backend="auto" reads."""
    console = Console(emoji=False, stderr=as_json)
    device = Device.current()

    def say(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    def conclude(lines: list[str], path: Path | None = None, **about: object) -> None:
        for line in lines:
            say(f"• {line}")
        if path is not None:
            say(f"Records: {path}")
        if as_json:
            print_json({**about, "verdict": lines})

    def fresh(preset: str) -> AbstractContextManager[Path]:
        """The file of today's records of `preset`; emptied unless it is gone on with."""
        path = results_path(device.slug, preset, datetime.date.today().isoformat(), root=folder)
        return nullcontext(path) if resume else _emptied(path)

    def write(table: Table, **about: object) -> None:
        slug = device.slug if table.gpu == device.name else Device.by_name(table.gpu).slug
        target = target_folder / f"{slug}.json"
        save_table(table, target)
        say(f"Table:   {target} ({len(table.problems)} problems)")
        if as_json:
            print_json({"table": target, "gpu": table.gpu, "problems": len(table.problems), **about})

    asked = {"verify": verify_count, "left-out": left_out_gpu, "add": add_backend, "from-records": from_records}
    kinds = [f"--{name}" for name, value in asked.items() if value]
    if len(kinds) > 1:
        raise ValueError(f"tune: expected at most one of its tasks, got {' and '.join(kinds)}")
    if least_rows and not add_backend:
        raise ValueError(f"least-rows: expected with --add alone, got {least_rows:g} without")
    chosen = tuple(by_name(name) for name in backend) or BACKENDS
    folder = check_folder("out", out or Path("out"))
    target_folder = check_folder("tables", tables or user_folder())
    if left_out_gpu:
        gpu = Device.by_name(left_out_gpu)
        known = table_for(gpu)
        if known is None or known.relative:
            raise ValueError(f"left-out: expected a GPU with a table, got {gpu.name}")
        conclude(summary(left_out(known, gpu, chosen)), gpu=gpu.name)
        return
    if verify_count:
        with fresh("auto") as path:
            found = verify(verify_count, path, minutes, resume=resume, seed=seed, backends=chosen, say=say)
        raced = verdicts(found, MEASURE)
        conclude([*summary(verdicts(found)), *(summary(raced, MEASURE) if raced else [])], path, records=path)
        return
    if add_backend:
        new = tuple(by_name(name) for name in add_backend)
        known = next(iter(load_tables(device.slug)), None)
        if known is None:
            raise ValueError(f"add: expected a GPU with a table, got {device.name}")
        with fresh("tune-add") as path:
            write(add(known, new, path, minutes, least_rows=least_rows, seed=seed or 0, say=say))
        return
    if from_records:
        records = [record for path in from_records for record in read(path)]
        if not records:
            raise ValueError(f"from-records: expected records, found none in {', '.join(map(str, from_records))}")
    else:
        with fresh("tune") as path:
            records = run_tune(
                minutes, path, resume=resume, seed=seed or 0, backends=chosen, most=problems or None, say=say
            )
        say(f"Records: {path}")
    write(table_of(records, chosen), records=len(records))


@contextmanager
def _emptied(path: Path) -> Iterator[Path]:
    """`path` without what it holds, which comes back where nothing is written: after a mistake, say."""
    held = path.read_bytes() if path.is_file() else None
    path.unlink(missing_ok=True)
    try:
        yield path
    finally:
        if held is not None and not path.exists():
            path.write_bytes(held)
