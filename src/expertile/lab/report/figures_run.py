"""Charts over workloads: roofline, scaling with the number of rows, launch overhead."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from expertile.device import Device, find_in_text
from expertile.lab.report.contest import Contest, Run
from expertile.lab.report.figures import Figure, add, line, log_axis, new_mark, row_label, two_axes
from expertile.lab.report.palette import look, styles
from expertile.lab.report.rows import Row, by, fixed_routing
from expertile.lab.report.units import byte_rate, flop_rate, micros, short

_LEAST_POINTS = 3
_LEAST_COST_US = 0.5


def roofline_figure(run: Run, contests: Sequence[Contest]) -> Figure | None:
    """TFLOP/s over FLOP per byte, with the roofs the records were judged by (Williams, Waterman, Patterson, "Roofline",
    CACM 52(4), 2009). None where nothing was timed."""
    points = [
        (row, row.flops / row.nbytes, row.tflops)
        for contest in contests
        for row in contest.rows
        if row.timed and row.flops and row.nbytes and row.tflops and row.backend != "copy"
    ]
    if not points:
        return None
    marks = _marks("dots", (row.backend for row, _, _ in points), points)
    compute, memory = roofs(run)
    xs, ys = [x for _, x, _ in points], [y for _, _, y in points]
    left, right = min(xs) / 1.8, max(xs) * 1.8
    lines, labels = _roof_lines(compute, memory, left, right)
    across = log_axis([left, right], "FLOP per byte (logarithmic)")
    up = log_axis([*ys, *compute.values()], "TFLOP/s (logarithmic)")
    return two_axes(across, up, [*lines, *marks], labels, height=440)


def roofs(run: Run) -> tuple[dict[str, float], float | None]:
    """(TFLOP/s peak by dtype, TB/s or None) behind the run's bounds: work ÷ bound of the records each one limits, the
    highest where workloads differ. A roof that limited no record is from the device's datasheet, if it is known."""
    compute: dict[str, float] = {}
    memory: float | None = None
    for row in run.rows:
        if row.bound_s and row.limiter == "compute" and row.flops:
            compute[row.dtype] = max(row.flops / row.bound_s / 1e12, compute.get(row.dtype, 0.0))
        elif row.bound_s and row.limiter == "memory" and row.nbytes:
            memory = max(row.nbytes / row.bound_s / 1e12, memory or 0.0)
    known: list[Device] = find_in_text(run.device)
    if known:
        for dtype in {row.dtype for row in run.rows} - set(compute):
            peak = known[0].peak(dtype)
            if peak:
                compute[dtype] = peak / 1e12
        if memory is None and known[0].memory_bps:
            memory = known[0].memory_bps / 1e12
    return compute, memory


def growth_figures(contests: Sequence[Contest]) -> dict[str, Figure]:
    """Charts by title, one for each operator other than the grouped product and dtype that has three sizes or more: the
    rate over the bytes that a call moves, or over its FLOPs where compute limits."""
    own = (
        c
        for c in contests
        if "layout" not in c.sample.shape and c.of("copy") is not None and c.ranked and _size(c, c.sample.moves)
    )
    found: dict[str, Figure] = {}
    for (op, dtype, moves), members in by(own, lambda c: (c.sample.op, c.sample.dtype, c.sample.moves)).items():
        sized = sorted(((_size(contest, moves), contest) for contest in members), key=lambda member: member[0])
        if len({size for size, _ in sized}) >= _LEAST_POINTS:
            title = f"{op}, {dtype}"
            found[title if title not in found else f"{title}, {'memory' if moves else 'compute'}"] = _rates(
                sized, "MB moved" if moves else "GFLOP", moves, "dots"
            )
    return found


def _size(contest: Contest, moves: bool) -> float:
    """MB that a call moves, or GFLOP that it computes."""
    return (contest.sample.nbytes or 0.0) / 1e6 if moves else (contest.sample.flops or 0.0) / 1e9


def scaling_figures(contests: Sequence[Contest]) -> dict[str, Figure]:
    """Charts by title: families of workloads that differ in their number of rows only, three or more of them."""
    grouped = (
        (contest.sample.tokens, contest)
        for contest in contests
        if contest.ranked and contest.sample.tokens and "layout" in contest.sample.shape
    )
    found: dict[str, Figure] = {}
    for members in by(grouped, lambda member: member[1].sample.family).values():
        if len({tokens for tokens, _ in members}) < _LEAST_POINTS:
            continue
        members.sort(key=lambda member: member[0])
        sample = members[0][1].sample
        ragged = str(sample.shape.get("layout", "")).removeprefix("ragged_")
        sizes = [
            f"{name} {sample.shape[name]}"
            for name in ("groups", "m", "n", "k")
            if name in sample.shape and name != ragged
        ]
        routing = [fixed_routing(str(sample.shape["routing"]))] if sample.shape.get("routing") else []
        title = ", ".join([sample.dtype, *sizes, *routing])
        found[title if title not in found else f"{title} ({len(found) + 1})"] = _rates(
            members, "rows in all", False, "curve"
        )
    return found


