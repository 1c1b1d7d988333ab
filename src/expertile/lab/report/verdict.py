"""What was found, in sentences: the first thing every report shows, computed from the records and nothing else."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from expertile.lab.measure.cpu import QUOTA
from expertile.lab.measure.stats import WIDE, too_wide
from expertile.lab.race.record import Record
from expertile.lab.report.contest import LIMITER, Contest, Run, relative_speed, runs
from expertile.lab.report.rows import POLICY_NAMES, Row, by
from expertile.lab.report.units import listed, micros, percent, plural, rate, sentence_case, short, significant, times

_BUSY = 1.25  # runnable threads for each core; a race of this process alone has at most one
_LEADERS = 2  # backends that the first sentence names, so that it is read at a glance
_REASON = 200  # characters of it that a sentence quotes
_NAMED = 3  # workloads or reasons spelled out in one sentence before "and n more"
_FATES_IN_ORDER = ("wrong", "failed", "refused", "unsupported")
_FATES = {"failed": "without a result (failed)", "refused": "refused a time"}


@dataclass(frozen=True)
class Sentence:
    """`kind` is "scope", "lead", "choice", "bound", "baseline", "tie", "launch", "trouble" or "machine"."""

    kind: str
    text: str
    policy: str = ""


def verdict(records: Iterable[Record], told: Sequence[str] = ()) -> list[str]:
    """Plain-language findings, run by run, most important first: per policy which backend is fastest on how many
    workloads and by what geometric mean, how much of the bound is reached, ties, what has no time and why, what a
    launch costs, and whether the machine was throttled. Why backends in `told` have no time is not said again."""
    found = runs(records)
    if not found:
        return ["No records: nothing was measured."]
    return [sentence.text for run in found for sentence in sentences(run, told)]


def sentences(run: Run, told: Sequence[str] = ()) -> tuple[Sentence, ...]:
    """The findings of one run."""
    said = [Sentence("scope", _scope(run))]
    for policy in run.policies:
        contests = [contest for contest in run.contests_of(policy) if contest.ranked]
        if contests:
            found = {
                "lead": [_lead(policy, contests)],
                "choice": _choice(contests),
                "bound": [_bound(contests)],
                "baseline": _baseline(contests),
                "tie": _ties(contests),
            }
            said += [Sentence(kind, text, policy) for kind, texts in found.items() for text in texts]
    if len(said) == 1:
        said.append(Sentence("lead", "No backend has both a right result and a time, so nothing can be compared."))
    of_run = {"launch": _launch(run), "trouble": _trouble(run, told), "machine": _machine(run)}
    return (*said, *(Sentence(kind, text) for kind, texts in of_run.items() for text in texts))


def overhead(run: Run, preset: str | None = None) -> dict[str, list[tuple[Contest, float]]]:
    """Per rival: eager time minus graph time in seconds on every workload that has both."""
    graph = {contest.sample.work: contest for contest in run.contests_of("graph", preset)}
    found: dict[str, list[tuple[Contest, float]]] = {}
    for contest in run.contests_of("eager", preset):
        for row in contest.ranked:
            partner = graph[row.work].of(row.backend) if row.work in graph else None
            if partner and partner.timed:
                found.setdefault(row.backend, []).append((contest, row.seconds - partner.seconds))
    return found


def failures(run: Run) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(status, backend, reason, workloads) of all rows without a time; wrong results first."""
    labels = {row.work: contest.label for contest in run.contests for row in contest.rows}
    untimed = by((row for row in run.rows if not row.timed), lambda row: (row.status, row.backend, row.reason))
    return sorted(
        ((*key, tuple(dict.fromkeys(labels[row.work] for row in rows))) for key, rows in untimed.items()),
        key=lambda item: (_fate(item[0]), item[1], item[2]),
    )


def _scope(run: Run) -> str:
    measured = sum(row.timed for row in run.rows)
    policies = listed([POLICY_NAMES.get(policy, policy) for policy in run.policies])
    return (
        f"{run.device}, {run.day} (run {run.name}): {plural(len(run.workloads), 'workload')}, "
        f"{plural(len(run.backends), 'backend')}, {policies}; {measured} of {plural(len(run.rows), 'record')} "
        f"{'has' if measured == 1 else 'have'} a right result and a time{_without(run)}."
    )


