"""The part of explain that shows memory traffic: an operator's ways step by step, and what Nsight Compute counts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from expertile.device import Device
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.operators import attention
from expertile.lab.race.operator import Workload
from expertile.lab.race.record import SECONDS, Record, read
from expertile.lab.report.units import byte_rate, micros, percent, significant, times
from expertile.lab.traffic import Step, Way, formulas
from expertile.lab.traffic.explain import Explained
from expertile.lab.traffic.measured import measure
from expertile.ops.attention.explain import explain_problem as explain_attention
from expertile.suggest import one_of

GROUPED = "grouped_mm"
OPTIONS = (
    *("rows", "cols", "batch", "heads", "kv_heads", "seq_len", "k_len", "head_dim"),
    *("causal", "grids", "boundary", "elements"),
)
# What an option is called among an operator's dimensions.
_DIMENSIONS = {o: (o,) for o in OPTIONS} | {"cols": ("cols", "columns"), "seq_len": ("q_len",)}
_NAME = 19  # columns for the name of a kernel, so that the table fits a terminal of 80
OPERATORS = (GROUPED, *formulas())


def subject_of(op: str, given: Mapping[str, Any], dtype: str) -> Workload:
    """The call that the command line's options describe. ValueError for an option that the operator does not have."""
    if op not in formulas():
        raise ValueError(f"op: expected {one_of(op, OPERATORS)}")
    formula = formulas()[op]
    dims: dict[str, Any] = {}
    for option, value in given.items():
        names = [name for name in _DIMENSIONS[option] if name in formula.dims]
        if not names:
            own = [o for o, names in _DIMENSIONS.items() if any(name in formula.dims for name in names)]
            raise ValueError(f"{_flag(option)}: expected {', '.join(map(_flag, own))} for {op}, got {_flag(option)}")
        dims[names[0]] = value
    if "q_len" in dims:  # as many keys, and as many key heads, unless said otherwise
        dims.setdefault("k_len", dims["q_len"])
    if "heads" in dims and "kv_heads" in formula.dims:
        dims.setdefault("kv_heads", dims["heads"])
    return formula.subject(dtype, dims)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def records_in(place: Path | None) -> list[Record] | None:
    """The records of times in a file or in all files of a folder; None, for the shipped ones, without a place."""
    if place is None:
        return None
    if not place.exists():
        raise FileNotFoundError(f"records: {place} does not exist")
    files = [place] if place.is_file() else sorted(place.rglob("*.jsonl*"))
    records = [record for file in files for record in read(file) if record.metric == SECONDS]
    if not records:
        raise ValueError(f"records: expected record files (JSONL), found none in {place}")
    return records


def as_answer(explained: Explained) -> dict[str, Any]:
    """What JSON says of a call: of the workload that it is, operator, dimensions and dtype."""
    subject = {name: getattr(explained.subject, name) for name in ("op", "dims", "dtype")}
    return vars(explained) | {"subject": subject}


def show_traffic(explained: Explained, measured: bool, console: Console) -> None:
    """Print work, bound, ways and records of a call; with `measured` also what is counted here."""
    subject, ways = explained.subject, explained.ways
    show(explained, console)
    if subject.op.startswith("attention"):
        for line in _choices(explained):
            _say(console, escape(line))
    if measured:
        if subject.op != GROUPED:  # as they run on this GPU
            ways = formulas()[subject.op].ways(subject, Device.current())
        show_measured(subject, ways, console)


