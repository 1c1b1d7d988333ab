"""The HTML report: one file that opens offline, verdict first; or a folder with a page for each file of records, an
index, and the style and script that they share. Sections of a run are in `sections.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from expertile.lab.race.record import Record
from expertile.lab.report import sections
from expertile.lab.report.contest import Run, runs
from expertile.lab.report.frame import ASSETS, asset, controls, document
from expertile.lab.report.leaderboard import html_boards
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
    figures = sections.Figures([row for run in everything for row in run.rows])
    body = [_run(run, f"run-{index}", figures, "") for index, run in enumerate(here, start=1)]
    if not here:
        body.append(
            '<section class="run"><p class="lead">No records: nothing was measured on this machine.</p></section>'
        )
    seen = [*(run.backends for run in everything), *(chart.backends for chart in charts)]
    names = list(dict.fromkeys(name for backends in seen for name in backends))
    body.append(sections.memory(charts, figures, names))
    if shipped:
        body.append('<h1 class="elsewhere" id="elsewhere">Recorded elsewhere</h1>')
        body.append(
            "<p>Shipped records, for orientation. They come from other machines and other days: compare them with "
            "each other inside one run, not with the figures above.</p>"
        )
        body += [_run(run, f"shipped-{index}", figures, elsewhere(run)) for index, run in enumerate(shipped, start=1)]
    policy = next((run.policies[0] for run in everything), "graph")
    title = f"expertile: {listed(list(dict.fromkeys(run.device for run in here))) or 'no records'}"
    timed = {row.backend for run in everything for row in run.rows if row.timed}
    timed |= {name for chart in charts for name in chart.backends}
    bounded = any(row.bound_s for run in everything for row in run.rows)
    policies = {policy for run in everything for policy in run.policies}
    top = [_header(here, shipped), controls(names, timed, bounded, policies, policy)]
    footer = (
        "Times are medians with 95 % intervals. FLOPs count useful rows only; bytes count each input and "
        "each output once. × best is time over the fastest right backend’s time in the same run."
    )
    return document(title, top, body, footer, figures, policy, shared)


def _header(here: Sequence[Run], shipped: Sequence[Run]) -> str:
    links = [(f"run-{index}", f"{run.device}: {', '.join(run.presets)}") for index, run in enumerate(here, start=1)]
    links += [
        (f"shipped-{index}", f"{run.device}, {run.day} (elsewhere): {', '.join(run.presets)}")
        for index, run in enumerate(shipped, start=1)
    ]
    items = "".join(f'<li><a href="#{target}">{escape(text)}</a></li>' for target, text in links)
    contents = f'<nav aria-label="Runs"><ul>{items}</ul></nav>' if len(links) > 1 else ""
    return f'<header class="top"><p class="brand">expertile <span>benchmark report</span></p>{contents}</header>'


def _run(run: Run, anchor: str, figures: sections.Figures, label: str) -> str:
    badge = f'<p class="badge">{escape(sections.sentence_case(label))}</p>' if label else ""
    parts = [
        badge,
        sections.verdict(run, anchor),
        sections.environment(run),
        html_boards(run),
        sections.glance(run, anchor, figures, label),
        *(sections.preset(run, name, figures, label) for name in run.presets),
        sections.without_time(run),
        sections.all_records(run, figures),
    ]
    return f'<section class="run{" foreign" if label else ""}" id="{anchor}">{"".join(parts)}</section>'


def site(found: Mapping[str, Sequence[Record]], folder: Path) -> Path:
    """Writes a page for each of `found`, records by the page's name, and `index.html`, whose path is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ASSETS:
        (folder / name).write_text(asset(name), encoding="utf-8")
    entries = []
    for name, records in found.items():
        html(records, folder / f"{name}.html", shared=True)
        entries.append(_entry(name, records))
    index = folder / "index.html"
    index.write_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>expertile: {plural(len(entries), 'report')}</title>\n"
        f'<link rel="stylesheet" href="{ASSETS[0]}">\n</head>\n<body class="index">\n'
        '<header class="top"><p class="brand">expertile <span>benchmark reports</span></p></header>\n<main>\n'
        f"{''.join(entries)}</main>\n</body>\n</html>\n",
        encoding="utf-8",
    )
    return index


def summary(records: Sequence[Record]) -> str:
    """One line for a file of records: device, day, and what led."""
    found = runs(records)
    if not found:
        return f"{plural(len(records), 'record')} without a time of their own"
    last = found[-1]
    lead = next((s.text for s in sentences(last) if s.kind == "lead"), "")
    return f"{last.device}, {last.day}: {lead}"


def _entry(name: str, records: Sequence[Record]) -> str:
    presets = listed(sorted({r.workload.split("/")[0] for r in records}))
    return (
        f'<section class="run"><h2><a href="{escape(name)}.html">{escape(presets)}</a></h2>'
        f"<p>{escape(summary(records))}</p></section>\n"
    )