def _without(run: Run) -> str:
    """How many records have none of both, by their status."""
    counts = Counter(row.status for row in run.rows if not row.timed)
    return "; " + listed([f"{counts[status]} {status}" for status in sorted(counts, key=_fate)]) if counts else ""


def _fate(status: str) -> int:
    return _FATES_IN_ORDER.index(status) if status in _FATES_IN_ORDER else len(_FATES_IN_ORDER)


def _lead(policy: str, contests: Sequence[Contest]) -> str:
    where = sentence_case(POLICY_NAMES.get(policy, policy))
    alone = [contest for contest in contests if len(contest.ranked) == 1]
    raced = [contest for contest in contests if len(contest.ranked) > 1]
    if not raced:
        names = listed(sorted({contest.ranked[0].backend for contest in alone}))
        return f"{where}: only {names} ran, so there is nothing to be faster than."
    parts = [f"{where}: {', '.join(_wins(raced, len(contests))) or 'no backend is fastest alone'}"]
    unclear = sum(contest.inconclusive for contest in raced)
    ties = sum(contest.winner is None for contest in raced) - unclear
    if ties:
        first = Counter(row.backend for contest in raced if not contest.inconclusive for row in contest.leaders)
        leader, count = min(first.items(), key=lambda item: (-item[1], item[0]))
        parts.append(
            f"{ties} {'is a tie' if ties == 1 else 'are ties'}; counting ties, {leader} is at the front most often, "
            f"on {count}"
        )
    if unclear:
        parts.append(f"{unclear} {'is' if unclear == 1 else 'are'} inconclusive")
    if alone:
        names = listed(sorted({contest.ranked[0].backend for contest in alone}))
        parts.append(f"{len(alone)} {'was' if len(alone) == 1 else 'were'} run by {names} only")
    return "; ".join(parts) + "."


def _wins(raced: Sequence[Contest], total: int) -> list[str]:
    """Who is fastest alone on how many of `total` workloads and by how much; two backends by name."""
    won = by((contest for contest in raced if contest.winner), lambda contest: contest.leaders[0].backend)
    ranked = sorted(won.items(), key=lambda item: (-len(item[1]), item[0]))
    wins: list[str] = []
    for name, group in ranked[:_LEADERS]:
        margin = times(geometric_mean([contest.margin or 1 for contest in group]))
        mean = "a geometric mean of " if len(group) > 1 else ""
        wins.append(
            f"{name} on {len(group)} (by {margin})"
            if wins
            else f"{name} is fastest on {len(group)} of {plural(total, 'workload')}, by {mean}{margin} over the next"
        )
    if len(ranked) > _LEADERS:
        rest = sum(len(group) for _, group in ranked[_LEADERS:])
        wins.append(f"{plural(len(ranked) - _LEADERS, 'other')} on {rest}")
    return wins


def _choice(contests: Sequence[Contest]) -> list[str]:
    """The backend that loses least when one must serve all workloads."""
    speeds = relative_speed(contests)
    whole = {name: speed for name, (speed, count) in speeds.items() if count == len(contests)}
    if len(contests) < 2 or len(speeds) < 2 or not whole:
        return []
    name = max(whole, key=lambda candidate: whole[candidate])
    worst = max(contests, key=lambda contest: contest.times_best(row) or 1 if (row := contest.of(name)) else 1)
    row = worst.of(name)
    slowest = f", at worst {times(worst.times_best(row))} the best time ({worst.label})" if row else ""
    return [
        f"If one backend must serve all {len(contests)}, {name} loses least: {percent(whole[name])} of the fastest "
        f"backend’s speed in geometric mean{slowest}."
    ]


def _bound(contests: Sequence[Contest]) -> str:
    # Where bytes matter and the bandwidth is not known, a bound by FLOPs says nothing.
    known = [contest for contest in contests if contest.limiter == "memory" or not contest.sample.moves]
    reached = [(contest, contest.best.share) for contest in known if contest.best and contest.best.share]
    if not reached:
        return "No bound is known for this machine, so no share of it can be stated."
    shares = [share for _, share in reached if share]
    worst, best = (pick(reached, key=lambda pair: pair[1] or 0) for pick in (min, max))
    if len(reached) == 1:
        return f"The fastest backend reaches {percent(shares[0])} of the bound ({_limit(best[0])})."
    return (
        f"The fastest backend of each workload reaches {percent(geometric_mean(shares))} of the bound in geometric "
        f"mean: from {percent(worst[1])} on {worst[0].label} ({_limit(worst[0])}) to {percent(best[1])} on "
        f"{best[0].label} ({_limit(best[0])})."
    )


