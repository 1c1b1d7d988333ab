"""The figures of docs/results/traffic.md, docs/results/elementwise.md and docs/results/stencil.md, put between their
markers: formulas from the code, times and counted bytes from records. All else in the pages stays byte for byte."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from expertile.device import Device
from expertile.lab.race.operator import Workload
from expertile.lab.race.record import MOVED_BYTES, SECONDS, Record
from expertile.lab.report.contest import Contest, runs
from expertile.lab.report.rows import Row, by
from expertile.lab.report.units import MISSING, byte_rate, cell, markdown_table, micros, percent, significant, times
from expertile.lab.traffic import call, formulas
from expertile.lab.traffic.model import OURS, TORCH, UNFUSED
from expertile.roofline import bound
from tools.pages.markers import fill_file
from tools.pages.recorded import NOT_MEASURED

_PER_OPERATOR = 4  # workloads of an operator in the table of times, the largest first
_LARGE = 64e6  # bytes from which memory, not a launch, is what is measured
# Which way a rival of the lab goes, where it is not called so.
_WAYS = {
    ("laplacian", "torch"): UNFUSED,
    ("laplacian_backward", "torch"): UNFUSED,
    ("laplacian", "conv2d"): TORCH,
    ("attention", "sdpa_fa2"): TORCH,
    ("attention_backward", "sdpa_fa2"): TORCH,
}


def update_pages(docs: Path, records: Sequence[Record], device: Device, check: bool = False) -> list[Path]:
    """Fill every block of the three pages in folder `docs`; returns those that were out of date.

    With `check` nothing is written. `records` of other devices than `device` are left out.
    """
    here = [r for r in records if r.env.gpu == device.name and r.metric == SECONDS]
    counted = [r for r in records if r.env.gpu == device.name and r.metric == MOVED_BYTES]
    pages: Mapping[str, Mapping[str, str]] = {
        "traffic.md": {
            "traffic formulas": formulas_block(device),
            "traffic times": times_block(here, device),
            "traffic counted": counted_block(counted),
        },
        "elementwise.md": {"elementwise launch": launch_block(here)},
        "stencil.md": {"stencil times": stencil_block(here)},
    }
    return [docs / name for name, blocks in pages.items() if not fill_file(docs / name, blocks, check)]


def formulas_block(device: Device) -> str:
    """Bytes of every way relative to ours, at the default size of each operator."""
    body = []
    for op, formula in formulas().items():
        subject = formula.subject("bf16", {})
        ways = formula.ways(subject, device)
        ours = next(way for way in ways if way.name == OURS).total
        cells = {way.name: f"{times(way.total.nbytes / ours.nbytes)} in {way.total.launches}" for way in ways}
        others = [f"{name}: {told}" for name, told in cells.items() if name not in (UNFUSED, TORCH, OURS)]
        body.append(
            [
                f"`{op}`",
                _call(subject),
                cells.get(UNFUSED, MISSING),
                cells.get(TORCH, MISSING),
                f"{significant(ours.nbytes / 1e6)} in {ours.launches}",
                significant(formula.work(subject).intensity),
                ", ".join(others) or MISSING,
            ]
        )
    header = ["operator", "call (bf16)", "unfused", "torch", "ours, MB", "FLOP/byte", "other ways"]
    lead = f"Bytes relative to ours, and kernels; by formula, for a processor of {device.sm_count} SMs ({device.name})."
    return f"{lead}\n\n{markdown_table(header, body, left=2)}"


def times_block(records: Sequence[Record], device: Device) -> str:
    """Bytes by formula beside times by record: how much of a rival's slowness its traffic explains."""
    body: list[list[str]] = []
    for op in formulas():
        races = [race for race in _races(records, op) if race[0].nbytes >= _LARGE]
        for race in sorted(races, key=lambda race: -race[0].nbytes)[:_PER_OPERATOR]:
            body += _race_lines(*race, device)
    if not body:
        return NOT_MEASURED
    header = ["operator", "call", "rival", "its bytes", "its time", "of the bound", "ours of the bound"]
    lead = (
        f"{device.name}, CUDA graph; calls of 64 MB and more. Bytes (by formula) and times (recorded) relative to ours."
    )
    return f"{lead}\n\n{markdown_table(header, body, left=3)}"


def counted_block(counted: Sequence[Record]) -> str:
    """Bytes that Nsight Compute counted beside those of the formula."""
    done = [c for c in counted if c.status == "ok"]
    reasons = dict.fromkeys(c.reason for c in counted if c.reason)
    told = "\n".join(f"Not counted: {cell(reason)}." for reason in reasons)
    if not done:
        return "\n\n".join(part for part in (NOT_MEASURED, told) if part)
    body = [
        [
            f"`{c.op}`",
            _call(call(c.op, tuple(c.shape.items()), c.dtype)),
            c.backend,
            f"{c.details['launches']} / {c.details['model_launches']}",
            *(_mb(c.details[key]) for key in ("read", "model_read", "written", "model_written")),
        ]
        for c in done
    ]
    header = ["operator", "call", "way", "kernels / formula", "read, MB", "formula", "written, MB", "formula"]
    first = done[0]
    lead = (
        f"{first.env.gpu}, {first.date[:10]}, Nsight Compute, caches flushed before each kernel. What a kernel leaves "
        "in L2 when it ends is not among its bytes written."
    )
    return "\n\n".join(part for part in (lead, markdown_table(header, body, left=3), told) if part)


