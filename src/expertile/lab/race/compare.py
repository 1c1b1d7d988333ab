"""Compare two sets of records: faster, slower or tie, with confidence, and what was lost.

Rows are matched by `Record.key`. Two runs differ in power, clocks and temperature: a time is judged, where both runs
have one, relative to the speed of light of its own run, `dense` where compute limits, `copy` where memory does. Records
of `copy` made before its ways were raced are of memcpy alone, and serve only beside memcpy's.

The speed-up is ln(old / new), of tokens/s ln(new / old), minus that of the normaliser. Half the 95 % intervals, in the
logarithm, add in squares; bytes have none. A row is faster or slower only if the interval of the speed-up excludes 1
and the speed-up is at least `min_effect`; else a tie, or inconclusive where it reaches further than 10 % (`WIDE`). A
workload under a policy that only one side measured is counted apart.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from expertile.lab.measure.stats import WIDE, log_half_width
from expertile.lab.race.record import BASELINES, SECONDS, TOKENS_PER_S, Record

Records = dict[tuple[str, ...], Record]
_NAMED = 4  # workloads named of those that only one side has
_NORMALISER = {"compute": "dense", "memory": "copy", "unknown": "dense"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One matched row. `old` and `new` are in the unit of `metric`; ratios above 1 mean that new is better, `speedup`
    normalised by the record named in `normalised_by`, `raw_speedup` not. `verdict` of two values: "faster", "slower",
    "tie", "inconclusive"; else "missing" or "new" (one side has no row; `alone`: nor any of that workload), "broken" or
    "fixed" (the status changed), "untimed" (neither has a value)."""

    op: str
    workload: str
    dtype: str
    backend: str
    policy: str
    metric: str
    old: float | None
    new: float | None
    raw_speedup: float | None = None
    speedup: float | None = None
    ci95: tuple[float, float] | None = None
    normalised_by: str = ""
    verdict: str
    regression: bool
    reason: str
    alone: bool = False


def compare(old: Iterable[Record], new: Iterable[Record], min_effect: float = 0.03) -> list[Row]:
    """Match and judge two sets of records, in the order of `old`, rows only `new` has last; of a row held more than
    once the last counts. `min_effect` is the smallest relative change that counts. Speed-of-light records are judged
    raw and are no regression: they say how the machines differ. ValueError for a negative `min_effect`."""
    if not min_effect >= 0:
        raise ValueError(f"min_effect: expected 0 or more, got {min_effect!r}")
    old_rows, new_rows = {r.key: r for r in old}, {r.key: r for r in new}
    both = {key[:-1] for key in old_rows} & {key[:-1] for key in new_rows}  # all but the backend
    rows = []
    for key in [*old_rows, *(k for k in new_rows if k not in old_rows)]:
        before, after = old_rows.get(key), new_rows.get(key)
        if before is not None and after is not None and before.status == after.status == "ok":
            rows.append(_timed(before, after, old_rows, new_rows, min_effect))
        else:
            rows.append(_untimed(before, after, alone=key[:-1] not in both))
    return rows


def exit_code(rows: Iterable[Row]) -> int:
    """1 if any row is a regression, else 0."""
    return int(any(row.regression for row in rows))


