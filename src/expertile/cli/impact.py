"""impact: what recorded times mean for a served model, with the arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from expertile.cli.traffic import records_in
from expertile.device import Device
from expertile.lab.report import impact as lab
from expertile.lab.report.impact_models import MODELS
from expertile.lab.report.units import micros, percent
from expertile.lab.traffic.explain import shipped


def impact(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "bert-base",
    qps: Annotated[float, typer.Option(help="Queries per second; a query is one sequence.", min=0)] = 1000.0,
    batch: Annotated[int | None, typer.Option(help="Queries in one forward pass; the model's own by default.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a query; the model's own by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; the model's own by default.")] = None,
    gpu: Annotated[str, typer.Option(help="The GPU whose records count.")] = "h200",
    policy: Annotated[str, typer.Option(help="graph or eager: which times count.")] = "graph",
    baseline: Annotated[str, typer.Option(help="Compared with: torch, torch.compile, unfused, liger …")] = lab.TORCH,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="In any currency; none is assumed.", min=0)] = None,
    records: Annotated[Path | None, typer.Option(help="Your records (a file or folder) instead of ours.")] = None,
    scale: Annotated[bool, typer.Option("--scale", help="Scale the nearest record where there is none.")] = False,
    missing: Annotated[Path | None, typer.Option(help="Write a bench file (TOML) of what has no record.")] = None,
) -> None:
    """Time saved in a forward pass and GPU-hours in a day, from records alone, with the arithmetic shown."""
    own = records_in(records)
    found = lab.impact(
        model,
        qps,
        shipped() if own is None else own,
        Device.by_name(gpu),
        batch=batch,
        seq_len=seq_len,
        dtype=dtype,
        policy=policy,
        baseline=baseline,
        price_per_gpu_hour=price_per_gpu_hour,
        scale=scale,
    )
    console = Console(emoji=False)
    show(found, console)
    if missing is not None:
        missing.write_text(lab.bench_file(found))
        console.print(
            f"To measure them: expertile bench --config {escape(str(missing))}", highlight=False, soft_wrap=True
        )


def show(found: lab.Impact, console: Console) -> None:
    """The table of operators, then the arithmetic line by line."""

    def say(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    model, tokens = found.model, found.batch * found.seq_len
    say(
        f"{model.name} ({model.source}): one forward pass of {found.batch} queries x {found.seq_len} tokens = {tokens} "
        f"tokens, {found.dtype}, on {found.gpu}, {found.policy}; against {found.baseline}"
    )
    if found.counted:
        console.print(_table(found))
    for line in found.left_out:
        say(f"left out: {_told(line)}: {line.reason}.")
    scaled = [line for line in found.counted if line.pair is not None and line.pair.scaled]
    for line in scaled:
        assert line.pair is not None
        say(f"not measured at this size: {_told(line)}, {line.pair.scaled}.")
    if not found.counted:
        say("Nothing can be said without records.")
        return
    for text in arithmetic(found):
        say(text)


def arithmetic(found: lab.Impact) -> list[str]:
    """How the result comes about, a line for each step."""
    share = found.saved_s / found.baseline_s
    seconds = found.qps * lab.SECONDS_A_DAY * found.saved_per_query_s
    lines = [
        f"saved per pass: {' + '.join(f'{_ms(line.saved_s)} ms' for line in found.counted)} = {_ms(found.saved_s)} ms "
        f"of {_ms(found.baseline_s)} ms in these operators ({percent(abs(share))}"
        f"{' more' if found.saved_s < 0 else ''})",
        f"saved per query: {_ms(found.saved_s)} ms / {found.batch} queries = {_us(found.saved_per_query_s)} µs",
        f"a day: {found.qps:,.10g} queries/s x 86,400 s x {_us(found.saved_per_query_s)} µs = {_plain(seconds)} GPU-s; "
        f"/ 3600 = {_plain(found.gpu_hours_per_day)} GPU-hours",
    ]
    if found.price_per_day is not None:
        lines.append(
            f"price: {_plain(found.gpu_hours_per_day)} GPU-hours x {found.price_per_gpu_hour:,.10g} = "
            f"{_plain(found.price_per_day)} a day"
        )
    runs = dict.fromkeys(f"{line.pair.run} ({line.pair.date[:10]})" for line in found.counted if line.pair is not None)
    lines.append(f"records: run {', '.join(runs)}; operators one after another, everything else unchanged.")
    return lines


def _table(found: lab.Impact) -> Table:
    table = Table(Column("operator", overflow="fold"), "calls", "baseline, µs", "ours, µs", "saved a pass, µs")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in found.counted:
        assert line.pair is not None
        pair = line.pair
        table.add_row(
            escape(_told(line)),
            str(line.use.count),
            f"{micros(pair.baseline_s)} {escape(pair.baseline)}",
            f"{micros(pair.ours_s)} {escape(pair.ours)}",
            _us(line.saved_s),
        )
    return table


def _told(line: lab.Line) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in line.use.dims if key != "layout")
    return f"{line.use.op}, {line.use.where} ({shown})"


def _plain(value: float) -> str:
    """Six figures, so that the lines can be checked with a calculator."""
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def _us(seconds: float) -> str:
    return _plain(seconds * 1e6)


def _ms(seconds: float) -> str:
    return _plain(seconds * 1e3)
