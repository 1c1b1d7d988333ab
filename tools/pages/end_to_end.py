"""The figures of docs/results/end-to-end.md, from the records of the presets end-to-end-train and end-to-end-serve."""

from collections.abc import Sequence

from expertile.device import Device
from expertile.lab.race.record import PEAK_BYTES, TOKENS_PER_S, Record
from expertile.lab.report.units import MISSING, cell, error, markdown_table, percent, significant, times
from tools.pages.recorded import NOT_MEASURED

PRESETS = ("end-to-end-train", "end-to-end-serve")
_COLUMNS = ["", "tokens/s", "of bound", "peak, GB", "in the experts", "error", "ours to it"]


def _workload(name: str, records: Sequence[Record]) -> list[str]:
    """A table of the candidates; "ours to it": tokens/s of expertile's on the same weights, by those of another."""
    rates = {r.backend: r for r in records if r.metric == TOKENS_PER_S}
    peaks = {r.backend: r.value for r in records if r.metric == PEAK_BYTES}
    right = {n: r.value for n, r in rates.items() if r.status == "ok" and r.value}
    body = []
    for backend, value in right.items():
        r, peak = rates[backend], peaks.get(backend)
        share, compiled = r.details.get("experts_share"), backend.endswith("-compiled")
        ours = right.get(f"expertile{'-compiled' * compiled}", right.get("expertile-mxfp4", right.get("expertile")))
        body.append(
            [
                f"`{backend}`",
                f"{value:,.0f}",
                percent(value / r.bound) if r.bound else MISSING,
                significant(peak / 1e9) if peak else MISSING,
                MISSING if share is None else percent(share),
                error(r.rel_error) if r.rel_error is not None else MISSING,
                MISSING if ours is None or backend.startswith("expertile") else times(ours / value),
            ]
        )
    gone = [f"`{n}` has no figure: {cell(r.reason)}" for n, r in rates.items() if n not in right]
    title = [f"**{name}** ({records[0].policy}, {records[0].shape['layers']} layers)"]
    return [*title, *([markdown_table(_COLUMNS, body)] if body else []), *gone]


def blocks(records: Sequence[Record], device: Device) -> dict[str, str]:
    """Markdown of the block, of the records measured on `device`; of one name the last counts."""
    by_name: dict[str, dict[tuple[str, str], Record]] = {}
    for r in (r for r in records if r.env.gpu == device.name):
        by_name.setdefault(r.workload.partition("/")[2], {})[r.backend, r.metric] = r
    if not by_name:
        return {"models": NOT_MEASURED}
    first = next(iter(next(iter(by_name.values())).values()))
    versions = f"transformers {first.details.get('transformers')}, torch {first.env.torch}"
    lines = [f"{device.name}, {versions}, {first.date[:10]}: `results/{device.slug}/*-end-to-end-*.jsonl`."]
    for name, found in by_name.items():
        lines += _workload(name, list(found.values()))
    return {"models": "\n\n".join(lines)}
