"""The HTML report: one file that opens offline, verdict first; or a folder with a page for each file of records, an
index, and the style and script that they share. Sections of a run are in `sections.py`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    own = {f"run-{index}": run for index, run in enumerate(here, start=1)}
    others = {f"shipped-{index}": run for index, run in enumerate(shipped, start=1)}
    titles = {anchor: f"{run.device}: {', '.join(run.presets)}" for anchor, run in own.items()}
    alike = Counter(titles.values())
    links = [(a, f"{title} (run {own[a].name})" if alike[title] > 1 else title) for a, title in titles.items()]
    links += [(a, f"{run.device}, {run.day} (elsewhere): {', '.join(run.presets)}") for a, run in others.items()]
    sections_here = [sections.of_run(run, anchor, figures, "") for anchor, run in own.items()]
    memory = sections.memory(charts, figures, names)
    sections_elsewhere = [sections.of_run(run, anchor, figures, elsewhere(run)) for anchor, run in others.items()]
    title = f"expertile: {listed(list(dict.fromkeys(run.device for run in here))) or 'no records'}"
    timed |= {"bound"} if any(row.bound_s for row in rows) else set()
    policies = {policy for run in everything for policy in run.policies}
    policy = next((run.policies[0] for run in everything), "graph")
    shown: Any = dict(links=links, here=sections_here, memory=memory, elsewhere=sections_elsewhere, note=NOTE)
    return charted("report.html", title, figures, names, timed, policies, policy, shared=shared, **shown)


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
