"""A Markdown summary of all records."""

from collections.abc import Iterable, Sequence

from expertile.lab.race.record import Record
from expertile.lab.report.contest import Contest, Run, runs
from expertile.lab.report.leaderboard import markdown_boards
from expertile.lab.report.rows import POLICY_NAMES
from expertile.lab.report.units import cell, markdown_table, micros, percent, plural, rate, spread, times
from expertile.lab.report.verdict import failures, sentences


def markdown(records: Iterable[Record]) -> str:
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


def _backend_table(contests: Sequence[Contest]) -> str:
    body = []
    for contest in contests:
        baselines = [row for row in contest.rows if row.timed and row.is_baseline]
        for row in (*contest.ranked, *baselines):
            mark = f" ({place})" if (place := contest.place(row)) in ("tie", "inconclusive") else ""
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
