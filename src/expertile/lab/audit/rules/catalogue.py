"""The list of rules, and what is said of claims that no rule could judge."""

from __future__ import annotations

from collections.abc import Callable

from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import NOT_CHECKABLE, Finding
from expertile.lab.audit.rules import (
    blocks,
    columns,
    equations,
    fairness,
    limits,
    peaks,
    ranges,
    rates,
    sentences,
    sizes,
    summaries,
    tokens,
    traffic,
)

RULES: tuple[Callable[[Context], list[Finding]], ...] = (
    limits.rates,
    limits.times,
    columns.derived,
    summaries.summaries,
    summaries.averages_in_text,
    rates.time_against_rate,
    equations.equations,
    sentences.changes,
    sentences.reciprocals,
    sentences.slower_below_one,
    blocks.speedups,
    blocks.per_item,
    blocks.totals,
    blocks.tiles,
    blocks.group_sums,
    blocks.per_day,
    sizes.tensor_bytes,
    sizes.compression,
    sizes.attention_memory,
    sizes.capacity,
    traffic.traffic,
    tokens.tokens_over_time,
    tokens.weights_per_token,
    peaks.shares,
    peaks.over_the_peak,
    peaks.intensity,
    ranges.ranges,
    ranges.extremes,
    ranges.trends,
    fairness.equal_work,
    fairness.failed_checks,
)

_WHY = {
    "time": "nothing in reach says what was computed in this time",
    "flops": "no sizes to compare this amount of work with",
    "bytes": "no sizes to compare this amount of memory with",
    "ratio": "no two figures in the report give this ratio",
    "percent": "no two figures in the report give this percentage",
    "token_rate": "the number of tokens or the time is not stated",
    "event_rate": "the time of one event is not stated",
    "intensity": "FLOPs and bytes are not both stated",
}


def remaining(context: Context, findings: list[Finding]) -> list[Finding]:
    """A "not checkable" finding, with the reason, for every claim that no finding is about."""
    judged = {f.anchor for f in findings}
    return [
        context.finding(c, NOT_CHECKABLE, "unjudged", f"{c.quantity.text}: {_WHY.get(c.kind, 'no rule applies')}")
        for c in context.claims
        if c.anchor not in judged
    ]
