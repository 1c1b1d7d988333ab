"""doctor and explain: what this machine can run, and what a workload costs at least."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import expertile
from expertile.cli.traffic import (
    GROUPED,
    OPERATORS,
    OPTIONS,
    explain_grouped_traffic,
    explain_operator,
    records_in,
)
from expertile.device import DTYPES, Device
from expertile.lab.race.routing import draw
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.explain import explain_problem
from expertile.ops.grouped_mm.problem import Problem


def doctor() -> None:
    """What this machine can run: the GPU, its limits, and each backend with ✓ or the reason it can't."""
    console = Console(emoji=False)
    device = Device.current()
    what = f"{device.sm_count} cores"
    if device.capability:
        what = f"compute capability {device.capability[0]}.{device.capability[1]}"
    console.print(f"[bold]{escape(device.name)}[/bold]  ({what})")
    for line in _limits(device):
        console.print(f"  {line}")
    versions = f"torch {torch.__version__}, Triton {_version('triton')}, Python {platform.python_version()}"
    console.print(f"  expertile {expertile.__version__}, {versions}")
    table = Table(
        "backend", "forward", "dgrad", "wgrad", "what it is", title="grouped_mm backends, bfloat16, K = 2048, N = 1536"
    )
    probes = _probes(device)
    reasons: list[str] = []
    for backend in BACKENDS:
        cells = []
        for name, problem in probes.items():
            reason = backend.supports(problem, device)
            cells.append("[green]✓[/green]" if reason is None else "[red]✗[/red]")
            if reason is not None:
                reasons.append(f"{backend.name} {name}: {reason}")
        table.add_row(backend.name, *cells, backend.summary + (" (peer)" if backend.peer else ""))
    console.print(table)
    for reason in _merged(reasons):
        console.print(f"  ✗ {escape(reason)}")


def _limits(device: Device) -> list[str]:
    peaks = ", ".join(f"{k} {device.peak_flops[k] / 1e12:.4g}" for k in DTYPES if k in device.peak_flops)
    memory = f"{device.memory_bps / 1e12:.3g} TB/s" if device.memory_bps else "bandwidth not stated"
    if device.kind == "cpu":
        cache = f"last-level cache {device.l2_bytes / 2**20:.0f} MiB"
        return [f"memory: {device.memory_bytes / 1e9:.0f} GB; {cache}", "peak and bandwidth: bench measures them"]
    lines = [f"dense peak at {device.max_clock_hz / 1e9:.3g} GHz, TFLOP/s: {peaks}"]
    cache = f"last-level cache {device.l2_bytes / 2**20:.0f} MiB"
    lines.append(f"memory: {device.memory_bytes / 1e9:.0f} GB, {memory}; {cache}")
    if device.kind == "cuda":
        lines.append(f"{device.sm_count} SMs, {device.smem_bytes / 1024:.0f} KiB shared memory a block")
    return lines


def _probes(device: Device) -> dict[str, Problem]:
    """The three products of an expert layer's training step, with Linear-layout weights."""
    sizes, k, n = (128,) * 8, 2048, 1536
    workloads = {
        "forward": ragged_m("forward", "", sizes, k, n, "bf16"),
        "dgrad": ragged_m("dgrad", "", sizes, n, k, "bf16", b_layout="kn"),
        "wgrad": wgrad("wgrad", "", sizes, k, n, "bf16"),
    }
    # The library sees offs on the device only, so the probe does not know the sizes either.
    return {name: w.problem(device.kind).with_sizes(None) for name, w in workloads.items()}


