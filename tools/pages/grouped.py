"""Generated blocks of docs/results/grouped_mm.md: our kernels against the best peer of each row, and what was checked.

`against` compares times of one run under CUDA-graph replay: of our kernels the fastest, each with its default
configuration, of the peers the fastest, and `dense` where compute limits or `copy` where memory does. `checked` reads
the records that are no times: `*-random-shapes.json` (tests/gpu/random_shapes.py) and `*-sanitize.json`
(tests/gpu/sanitize.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from expertile.lab.race.record import Record
from expertile.lab.report.contest import LIMITER, Contest, Run, runs
from expertile.lab.report.rows import Row
from expertile.lab.report.units import MISSING, cell, listed, markdown_table, micros, plural, rate, times
from tools.pages.recorded import KERNELS, NOT_MEASURED

PRESETS = ("anchors", "gradients")
_LIGHT = {limiter: light for light, limiter in LIMITER.items()}


def blocks(records: Sequence[Record], checks: Mapping[str, Any], gpu: str) -> dict[str, str]:
    """Text by marker."""
    here = [r for r in records if r.env.gpu == gpu and r.policy == "graph"]
    of_presets = {preset: [r for r in here if r.workload.startswith(f"{preset}/")] for preset in PRESETS}
    return {**{preset: against(found) for preset, found in of_presets.items()}, "checked": checked(checks)}


def read_checks(folder: Path) -> dict[str, Any]:
    """The newest JSON record of each kind in a folder of results."""
    kinds = ("random-shapes", "sanitize")
    files = {kind: sorted(folder.glob(f"????-??-??-{kind}.json")) for kind in kinds}
    return {kind: json.loads(paths[-1].read_text()) for kind, paths in files.items() if paths}


def against(records: Sequence[Record]) -> str:
    """One line for each workload of the last run that got through most of them, the geometric means by kind of product,
    and what runs after it, which were cut short, have found."""
    if not records:
        return NOT_MEASURED
    every = runs(records)
    place = max(range(len(every)), key=lambda i: (len(every[i].contests_of("graph")), i))
    last = every[place]
    body, ratios = [], {}  # type: ignore[var-annotated]
    for contest, ours, peer, ratio in _ratios(last):
        ratios.setdefault(_kind(contest.label), []).append(ratio)
        light = contest.timed(_LIGHT.get(contest.limiter, ""))
        share = f"{times(light.seconds / ours.seconds)} `{light.backend}`" if light else MISSING
        body.append(
            [
                cell(contest.label),
                f"`{ours.backend}`",
                micros(ours.time_s),
                rate(ours),
                f"`{peer.backend}`",
                micros(peer.time_s),
                times(ratio),
                share,
            ]
        )
    means = listed(
        [
            f"{_NAMES[kind]} {geometric_mean(r):.3f} ({plural(len(r), 'row')}, worst {min(r):.3f})"
            for kind, r in ratios.items()
        ]
    )
    where = f"Recorded on {cell(last.device)}, {last.day}, CUDA-graph replay, run `{last.name}`."
    head = ("workload", "ours", "µs", "rate", "best peer", "µs", "speed against it", "of the speed of light")
    table = f"{where} Geometric mean of the speed against the best peer: {means}.\n\n{markdown_table(head, body)}"
    return "\n\n".join([table, *map(_cut_short, every[place + 1 :])])


def _cut_short(run: Run) -> str:
    found = [f"{cell(contest.label)} {times(ratio)}" for contest, _, _, ratio in _ratios(run)]
    return f"A later run of {plural(len(found), 'row')}, `{run.name}`, against the best peer: {listed(found)}."


def _ratios(run: Run) -> Iterator[tuple[Contest, Row, Row, float]]:
    """(contest, our best, the best peer, its time over ours) where both have a time."""
    for contest in run.contests_of("graph"):
        ours = contest.fastest(lambda row: row.backend in KERNELS)
        peer = contest.fastest(lambda row: row.backend not in KERNELS)
        if ours and peer:
            yield contest, ours, peer, peer.seconds / ours.seconds


_NAMES = {"forward": "products", "dgrad": "input gradients", "wgrad": "weight gradients"}


def _kind(label: str) -> str:
    lead = label.rpartition("/")[2].partition("-")[0]
    return lead if lead in _NAMES else "forward"


def checked(checks: Mapping[str, Any]) -> str:
    """What random shapes and compute-sanitizer said."""
    lines = []
    if shapes := checks.get("random-shapes"):
        results = sum(shapes["runs"].values())
        worst = max((w["of_allowed"] for w in shapes["worst"].values()), default=0.0)
        lines.append(
            f"- **Random shapes** ({cell(shapes['env']['gpu'])}, {shapes['date'][:10]}, seed {shapes['seed']}): "
            f"{shapes['cases']:,} problems drawn, {results:,} results compared with the reference, "
            f"{plural(len(shapes['failures']), 'failure')}; the largest error is {worst:.2f} of what is allowed. "
            f"`auto` ran again on {shapes['repeated']:,} of them and gave the same bits."
        )
    if sanitize := checks.get("sanitize"):
        for tool in dict.fromkeys(r["tool"] for r in sanitize["runs"]):
            outcomes: dict[str, list[str]] = {}
            for r in sanitize["runs"]:
                if r["tool"] == tool:
                    outcomes.setdefault(r["outcome"], []).append(f"`{r['backend']}`")
            said = "; ".join(f"{outcome}: {listed(names)}" for outcome, names in outcomes.items())
            day = sanitize["date"][:10]
            lines.append(f"- **compute-sanitizer {tool}** ({cell(sanitize['env']['gpu'])}, {day}): {said}.")
    return "\n".join(lines) or "Not checked yet."