def _choices(explained: Explained) -> list[str]:
    """What "auto" takes; why, and what is expected, only where no record of this very call says what it takes."""
    found = explain_attention(attention.problem(explained.subject), explained.device)
    taken = f'"auto" takes {found.forward.backend.name} forward and {found.backward.backend.name} backward'
    if explained.achieved:
        return [taken + "."]
    lines = [f"{taken}; forward, {found.forward.why}"]
    for e in found.forward.estimates:
        lines.append(f"  {e.backend:<14} {'' if e.seconds is None else f'{micros(e.seconds)} µs, '}{e.reason}")
    return lines


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    first, numbers = Column("MB", overflow="fold", min_width=_NAME), (Column(name, justify="right") for name in columns)
    return Table(first, *numbers, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _moved(of: Step) -> list[str]:
    return [str(of.launches), _mb(of.read), _mb(of.written), _mb(of.again), significant(of.flops / 1e9)]


def show(e: Explained, console: Console) -> None:
    """Work and bound, the ways step by step, sources, and recorded times."""
    _say(console, f"[bold]{escape(_told(e.subject))}[/bold] on {escape(e.device.name)}")
    work = (
        f"{significant(e.work.flops / 1e9)} GFLOP, {_mb(e.work.nbytes)} MB, {significant(e.work.intensity)} FLOP/byte"
    )
    limit = f"{micros(e.bound.seconds)} µs ({e.bound.limiter})" if e.bound.seconds else "unknown"
    _say(console, f"useful work: {work}; bound: {limit}")
    table = _table("kernels", "read", "written", "again", "GFLOP", "× ours", "least µs")
    for way in e.ways:
        at_least = micros(e.least_time_s(way)) if e.bound.seconds else "–"
        alone = way.steps[0].name if len(way.steps) == 1 else ""
        label = f"{way.name}: {alone}" if alone not in ("", e.subject.op) else way.name
        table.add_row(escape(label), *_moved(way.total), times(e.times_ours(way)), at_least, style="bold")
        for step in () if alone else way.steps:
            table.add_row(f"  {escape(step.name)}", *_moved(step))
    console.print(table)
    _say(
        console,
        "[dim]again: bytes asked for while still in L1 or L2; least: step after step, each at the device's peak.[/dim]",
    )
    for way in e.ways:
        said = "; ".join(part for part in (way.note, f"PyTorch: {way.source}" if way.source else "") if part)
        if said:
            _say(console, f"[dim]{escape(way.name)}: {escape(said)}[/dim]")
    if e.fits_in_cache:
        _say(
            console,
            "[dim]All of it fits the last-level cache: steps that follow each other find their inputs there, "
            "and memory sees less than the formula.[/dim]",
        )
    _show_achieved(e, console)


def _show_achieved(e: Explained, console: Console) -> None:
    if not e.achieved:
        _say(console, f"achieved: no record of this call on {escape(e.device.name)}.")
        return
    first = e.achieved[0]
    for a in e.achieved:
        rate = byte_rate(e.work.nbytes / a.time_s / 1e9)
        told = f"{a.backend} ({a.policy}): {micros(a.time_s)} µs, {rate}, {percent(a.share(e.bound))} of the bound"
        _say(console, f"achieved: {escape(told)}")
    _say(console, f"[dim]recorded {escape(first.date[:10])}, run {escape(first.run)}[/dim]")


def show_measured(subject: Workload, ways: Sequence[Way], console: Console) -> None:
    """Count the ways with Nsight Compute on this machine's GPU and print model and count side by side."""
    records = list(measure(subject, ways, capture_env(Device.current()), new_run_id()))
    reasons = dict.fromkeys(r.reason for r in records if r.reason)
    if any(r.status == "ok" for r in records):
        console.print(measured_table(records))
        _say(
            console,
            "[dim]counted: by ncu on this GPU, caches flushed before each kernel; what a kernel leaves in L2 "
            "is not yet among its bytes written.[/dim]",
        )
    for reason in reasons:
        names = [r.backend for r in records if r.reason == reason]
        which = "" if len(names) == len(records) else f" ({', '.join(names)})"
        _say(console, f"not counted{escape(which)}: {escape(reason)}.")


def measured_table(records: Sequence[Record]) -> Table:
    """Bytes by formula beside bytes counted, kernel by kernel."""
    table = _table("kernels", "read", "by formula", "written", "by formula", "from L2")
    for r in (r for r in records if r.status == "ok"):
        found = r.details
        table.add_row(
            escape(r.backend),
            f"{found['launches']} / {found['model_launches']}",
            *(_mb(found[key]) for key in ("read", "model_read", "written", "model_written", "l2_read")),
            style="bold",
        )
        for name, was_read, was_written in found["kernels"]:
            table.add_row(f"  {escape(name)}", "", _mb(was_read), "", _mb(was_written))
    return table


def _told(subject: Workload) -> str:
    sizes = {key: f"of {len(x)} groups, {sum(x)} rows" for key, x in subject.dims if isinstance(x, tuple)}
    dims = ", ".join(f"{key} {sizes.get(key, value)}" for key, value in subject.dims)
    return f"{subject.op}: {dims}, {subject.dtype}"


def _mb(nbytes: float | None) -> str:
    return "–" if nbytes is None else significant(nbytes / 1e6)
