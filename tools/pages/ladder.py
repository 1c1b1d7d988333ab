"""The figures of docs/notes/ladder.md, put between its markers from records of `expertile bench --preset ladder`.

Blocks: `table` (every rung on every workload), one for each rung under its name, and `report-000` (what rungs three and
four say about that report's two kernels). A block NAME stands between <!-- expertile:ladder NAME --> and
<!-- /expertile:ladder NAME -->; all else in the page stays byte for byte.
"""

from collections.abc import Iterable

from expertile.lab.race.record import BASELINES, Record
from expertile.lab.report.contest import Contest, Run, runs
from expertile.lab.report.rows import POLICY_NAMES
from expertile.lab.report.units import MISSING, micros, percent, rate, times
from expertile.ladder import RUNGS
from tools.pages.recorded import NOT_MEASURED, versions

PRESET = "ladder"
# Report 000, table of 2025-10-13, RTX 3090: time of its generated kernel over that of its expert kernel.
_REPORT_000 = {"64x1024": 16.5123 / 3.8118, "16x2048": 28.2677 / 7.3063}


def blocks(records: Iterable[Record]) -> dict[str, str]:
    """The text of every block, by name. Of several runs the one with most rungs counts, the latest of equals."""
    found = [run for run in runs(records) if PRESET in run.presets and any(row.timed for row in run.rows)]
    names = [rung.name for rung in RUNGS]
    if not found:
        return dict.fromkeys(("table", *names, "report-000"), NOT_MEASURED)
    run = max(found, key=lambda run: (len(_timed_rungs(run)), max(row.date for row in run.rows)))
    policy = run.policies[0]
    contests = run.contests_of(policy, PRESET)
    texts = {"table": _table(run, policy, contests), "report-000": _report_000(run, contests)}
    for place, name in enumerate(names):
        texts[name] = _rung(contests, name, names[place - 1] if place else "", run.device)
    return texts


def _timed_rungs(run: Run) -> set[str]:
    return {row.backend for row in run.rows if row.timed} & {rung.name for rung in RUNGS}


def _times_below(contest: Contest, name: str, below: str) -> float | None:
    """How many times as fast a rung is as the rung below."""
    row, other = contest.timed(name), contest.timed(below)
    return other.seconds / row.seconds if row and other else None


def _table(run: Run, policy: str, contests: tuple[Contest, ...]) -> str:
    lead = (
        f"{', '.join([run.device, run.day, *versions(run.rows[0].env)])}, {POLICY_NAMES.get(policy, policy)}, run "
        f"`{run.name}`. Each cell: µs per call, rate, and how many times as fast as the rung below. The last lines are "
        "the speed-of-light baselines of the same run, and the bound."
    )
    lines = ["| rung | " + " | ".join(contest.label for contest in contests) + " |", "|-" + "|-:" * len(contests) + "|"]
    names = [rung.name for rung in RUNGS]
    for place, name in enumerate(names):
        cells = []
        for contest in contests:
            row = contest.of(name)
            if row is None or not row.timed:
                cells.append(row.status if row is not None and row.status != "ok" else MISSING)
                continue
            step = _times_below(contest, name, names[place - 1]) if place else None
            cells.append(f"{micros(row.time_s)}, {rate(row)}" + (f", {times(step)}" if step else ""))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    for name in BASELINES:
        rows = [contest.timed(name) for contest in contests]
        cells = [f"{micros(row.time_s)}, {rate(row)}" if row else MISSING for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    bounds = [f"{micros(c.sample.bound_s)}, {c.limiter}" if c.sample.bound_s else MISSING for c in contests]
    lines.append("| bound | " + " | ".join(bounds) + " |")
    return f"{lead}\n\n" + "\n".join(lines)


def _rung(contests: tuple[Contest, ...], name: str, below: str, device: str) -> str:
    """One line: what the rung reaches on each workload."""
    parts, reasons = [], []
    for contest in contests:
        row = contest.of(name)
        if row is None:
            continue
        if not row.timed:
            reasons.append(f"{contest.label}: {row.status}, {row.reason}")
            continue
        step = _times_below(contest, name, below)
        details = [f"{percent(row.share)} of the bound"] if row.share else []
        details += [f"{times(step)} the rung below"] if step else []
        parts.append(f"{contest.label} {rate(row)}" + (f" ({', '.join(details)})" if details else ""))
    if not parts:
        return f"**Measured** on {device}: no time. {reasons[0]}" if reasons else NOT_MEASURED
    return f"**Measured** on {device}: " + "; ".join(parts + reasons) + "."


def _report_000(run: Run, contests: tuple[Contest, ...]) -> str:
    """Rung 4 over rung 3 against the ratio of report 000's two kernels, and the share of the loop that both reach."""
    loop, masked, hinted = RUNGS[0].name, "3_masked_pointer", "4_hints_unmasked"
    sentences = []
    for contest in contests:
        ratio = _times_below(contest, hinted, masked)
        if contest.label not in _REPORT_000 or ratio is None:
            continue
        sentence = (
            f"On {contest.label}, rung four is {times(ratio)} as fast as rung three on {run.device}; the report's "
            f"expert kernel is {times(_REPORT_000[contest.label])} as fast as its generated one on an RTX 3090."
        )
        speeds = [_times_below(contest, name, loop) for name in (masked, hinted)]
        if speeds[0] and speeds[1]:
            sentence += f" Against the naive loop they reach {times(speeds[0])} and {times(speeds[1])} its speed."
        sentences.append(sentence)
    return "\n".join(sentences) or NOT_MEASURED
