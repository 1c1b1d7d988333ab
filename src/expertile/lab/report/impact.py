"""What recorded times mean for a served model: seconds saved in a forward pass, GPU-hours in a day.

    saved per pass  = sum over operators of count * (time of the baseline - time of ours)
    saved per query = saved per pass / queries per pass
    GPU-hours a day = queries per second * 86400 * saved per query / 3600

Both times of an operator come from one run. An operator without such records is left out and named; nothing is
estimated, unless scaling is asked for: then the nearest record of the same operator that differs in one dimension along
which time grows in proportion (rows of a norm, sequences of attention) is scaled by it, and the line says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from expertile.device import Device
from expertile.lab.race.record import Record
from expertile.lab.race.workloads import ragged_m
from expertile.lab.report.impact_models import MODELS, Model, Use
from expertile.ops.grouped_mm.choose import choose

SECONDS_A_DAY = 86400
TORCH = "torch"
NO_RECORD = "no record"
# What the baseline "torch" is called in the records of an operator: F.grouped_mm, and what F.sdpa takes by default.
_TORCH_NAMES = {"grouped_mm": "torch_grouped", "attention": "sdpa_fa2"}
_LINEAR = {"layer_norm": "rows", "rms_norm": "rows", "softmax": "rows", "attention": "batch"}


@dataclass(frozen=True)
class Pair:
    """Times of one call of the baseline and of ours, from one run; `scaled` says from where and by what, or is ""."""

    baseline: str
    baseline_s: float
    ours: str
    ours_s: float
    run: str
    date: str
    scaled: str = ""


@dataclass(frozen=True)
class Line:
    """An operator of the model with its times, or the reason why it is left out."""

    use: Use
    pair: Pair | None
    reason: str = ""

    @property
    def saved_s(self) -> float:
        """Seconds saved in one forward pass; negative where ours is slower."""
        return 0.0 if self.pair is None else self.use.count * (self.pair.baseline_s - self.pair.ours_s)


@dataclass(frozen=True)
class Impact:
    """A model's forward pass under load."""

    model: Model
    dtype: str
    batch: int
    seq_len: int
    qps: float
    gpu: str
    policy: str
    baseline: str
    lines: tuple[Line, ...]
    price_per_gpu_hour: float | None = None

    @property
    def counted(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.pair is not None)

    @property
    def left_out(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.pair is None)

    @property
    def baseline_s(self) -> float:
        """Seconds of the counted operators in one pass, by the baseline."""
        return sum(line.use.count * line.pair.baseline_s for line in self.lines if line.pair is not None)

    @property
    def saved_s(self) -> float:
        """Seconds saved in one pass."""
        return sum(line.saved_s for line in self.lines)

    @property
    def saved_per_query_s(self) -> float:
        return self.saved_s / self.batch

    @property
    def gpu_hours_per_day(self) -> float:
        return self.qps * SECONDS_A_DAY * self.saved_per_query_s / 3600

    @property
    def price_per_day(self) -> float | None:
        """None unless a price was given."""
        return None if self.price_per_gpu_hour is None else self.price_per_gpu_hour * self.gpu_hours_per_day


