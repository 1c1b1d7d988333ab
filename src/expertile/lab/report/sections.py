"""Sections of one run in the HTML report. All text that comes from records passes through `html.escape`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import geometric_mean, median

from expertile.lab.report.contest import Contest, Run
from expertile.lab.report.figures import Figure, share_figure, time_figure
from expertile.lab.report.figures_run import growth_figures, launch_figure, roofline_figure, roofs, scaling_figures
from expertile.lab.report.memory import MemoryChart
from expertile.lab.report.memory import figure as memory_figure
from expertile.lab.report.memory import sentences as memory_sentences
from expertile.lab.report.palette import styles
from expertile.lab.report.rows import POLICY_NAMES, Row, config_text, shape_text
from expertile.lab.report.units import MISSING, error, micros, percent, plural, rate, short, significant, spread
from expertile.lab.report.verdict import failures, overhead, sentences, standing

_LISTED_GROUPS = 64
COLUMNS = (
    ("Workload", ""),
    ("Backend", ""),
    ("Policy", ""),
    ("µs", "num"),
    ("95 %", "num"),
    ("Rate", "num"),
    ("Of bound", "num"),
    ("Limited by", ""),
    ("Standing", "num"),
    ("Status", ""),
    ("Relative error", "num"),
    ("Largest error", "num"),
    ("Config", ""),
    ("Shape", ""),
    ("Rows of each group", ""),
    ("Reason", ""),
)
"""Names of a record's texts on the page, and whether they are numbers."""


@dataclass
class Figures:
    """The charts of one page, in order, and its records; the page's script draws item i into the element with
    data-figure=i, and tells record i where data-row=i."""

    rows: Sequence[Row]
    items: list[Figure] = field(default_factory=list)
    lines: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = {id(row): place for place, row in enumerate(self.rows)}

    def add(self, figure: Figure | None, title: str, policy: str = "", label: str = "") -> str:
        """The element that will hold `figure`; empty for None. `label` marks records from elsewhere."""
        if figure is None:
            return ""
        self.items.append(figure)
        shown = f"{title}, {POLICY_NAMES.get(policy, policy)}" if policy else title
        marker = f' <span class="foreign-mark">{escape(label)}</span>' if label else ""
        return (
            f"<figure{_policy(policy)}><figcaption>{escape(shown)}{marker}</figcaption>"
            f'<div class="plot" role="img" aria-label="{escape(shown)}. The same figures stand in the tables below." '
            f'data-figure="{len(self.items) - 1}" style="height:{figure["height"]}px"></div></figure>'
        )


def verdict(run: Run, anchor: str) -> str:
    """Findings first, then what went wrong, with the measured setting underneath."""
    said = sentences(run)
    main = "".join(
        f'<p class="{"lead" if sentence.kind == "lead" else "finding"}"{_policy(sentence.policy)}>'
        f"{escape(sentence.text)}</p>"
        for sentence in said
        if sentence.kind not in ("scope", "trouble", "machine")
    )
    bad = [sentence.text for kind in ("machine", "trouble") for sentence in said if sentence.kind == kind]
    notes = "".join(f"<li>{escape(text)}</li>" for text in bad)
    trouble = f'<ul class="trouble" aria-label="Problems">{notes}</ul>' if bad else ""
    scope = next(sentence.text for sentence in said if sentence.kind == "scope")
    return (
        f'<div class="verdict"><h2 id="{anchor}-verdict">Verdict</h2>{main}'
        f'<p class="scope">{escape(scope)}</p>{trouble}</div>'
    )


def environment(run: Run) -> str:
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
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts if value)
    return f'<dl class="environment" aria-label="Environment">{items}</dl>'


def glance(run: Run, anchor: str, figures: Figures, label: str) -> str:
    """Workloads × backends, one table per policy: share of the bound (or relative speed), shaded.

    Every workload is an anchor: `anchor` and its name, under the second policy with that policy's name.
    """
    slugs = _slugs(run, anchor)
    tables = [
        _glance_table(run, policy, label, figures, slugs, f"-{policy}" if policy != run.policies[0] else "")
        for policy in run.policies
    ]
    return f'<h2>At a glance</h2><div class="panels">{"".join(tables)}</div>'


