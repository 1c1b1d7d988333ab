"""impact: what recorded times mean for a served model, with the arithmetic."""

from math import floor, isfinite, log10, sqrt
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from expertile.cli.complete import gpus, models
from expertile.cli.output import print_json
from expertile.cli.traffic import records_in
from expertile.device import Device
from expertile.lab.race.record import Record
from expertile.lab.report import impact as lab
from expertile.lab.traffic.explain import shipped


def impact(
    model: Annotated[str, Option(help=f"One of {', '.join(lab.MODELS)}.", autocompletion=models)] = "qwen3-30b-a3b",
    qps: Annotated[float, Option(help="Queries per second; a query is one sequence.", min=0)] = 1000.0,
    batch: Annotated[int | None, Option(help="Queries in one forward pass; the model's own by default.")] = None,
    seq_len: Annotated[int, Option(help="Tokens of a query.")] = 512,
    dtype: Annotated[str | None, Option(help="bf16, fp16 or fp32; the model's own by default.")] = None,
    gpu: Annotated[str, Option(help="The GPU whose records count.", autocompletion=gpus)] = "h200",
    policy: Annotated[str, Option(help="graph or eager: which times count.")] = "graph",
    baseline: Annotated[str, Option(help="Compared with: torch, torch.compile, unfused, liger …")] = lab.TORCH,
    price_per_gpu_hour: Annotated[float | None, Option(help="In any currency; none is assumed.", min=0)] = None,
    records: Annotated[Path | None, Option(help="Your records (a file or folder) instead of ours.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time saved in a forward pass and GPU-hours in a day, from records alone, with the arithmetic shown."""
    for option, value in (("qps", qps), ("price-per-gpu-hour", price_per_gpu_hour or 0.0)):
        if not isfinite(value):
            raise ValueError(f"--{option}: expected a finite number, got {value:g}")
    found, own = Device.by_name(gpu), records_in(records)
    held = shipped() if own is None else own
    lines = lab.impact(model, held, found, batch=batch, seq_len=seq_len, dtype=dtype, policy=policy, baseline=baseline)
    batch = batch or lab.MODELS[model].batch
    if as_json:
        print_json({"model": model, "gpu": found.name, "policy": policy, "batch": batch, "lines": lines})
    else:
        console = Console(emoji=False)
        title = f"{model}: one forward pass of {batch} queries x {seq_len} tokens on {found.name}, {policy}"
        for text in (title, *told(lines, batch, qps, price_per_gpu_hour)):
            console.print(escape(text), highlight=False)
    if not any(line.pair for line in lines):
        raise typer.Exit(2)  # there was nothing to reckon with


def told(lines: list[lab.Line], batch: int, qps: float, price: float | None = None) -> list[str]:
    """The operators, and how the result comes about, each figure with the digits that its 95 % interval allows."""
    found, before, saved, squares = [], 0.0, 0.0, 0.0
    for line in lines:
        dims = ", ".join(f"{key} {value}" for key, value in line.dims.items() if key != "layout")
        if line.pair is None:
            found.append(f"left out: {line.op} ({dims}): {line.reason}.")
            continue
        theirs_s, ours_s = (r.time_s or 0.0 for r in line.pair)
        before, saved = before + line.count * theirs_s, saved + line.count * (theirs_s - ours_s)
        squares += sum((line.count * _half(r)) ** 2 for r in line.pair)
        calls = " - ".join(f"{_figure(r.time_s or 0.0, _half(r), 1e6)} µs {r.backend}" for r in line.pair)
        found.append(
            f"{line.op} ({dims}): {line.count} calls x ({calls}); run {line.pair[1].run}, {line.pair[1].date[:10]}"
        )
    if not before:
        return [*found, "Nothing can be said without records."]
    half, each, hours = sqrt(squares), saved / batch, qps * 24 * saved / batch
    us, daily = _figure(each, half / batch, 1e6), _figure(hours, qps * 24 * half / batch)
    found.append(f"saved per pass: {_figure(saved, half, 1e3)} ms of {before * 1e3:.4g} ms in these operators")
    found.append(f"saved per query: {_figure(saved, half, 1e3)} ms / {batch} queries = {us} µs")
    found.append(f"a day: {qps:g} queries/s x 86400 s x {us} µs / 3600 = {daily} GPU-hours")
    if price is not None:
        cost = _figure(hours * price, qps * 24 * half / batch * price)
        found.append(f"price: {daily} GPU-hours x {price:g} = {cost} a day")
    return [*found, "±: the 95 % intervals of these runs; another day or card differs by more."]


def _half(record: Record) -> float:
    """Half the 95 % interval of a time, its larger side; 0 where none was recorded."""
    low, high = record.ci95_s or (record.time_s or 0.0,) * 2
    return max(high - (record.time_s or 0.0), (record.time_s or 0.0) - low)


def _figure(value: float, half: float, unit: float = 1.0) -> str:
    """`value` and `half` times `unit`, to the first digit of `half`: "161.9 ± 0.2"; three digits where that is 0."""
    value, half = value * unit, half * unit
    if half <= 0:
        return f"{value:.3g}"
    digits = -floor(log10(half))
    shown = (f"{round(number, digits):.{max(digits, 0)}f}" for number in (value, half))
    return " ± ".join(shown)
