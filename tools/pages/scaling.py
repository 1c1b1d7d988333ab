"""How cost grows, from records of the presets `scaling` and `skew`: figures for docs/, and the words beside them.

    records -> scaling_svg: {"qwen3-gate-up-tokens": "<svg …>", …}
            -> scaling_text: {"tokens": "Markdown", …}, one text for each section of docs/results/scaling.md

Only the newest run of each preset is used: figures of two runs must not stand in one curve.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from expertile.lab.race.record import BASELINES, Record
from expertile.lab.report.contest import Contest, Run, runs
from expertile.lab.report.palette import styles
from expertile.lab.report.rows import POLICY_NAMES, Row
from expertile.lab.report.units import MISSING, markdown_table, micros, percent, rate, significant, times
from tools.pages.recorded import NOT_MEASURED, percents
from tools.pages.svg import Series, curves, dots

SECTIONS = ("tokens", "groups", "shape", "skew")
"""Sections of docs/results/scaling.md: of the sweeps over each axis (K and N share one), and of skew."""

AXIS_NAMES = {"tokens": "tokens", "groups": "groups", "k": "K", "n": "N"}
_DASHES = {"dense": "7 4", "copy": "2 3", "bound": ""}
_FLAT = 1.25  # a stretch is flat if the time at its end is at most this times the time at its start
_SKEW_TARGET = 1.05


@dataclass(frozen=True)
class Sweep:
    """Contests of one policy that differ in one number: (value, contest), the smallest value first."""

    name: str
    axis: str
    points: tuple[tuple[int, Contest], ...]

    @property
    def title(self) -> str:
        """ "mixtral-up: 8 groups, K 4096, N 14336", leaving out what varies."""
        shapes = [contest.sample.shape for _, contest in self.points]
        fixed = []
        for key, text in (("groups", "{} groups"), ("m", "{} rows"), ("k", "K {}"), ("n", "N {}")):
            values = {shape.get(key) for shape in shapes}
            if len(values) == 1:
                fixed.append(text.format(values.pop()))
        return f"{self.name}: {', '.join(fixed)}"

    @property
    def section(self) -> str:
        return self.axis if self.axis in SECTIONS else "shape"


def axis_of(name: str) -> tuple[str, str, int] | None:
    """("mixtral-up", "tokens", 64) for "mixtral-up-tokens64", with or without a preset in front; None for others."""
    match = re.fullmatch(rf"(?:[^/]*/)?(.+)-({'|'.join(AXIS_NAMES)})(\d+)", name)
    return (match[1], match[2], int(match[3])) if match else None


def sweeps(run: Run, policy: str) -> list[Sweep]:
    """The sweeps of one run under one policy, those with three points or more."""
    found: dict[tuple[str, str], dict[int, Contest]] = {}
    for contest in run.contests_of(policy, "scaling"):
        place = axis_of(contest.sample.workload)
        if place is not None and contest.ranked:
            found.setdefault(place[:2], {})[place[2]] = contest
    return [Sweep(*key, tuple(sorted(at.items()))) for key, at in found.items() if len(at) >= 3]


def scaling_svg(records: Iterable[Record]) -> dict[str, str]:
    """SVG figures by name: a chart of time for each sweep of `scaling` under CUDA-graph replay (and, over tokens, of
    eager calls), and one of `skew`. None for what was not measured.
    """
    records = list(records)
    found: dict[str, str] = {}
    if run := newest(records, "scaling"):
        for policy in run.policies:
            first = policy == run.policies[0]
            for sweep in sweeps(run, policy):
                if first or sweep.axis == "tokens":
                    name = f"{sweep.name}-{sweep.axis}" + ("" if first else f"-{policy}")
                    found[name] = _sweep_svg(sweep, run, policy)
    if (skewed := newest(records, "skew")) and (cases := skew_cases(skewed)):
        found["skew"] = _skew_svg(cases, skewed)
    return found


def scaling_text(records: Iterable[Record]) -> dict[str, str]:
    """Markdown by section of docs/results/scaling.md: figures, what is seen in them, and a table of some points."""
    records = list(records)
    figures = scaling_svg(records)
    parts: dict[str, list[str]] = {section: [] for section in SECTIONS}
    run = newest(records, "scaling")
    for sweep in sweeps(run, run.policies[0]) if run else ():
        name = f"{sweep.name}-{sweep.axis}"
        part = parts[sweep.section]
        part.append(f"### {sweep.title}")
        part += [_image(n) for n in (name, f"{name}-eager") if n in figures]
        part += ["\n".join(f"- {s}" for s in sentences(sweep)), _sweep_table(sweep)]
    skewed = newest(records, "skew")
    cases = skew_cases(skewed) if skewed else []
    if cases:
        parts["skew"] += [_image("skew"), "\n".join(f"- {s}" for s in skew_sentences(cases)), _skew_table(cases)]
    for section, part in parts.items():
        source = skewed if section == "skew" else run
        if part and source:
            policy = POLICY_NAMES.get(source.policies[0], source.policies[0])
            part.insert(0, f"Recorded on {source.device}, {source.day}, {policy}, run `{source.name}`.")
    return {section: "\n\n".join(part) for section, part in parts.items() if part}


def blocks(records: Iterable[Record]) -> dict[str, str]:
    """The text of every section."""
    texts = scaling_text(records)
    return {section: texts.get(section, NOT_MEASURED) for section in SECTIONS}


def newest(records: Iterable[Record], preset: str) -> Run | None:
    """The newest run that has a time for `preset`."""
    timed = [run for run in runs(records) if any(r.timed and r.preset == preset for r in run.rows)]
    return max(timed, key=lambda run: max(row.date for row in run.rows), default=None)


def sentences(sweep: Sweep) -> list[str]:
    """What is seen along a sweep, in words: growth, what limits where, who is fastest where, how near the limits."""
    axis, points = AXIS_NAMES[sweep.axis], sweep.points
    (first, start), (last, end) = points[0], points[-1]
    pairs = ((_value(start, key), _value(end, key)) for key in ("flops", "nbytes", "time_s"))
    grown = [f"{significant(after / before)}×" if before and after else MISSING for before, after in pairs]
    said = [
        f"From {first} to {last} {axis} FLOPs grow {grown[0]}, bytes {grown[1]}, and the time of the fastest backend "
        f"{grown[2]}: {micros(_value(start, 'time_s'))} µs to {micros(_value(end, 'time_s'))} µs."
    ]
    plain = _plain(sweep) if sweep.axis == "tokens" else None
    if plain:
        low, high, ratio = plain
        said.append(
            f"From {low} to {high} {axis}, {significant(high / low)} times as many, it grows only {times(ratio)}."
        )
    said.append(_stretches("Limited by", sweep, [{c.limiter} for _, c in points]))
    leaders = [{f"`{row.backend}`" for row in contest.leaders} for _, contest in points]
    said.append(_stretches("Fastest (ties count for both)", sweep, leaders))
    for limiter, baseline in (("compute", "dense"), ("memory", "copy")):
        near = [(c.best, c.timed(baseline), c.share(c.best)) for _, c in points if c.limiter == limiter and c.best]
        shares = [share for _, _, share in near if share]
        ratios = [light.seconds / best.seconds for best, light, _ in near if light]
        if shares:
            text = f"Where {limiter} limits, the fastest backend reaches {percents(shares)} of the bound"
            said.append(text + (f" and {percents(ratios)} of `{baseline}`'s speed." if ratios else "."))
    return said


@dataclass(frozen=True)
class SkewCase:
    """A contest with uneven groups, and the one with even groups of the same FLOPs and bytes in the same run."""

    skewed: Contest
    even: Contest

    def ratio(self, backend: str) -> float | None:
        """Time of `backend` over its own time on even groups."""
        return _time_ratio(self.skewed.timed(backend), self.even.timed(backend))

    @property
    def best_ratio(self) -> float | None:
        """The fastest backend's time over the fastest backend's on even groups."""
        return _time_ratio(self.skewed.best, self.even.best)


def skew_cases(run: Run) -> list[SkewCase]:
    """The uneven workloads of `skew` with their even twins: equal FLOPs, bytes, K and N."""
    contests = [c for c in run.contests_of(run.policies[0], "skew") if c.ranked]
    even = {_work_key(c): c for c in contests if _is_even(c.sample)}
    return [SkewCase(c, even[_work_key(c)]) for c in contests if not _is_even(c.sample) and _work_key(c) in even]


def skew_sentences(cases: Sequence[SkewCase]) -> list[str]:
    """What skew costs, in words."""
    said = []
    ratios = [(case.best_ratio, case.skewed.label) for case in cases if case.best_ratio]
    if ratios:
        worst, where = max(ratios)
        within = sum(ratio <= _SKEW_TARGET for ratio, _ in ratios)
        said.append(
            f"The fastest backend takes at most {times(worst)} the fastest time on even groups (`{where}`); "
            f"on {within} of {len(ratios)} cases within {_SKEW_TARGET:g}×."
        )
    for backend in _rivals(cases):
        own = [(ratio, c.skewed.label) for c in cases if (ratio := c.ratio(backend))]
        if own:
            (worst, where), (least, _) = max(own), min(own)
            said.append(
                f"`{backend}`: {times(least)} to {times(worst)} its own time on even groups (worst: `{where}`)."
            )
    return said


def _sweep_svg(sweep: Sweep, run: Run, policy: str) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for value, contest in sweep.points:
        for row in contest.rows:
            if row.timed:
                lines.setdefault(row.backend, []).append((value, row.seconds * 1e6))
        if contest.sample.bound_s:
            lines.setdefault("bound", []).append((value, contest.sample.bound_s * 1e6))
    looks = styles(name for name in lines if name != "bound")
    series = [
        Series(name, tuple(points), *looks.get(name, ("", "")), dash=_DASHES.get(name, ""))
        for name, points in lines.items()
    ]
    title = f"{sweep.title} ({run.device}, {POLICY_NAMES.get(policy, policy)})"
    return curves(title, f"{AXIS_NAMES[sweep.axis]} (logarithmic)", "time, µs (logarithmic)", series)


def _skew_svg(cases: Sequence[SkewCase], run: Run) -> str:
    names = _rivals(cases)
    looks = styles(names)
    series = []
    for name in names:
        points = tuple((ratio, float(i)) for i, case in enumerate(cases) if (ratio := case.ratio(name)))
        if points:
            series.append(Series(name, points, *looks[name]))
    label = f"time ÷ own time on even groups of the same FLOPs and bytes (strokes: 1 and {_SKEW_TARGET:g})"
    rows = [case.skewed.label for case in cases]
    return dots(f"What skew costs ({run.device})", label, rows, series, (1.0, _SKEW_TARGET))


def _sweep_table(sweep: Sweep) -> str:
    """About eight points of the sweep, the first and the last among them."""
    step = max(1, (len(sweep.points) - 1) // 8)
    last = len(sweep.points) - 1
    body = []
    for index, (value, contest) in enumerate(sweep.points):
        if contest.best is None or (index % step and index != last):
            continue
        second = contest.second
        body.append(
            [
                str(value),
                " = ".join(f"`{row.backend}`" for row in contest.leaders),
                micros(contest.best.time_s),
                rate(contest.best),
                percent(contest.share(contest.best)),
                contest.limiter,
                f"`{second.backend}` {times(contest.times_best(second))}" if second else MISSING,
            ]
        )
    return markdown_table([AXIS_NAMES[sweep.axis], "fastest", "µs", "rate", "of bound", "limited by", "next"], body)


def _skew_table(cases: Sequence[SkewCase]) -> str:
    names = _rivals(cases)
    body = [[f"`{c.skewed.label}`", times(c.best_ratio), *(times(c.ratio(name)) for name in names)] for c in cases]
    return markdown_table(["case", "fastest ÷ fastest", *(f"`{name}`" for name in names)], body)


def _stretches(lead: str, sweep: Sweep, labels: Sequence[set[str]]) -> str:
    """Consecutive points that share a label, told together: "compute (64 to 512)"."""
    told: list[str] = []
    index = 0
    while index < len(labels):
        common, end = set(labels[index]), index
        while end + 1 < len(labels) and common & labels[end + 1]:
            end += 1
            common &= labels[end]
        low, high = sweep.points[index][0], sweep.points[end][0]
        told.append(f"{' = '.join(sorted(common))} ({low} to {high})" if end > index else f"{min(common)} ({low})")
        index = end + 1
    return f"{lead}: {', '.join(told)}."


def _plain(sweep: Sweep) -> tuple[int, int, float] | None:
    """(first, last, growth) of the longest stretch over which the time hardly grows; None under a factor of 4."""
    at = [(value, _value(contest, "time_s") or 0.0) for value, contest in sweep.points]
    found = [
        (end / start, start, end, end_s / start_s)
        for i, (start, start_s) in enumerate(at)
        for end, end_s in at[i + 1 :]
        if end >= 4 * start and start_s and end_s <= _FLAT * start_s
    ]
    return max(found)[1:] if found else None


def _value(contest: Contest, key: str) -> float | None:
    return getattr(contest.best or contest.sample, key)


def _time_ratio(first: Row | None, second: Row | None) -> float | None:
    """Time over time; None unless both have one."""
    return first.seconds / second.seconds if first and second else None


def _is_even(row: Row) -> bool:
    sizes = row.shape.get("group_sizes") or [0]
    return max(sizes) - min(sizes) <= 1 and min(sizes) > 0


def _work_key(contest: Contest) -> tuple[Any, ...]:
    sample = contest.sample
    return (sample.flops, sample.nbytes, sample.shape.get("k"), sample.shape.get("n"))


def _rivals(cases: Sequence[SkewCase]) -> list[str]:
    found = {row.backend for case in cases for row in case.skewed.rows if row.timed}
    return sorted(found - set(BASELINES))


def _image(name: str) -> str:
    return f"![{name}](figures/{name}.svg)"
