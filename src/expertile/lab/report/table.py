"""The terminal table: workloads down, and side by side as many policies as the width allows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from expertile.lab.measure.stats import WIDE
from expertile.lab.race.record import BASELINES, Record
from expertile.lab.report.contest import Contest, Run, runs
from expertile.lab.report.rows import POLICY_NAMES, Row
from expertile.lab.report.units import MISSING, bound_rate, micros, percent, plural, rate, short, times
from expertile.lab.report.verdict import failures, nowhere, unable

_NAME_WIDTH = 23
_COLUMNS = (("µs", 10), ("rate", 12), ("bound", 6), ("× best", 6))
_PANEL_WIDTH = sum(width + 1 for _, width in _COLUMNS)
_LIGHT = {"dense": "same rows with one weight", "copy": "same bytes moved"}
_PLACES = {"fastest": ("", "bold green"), "tie": ("=", "bold green"), "inconclusive": ("?", "yellow")}
_STATUS_STYLES = {"wrong": "bold red", "failed": "red", "refused": "yellow", "unsupported": "dim"}


# One group of columns: the name of a policy, and the contests of the run under it by workload name.
_Panel = tuple[str, dict[str, Contest]]


@dataclass(frozen=True)
class ResultTable:
    """A rich renderable that lays itself out for the console's width (made by `table`)."""

    runs: tuple[Run, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.runs:
            yield Text("No records.")
        fit = max(1, (options.max_width - _NAME_WIDTH - 1) // _PANEL_WIDTH)
        for run in self.runs:
            panels = [
                (POLICY_NAMES.get(policy, policy), {contest.label: contest for contest in run.contests_of(policy)})
                for policy in run.policies
            ]
            yield Text(f"{run.device} · {run.day} · run {run.name}", style="bold")
            for first in range(0, len(panels), fit):
                yield from _grid(run, panels[first : first + fit])
            yield from _notes(run, options.max_width)


def table(records: Iterable[Record]) -> ResultTable:
    """A renderable for `rich.console.Console.print`, per run one table of all workloads and backends. Columns per
    policy: time in µs, the rate that limits (TFLOP/s or TB/s), share of the bound, and time over the best time ("=": a
    tie)."""
    return ResultTable(runs(records))


def elsewhere(run: Run) -> str:
    """The label that any figure from another machine or sitting carries."""
    return f"recorded on {run.device}, {run.day}, not on this machine"


def elsewhere_lines(records: Iterable[Record], shipped: Iterable[Record]) -> list[str]:
    """At most three lines on the same work recorded on other machines: where, when, and who led it."""
    others = runs(shipped)
    lines = []
    for run in runs(records):
        for other, policy, contests in matching(run, others):
            led = Counter(contest.leaders[0].backend for contest in contests.values() if contest.winner)
            front = ", ".join(f"{name} fastest on {count}" for name, count in led.most_common(2)) or "ties alone"
            where = f"{other.device}, {other.day}, {POLICY_NAMES.get(policy, policy)}"
            lines.append(f"{where}: {front} of {plural(len(contests), 'workload')}")
    return lines[:3]


def matching(run: Run, shipped: Sequence[Run]) -> list[tuple[Run, str, dict[str, Contest]]]:
    """(shipped run, policy, contests by this run's workload name) for work of exactly the same shape and dtype."""
    labels = {contest.sample.work: contest.label for contest in run.contests}
    found = []
    for other in shipped:
        for policy in other.policies:
            same = {
                labels[contest.sample.work]: contest
                for contest in other.contests_of(policy)
                if contest.sample.work in labels and contest.ranked
            }
            if same and other.name != run.name:
                found.append((other, policy, same))
    return found


def _grid(run: Run, panels: Sequence[_Panel]) -> Iterable[Text | Table]:
    """A heading, then per workload its name across the whole width and a table of fixed columns, so that they align."""
    titles = Table.grid(padding=(0, 1, 0, 0))
    titles.add_column(width=_NAME_WIDTH)
    for _ in panels:
        titles.add_column(width=_PANEL_WIDTH - 1)
    titles.add_row("", *(Text(title, style="bold") for title, _ in panels))
    yield titles
    headings = _columns(panels)
    headings.add_row(
        *(Text(text, style="bold") for text in ("  backend", *[heading for _ in panels for heading, _ in _COLUMNS]))
    )
    yield headings
    for label in run.workloads:
        shown = [contests.get(label) for _, contests in panels]
        present = [contest for contest in shown if contest]
        if not present:
            continue
        yield Text(label, style="bold", overflow="fold")
        block = _columns(panels)
        block.add_row(Text("  bound", style="cyan"), *(cell for contest in shown for cell in _bound_cells(contest)))
        for name in _order(run, present):
            style = "italic dim" if name in BASELINES else ""
            cells = [cell for contest in shown for cell in _cells(contest, name)]
            block.add_row(Text("  " + short(name, _NAME_WIDTH - 2), style=style), *cells)
        yield block


def _columns(panels: Sequence[_Panel]) -> Table:
    columns = Table.grid(padding=(0, 1, 0, 0))
    columns.add_column(width=_NAME_WIDTH, no_wrap=True)
    for _, width in _COLUMNS * len(panels):
        columns.add_column(justify="right", width=width, no_wrap=True)
    return columns


def _order(run: Run, contests: Sequence[Contest]) -> list[str]:
    """Backends of one workload by the first panel's ranking, then those that have no time, then baselines."""
    names = dict.fromkeys(row.backend for contest in contests for row in contest.ranked)
    names |= dict.fromkeys(row.backend for contest in contests for row in contest.rows if not row.is_baseline)
    names |= dict.fromkeys(name for name in run.backends if any(contest.of(name) for contest in contests))
    names |= dict.fromkeys(row.backend for contest in contests for row in contest.rows)
    absent = nowhere(run)
    return [name for name in names if name not in absent]


def _bound_cells(contest: Contest | None) -> list[Text]:
    if contest is None:
        return [Text()] * len(_COLUMNS)
    row = contest.sample
    texts = (micros(row.bound_s), bound_rate(row), "100 %", "") if row.bound_s else (MISSING, "unknown", "", "")
    return [Text(text, style="cyan") for text in texts]


def _cells(contest: Contest | None, backend: str) -> list[Text]:
    row = contest.of(backend) if contest else None
    if contest is None or row is None:
        return [Text()] * len(_COLUMNS)
    if not row.timed:
        fate = Text(row.status, style=_STATUS_STYLES.get(row.status, ""))
        return [Text(MISSING, style="dim"), fate, Text(), Text()]
    return [Text(micros(row.time_s)), Text(rate(row)), Text(percent(contest.share(row))), _times_best(contest, row)]


def _times_best(contest: Contest, row: Row) -> Text:
    place = contest.place(row) if len(contest.ranked) > 1 else ""
    mark, style = _PLACES.get(place, ("", "dim" if row.is_baseline else ""))
    return Text(mark + times(contest.times_best(row)).rstrip("×"), style=style)


def _notes(run: Run, width: int) -> Iterable[Text]:
    if any(contest.inconclusive for contest in run.contests):
        yield Text(f"? inconclusive: an interval reaches further than {percent(WIDE)} from its time", style="yellow")
    if any(len(contest.leaders) > 1 and not contest.inconclusive for contest in run.contests):
        yield Text("= ties with the best: 95 % intervals overlap, or less than 1 % apart", style="dim")
    if any(row.is_baseline for row in run.rows):
        held = {row.backend for row in run.rows}
        shown = {name: what for name, what in _LIGHT.items() if name in held}
        yield Text(f"{', '.join(shown)}: speed of light ({'; '.join(shown.values())}), not rivals", style="dim")
    absent = nowhere(run)
    for status, backend, reason, names in failures(run):
        if backend in absent:
            continue
        line = f"{status}: {backend} on {plural(len(names), 'workload')}: {reason}"
        yield Text(short(line, 2 * width), style=_STATUS_STYLES.get(status, ""))
    if absent:
        yield Text(unable(run), style="dim")