def impact(
    model: str,
    qps: float,
    records: Iterable[Record],
    device: Device,
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    policy: str = "graph",
    baseline: str = TORCH,
    price_per_gpu_hour: float | None = None,
    scale: bool = False,
) -> Impact:
    """What `records` of `device` say about `model` at `qps` queries per second, `batch` of them in one forward pass.

    batch, seq_len and dtype are the model's own (impact_models.py) by default. Raises ValueError naming the argument,
    what was expected and what came.
    """
    if model not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {model!r}")
    if policy not in ("graph", "eager"):
        raise ValueError(f"policy: expected graph or eager, got {policy!r}")
    for name, value in (("qps", qps), ("price_per_gpu_hour", price_per_gpu_hour)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: expected a number of 0 or more, got {value}")
    for name, count in (("batch", batch), ("seq_len", seq_len)):
        if count is not None and count < 1:
            raise ValueError(f"{name}: expected 1 or more, got {count}")
    found = MODELS[model]
    batch = found.batch if batch is None else batch
    seq_len = found.seq_len if seq_len is None else seq_len
    dtype = found.dtype if dtype is None else dtype
    usable = [
        r for r in records if r.status == "ok" and r.policy == policy and r.env.gpu == device.name and r.dtype == dtype
    ]
    lines = tuple(_line(use, usable, device, dtype, baseline, scale) for use in found.uses(batch, seq_len))
    return Impact(found, dtype, batch, seq_len, qps, device.name, policy, baseline, lines, price_per_gpu_hour)


def _line(use: Use, records: list[Record], device: Device, dtype: str, baseline: str, scale: bool) -> Line:
    if use.unsupported:
        return Line(use, None, use.unsupported)
    if use.op == "attention" and dtype not in ("bf16", "fp16"):
        return Line(use, None, f"no fused kernel takes {dtype}")
    theirs = _TORCH_NAMES.get(use.op, baseline) if baseline == TORCH else baseline
    ours = _ours(use, device, dtype)
    mine = [r for r in records if r.op == use.op]
    exact = _pair([r for r in mine if _same(r, dict(use.dims))], theirs, ours)
    if exact is not None:
        return Line(use, exact)
    if scale:
        scaled = _scaled(use, mine, theirs, ours)
        if scaled is not None:
            return Line(use, scaled)
    return Line(use, None, f"{NO_RECORD} of {theirs} and {ours} in one run")


def _ours(use: Use, device: Device, dtype: str) -> str:
    """The name in the records of what a user of this package gets: for grouped products what `auto` chooses."""
    if use.op != "grouped_mm":
        return "expertile-auto" if use.op == "attention" else "expertile"
    dims = dict(use.dims)
    even = [dims["m"] // dims["groups"] + (g < dims["m"] % dims["groups"]) for g in range(dims["groups"])]
    workload = ragged_m("impact", "", even, dims["k"], dims["n"], dtype)
    # As in a user's call, the sizes are not known to the host.
    return choose(workload.problem(device.kind).with_sizes(None), device).backend.name


def _same(record: Record, dims: Mapping[str, object]) -> bool:
    return all(key in record.shape and record.shape[key] == value for key, value in dims.items())


def _pair(records: list[Record], theirs: str, ours: str, factor: float = 1.0, scaled: str = "") -> Pair | None:
    """The two times of the latest run that has both; of several workloads in it, the first."""
    by_run: dict[tuple[str, str], dict[str, Record]] = {}
    for r in records:
        if r.backend in (theirs, ours):
            by_run.setdefault((r.run, r.workload), {}).setdefault(r.backend, r)
    both = [found for found in by_run.values() if theirs in found and ours in found]
    if not both:
        return None
    latest = max(both, key=lambda found: found[ours].date)
    a, b = latest[theirs], latest[ours]
    if a.time_s is None or b.time_s is None:
        return None
    return Pair(theirs, a.time_s * factor, ours, b.time_s * factor, b.run, b.date, scaled)


def _scaled(use: Use, records: list[Record], theirs: str, ours: str) -> Pair | None:
    """From the nearest record that differs in the operator's linear dimension alone."""
    along = _LINEAR.get(use.op)
    if along is None:
        return None
    dims = dict(use.dims)
    wanted = dims.pop(along)
    near = [r for r in records if _same(r, dims) and r.shape.get(along)]
    for size in sorted({r.shape[along] for r in near}, key=lambda size: abs(math.log(size / wanted))):
        factor = wanted / size
        told = f"scaled by {factor:.4g} from {along} {size}"
        pair = _pair([r for r in near if r.shape[along] == size], theirs, ours, factor, told)
        if pair is not None:
            return pair
    return None


def bench_file(found: Impact) -> str:
    """TOML for `expertile bench --config`: the calls that had no record, so that they get one."""
    tables = ['policy = "both"\n']
    for i, line in enumerate(line for line in found.left_out if line.reason.startswith(NO_RECORD)):
        use, dims = line.use, dict(line.use.dims)
        name = f"{found.model.name}-{i}-{use.op.replace('_', '-')}"
        if use.op == "grouped_mm":
            rows = [f"n = {dims['n']}", f"k = {dims['k']}", f"groups = {dims['groups']}", f"tokens = {dims['m']}"]
            rows.append('routing = "uniform"')
        else:
            if use.op in ("layer_norm", "rms_norm"):
                dims |= {"weight": True, "bias": use.op == "layer_norm"}
            inside = ", ".join(f"{key} = {str(v).lower() if isinstance(v, bool) else v}" for key, v in dims.items())
            rows = [f'op = "{use.op}"', f"dims = {{ {inside} }}"]
        tables.append("\n".join(["[[workload]]", f'name = "{name}"', f'dtype = "{found.dtype}"', *rows]) + "\n")
    return "\n".join(tables)
