"""impact: what recorded times mean for a served model, with the arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expertile.cli.traffic import records_in
from expertile.device import Device
from expertile.lab.report import impact as lab
from expertile.lab.traffic.explain import shipped


def impact(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(lab.MODELS)}.")] = "bert-base",
    qps: Annotated[float, typer.Option(help="Queries per second; a query is one sequence.", min=0)] = 1000.0,
    batch: Annotated[int | None, typer.Option(help="Queries in one forward pass; the model's own by default.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a query.")] = 512,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; the model's own by default.")] = None,
    gpu: Annotated[str, typer.Option(help="The GPU whose records count.")] = "h200",
    policy: Annotated[str, typer.Option(help="graph or eager: which times count.")] = "graph",
    baseline: Annotated[str, typer.Option(help="Compared with: torch, torch.compile, unfused, liger …")] = lab.TORCH,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="In any currency; none is assumed.", min=0)] = None,
    records: Annotated[Path | None, typer.Option(help="Your records (a file or folder) instead of ours.")] = None,
) -> None:
    """Time saved in a forward pass and GPU-hours in a day, from records alone, with the arithmetic shown."""
    found, own = Device.by_name(gpu), records_in(records)
    held = shipped() if own is None else own
    lines = lab.impact(model, held, found, batch=batch, seq_len=seq_len, dtype=dtype, policy=policy, baseline=baseline)
    batch = batch or lab.MODELS[model][-1]
    print(f"{model}: one forward pass of {batch} queries x {seq_len} tokens on {found.name}, {policy}")
    print("\n".join(told(lines, batch, qps, price_per_gpu_hour)))


def told(lines: list[lab.Line], batch: int, qps: float, price: float | None = None) -> list[str]:
    """The operators, and how the result comes about. Six figures, so that a calculator can check the lines."""
    found, before, saved = [], 0.0, 0.0
    for line in lines:
        dims = ", ".join(f"{key} {value}" for key, value in line.dims.items() if key != "layout")
        if line.pair is None:
            found.append(f"left out: {line.op} ({dims}): {line.reason}.")
            continue
        (theirs, theirs_s), (ours, ours_s) = ((r, r.time_s or 0.0) for r in line.pair)
        before, saved = before + line.count * theirs_s, saved + line.count * (theirs_s - ours_s)
        calls = f"{theirs_s * 1e6:.6g} µs {theirs.backend} - {ours_s * 1e6:.6g} µs {ours.backend}"
        found.append(f"{line.op} ({dims}): {line.count} calls x ({calls}); run {ours.run}, {ours.date[:10]}")
    if not before:
        return [*found, "Nothing can be said without records."]
    each = saved / batch
    hours = qps * 86400 * each / 3600
    found.append(f"saved per pass: {saved * 1e3:.6g} ms of {before * 1e3:.6g} ms in these operators")
    found.append(f"saved per query: {saved * 1e3:.6g} ms / {batch} queries = {each * 1e6:.6g} µs")
    found.append(f"a day: {qps:g} queries/s x 86400 s x {each * 1e6:.6g} µs / 3600 = {hours:.6g} GPU-hours")
    return found if price is None else [*found, f"price: {hours:.6g} GPU-hours x {price:g} = {hours * price:.6g} a day"]
