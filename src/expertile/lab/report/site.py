"""A folder of reports: a page for each file of records, an index of them, and the style and script that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from expertile.lab.race.record import Record
from expertile.lab.report.contest import runs
from expertile.lab.report.frame import ASSETS, asset
from expertile.lab.report.page import html
from expertile.lab.report.units import listed, plural
from expertile.lab.report.verdict import sentences


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
