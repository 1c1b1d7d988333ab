"""A workload over runs and commits: how the figures of each backend went, device by device. Runs differ in clocks,
temperature and power: the last is judged against the first as `compare` judges two files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertile.lab.race import compare as comparing
from expertile.lab.race.record import BASELINES, SECONDS, Record, read
from expertile.lab.report.figures import Figure, add, log_axis, new_mark, two_axes
from expertile.lab.report.frame import charted
from expertile.lab.report.palette import look, styles
from expertile.lab.report.rows import by
from expertile.lab.report.sections import Figures
from expertile.lab.report.units import plural, short, significant

_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 12  # runs that a line of the terminal shows, the last ones
_MOST_SHOWN = 12  # workloads on the terminal unless they are named


@dataclass(frozen=True)
class Series:
    """What backends did on one workload of one device under one policy, in runs from first to last: `runs` are (date,
    commit or "", run); `records` has for each backend a record of each run, or None."""

    device: str
    label: str
    unit: str
    runs: tuple[tuple[str, str, str], ...]
    records: dict[str, tuple[Record | None, ...]]

    def change(self) -> dict[str, comparing.Row]:
        """By backend, its last run judged against its first one; none for a backend of one run."""
        found = {}
        for name, held in self.records.items():
            places = [place for place, record in enumerate(held) if record is not None]
            first, last = (
                [record for other in self.records.values() if (record := other[place]) is not None]
                for place in (places[0], places[-1])
            )
            if len(places) > 1:
                found[name] = next(row for row in comparing.compare(first, last) if row.backend == name)
        return found


def history(folder: Path, only: Sequence[str] = ()) -> list[Series]:
    """The series in all record files below `folder`, device by device, those that changed most first. `only` are
    patterns of workload names, such as "models/*". FileNotFoundError without such a folder, ValueError for one without
    record files, a file of something else, or a pattern that no workload matches."""
    if not folder.is_dir():
        raise FileNotFoundError(f"history: {folder} is no folder")
    files = sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl.xz")])
    records = [record for file in files for record in read(file)]
    if not records:
        raise ValueError(f"history: expected record files (JSONL), found none in {folder}")
    for pattern in only:
        if not any(fnmatch(record.workload, pattern) for record in records):
            raise ValueError(f"only: expected a pattern of workloads in {folder}, got {pattern!r}")
    found = series(r for r in records if not only or any(fnmatch(r.workload, pattern) for pattern in only))
    return sorted(found, key=lambda s: (s.device, -_most(s)))


def _most(s: Series) -> float:
    """By how much the time of some rival changed."""
    changed = (r.speedup for name, r in s.change().items() if name not in BASELINES and r.speedup)
    return max((max(ratio, 1 / ratio) for ratio in changed), default=1.0)


def series(records: Iterable[Record]) -> list[Series]:
    """One for each device, workload, shape, dtype, policy and metric that has right values of two runs or more."""
    groups = by((r for r in records if r.status == "ok"), lambda record: (record.env.gpu, *record.key[:-1]))
    return [made for (device, *_), group in groups.items() if (made := _series(device, group)) is not None]


def _series(device: str, group: Sequence[Record]) -> Series | None:
    starts: dict[str, str] = {}
    for record in group:
        starts[record.run] = min(record.date, starts.get(record.run, record.date))
    if len(starts) < 2:
        return None
    order = sorted(starts, key=lambda run: (starts[run], run))
    held = {(record.backend, record.run): record for record in group}
    first = group[0]
    commits = {record.run: record.env.commit or "" for record in group}
    return Series(
        device,
        f"{first.workload} ({first.dtype}, {first.policy})",
        "µs" if first.metric == SECONDS else first.metric,
        tuple((starts[run], commits[run], run) for run in order),
        {
            name: tuple(held.get((name, run)) for run in order)
            for name in dict.fromkeys(record.backend for record in group)
        },
    )


def show_history(found: Sequence[Series], console: Console, every: bool = False) -> None:
    """Print the series; the first 12 of each device, or `every` one."""
    for device, own in by(found, lambda s: s.device).items():
        console.print(Text(f"{device}: {plural(len(own), 'workload')} of two runs or more", style="bold"))
        for s in own if every else own[:_MOST_SHOWN]:
            console.print(Text(f"{s.label}, {s.unit}", style="bold"), _table(s), Text(_span(s), style="dim"), sep="\n")
        if not every and len(own) > _MOST_SHOWN:
            console.print(f"and {len(own) - _MOST_SHOWN} more: --only PATTERN picks some, --out FILE draws all")


def _span(s: Series) -> str:
    first, last = (f"{day[:10]}{f' at {commit}' if commit else ''}" for day, commit, _ in (s.runs[0], s.runs[-1]))
    return f"  {plural(len(s.runs), 'run')}, from {first} to {last}"


def _table(s: Series) -> Table:
    judged = s.change()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width in (("  backend", 20), ("runs", _SPARKS), ("first", 9), ("last", 9), ("speed-up", 8)):
        table.add_column(name, width=width, justify="left" if width > 9 else "right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for name, held in s.records.items():
        values = [_value(record) for record in held]
        known = [value for value in values if value is not None]
        row = judged.get(name)
        said = (row.verdict + (f" (by {row.normalised_by})" if row.normalised_by else "")) if row else ""
        table.add_row(
            Text(f"  {short(name, 18)}", style="italic dim" if name in BASELINES else ""),
            _spark(values[-_SPARKS:]),
            significant(known[0]),
            significant(known[-1]),
            f"{row.speedup:.3f}" if row and row.speedup else "",
            Text(said, style={"faster": "green", "slower": "red"}.get(row.verdict if row else "", "")),
        )
    return table


def _spark(values: Sequence[float | None]) -> str:
    """A bar for each value between the least and the most of them; a gap where one is missing."""
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(" " if value is None else _BARS[round((value - low) / step)] for value in values)


def _value(record: Record | None) -> float | None:
    if record is None or record.value is None:
        return None
    return record.value * 1e6 if record.metric == SECONDS else record.value


def history_page(found: Sequence[Series], path: Path) -> Path:
    """Writes a page with a chart for each series to `path` and returns it."""
    figures = Figures([])
    devices = [
        (device, [place for s in own for place in figures.add(_figure(s), f"{s.label}, {s.unit}")])
        for device, own in by(found, lambda s: s.device).items()
    ]
    names = list(dict.fromkeys(name for s in found for name in s.records))
    text = charted("history.html", "expertile: history", figures, names, names, devices=devices)
    path.write_text(text, encoding="utf-8")
    return path


def _figure(s: Series) -> Figure:
    looks = styles(s.records)
    marks, values = [], []
    for name, held in s.records.items():
        mark = new_mark("curve", name, look(looks, name))
        for place, (record, (day, commit, run)) in enumerate(zip(held, s.runs, strict=True)):
            value = _value(record)
            if value is None or record is None:
                continue
            values.append(value)
            when = f"{day[:16].replace('T', ' ')}, run {run}{f', commit {commit}' if commit else ''}"
            add(mark, place, value, f"{name}\n{when}\n{significant(value)} {s.unit}")
        marks.append(mark)
    ticks = [[place, commit[:7] or day[:10]] for place, (day, commit, _) in enumerate(s.runs)]
    runs: Figure = {"range": [-0.3, len(s.runs) - 0.7], "ticks": ticks, "title": "run"}
    return two_axes(runs, log_axis(values, f"{s.unit} (logarithmic)"), marks)
