"""One line for each operator of each preset: how ours stands against the best rival, `copy` and the bound."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from expertile.lab.report.contest import Contest, Run
from expertile.lab.report.rows import POLICY_NAMES, Row
from expertile.lab.report.units import MISSING, cell, markdown_table, percent, times

GROUPED_OPS = ("grouped_mm",)
"""Operators whose rivals are backends, all in one table; every other operator has rivals of its own."""


AUTO = "expertile-auto"
"""What a user gets without naming a backend. It may choose a kernel of others, so it is neither ours nor theirs."""


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
    days, env, policy = sorted({run.day for run in group}), group[0].rows[0].env, group[0].policies[0]
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "expertile") if env.get(name))
    told = ", ".join(map(cell, filter(None, (group[0].device, dates, versions))))
    return f"{told}, {POLICY_NAMES.get(policy, cell(policy))}"


def _line(preset: str, op: str, contests: Sequence[Contest]) -> list[str] | None:
    found = [(c, ours, other) for c in contests if (ours := _best(c, True)) and (other := _best(c, False))]
    if not found:
        return None
    ratios = [_ratio(other, ours) for _, ours, other in found]
    copies = [
        _ratio(copy, ours)
        for c, ours, _ in found
        if c.limiter == "memory" and (copy := c.of("copy")) is not None and copy.timed
    ]
    autos = [_ratio(other, auto) for c, _, other in found if (auto := c.of(AUTO)) is not None and auto.timed]
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
        _spread(copies),
        _spread(shares),
    ]


def _best(contest: Contest, ours: bool) -> Row | None:
    return next((row for row in contest.ranked if is_ours(row) == ours and row.backend != AUTO), None)


def _ratio(first: Row, second: Row) -> float:
    return (first.time_s or 1.0) / (second.time_s or 1.0)


def _spread(shares: Sequence[float]) -> str:
    if not shares:
        return MISSING
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"
