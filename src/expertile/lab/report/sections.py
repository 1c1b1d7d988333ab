"""What the HTML report shows of a run, section by section; `assets/report.html` says where it stands."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

from markupsafe import Markup, escape

from expertile.lab.report.contest import Contest, Run
from expertile.lab.report.figures import Figure, share_figure, time_figure
from expertile.lab.report.figures_run import growth_figures, launch_figure, roofline_figure, roofs, scaling_figures
from expertile.lab.report.leaderboard import HEADER, Board, boards, cells
from expertile.lab.report.memory import MemoryChart
from expertile.lab.report.memory import figure as memory_figure
from expertile.lab.report.memory import sentences as memory_sentences
from expertile.lab.report.palette import styles
from expertile.lab.report.rows import POLICY_NAMES, Row, config_text, shape_text
from expertile.lab.report.units import MISSING, error, micros, percent, rate, sentence_case, short, significant, spread
from expertile.lab.report.verdict import failures, overhead, sentences, standing

_LISTED_GROUPS = 64
_KINDS = {"fastest": "win", "tie": "win", "inconclusive": "unclear"}  # of cells, by place
COLUMNS: tuple[tuple[str, str, Callable[[Contest, Row], str]], ...] = (
    ("Workload", "", lambda contest, row: contest.label),
    ("Backend", "", lambda contest, row: row.backend),
    ("Policy", "", lambda contest, row: row.policy),
    ("µs", "num", lambda contest, row: micros(row.time_s)),
    ("95 %", "num", lambda contest, row: spread(row)),
    ("Rate", "num", lambda contest, row: rate(row)),
    ("Of bound", "num", lambda contest, row: percent(contest.share(row))),
    ("Limited by", "", lambda contest, row: row.limiter if row.timed else MISSING),
    ("Standing", "num", standing),
    ("Status", "", lambda contest, row: row.status),
    ("Relative error", "num", lambda contest, row: error(row.rel_error)),
    ("Largest error", "num", lambda contest, row: error(row.max_error)),
    ("Config", "", lambda contest, row: config_text(row.config) or MISSING),
    ("Shape", "", lambda contest, row: shape_text(row.shape)),
    ("Rows of each group", "", lambda contest, row: _sizes(row)),
    ("Reason", "", lambda contest, row: row.reason),
)
"""What the page tells of a record: name, "num" for numbers, and the text."""


@dataclass
class Figures:
    """The charts of one page, in order, and its records; the page's script draws item i into the element with
    data-figure=i, and tells record i where data-row=i."""

    rows: Sequence[Row]
    items: list[Figure] = field(default_factory=list)
    lines: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = {id(row): place for place, row in enumerate(self.rows)}

    def add(self, figure: Figure | None, title: str, policy: str = "", label: str = "") -> list[dict[str, Any]]:
        """The place that will hold `figure`; none for None. `label` marks records from elsewhere."""
        if figure is None:
            return []
        self.items.append(figure)
        shown = f"{title}, {POLICY_NAMES.get(policy, policy)}" if policy else title
        place = {"title": shown, "policy": policy, "label": label, "height": figure["height"]}
        return [place | {"index": len(self.items) - 1}]


def of_run(run: Run, anchor: str, figures: Figures, label: str) -> dict[str, Any]:
    """All sections: findings first, then what went wrong, with the measured setting underneath; `label` says where the
    records of another machine come from."""
    said, first = sentences(run), len(figures.lines)
    shown = {
        "anchor": anchor,
        "label": label,
        "said": [s for s in said if s.kind not in ("scope", "trouble", "machine")],
        "scope": next(s.text for s in said if s.kind == "scope"),
        "bad": [s.text for kind in ("machine", "trouble") for s in said if s.kind == kind],
        "facts": _facts(run),
        "boards": [_board(board) for board in boards(run)],
        "glance": _glance(run, anchor, figures),
        "presets": [(name, *charts) for name in run.presets if (charts := _preset(run, name, figures, label))[0]],
        "failures": failures(run),
        "first": first,
        "count": len(run.rows),
    }
    contests = {(contest.sample.work, contest.policy): contest for contest in run.contests}
    for row in run.rows:
        texts = (text(contests[row.work, row.policy], row) for _, _, text in COLUMNS)
        figures.lines.append([*texts, "baseline" if row.is_baseline else ""])
    return shown


def _facts(run: Run) -> list[tuple[str, str]]:
    """The machine, its software and its clocks while measuring."""
    rows = run.rows
    facts: list[tuple[str, str]] = [("Device", _values(rows, "gpu"))]
    facts += [(name, _values(rows, name.lower())) for name in ("Driver", "torch", "Triton", "expertile")]
    facts += [
        ("Cores", _values(rows, "cores")),
        ("Threads", _values(rows, "threads")),
        ("Cores granted by cgroup", _values(rows, "quota")),
        ("Load", _numbers(rows, "load", "runnable threads")),
        ("SM clock", _numbers(rows, "sm_clock_mhz", "MHz")),
        ("Power", _numbers(rows, "power_w", "W")),
        ("Throttle reasons", _throttle(rows)),
        ("Bound from", _limits(run)),
        ("Date", ", ".join(sorted({row.day for row in rows if row.day}))),
        ("Run", run.name),
    ]
    return [fact for fact in facts if fact[1]]


def _board(board: Board) -> dict[str, Any]:
    columns = [(name.capitalize(), "" if name in ("backend", "workloads") else "num") for name in HEADER]
    held = {name: getattr(board, name) for name in ("title", "policy", "scores", "absent")}
    return held | {"columns": columns, "texts": [cells(board, score) for score in board.able]}


def _preset(run: Run, name: str, figures: Figures, label: str) -> tuple[list[Any], list[Any]]:
    """Charts of one preset: share of the bound; beside it time, scaling, roofline and launch overhead."""
    near: list[Any] = []
    rest: list[Any] = []
    for policy in run.policies:
        contests = run.contests_of(policy, name)
        near += figures.add(share_figure(contests), "How near the limit", policy, label)
    for policy in run.policies:
        rest += figures.add(time_figure(run.contests_of(policy, name)), "Time", policy, label)
    for make, what in ((scaling_figures, "Scaling"), (growth_figures, "Rate against size")):
        charts = [make(run.contests_of(policy, name)) for policy in run.policies]
        for title in dict.fromkeys(title for found in charts for title in found):
            for policy, found in zip(run.policies, charts, strict=True):
                rest += figures.add(found.get(title), f"{what}: {title}", policy, label)
    compute, memory = roofs(run)
    unknown = [what for what, known in (("compute peak", compute), ("memory bandwidth", memory)) if not known]
    roofline = "Roofline" + (f" ({' and '.join(unknown)} unknown)" if unknown else "")
    for policy in run.policies:
        rest += figures.add(roofline_figure(run, run.contests_of(policy, name)), roofline, policy, label)
    rest += figures.add(launch_figure(overhead(run, name)), "Launch overhead: eager minus graph", "", label)
    return near, rest


def memory(charts: Sequence[MemoryChart], figures: Figures, names: Sequence[str]) -> list[Any]:
    """Peak memory against length, in the colours of `names`, and what is seen."""
    looks, found = styles(names), []
    for chart in charts:
        dotted = "; dotted: by formula" * any(map(chart.formula, chart.backends))
        caption = f"{chart.title}, recorded on {chart.first.env.gpu}, {chart.first.date[:10]}{dotted}"
        said = [sentence.replace("`", "") for sentence in memory_sentences(chart)]
        found.append((*figures.add(memory_figure(chart, looks), caption), said))
    return found


def _sizes(row: Row) -> str:
    """Of few groups."""
    sizes = row.shape.get("group_sizes")
    few = isinstance(sizes, (list, tuple)) and len(sizes) <= _LISTED_GROUPS
    return ", ".join(map(str, sizes or ())) if few else ""


def _slugs(run: Run, anchor: str) -> dict[str, str]:
    """The anchor of each workload on the page."""
    found: dict[str, str] = {}
    for label in run.workloads:
        slug = f"{anchor}-{re.sub('[^a-z0-9]+', '-', label.lower()).strip('-')}"
        found[label] = slug if slug not in found.values() else f"{slug}-{len(found) + 1}"
    return found


def _glance(run: Run, anchor: str, figures: Figures) -> list[dict[str, Any]]:
    """Workloads × backends, one table per policy: share of the bound (or relative speed), shaded.

    Every workload is an anchor: `anchor` and its name, under the second policy with that policy's name."""
    slugs, found = _slugs(run, anchor), []
    for policy in run.policies:
        contests = run.contests_of(policy)
        bounded = any(row.share for contest in contests for row in contest.rows)
        # A column of nothing but "unsupported" says once below the tables what it would say in every line.
        names = [
            name
            for name in run.backends
            if any((row := contest.of(name)) and row.status != "unsupported" for contest in contests)
        ]
        heads = [escape(short(name, 28)).replace("_", Markup("_<wbr>")) for name in names]  # may break at "_"
        suffix = f"-{policy}" if policy != run.policies[0] else ""
        lines = []
        for contest in contests:
            marks = [_mark(contest, contest.of(name), bounded, figures.places) for name in names]
            lines.append((contest, slugs[contest.label] + suffix, marks))
        found.append(
            {
                "policy": policy,
                "title": sentence_case(POLICY_NAMES.get(policy, policy)),
                "what": "share of the bound" if bounded else "speed relative to the fastest backend",
                "columns": [("Workload", ""), *((text, "num") for text in ("Bound, µs", *heads))],
                "rows": lines,
                "means": [_mean(contests, name, bounded) for name in names],
            }
        )
    return found