def _rates(members: Sequence[tuple[float, Contest]], what: str, moves: bool, kind: str) -> Figure:
    """Rates of contests over their sizes, called `what`, with the bound as a line: GB/s, or TFLOP/s unless `moves`."""
    every = [(size, row) for size, contest in members for row in contest.rows if moves or row.backend != "copy"]
    points = [(row, size, row.gbps if moves else row.tflops) for size, row in every if row.timed]
    marks = _marks(kind, (row.backend for _, row in every), points)
    samples = [(size, contest.sample) for size, contest in members]
    amounts = [(size, s.nbytes / 1e9 if moves else s.flops / 1e12, s.bound_s) for size, s in samples]
    bounds = [(size, amount / bound_s) for size, amount, bound_s in amounts if amount and bound_s]
    rates = [y for mark in marks for y in mark["y"]] + [y for _, y in bounds]
    across = log_axis([size for size, _ in members], f"{what} (logarithmic)")
    up = log_axis(rates, f"{'GB/s' if moves else 'TFLOP/s'} (logarithmic)")
    return two_axes(across, up, [*([line("bound", bounds)] if bounds else []), *marks])


def launch_figure(costs: Mapping[str, Sequence[tuple[Contest, float]]]) -> Figure | None:
    """`costs` (of `verdict.overhead`) in µs: a dot per workload, a stroke at the median, on a logarithmic axis, at
    whose left end stands what is not measurably more than zero. None where there are none."""
    if not costs:
        return None
    names = sorted(costs, key=lambda name: median(cost for _, cost in costs[name]))
    looks = styles(names)
    marks, labels, values = [], [], []
    for index, name in enumerate(names):
        y = 2.2 * index + 0.9
        mark = new_mark("dots", name, looks[name])
        for contest, cost in costs[name]:
            note = f"{name}\n{contest.label}\neager − graph {micros(cost)} µs"
            add(mark, max(cost * 1e6, _LEAST_COST_US), y, note)
        middle = median(cost for _, cost in costs[name])
        at = max(middle * 1e6, _LEAST_COST_US)
        stroke = line("dense", [(at, y - 0.5), (at, y + 0.5)]) | {"backend": name}
        marks += [mark, stroke]
        values += mark["x"]
        labels.append(row_label(2.2 * index, f"{short(name, 24)}: median {micros(middle)} µs"))
    axis = log_axis([_LEAST_COST_US, *values], "eager − graph, µs per call (logarithmic)") | {"top": True}
    axis["ticks"] = [[at, f"≤{text}" if at == _LEAST_COST_US else text] for at, text in axis["ticks"]]
    lines: Figure = {"range": [2.2 * len(names) - 0.4, -0.7]}
    return two_axes(axis, lines, marks, labels, height=len(names) * 44 + 64)


def _marks(kind: str, names: Iterable[str], points: Iterable[tuple[Row, float, float | None]]) -> list[Figure]:
    """A mark for each backend of the points (record, x, y) that have a y; `names` are all backends of the chart."""
    looks = styles(names)
    marks: dict[str, Figure] = {}
    for row, x, y in points:
        if y:
            mark = marks.setdefault(row.backend, new_mark(kind, row.backend, look(looks, row.backend)))
            add(mark, x, y, row)
    return list(marks.values())


def _roof_lines(
    compute: dict[str, float], memory: float | None, left: float, right: float
) -> tuple[list[Figure], list[Figure]]:
    lines, labels = [], []
    for dtype, peak in sorted(compute.items()):
        start = max(left, peak / memory) if memory else left
        lines.append(line("bound", [(min(start, right), peak), (right, peak)]))
        labels.append({"x": right, "y": peak, "anchor": "end", "text": f"{dtype} peak {flop_rate(peak)}"})
    if memory:
        top = max(compute.values(), default=memory * right)
        end = min(right, top / memory)
        if end > left:
            lines.append(line("bound", [(left, left * memory), (end, end * memory)]))
            middle = (left * end) ** 0.5
            labels.append({"x": middle, "y": middle * memory, "anchor": "end", "text": byte_rate(memory * 1e3)})
    return lines, labels