def _limit(contest: Contest) -> str:
    limiter = {"compute": "limited by compute", "memory": "limited by memory"}.get(contest.limiter, "limit unknown")
    return f"{limiter}, {rate(contest.sample)}"


def _baseline(contests: Sequence[Contest]) -> list[str]:
    said = []
    for name, what in (("dense", "one weight for all rows"), ("copy", "only moving the same bytes")):
        # Where memory limits, dense reads one weight instead of all; where compute limits, copy does no work.
        limiter = LIMITER[name]
        beside = ((contest, contest.of(name)) for contest in contests if contest.limiter == limiter)
        ratios = [ratio for contest, row in beside if row and (ratio := contest.times_best(row))]
        if ratios:
            said.append(
                f"against {name} ({what}) it runs at {times(geometric_mean(ratios))} the speed over "
                f"{plural(len(ratios), f'{limiter}-bound workload')}"
            )
    return [f"As speed of light, {'; '.join(said)}."] if said else []


def _ties(contests: Sequence[Contest]) -> list[str]:
    drawn = [contest for contest in contests if len(contest.leaders) > 1 and not contest.inconclusive]
    unclear = [contest.label for contest in contests if contest.inconclusive]
    said = []
    if unclear:
        more = f" and {len(unclear) - _NAMED} more" if len(unclear) > _NAMED else ""
        text = f"Inconclusive (an interval reaches further than {percent(WIDE)} from its time)"
        said.append(f"{text}: {', '.join(unclear[:_NAMED])}{more}.")
    if drawn:
        shown = [f"{listed([row.backend for row in contest.leaders])} on {contest.label}" for contest in drawn[:_NAMED]]
        more = f"; and {len(drawn) - _NAMED} more" if len(drawn) > _NAMED else ""
        said.append(f"Ties (95 % intervals overlap, or less than 1 % apart): {'; '.join(shown)}{more}.")
    return said


def _launch(run: Run) -> list[str]:
    costs = {name: median(cost for _, cost in pairs) for name, pairs in overhead(run).items()}
    if not costs:
        return []
    least, most = min(costs, key=lambda name: costs[name]), max(costs, key=lambda name: costs[name])
    if costs[most] <= 0:
        return ["Outside a CUDA graph no backend takes measurably longer per call."]
    if micros(costs[least]) == micros(costs[most]):
        who = f"a call of {most}" if least == most else "a call of any backend"
        return [f"Outside a CUDA graph {who} takes {micros(costs[most])} µs longer (median over the workloads)."]
    low = f"{micros(costs[least])} µs" if costs[least] > 0 else "nothing measurable"
    return [
        f"Outside a CUDA graph a call takes longer by {low} ({least}) to {micros(costs[most])} µs ({most}), "
        "median over the workloads."
    ]


def nowhere(run: Run) -> dict[str, str]:
    """Backends that could run no workload of the run, with the first reason, without what it says in brackets."""
    able = {row.backend for row in run.rows if row.status != "unsupported"}
    found: dict[str, str] = {}
    for row in run.rows:
        if row.backend not in able:
            found.setdefault(row.backend, re.split(r" \(|[:;]", row.reason)[0])
    return found


def unable(run: Run) -> str:
    """One sentence on the backends of `nowhere`; empty for none."""
    absent = nowhere(run)
    reasons = by(absent, absent.__getitem__)
    told = "; ".join(f"{', '.join(names)} ({short(reason, 80)})" for reason, names in reasons.items())
    return f"Not supported on any workload: {told}." if told else ""


def _trouble(run: Run, told: Sequence[str]) -> list[str]:
    absent = nowhere(run)
    said = []
    new = (found for found in failures(run) if found[1] not in absent and found[1] not in told)
    grouped = by(new, lambda found: found[:2])
    verbs = {
        "wrong": "gave a wrong result on",
        "failed": "failed on",
        "refused": "was refused a time on",
        "unsupported": "does not support",
    }
    for (status, backend), reasons in grouped.items():
        count = len({name for *_, names in reasons for name in names})
        shown = "; ".join(short(reason, 160) for _, _, reason, _ in reasons[:_NAMED])
        more = f"; and {plural(len(reasons) - _NAMED, 'more reason')}" if len(reasons) > _NAMED else ""
        verb = verbs.get(status, f"is “{status}” on")
        text = f"{backend} {verb} {plural(count, 'workload')}: {shown}{more}"
        said.append(text if text.endswith("…") else f"{text.rstrip('.')}.")
    return [*said, *([unable(run)] if absent else [])]