def _mark(contest: Contest, row: Row | None, bounded: bool, places: Mapping[int, int]) -> dict[str, Any] | None:
    """A cell of the first table."""
    if row is None:
        return None
    value, place = contest.near(row, bounded), places[id(row)]
    if value is None:
        text = MISSING if row.timed else standing(contest, row)
        return {"place": place, "share": None, "status": row.status, "text": text}
    kind = _KINDS.get(contest.place(row), "light" if row.is_baseline else "")
    return {"place": place, "share": f"{min(value, 1):.2f}", "kind": kind, "text": percent(value)}


def _mean(contests: Sequence[Contest], name: str, bounded: bool) -> tuple[str, str]:
    found = [(contest, contest.of(name)) for contest in contests]
    values = [value for contest, row in found if row and (value := contest.near(row, bounded))]
    if not values:
        return MISSING, ""
    note = f"on {len(values)} of {len(contests)}" if len(values) < len(contests) else ""
    return percent(geometric_mean(values)), note


def _values(rows: Sequence[Row], name: str) -> str:
    return ", ".join(dict.fromkeys(str(value) for row in rows if (value := getattr(row.env, name)) not in (None, "")))


def _numbers(rows: Sequence[Row], name: str, unit: str) -> str:
    values: list[float] = [value for row in rows if row.timed and (value := getattr(row.env, name)) is not None]
    if not values:
        return ""
    if min(values) == max(values):
        return f"{significant(values[0])} {unit}"
    return f"{significant(min(values))} to {significant(max(values))} {unit}, median {significant(median(values))}"


def _throttle(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.timed and row.env.throttle is not None]
    if not measured:
        return ""
    reasons = Counter(reason for row in measured for reason in row.throttle)
    if not reasons:
        return "none"
    return ", ".join(f"{reason} in {count} of {len(measured)} measurements" for reason, count in reasons.most_common())


def _limits(run: Run) -> str:
    compute, memory = roofs(run)
    parts = [f"{dtype} {significant(peak)} TFLOP/s" for dtype, peak in sorted(compute.items())]
    parts.append(f"memory {significant(memory)} TB/s" if memory else "memory bandwidth unknown")
    return ", ".join(parts)
