"""Every preset for the results page: grouped products as presets × backends and each workload; every other operator in
one line, ours against the best rival, `copy` and the bound."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from expertile.lab.race.record import Record
from expertile.lab.report.contest import Contest, Run, relative_speed, runs
from expertile.lab.report.rows import POLICY_NAMES, Row, by
from expertile.lab.report.units import MISSING, cell, markdown_table, micros, percent, rate, times
from tools.pages.recorded import counts, percents, versions

_OTHER_RACES = {"ladder", "diagnose", "tune", "auto"}
AUTO = "expertile-auto"
"""What a user gets without naming a backend. It may choose a kernel of others, so it is neither ours nor theirs."""


def headline(records: Iterable[Record]) -> str:
    """The headline of the results page: a table of presets × backends, and every workload below it, ready to paste.
    Only ratios within one run are averaged, of the graph policy where a run has it. The ladder, diagnostics and tuning
    have pages of their own and are left out. Presets of other operators have a table of a line each."""
    every = tuple(run for run in runs(r for r in records if counts(r.workload)) if not set(run.presets) & _OTHER_RACES)
    if not every:
        return "No records: nothing was measured."
    found = tuple(run for run in every if _grouped(run))
    parts = [_headline_table(group) for group in _by_backends(found)]
    fused = [operator_table(group) for group in _by_backends([run for run in every if not _grouped(run)])]
    details = []
    for run, preset, contests in _raced(found):
        policy = POLICY_NAMES.get(run.policies[0], cell(run.policies[0]))
        where = f"{cell(run.device)}, {cell(run.day)}, {policy}, run `{cell(run.name)}`"
        details += [f"**{cell(preset)}**: {where}", _workload_table(contests)]
    if details:
        parts.append("<details><summary>Every workload</summary>")
        parts += [*details, "</details>"]
    return "\n\n".join([*parts, *filter(None, fused)])


def _grouped(run: Run) -> bool:
    """Whether a run raced the backends of grouped products, which share one table; other operators have own rivals."""
    return any(row.op == "grouped_mm" for row in run.rows)


def _by_backends(found: Sequence[Run]) -> list[list[Run]]:
    """Runs of one device and policy share a table; the columns mean the same there."""
    return list(by(found, lambda run: (run.device, run.policies[0])).values())


def _raced(found: Sequence[Run]) -> list[tuple[Run, str, list[Contest]]]:
    """(run, preset, contests with a time) of each preset, under the run's first policy."""
    presets = [(run, preset, run.contests_of(run.policies[0], preset)) for run in found for preset in run.presets]
    ranked = ((run, preset, [c for c in contests if c.ranked]) for run, preset, contests in presets)
    return [(run, preset, contests) for run, preset, contests in ranked if contests]


def _headline_table(group: Sequence[Run]) -> str:
    """A line for each preset; the backends from the fastest on."""
    raced = [(preset, contests, relative_speed(contests)) for _, preset, contests in _raced(group)]
    sums: dict[str, float] = {}
    for _, _, speeds in raced:
        for name, (speed, _) in speeds.items():
            sums[name] = sums.get(name, 0.0) + speed
    names = sorted(sums, key=lambda name: (-sums[name], name))
    body = []
    for preset, contests, speeds in raced:
        best = max((speed for speed, count in speeds.values() if count == len(contests)), default=None)
        cells = [_speed(*speeds.get(name, (0.0, 0)), len(contests), best) for name in names]
        shares = percents([contest.best.share for contest in contests if contest.best and contest.best.share])
        body.append([cell(preset), str(len(contests)), *cells, shares])
    lead = (
        f"Recorded on {source(group)}. Speed of each backend relative to the fastest one on the same "
        "workload in the same run, geometric mean; in brackets how many workloads it could run, where not all."
    )
    header = ["preset", "workloads", *(f"`{cell(name)}`" for name in names), "fastest, of bound"]
    return f"{lead}\n\n{markdown_table(header, body, left=1)}"


def _speed(speed: float, count: int, total: int, best: float | None) -> str:
    """A relative speed on `count` of `total` workloads, bold where it is the best on all of them."""
    if not count:
        return MISSING
    if count < total:
        return f"{speed:.2f} ({count})"
    return f"**{speed:.2f}**" if speed == best else f"{speed:.2f}"


def _workload_table(contests: Sequence[Contest]) -> str:
    body = []
    for contest in contests:
        best, second = contest.best, contest.second
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


def is_ours(row: Row) -> bool:
    """Whether a rival of an operator is a kernel of this package: "expertile", or "expertile-" and a variant."""
    return (row.backend == "expertile" or row.backend.startswith("expertile-")) and row.backend != AUTO


def operator_table(group: Sequence[Run]) -> str:
    """Markdown: a line for each operator of each preset of runs on one device under one policy; empty for none. Only
    workloads count on which ours and at least one other have a time."""
    policy = group[0].policies[0]
    body = [
        line
        for run in group
        for preset in run.presets
        for op in dict.fromkeys(contest.sample.op for contest in run.contests_of(policy, preset))
        if (line := _line(preset, op, [c for c in run.contests_of(policy, preset) if c.sample.op == op]))
    ]
    if not body:
        return ""
    lead = (
        f"Fused operators, recorded on {source(group)}. Speed of ours relative to the fastest other on the same "
        "workload in the same run, geometric mean and worst; to copying the same bytes, where memory limits; and to "
        "the bound."
    )
    header = "preset | operator | workloads | of fastest other | worst | fastest others | `auto`, of fastest other"
    header += " | of `copy` | of bound"
    return f"{lead}\n\n{markdown_table(header, body, left=2)}"


def source(group: Sequence[Run]) -> str:
    """Device, days, versions and policy of runs on one device under one policy."""
    days, policy = sorted({run.day for run in group}), group[0].policies[0]
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    told = ", ".join(map(cell, (group[0].device, dates, *versions(group[0].rows[0].env))))
    return f"{told}, {POLICY_NAMES.get(policy, cell(policy))}"


def _line(preset: str, op: str, contests: Sequence[Contest]) -> list[str] | None:
    found = [
        (c, ours, other)
        for c in contests
        if (ours := c.fastest(is_ours)) and (other := c.fastest(lambda row: not is_ours(row) and row.backend != AUTO))
    ]
    if not found:
        return None
    ratios = [other.seconds / ours.seconds for _, ours, other in found]
    copies = [
        copy.seconds / ours.seconds for c, ours, _ in found if c.limiter == "memory" and (copy := c.timed("copy"))
    ]
    autos = [other.seconds / auto.seconds for c, _, other in found if (auto := c.timed(AUTO) or c.timed("expertile"))]
    shares = [ours.share for _, ours, _ in found if ours.share]
    others = dict.fromkeys(other.backend for _, _, other in found)
    return [
        cell(preset),
        cell(op),
        str(len(found)),
        times(geometric_mean(ratios)),
        times(min(ratios)),
        ", ".join(f"`{cell(name)}`" for name in others),
        times(geometric_mean(autos) if autos else None),
        percents(copies),
        percents(shares),
    ]
