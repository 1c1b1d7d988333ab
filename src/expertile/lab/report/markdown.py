"""Markdown exports: a summary of all records, and the headline table of several runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from expertile.lab.report.contest import Contest, Run, relative_speed, runs
from expertile.lab.report.leaderboard import markdown_boards
from expertile.lab.report.operators import GROUPED_OPS, operator_table, source
from expertile.lab.report.rows import POLICY_NAMES, by
from expertile.lab.report.units import MISSING, cell, markdown_table, micros, percent, plural, rate, spread, times
from expertile.lab.report.verdict import failures, sentences

_OTHER_RACES = {"ladder", "diagnose", "tune", "auto"}


def markdown(records: Iterable[Any]) -> str:
    """A Markdown summary: per run the verdict, leaderboards, one table per preset and policy, and what has no time and
    why."""
    parts = []
    for run in runs(records):
        parts.append(f"## {cell(run.device)}, {cell(run.day)} (run {cell(run.name)})")
        parts.append("\n".join(f"- {cell(sentence.text)}" for sentence in sentences(run)))
        parts += markdown_boards(run)
        for policy in run.policies:
            for preset in run.presets:
                contests = run.contests_of(policy, preset)
                if contests:
                    parts.append(f"### {cell(preset)}, {POLICY_NAMES.get(policy, cell(policy))}")
                    parts.append(_backend_table(contests))
        if failures(run):
            parts.append("### Without a time")
            parts.append(_failure_table(run))
    return "\n\n".join(parts or ["No records: nothing was measured."]) + "\n"


def headline(records: Iterable[Any]) -> str:
    """The headline of the results page: a table of presets × backends, and every workload below it, ready to paste.
    Only ratios within one run are averaged, of the graph policy where a run has it. The ladder, diagnostics and tuning
    have pages of their own and are left out. Presets of other operators have a table of a line each."""
    every = tuple(run for run in runs(records) if not set(run.presets) & _OTHER_RACES)
    if not every:
        return "No records: nothing was measured."
    found = tuple(run for run in every if _grouped(run))
    parts = [_headline_table(group) for group in _by_backends(found)]
    fused = [operator_table(group) for group in _by_backends([run for run in every if not _grouped(run)])]
    details = []
    for run in found:
        policy = run.policies[0]
        for preset in run.presets:
            contests = [contest for contest in run.contests_of(policy, preset) if contest.ranked]
            if contests:
                details += [
                    f"**{cell(preset)}**: {cell(run.device)}, {cell(run.day)}, "
                    f"{POLICY_NAMES.get(policy, cell(policy))}, run `{cell(run.name)}`",
                    _workload_table(contests),
                ]
    if details:
        parts.append("<details><summary>Every workload</summary>")
        parts += [*details, "</details>"]
    return "\n\n".join([*parts, *filter(None, fused)])


def _grouped(run: Run) -> bool:
    """Whether a run raced the backends of grouped products."""
    return any(row.op in GROUPED_OPS for row in run.rows)


def _by_backends(found: Sequence[Run]) -> list[list[Run]]:
    """Runs of one device and policy share a table; the columns mean the same there."""
    return list(by(found, lambda run: (run.device, run.policies[0])).values())


def _headline_table(group: Sequence[Run]) -> str:
    policy = group[0].policies[0]
    standings = {
        (run.name, preset): relative_speed(run.contests_of(policy, preset)) for run in group for preset in run.presets
    }
    names = sorted(
        {name for standing in standings.values() for name in standing},
        key=lambda name: (-sum(standing.get(name, (0.0, 0))[0] for standing in standings.values()), name),
    )
    lead = (
        f"Recorded on {source(group)}. Speed of each backend relative to the fastest one on the same "
        "workload in the same run, geometric mean; in brackets how many workloads it could run, where not all."
    )
    body = []
    for run in group:
        for preset in run.presets:
            contests = [contest for contest in run.contests_of(policy, preset) if contest.ranked]
            if not contests:
                continue
            standing = standings[run.name, preset]
            full = [speed for speed, count in standing.values() if count == len(contests)]
            cells = []
            for name in names:
                speed, count = standing.get(name, (0.0, 0))
                text = f"{speed:.2f}" if count else MISSING
                if count == len(contests) and speed == max(full):
                    text = f"**{text}**"
                cells.append(text + (f" ({count})" if 0 < count < len(contests) else ""))
            cells.append(_share(contests))
            body.append([cell(preset), str(len(contests)), *cells])
    header = ["preset", "workloads", *(f"`{cell(name)}`" for name in names), "fastest, of bound"]
    return f"{lead}\n\n{markdown_table(header, body, left=1)}"


def _share(contests: Sequence[Contest]) -> str:
    shares = [contest.best.share for contest in contests if contest.best and contest.best.share]
    if not shares:
        return MISSING
    return percent(shares[0]) if len(shares) == 1 else f"{percent(min(shares))} to {percent(max(shares))}"


def _workload_table(contests: Sequence[Contest]) -> str:
    body = []
    for contest in contests:
        best, second = contest.best, next((row for row in contest.ranked if row not in contest.leaders), None)
        dense, copy = contest.of("dense"), contest.of("copy")
        light = (dense if contest.limiter == "compute" else copy) or dense or copy
        body.append(
            [
                cell(contest.label),
                " = ".join(f"`{cell(row.backend)}`" for row in contest.leaders),
                micros(best.time_s if best else None),
                rate(best) if best else MISSING,
                percent(best.share if best else None),
                contest.limiter if best and best.share else MISSING,
                f"`{cell(second.backend)}` {times(contest.times_best(second))}" if second else MISSING,
                f"{cell(light.backend)} {times(contest.times_best(light))}" if light and light.timed else MISSING,
            ]
        )
    header = ["workload", "fastest", "µs", "rate", "of bound", "limited by", "next", "speed of light"]
    return markdown_table(header, body, left=2)


def _backend_table(contests: Sequence[Contest]) -> str:
    body = []
    for contest in contests:
        baselines = [row for row in contest.rows if row.timed and row.is_baseline]
        for row in (*contest.ranked, *baselines):
            drawn = "inconclusive" if contest.inconclusive else "tie"
            mark = f" ({drawn})" if row in contest.leaders and len(contest.leaders) > 1 else ""
            body.append(
                [
                    cell(contest.label),
                    f"`{cell(row.backend)}`",
                    micros(row.time_s),
                    spread(row),
                    rate(row),
                    percent(contest.share(row)),
                    times(contest.times_best(row)) + mark,
                ]
            )
    return markdown_table(["workload", "backend", "µs", "95 %", "rate", "of bound", "× best"], body, left=2)


def _failure_table(run: Run) -> str:
    body = [
        [status, f"`{cell(backend)}`", plural(len(names), "workload"), cell(reason)]
        for status, backend, reason, names in failures(run)
    ]
    return markdown_table(["status", "backend", "on", "reason"], body, left=4)