def _merged(reasons: list[str]) -> list[str]:
    """One line for each reason, with the products it hits."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for line in reasons:
        head, reason = line.split(": ", 1)
        backend, product = head.split(" ")
        by_reason.setdefault((backend, reason), []).append(product)
    return [f"{backend} ({', '.join(products)}): {reason}" for (backend, reason), products in by_reason.items()]


def _version(module: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(module)
    except PackageNotFoundError:
        return "not installed"


def explain(
    ctx: typer.Context,
    op: Annotated[str, typer.Option(help=f"Also memory traffic, of one operator: {', '.join(OPERATORS)}.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens; each takes top-k rows.", min=0)] = 16384,
    top_k: Annotated[int, typer.Option(help="Experts that each token goes to.", min=1)] = 1,
    groups: Annotated[int, typer.Option(help="Groups (experts).", min=1)] = 8,
    k: Annotated[int, typer.Option("-k", "--k", help="Summed dimension (rows of dW for wgrad).", min=1)] = 4096,
    n: Annotated[int, typer.Option("-n", "--n", help="Columns of the result.", min=1)] = 14336,
    product: Annotated[
        str,
        typer.Option(help="forward (a [rows, K] x weights [G, N, K]), dgrad (weights in the other order) or wgrad."),
    ] = "forward",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    routing: Annotated[
        str,
        typer.Option(help="balanced, uniform, skewed, zipf(1.2), one-expert, half-empty, or a FILE.json / .npz."),
    ] = "uniform",
    seed: Annotated[int, typer.Option(help="Seed of the routing.", min=0)] = 0,
    gpu: Annotated[str, typer.Option(help="A GPU by name (RTX 4090, H200 …); by default this machine's.")] = "",
    rows: Annotated[int | None, typer.Option(help="Rows (softmax, norms), or of each grid (laplacian).")] = None,
    cols: Annotated[int | None, typer.Option(help="Columns of a row or grid.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences (attention).")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads (attention).")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads; as many as query heads by default.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Queries of a sequence (attention).")] = None,
    k_len: Annotated[int | None, typer.Option(help="Keys of a sequence; as many as queries by default.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements of a head (attention).")] = None,
    causal: Annotated[bool | None, typer.Option("--causal", help="Later keys are masked (attention).")] = None,
    grids: Annotated[int | None, typer.Option(help="Grids of a batch (laplacian).")] = None,
    boundary: Annotated[str | None, typer.Option(help="zero, replicate, circular or interior (laplacian).")] = None,
    elements: Annotated[int | None, typer.Option(help="Elements (add_scalar).")] = None,
    measured: Annotated[bool, typer.Option("--measured", help="With --op: count bytes with Nsight Compute.")] = False,
    records: Annotated[Path | None, typer.Option(help="Your records (a file or folder) instead of ours.")] = None,
) -> None:
    """One workload in numbers: FLOPs, bytes, bound, waves, padding, launch share; which backend, and why.

    With --op the memory traffic of any operator: unfused, as torch does it, and as this package does.
    """
    console = Console(emoji=False)
    given = {name: value for name, value in ctx.params.items() if _is_given(ctx, name)}
    of_operators = {name: value for name, value in given.items() if name in OPTIONS}
    if op and op != GROUPED:
        for name in ("tokens", "top_k", "groups", "k", "n", "product", "routing", "seed"):
            if name in given:
                raise ValueError(f"{name}: expected without --op or with --op {GROUPED}, got it with --op {op}")
        device = Device.by_name(gpu) if gpu else Device.current()
        explain_operator(op, of_operators, dtype, device, measured, records_in(records), console)
        return
    for name in (*of_operators, *(n for n in ("measured", "records") if n in given and not op)):
        raise ValueError(f"{name}: expected with --op and one of {', '.join(OPERATORS)}, got it without")
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype: expected bf16, fp16 or fp32, got {dtype!r}")
    if product not in ("forward", "dgrad", "wgrad"):
        raise ValueError(f"product: expected forward, dgrad or wgrad, got {product!r}")
    here = Device.current()
    device = Device.by_name(gpu) if gpu else here
    for drawn in draw(routing, tokens, groups, top_k, seed):
        if product == "wgrad":
            workload = wgrad(product, "", drawn.group_sizes, k, n, dtype, routing=drawn.label)
        else:
            order = "nk" if product == "forward" else "kn"
            workload = ragged_m(product, "", drawn.group_sizes, k, n, dtype, b_layout=order, routing=drawn.label)
        console.print(f"{escape(drawn.label)}: rows per group {_summary(drawn.group_sizes)}", highlight=False)
        problem = workload.problem(device.kind)
        console.print(escape(str(explain_problem(problem, device))), highlight=False)
        if op:
            explain_grouped_traffic(problem, drawn.group_sizes, device, measured, records_in(records), console)
    if device.name != here.name:
        note = "is not this machine's device: nothing was measured here; each line says where its estimate is from."
        console.print(f"[dim]{escape(device.name)} {note}[/dim]")


def _is_given(ctx: typer.Context, option: str) -> bool:
    """Whether an option stands on the command line, rather than having its default."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _summary(sizes: tuple[int, ...], most: int = 16) -> str:
    shown = ", ".join(map(str, sizes[:most])) + (", …" if len(sizes) > most else "")
    return f"{shown} (smallest {min(sizes)}, largest {max(sizes)}, {sizes.count(0)} empty)"