def environment_changes(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """What differs between the machines and software of the two sets, e.g. "torch: 2.11 -> 2.13"."""
    changes = []
    for name in ("gpu", "driver", "torch", "triton", "expertile", "commit", "throttle"):
        before = sorted({str(getattr(r.env, name)) for r in old})
        after = sorted({str(getattr(r.env, name)) for r in new})
        if old and new and before != after:
            changes.append(f"{name}: {' | '.join(before)} -> {' | '.join(after)}")
    return changes


def render(rows: Sequence[Row], console: Console, ties: bool = True) -> None:
    """Print the verdict, then the rows workload by workload, regressions first; `ties=False` leaves ties out. Workloads
    that only one side has are named."""
    console.print(_summary(rows), highlight=False)
    for verdict, side in (("missing", "the old"), ("new", "the new")):
        only = dict.fromkeys(_label(r) for r in rows if r.alone and r.verdict == verdict)
        if only:
            names = ", ".join(list(only)[:_NAMED]) + (f" and {len(only) - _NAMED} more" if len(only) > _NAMED else "")
            console.print(escape(f"only in {side} records, not compared: {names}"), highlight=False)
    hidden = () if ties else ("tie", "untimed")
    shown = sorted((r for r in rows if not r.alone and r.verdict not in hidden), key=lambda r: not r.regression)
    for regression, label in dict.fromkeys((row.regression, _label(row)) for row in shown):
        console.print(f"[bold]{escape(label)}[/bold]", highlight=False)
        found = [r for r in shown if (r.regression, _label(r)) == (regression, label)]
        console.print(_table(found))
        for row in found:
            if row.reason:
                text = Padding(escape(f"{row.backend}: {row.reason}"), (0, 0, 0, 4))
                console.print(text, style="dim", highlight=False)


def _label(row: Row) -> str:
    return f"{row.workload} ({row.dtype}, {row.policy})"


def _table(rows: Sequence[Row]) -> Table:
    """Rows of one workload in at most 80 columns; the reasons follow below."""
    table = Table(box=None, pad_edge=False, show_header=True, padding=(0, 1, 0, 0))
    table.add_column("  backend", width=17, overflow="fold")
    for column, width in (("old", 12), ("new", 12), ("speed-up", 8), ("95 %", 11)):
        table.add_column(column, justify="right", min_width=width, no_wrap=True)
    table.add_column("verdict", ratio=1, overflow="fold")
    for row in rows:
        by = f" (by {row.normalised_by})" if row.normalised_by else ""
        values = (_value(row.metric, value) for value in (row.old, row.new))
        interval = f"{row.ci95[0]:.3f}–{row.ci95[1]:.3f}" if row.ci95 else ""
        speedup = "" if row.speedup is None else f"{row.speedup:.3f}"
        style = "red" if row.regression else {"faster": "green", "fixed": "green"}.get(row.verdict, "")
        table.add_row(f"  {escape(row.backend)}", *values, speedup, interval, row.verdict + by, style=style)
    return table


def _summary(rows: Sequence[Row]) -> str:
    if not rows:
        return "no rows to compare"
    counts = Counter(row.verdict for row in rows if not row.alone)
    order = ("faster", "slower", "tie", "inconclusive", "broken", "missing", "fixed", "new", "untimed")
    parts = ", ".join(f"{counts[v]} {v}" for v in order if counts[v]) or "nothing that both measured"
    timed = [r.speedup for r in rows if r.speedup and r.backend not in BASELINES]
    mean = f"; geometric mean speed-up {geometric_mean(timed):.3f} over {len(timed)} rows" if timed else ""
    regressions = sum(r.regression for r in rows)
    verdict = f"{regressions} regression{'s' if regressions != 1 else ''}" if regressions else "no regression"
    return f"{verdict}: {parts}{mean}"


def _timed(before: Record, after: Record, old: Records, new: Records, min_effect: float) -> Row:
    raw = _log_ratio(before, after)
    central, width, by = raw[0], raw[1] ** 2, ""
    light = before.backend in BASELINES
    if not light and before.metric == SECONDS:
        name = _NORMALISER[before.limiter]
        norm_before, norm_after = _same_run(before, name, old), _same_run(after, name, new)
        if norm_before is not None and norm_after is not None and _alike(norm_before, norm_after):
            shift, half = _log_ratio(norm_before, norm_after)
            central, width, by = central - shift, width + half**2, name
    half_width = math.sqrt(width)
    low, high = central - half_width, central + half_width
    least = math.log1p(min_effect)
    verdict = "inconclusive" if half_width > math.log1p(WIDE) else "tie"
    if low > 0 and central >= least:
        verdict = "faster"
    elif high < 0 and central <= -least:
        verdict = "slower"
    return _row(
        before,
        before,
        after,
        raw_speedup=math.exp(raw[0]),
        speedup=math.exp(central),
        ci95=(math.exp(low), math.exp(high)) if math.isfinite(half_width) else None,
        normalised_by=by,
        verdict=verdict,
        regression=verdict == "slower" and not light,
        reason="" if dict(before.config) == dict(after.config) else "another config",
    )


def _untimed(before: Record | None, after: Record | None, alone: bool) -> Row:
    """Rows of which one side, or both, has no value that counts."""
    record = after or before
    assert record is not None
    reason = f"{record.status}: {record.reason}"
    if after is None:
        lost = record.status == "ok" and record.backend not in BASELINES and not alone
        verdict, reason = "missing", "workload not in the new records" if alone else "not in the new records"
    elif before is None:
        verdict, lost, reason = "new", False, record.reason
    elif before.status == "ok" or (before.status != "wrong" and after.status == "wrong"):
        verdict, lost = "broken", True
    elif after.status == "ok":
        verdict, lost, reason = "fixed", False, f"was {before.status}: {before.reason}"
    else:
        verdict, lost = "untimed", False
    return _row(record, before, after, verdict=verdict, regression=lost, reason=reason, alone=alone)


def _row(record: Record, before: Record | None, after: Record | None, **more: Any) -> Row:
    old, new = (r.value if r is not None and r.status == "ok" else None for r in (before, after))
    same = {name: getattr(record, name) for name in ("op", "workload", "dtype", "backend", "policy", "metric")}
    return Row(**same, old=old, new=new, **more)


def _same_run(record: Record, backend: str, records: Records) -> Record | None:
    """The speed-of-light record beside `record`, if it was timed in the same run."""
    found = records.get((*record.key[:-1], backend))
    return found if found is not None and found.status == "ok" and found.run == record.run else None


def _alike(before: Record, after: Record) -> bool:
    """Whether two speed-of-light records are of the same: both of the fastest way, or both of memcpy."""
    ways = [r.config.get("way") for r in (before, after)]
    return all(ways) or not any(ways) or "memcpy" in ways


def _log_ratio(before: Record, after: Record) -> tuple[float, float]:
    """By how much `after` is better, in the logarithm, and half the width of that figure's 95 % interval."""
    assert before.value is not None and after.value is not None
    ratio = math.log(before.value / after.value) if before.value and after.value else 0.0
    half_width = math.hypot(_log_half_width(before), _log_half_width(after))
    return -ratio if before.metric == TOKENS_PER_S else ratio, half_width


def _log_half_width(record: Record) -> float:
    """What was counted is exact; a median without an interval says nothing."""
    if record.ci95 is None:
        return 0.0 if record.metric.endswith("bytes") else math.inf
    assert record.value is not None
    return log_half_width(record.value, record.ci95)


def _value(metric: str, value: float | None) -> str:
    """With its unit: µs, MiB or tokens/s."""
    if value is None:
        return ""
    if metric == SECONDS:
        return f"{value * 1e6:.2f} µs"
    return f"{value:.0f} {metric}" if metric == TOKENS_PER_S else f"{value / 2**20:.2f} MiB"