def _machine(run: Run) -> list[str]:
    measured = [row for row in run.rows if row.timed]
    reasons = Counter(reason for row in measured for reason in row.throttle)
    said = [*_busy(measured), *_noise(measured)]
    held = sum(bool(row.throttle) for row in measured)
    if set(reasons) == {QUOTA}:
        said.append(f"The quota of its cgroup stopped this process in {held} of {len(measured)} measurements.")
    elif reasons:
        said.append(
            f"The GPU held its clock back ({listed([name for name, _ in reasons.most_common()])}) in {held} of "
            f"{len(measured)} measurements: trust the ratios of this run before its absolute numbers."
        )
    return said


def _busy(measured: Sequence[Row]) -> list[str]:
    """Of a CPU: more runnable threads than cores that this process may use."""
    loads = [row.env.load for row in measured if row.env.load is not None]
    granted = [value for row in measured for value in (row.env.cores, row.env.quota) if value is not None]
    if not loads or not granted or median(loads) <= _BUSY * min(granted):
        return []
    return [
        f"The machine was busy: a load of {significant(median(loads))} on {significant(min(granted))} cores (median). "
        "Other work shared them, so times and ratios may both be wrong; measure again on a quiet machine."
    ]


def _noise(measured: Sequence[Row]) -> list[str]:
    wide = sum(too_wide(row.seconds, row.interval) for row in measured)
    if 3 * wide <= len(measured):
        return []
    return [
        f"The times are noisy: {wide} of {len(measured)} have an interval that reaches further than {percent(WIDE)}."
    ]


def standing(contest: Contest, row: Row) -> str:
    """Where a row stands: "fastest", "tie", "inconclusive", a multiple of the best time, or its status."""
    return (contest.place(row) or times(contest.times_best(row))) if row.timed else row.status


def of_candidate(records: Iterable[Record], name: str) -> list[str]:
    """How candidate `name` did: a sentence for each policy, then one for each reason why it has no time."""
    said: list[str] = []
    for run in runs(records):
        for policy in run.policies:
            own = [(c, row) for c in run.contests_of(policy) if (row := c.of(name)) is not None]
            timed = [(c, row) for c, row in own if row.timed]
            if timed:
                said.append(f"{name}, {POLICY_NAMES.get(policy, policy)}: {_race_of(timed, len(own))}.")
        untimed = [(c, row) for c in run.contests if (row := c.of(name)) is not None and not row.timed]
        for (status, reason), pairs in by(untimed, lambda pair: (pair[1].status, pair[1].reason)).items():
            where = _where({c.label for c, _ in pairs})
            said.append(f"{name} is {_FATES.get(status, status)} on {where}: {short(reason, _REASON)}.")
    return said or [f"{name} was not measured."]


def _race_of(timed: list[tuple[Contest, Row]], asked: int) -> str:
    """ "right on 4 of 4 workloads; fastest on 1, tied on 2; 1.20× the time of the best of the others"."""
    won = sum(c.winner is row and len(c.ranked) > 1 for c, row in timed)
    places = Counter(c.place(row) for c, row in timed)
    named = (("fastest on", won), ("tied on", places["tie"]), ("inconclusive on", places["inconclusive"]))
    counts = [f"{word} {n}" for word, n in named if n]
    ratios = [
        row.seconds / others[0].seconds
        for c, row in timed
        if (others := [r for r in c.ranked if r.backend != row.backend])
    ]
    parts = [f"right on {len(timed)} of {plural(asked, 'workload')}", ", ".join(counts) or "fastest on none"]
    if ratios:
        mean = " in geometric mean" if len(ratios) > 1 else ""
        parts.append(f"{times(geometric_mean(ratios))} the time of the best other backend{mean}")
    return "; ".join(parts)


def _where(labels: set[str]) -> str:
    names = sorted(labels)
    return listed(names) if len(names) <= 2 else plural(len(names), "workload")
