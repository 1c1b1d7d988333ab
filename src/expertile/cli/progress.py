"""The live display of a run: a bar with the time left, what is being measured, and the leader so far."""

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from expertile.lab.bench.run import Event

_WIDE = 100  # columns from which on there is room for a bar


class Display:
    """Context manager; give `on_event` to `run`. On a console that is no terminal it prints a line per workload."""

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[title]}[/bold]", table_column=Column(no_wrap=True)),
            *([BarColumn(bar_width=24), TimeElapsedColumn()] if console.width >= _WIDE else []),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            # What is left of the line is its: the count and the time are never cut.
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
            transient=True,
        )
        self.task = self.progress.add_task("", title=title, left="", total=None)

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def on_event(self, event: Event) -> None:
        left = f"~{event.eta_s:.0f} s left" if event.eta_s is not None else ""
        self.progress.update(self.task, completed=event.done, total=event.total or None, left=left)
        if event.kind == "workload":
            self._say(escape(event.workload))
            if not self.console.is_terminal:
                place = f"{event.done}/{event.total} records" + (f", {left}" if left else "")
                self.console.print(f"{self.title}: {escape(event.workload)} ({place})", highlight=False)
        elif event.kind == "gate":
            self._say(f"{escape(event.workload)}: {escape(event.backend)} {'✓' if event.text == 'ok' else '✗'}")
        elif event.kind == "round" and event.medians:
            name, seconds = min(event.medians.items(), key=lambda pair: pair[1])
            self._say(f"{escape(event.workload)} {event.policy}: {escape(name)} leads, {seconds * 1e6:.1f} µs")
        elif event.kind == "note":
            self.console.print(escape(event.text), highlight=False)

    def _say(self, text: str) -> None:
        self.progress.update(self.task, description=text)
