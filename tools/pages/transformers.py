"""The figures of docs/results/transformers.md, put between <!-- expertile:transformers layers --> and its end, from the
newest file of results/<gpu>/transformers/, which tools/measure_transformers.py makes.

A file is JSON lines, told apart by "part"; `layer` has the seconds of each implementation in calls that took turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from expertile.device import Device
from expertile.lab.race.parts import newest_parts, read_parts
from expertile.lab.race.record import shipped_root
from expertile.lab.report.markers import fill_file
from expertile.lab.report.units import MISSING, cell, error, listed, markdown_table, percent, significant, times
from expertile.roofline import Work, bound

NOT_MEASURED = "Not measured yet."
OURS = "expertile"
_KINDS = (  # (both, policy): how the text calls them
    ((False, "eager"), "(forward, called from Python)"),
    ((False, "graph"), "(forward, in a CUDA graph)"),
    ((True, "eager"), "(forward and backward)"),
)

Part = Mapping[str, Any]


def shipped_transformers(slug: str, root: str | Path | None = None) -> Path | None:
    """The newest file of `results/<slug>/transformers/`, or None."""
    return newest_parts((shipped_root() if root is None else Path(root)) / slug / "transformers")


def _kind(part: Part) -> tuple[bool, str]:
    return part["both"], part["policy"]


def _order(part: Part) -> tuple[bool, int, bool]:
    return part["both"], part["tokens"], part["policy"] == "graph"


def _timed(part: Part) -> dict[str, float]:
    """Seconds by implementation, ours among them, or nothing."""
    seconds = {name: s for name, s in part["seconds"].items() if isinstance(s, float)}
    return seconds if OURS in seconds else {}


def _others(parts: Iterable[Part]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in _timed(part) if name != OURS))


def _title(part: Part) -> str:
    return f"{part['tokens']}{', with backward' * part['both']}{', CUDA graph' * (part['policy'] == 'graph')}"


def _table(parts: Sequence[Part], device: Device) -> str:
    others = _others(parts)
    body = []
    for part in sorted(parts, key=_order):
        seconds, least = _timed(part), bound(Work(part["flops"], part["nbytes"]), device, "bf16")
        if not seconds:
            continue
        ours = seconds[OURS]
        row = [_title(part), significant(least.seconds * 1e3), least.limiter, significant(ours * 1e3)]
        row.append(percent(least.seconds / ours))
        for name in others:
            there = name in seconds
            row += [significant(seconds[name] * 1e3), times(seconds[name] / ours)] if there else [MISSING, MISSING]
        body.append(row)
    columns = [column for name in others for column in (f"`{name}`, ms", "to ours")]
    return markdown_table(["tokens", "bound, ms", "limited by", "expertile, ms", "of bound", *columns], body)


def _reasons(parts: Sequence[Part]) -> list[str]:
    return [
        f"{_title(part)}: `{name}` has no time: {cell(reason)}"
        for part in sorted(parts, key=_order)
        for name, reason in part["seconds"].items()
        if not isinstance(reason, float)
    ]


def _model(name: str, parts: Sequence[Part], device: Device) -> list[str]:
    sizes = ", ".join(f"{key} = {parts[0][key]}" for key in "HIEk")
    return [f"**{name}**, {sizes}", _table(parts, device), *_reasons(parts)]


def _summary(parts: Sequence[Part]) -> list[str]:
    """The range of the fastest other's time to ours, for each kind of call, and the largest errors."""
    ranges = []
    for kind, words in _KINDS:
        timed = [_timed(part) for part in parts if _kind(part) == kind]
        ratios = [min(s for n, s in t.items() if n != OURS) / t[OURS] for t in timed if len(t) > 1]
        if ratios:
            ranges.append(f"{times(min(ratios))} to {times(max(ratios))} {words}")
    if not ranges:
        return []
    ours = [part["rel_error"][OURS] for part in parts if OURS in part["rel_error"]]
    others = [e for part in parts for name, e in part["rel_error"].items() if name != OURS]
    worst = [f"{error(max(found))} of {whose}" for found, whose in ((ours, OURS), (others, "the others")) if found]
    return [
        f"The time of the fastest of transformers' own, to ours: {listed(ranges)}.",
        f"Largest relative error against float32: {listed(worst)}.",
    ]


def blocks(path: Path | None, device: Device) -> dict[str, str]:
    """Markdown of the block: of the file at `path`, measured on `device`."""
    parts = [] if path is None else read_parts(path)
    layers = [part for part in parts if part["part"] == "layer"]
    if path is None or not any(_timed(part) for part in layers):
        return {"layers": NOT_MEASURED}
    run = next((part for part in parts if part["part"] == "run"), {})
    versions = "".join(f", {name} {run[name]}" for name in ("transformers", "torch") if name in run)
    source = f"{device.name}{versions}, {path.stem}: `results/{device.slug}/transformers/{path.name}`."
    lines = [source]
    for name in dict.fromkeys(part["model"] for part in layers):
        lines += _model(name, [part for part in layers if part["model"] == name], device)
    return {"layers": "\n\n".join([*lines, *_summary(layers)])}


def update_page(page: str | Path, path: Path | None, device: Device, check: bool = False) -> bool:
    """Fill the block of the page; returns whether it was up to date. With `check` nothing is written. ValueError unless
    its markers stand in the page exactly once, in order."""
    return fill_file(page, {f"transformers {name}": text for name, text in blocks(path, device).items()}, check)