def preset(run: Run, name: str, figures: Figures, label: str) -> str:
    """Charts of one preset: share of the bound; beside it time, scaling, roofline and launch overhead."""
    near, rest = [], []
    for policy in run.policies:
        contests = run.contests_of(policy, name)
        near.append(figures.add(share_figure(contests), "How near the limit", policy, label))
    for policy in run.policies:
        rest.append(figures.add(time_figure(run.contests_of(policy, name)), "Time", policy, label))
    for make, what in ((scaling_figures, "Scaling"), (growth_figures, "Rate against size")):
        charts = [make(run.contests_of(policy, name)) for policy in run.policies]
        for title in dict.fromkeys(title for found in charts for title in found):
            for policy, found in zip(run.policies, charts, strict=True):
                rest.append(figures.add(found.get(title), f"{what}: {title}", policy, label))
    for policy in run.policies:
        chart = roofline_figure(run, run.contests_of(policy, name))
        rest.append(figures.add(chart, f"Roofline{_roof_note(run)}", policy, label))
    rest.append(figures.add(launch_figure(overhead(run, name)), "Launch overhead: eager minus graph", "", label))
    if not any(near):
        return ""
    return (
        f'<h2>{escape(name)}</h2><div class="panels charts"><div class="column">{"".join(near)}</div>'
        f'<div class="column">{"".join(rest)}</div></div>'
    )


def memory(charts: Sequence[MemoryChart], figures: Figures, names: Sequence[str]) -> str:
    """Peak memory against length, with what is seen, in the colours of `names`; empty without charts."""
    if not charts:
        return ""
    looks, body = styles(names), []
    for chart in charts:
        dotted = "; dotted: by formula" * any(map(chart.formula, chart.backends))
        caption = f"{chart.title}, recorded on {chart.first.env.gpu}, {chart.first.date[:10]}{dotted}"
        said = "".join(f"<li>{escape(sentence.replace('`', ''))}</li>" for sentence in memory_sentences(chart))
        body.append(f"{figures.add(memory_figure(chart, looks), caption)}<ul>{said}</ul>")
    return f'<section class="run"><h2>Peak memory of a call</h2>{"".join(body)}</section>'


