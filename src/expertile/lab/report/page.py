"""The HTML report: one file that opens offline, verdict first; or a folder with a page for each file of records, an
index, and the style and script that they share. Sections of a run are in `sections.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from expertile.lab.race.record import Record
from expertile.lab.report import sections
from expertile.lab.report.contest import Run, runs
from expertile.lab.report.frame import ASSETS, asset, charted, page
from expertile.lab.report.leaderboard import NOTE
from expertile.lab.report.memory import MemoryChart, memory_charts
from expertile.lab.report.table import elsewhere
from expertile.lab.report.units import listed, plural
from expertile.lab.report.verdict import sentences


def html(records: Iterable[Record], path: str | Path, shipped: Iterable[Record] = (), shared: bool = False) -> Path:
    """Writes the report on `records` to `path` (folders are made) and returns it. Every run has its own section; those
    of `shipped` follow under "Recorded elsewhere". The file needs no network: style and script are inlined, or with
    `shared` the files `ASSETS` beside it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records, shipped = list(records), list(shipped)
    charts = memory_charts([*records, *shipped])
    path.write_text(_page(runs(records), runs(shipped), charts, shared), encoding="utf-8")
    return path


def _page(here: Sequence[Run], shipped: Sequence[Run], charts: Sequence[MemoryChart], shared: bool) -> str:
    shipped = [run for run in shipped if run.name not in {own.name for own in here}]
    everything = [*here, *shipped]
    rows = [row for run in everything for row in run.rows]
    figures = sections.Figures(rows)
    seen = [*(run.backends for run in everything), *(chart.backends for chart in charts)]
    names = list(dict.fromkeys(name for backends in seen for name in backends))
    timed = {row.backend for row in rows if row.timed} | {name for chart in charts for name in chart.backends}
    titles = [f"{run.device}: {', '.join(run.presets)}" for run in here]
    links = [
        (f"run-{index}", f"{title} (run {run.name})" if titles.count(title) > 1 else title)
        for index, (run, title) in enumerate(zip(here, titles, strict=True), start=1)
    ]
    links += [
        (f"shipped-{index}", f"{run.device}, {run.day} (elsewhere): {', '.join(run.presets)}")
        for index, run in enumerate(shipped, start=1)
    ]
    own = [sections.of_run(run, f"run-{index}", figures, "") for index, run in enumerate(here, start=1)]
    memory = sections.memory(charts, figures, names)
    others = [
        sections.of_run(run, f"shipped-{index}", figures, elsewhere(run)) for index, run in enumerate(shipped, start=1)
    ]
    return charted(
        "report.html",
        f"expertile: {listed(list(dict.fromkeys(run.device for run in here))) or 'no records'}",
        figures,
        names,
        timed | ({"bound"} if any(row.bound_s for row in rows) else set()),
        {policy for run in everything for policy in run.policies},
        next((run.policies[0] for run in everything), "graph"),
        shared=shared,
        links=links,
        here=own,
        memory=memory,
        elsewhere=others,
        note=NOTE,
    )


def site(found: Mapping[str, Sequence[Record]], folder: Path) -> Path:
    """Writes a page for each of `found`, records by the page's name, and `index.html`, whose path is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ASSETS:
        (folder / name).write_text(asset(name), encoding="utf-8")
    entries = []
    for name, records in found.items():
        html(records, folder / f"{name}.html", shared=True)
        entries.append((name, listed(sorted({r.workload.split("/")[0] for r in records})), summary(records)))
    index = folder / "index.html"
    title = f"expertile: {plural(len(entries), 'report')}"
    index.write_text(page("index.html", title, shared=True, entries=entries), encoding="utf-8")
    return index


def summary(records: Sequence[Record]) -> str:
    """One line for a file of records: device, day, and what led."""
    found = runs(records)
    if not found:
        return f"{plural(len(records), 'record')} without a time of their own"
    last = found[-1]
    lead = next((s.text for s in sentences(last) if s.kind == "lead"), "")
    return f"{last.device}, {last.day}: {lead}"