def launch_block(records: Sequence[Record]) -> str:
    """add_scalar in float32: times under both policies, and where the launch ends."""
    table: dict[int, dict[tuple[str, str], Record]] = {}
    for policy in ("graph", "eager"):
        for ours, contest in _races(records, "add_scalar", policy):
            if ours.dtype == "fp32":
                found = {(r.backend, policy): r for r in contest.rows if r.timed}
                table.setdefault(ours.shape["elements"], {}).update(found)
    columns = [(name, policy) for policy in ("graph", "eager") for name in (OURS, TORCH, "torch.compile")]
    body = [
        [f"{n:,}", *(micros(found[c].time_s) if c in found else MISSING for c in columns)]
        for n, found in sorted(table.items())
    ]
    if not body:
        return NOT_MEASURED
    header = ["elements", *(f"{name}, {policy}" for name, policy in columns)]
    return "\n\n".join([f"µs a call, float32.\n\n{markdown_table(header, body)}", *_crossover(table)])


def _crossover(table: Mapping[int, Mapping[tuple[str, str], Record]]) -> list[str]:
    """The sentence on launches: t = L + bytes / B, with L and B from the smallest and the largest call."""
    smallest, largest = table[min(table)], table[max(table)]
    lines = []
    for name in (OURS, TORCH):
        first, last = smallest.get((name, "eager")), largest.get((name, "graph"))
        if first is None or last is None or not first.time_s or not last.time_s:
            continue
        rate = last.nbytes / last.time_s
        launch = first.time_s - first.nbytes / rate
        lines.append(
            f"{name}: B = {byte_rate(rate / 1e9)} from {last.shape['elements']:,} elements, L = {micros(launch)} µs "
            f"from {first.shape['elements']:,}, so launch and work are equal at {significant(launch * rate / 8)} "
            "elements."
        )
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def stencil_block(records: Sequence[Record]) -> str:
    """Every workload of the preset, forward and backward, as shares of copying the same bytes."""
    body = []
    for op in ("laplacian", "laplacian_backward"):
        for ours, contest in _races(records, op):
            copy, rows = contest.timed("copy"), map(contest.timed, (OURS, "torch", "torch.compile", "conv2d"))
            shares = (percent(copy.seconds / row.seconds if row and copy else None) for row in rows)
            body.append([ours.workload.split("/")[-1], byte_rate(ours.gbps), micros(ours.time_s), *shares])
    if not body:
        return NOT_MEASURED
    header = ["call", "ours", "µs", "of copy", "torch (slices)", "torch.compile", "conv2d"]
    return f"CUDA graph; shares of copying the same bytes in the same run.\n\n{markdown_table(header, body)}"


def _races(records: Iterable[Record], op: str, policy: str = "graph") -> list[tuple[Row, Contest]]:
    """Our row and the contest of each call of `op` that ours has a time of, from the latest run of that call."""
    met = ((c.timed(OURS), c) for run in runs(r for r in records if r.op == op) for c in run.contests_of(policy))
    calls = by(((ours, c) for ours, c in met if ours), lambda race: race[0].work)
    return [max(races, key=lambda race: race[0].date) for races in calls.values()]


def _race_lines(ours: Row, contest: Contest, device: Device) -> list[list[str]]:
    formula = formulas()[ours.op]
    if ours.dtype not in formula.dtypes:
        return []
    dims = {key: value for key, value in ours.shape.items() if key in formula.dims}
    subject = formula.subject(ours.dtype, dims)
    ways = {way.name: way for way in formula.ways(subject, device)}
    limit = bound(formula.work(subject), device, ours.dtype).seconds
    lines = []
    for rival in (row for row in contest.rows if row.timed and row.backend != OURS):
        way = ways.get(_WAYS.get((ours.op, rival.backend), rival.backend))
        if way is not None:
            lines.append(
                [
                    f"`{ours.op}`",
                    f"{_call(subject)}, {ours.dtype}",
                    rival.backend,
                    times(way.total.nbytes / ways[OURS].total.nbytes),
                    times(rival.seconds / ours.seconds),
                    percent(limit / rival.seconds),
                    percent(limit / ours.seconds),
                ]
            )
    return lines


def _call(subject: Workload) -> str:
    """A call's dimensions in few words: 8192 × 8192; 4 × 16 × 4096² × 128."""
    values: dict[str, Any] = dict(subject.dims)
    if "q_len" in values:
        causal = ", causal" if values["causal"] else ""
        heads = (
            f"{values['heads']}" if values["heads"] == values["kv_heads"] else f"{values['heads']}/{values['kv_heads']}"
        )
        return f"B {values['batch']}, H {heads}, L {values['q_len']}, D {values['head_dim']}{causal}"
    if "elements" in values:
        return f"{values['elements']:,}"
    if "grids" in values:
        return f"{values['grids']} × {values['rows']} × {values['columns']}, {values['boundary']}"
    if "group_sizes" in values:
        sizes = values["group_sizes"]
        return f"{len(sizes)} groups, {sum(sizes)} rows, {values['k']} → {values['n']}"
    return f"{values['rows']} × {values['cols']}"


def _mb(nbytes: float | None) -> str:
    return MISSING if nbytes is None else significant(nbytes / 1e6)
