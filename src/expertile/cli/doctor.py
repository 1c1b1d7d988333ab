"""doctor: what this machine can run, and which table "auto" reads."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

import expertile
from expertile.cli.output import print_json
from expertile.device import DTYPES, Device
from expertile.lab.measure.environment import package_version
from expertile.lab.operators import operators, presets
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.lab.report.rows import by
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.relatives import table_for
from expertile.ops.grouped_mm.tuned import package_folder, user_folder


@dataclass(frozen=True)
class Standing:
    """Whether a backend runs here: on how many of `asked` workloads, and why not on the others."""

    operator: str
    backend: str
    peer: bool
    runs: int
    asked: int
    reason: str


def doctor(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """What this machine can run: the GPU, its limits, and each backend with ✓ or the reason it can't."""
    device = Device.current()
    standings, tuned = list(_standings(device)), _tuned(device)
    versions = {
        "expertile": expertile.__version__,
        "torch": torch.__version__,
        "triton": package_version("triton") or "not installed",
    }
    versions["python"] = platform.python_version()
    if as_json:
        limits = (
            {"memory_bps": device.memory_bps, "peak_flops": dict(device.peak_flops)} if device.kind != "cpu" else {}
        )
        facts = {"device": device.name, "kind": device.kind, "capability": device.capability, **limits}
        print_json({**facts, "versions": versions, "tuned_table": tuned, "backends": standings})
        return
    console = Console(emoji=False)
    what = f"{device.sm_count} cores"
    if device.capability:
        what = f"compute capability {device.capability[0]}.{device.capability[1]}"
    console.print(f"[bold]{escape(device.name)}[/bold]  ({what})")
    for line in _limits(device):
        console.print(f"  {line}")
    console.print("  " + ", ".join(f"{name} {version}" for name, version in versions.items()), highlight=False)
    none = f'none; "auto" goes by its model, and expertile tune writes one to {user_folder()}'
    console.print(f"  tuned table: {escape(tuned or none)}", highlight=False, soft_wrap=True)
    console.print(_grouped(device))
    for operator, own in by(standings, lambda s: s.operator).items():
        console.print(f"[bold]{escape(operator)}[/bold]", highlight=False)
        able = [s.backend + ("" if s.runs == s.asked else f" ({s.runs} of {s.asked} workloads)") for s in own if s.runs]
        if able:
            console.print(f"  [green]✓[/green] {escape(', '.join(able))}", highlight=False)
        for reason, unable in by((s for s in own if not s.runs), lambda s: s.reason).items():
            names = ", ".join(s.backend for s in unable)
            console.print(f"  [red]✗[/red] {escape(names)}: {escape(reason)}", highlight=False)


def _grouped(device: Device) -> Table:
    """The three products of a training step for each backend of grouped_mm."""
    table = Table(
        "backend", "forward", "dgrad", "wgrad", "what it is", title="grouped_mm, bfloat16, K = 2048, N = 1536"
    )
    for backend, reasons in _probed(device):
        cells = ["[green]✓[/green]" if reason is None else "[red]✗[/red]" for reason in reasons]
        table.add_row(backend.name, *cells, backend.summary + (" (peer)" if backend.peer else ""))
    return table


def _standings(device: Device) -> Iterator[Standing]:
    """grouped_mm on the three products of a training step, every other operator on the workloads of its presets."""
    for backend, reasons in _probed(device):
        yield _standing("grouped_mm", backend.name, backend.peer, reasons)
    workloads = by((workload for build in presets().values() for workload in build()), lambda w: w.op)
    for operator in operators().values():
        for rival in operator.rivals:
            found = [rival.supports(w, device) for w in workloads.get(operator.name, [])]
            if found:
                yield _standing(operator.name, rival.name, rival.peer, found)


def _standing(operator: str, name: str, peer: bool, reasons: list[str | None]) -> Standing:
    first = next((reason for reason in reasons if reason is not None), "")
    return Standing(operator, name, peer, reasons.count(None), len(reasons), first)


def _tuned(device: Device) -> str:
    """The file of the table that "auto" reads for `device`, and whose times it has if another GPU's; "" if none."""
    table = table_for(device)
    if table is None:
        return ""
    slug = Device.by_name(table.gpu).slug if table.relative else device.slug
    paths = (folder / f"{slug}.json" for folder in (user_folder(), package_folder()))
    path = str(next((path for path in paths if path.is_file()), "shipped, compressed"))
    return path + f" (of {table.gpu}, the same chip; times scaled)" * table.relative


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


def _probed(device: Device) -> list[tuple[Backend, list[str | None]]]:
    """Why each backend does not compute forward, dgrad and wgrad of an expert layer, with Linear-layout weights."""
    sizes, k, n = (128,) * 8, 2048, 1536
    workloads = (
        ragged_m("forward", "", sizes, k, n, "bf16"),
        ragged_m("dgrad", "", sizes, n, k, "bf16", b_layout="kn"),
        wgrad("wgrad", "", sizes, k, n, "bf16"),
    )
    # The library sees offs on the device only, so the probe does not know the sizes either.
    problems = [w.problem(device.kind).with_sizes(None) for w in workloads]
    return [(backend, [backend.supports(problem, device) for problem in problems]) for backend in BACKENDS]