def without_time(run: Run) -> str:
    """What was wrong, failed, was refused or unsupported, with the reason."""
    found = failures(run)
    if not found:
        return ""
    body = "".join(
        f'<tr><td><span class="status {escape(status)}">{escape(status)}</span></td><td>{escape(backend)}</td>'
        f"<td>{escape(reason)}</td><td>{_workload_list(names)}</td></tr>"
        for status, backend, reason, names in found
    )
    return (
        '<h2>Without a time</h2><div class="scroll" tabindex="0" role="region" aria-label="Records without a time">'
        '<table class="reasons"><thead><tr><th scope="col">Status</th><th scope="col">Backend</th>'
        f'<th scope="col">Reason</th><th scope="col">Workloads</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def all_records(run: Run, figures: Figures) -> str:
    """Every record, sortable and searchable; the page's script fills the table."""
    places = {(contest.sample.work, contest.policy): contest for contest in run.contests}
    first = len(figures.lines)
    figures.lines += [_record(row, places[row.work, row.policy]) for row in run.rows]
    return (
        f'<details class="records" data-first="{first}" data-count="{len(run.rows)}">'
        f"<summary>All {plural(len(run.rows), 'record')}</summary>"
        '<label class="search">Filter <input type="search" placeholder="workload, backend, status …"></label>'
        '<p class="save">Save as <button type="button" data-save="csv">CSV</button> '
        '<button type="button" data-save="json">JSON</button></p>'
        '<div class="scroll tall" tabindex="0" role="region" aria-label="All records">'
        '<table class="sortable"></table></div></details>'
    )


def _record(row: Row, contest: Contest) -> list[str]:
    """The texts of `COLUMNS`, and whether it is a baseline."""
    return [
        contest.label,
        row.backend,
        row.policy,
        micros(row.time_s),
        spread(row),
        rate(row),
        percent(contest.share(row)),
        row.limiter if row.timed else MISSING,
        standing(contest, row),
        row.status,
        error(row.rel_error),
        error(row.max_error),
        config_text(row.config) or MISSING,
        shape_text(row.shape),
        _sizes(row),
        row.reason,
        "baseline" if row.is_baseline else "",
    ]


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


def _glance_table(run: Run, policy: str, label: str, figures: Figures, slugs: Mapping[str, str], suffix: str) -> str:
    contests = run.contests_of(policy)
    bounded = any(row.share for contest in contests for row in contest.rows)
    # A column of nothing but "unsupported" says once below the tables what it would say in every line.
    names = [
        name
        for name in run.backends
        if any((row := contest.of(name)) and row.status != "unsupported" for contest in contests)
    ]
    head = "".join(
        f'<th scope="col"{kind}><button type="button">{text}</button></th>'
        for text, kind in (("Workload", ""), *((t, ' class="num"') for t in ("Bound, µs", *map(_breakable, names))))
    )
    body = "".join(
        _glance_row(contest, names, bounded, figures.places, slugs[contest.label] + suffix) for contest in contests
    )
    what = "share of the bound" if bounded else "speed relative to the fastest backend"
    mark = f' <span class="foreign-mark">{escape(label)}</span>' if label else ""
    foot = "".join(f"<td>{_mean(contests, name, bounded)}</td>" for name in names)
    return (
        f'<div{_policy(policy)}><p class="caption">{escape(sentence_case(POLICY_NAMES.get(policy, policy)))}: {what}; '
        f'<b class="win">bold</b> is fastest or tied, <i class="unclear">?</i> inconclusive{mark}</p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Workloads by backend">'
        f'<table class="glance sortable"><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody><tfoot><tr><th scope="row">Geometric mean</th><td></td>{foot}</tr></tfoot>'
        "</table></div></div>"
    )


def _glance_row(contest: Contest, names: Sequence[str], bounded: bool, places: Mapping[int, int], anchor: str) -> str:
    cells = []
    for name in names:
        row = contest.of(name)
        value = contest.near(row, bounded) if row else None
        if row is None:
            cells.append("<td></td>")
            continue
        place = f' data-row="{places[id(row)]}"'
        if value is None:
            text = MISSING if row.timed else standing(contest, row)
            status = f'<span class="status {escape(row.status)}">{escape(text)}</span>'
            cells.append(f'<td class="none"{place}>{status}</td>')
        else:
            kind = ' class="light"' if row.is_baseline else ""
            if row in contest.leaders:
                kind = ' class="unclear"' if contest.inconclusive else ' class="win"'
            cells.append(f'<td{kind}{place} style="--share:{min(value, 1):.2f}">{percent(value)}</td>')
    limit = escape(contest.limiter) if contest.sample.bound_s else "unknown"
    return (
        f'<tr id="{anchor}"><th scope="row"><a href="#{anchor}">{escape(contest.label)}</a></th>'
        f'<td class="bound">{micros(contest.sample.bound_s)}<small>{limit}</small></td>{"".join(cells)}</tr>'
    )


def _mean(contests: Sequence[Contest], name: str, bounded: bool) -> str:
    found = [(contest, contest.of(name)) for contest in contests]
    values = [value for contest, row in found if row and (value := contest.near(row, bounded))]
    if not values:
        return MISSING
    note = f"<small>on {len(values)} of {len(contests)}</small>" if len(values) < len(contests) else ""
    return f"{percent(geometric_mean(values))}{note}"


def _breakable(name: str) -> str:
    return escape(short(name, 28)).replace("_", "_<wbr>")


def _workload_list(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return escape(", ".join(names))
    items = "".join(f"<li>{escape(name)}</li>" for name in names)
    return f"<details><summary>{plural(len(names), 'workload')}</summary><ul>{items}</ul></details>"


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _policy(policy: str) -> str:
    """The attribute by which the page's switch shows and hides an element."""
    return f' data-policy="{policy}"' if policy in ("graph", "eager") else ""


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


def _roof_note(run: Run) -> str:
    compute, memory = roofs(run)
    missing = [name for name, known in (("compute peak", compute), ("memory bandwidth", memory)) if not known]
    return f" ({' and '.join(missing)} unknown)" if missing else ""
