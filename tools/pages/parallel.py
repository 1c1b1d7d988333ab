"""The figures of docs/results/parallel.md, put between its markers, from the records of `tools.parallel`
(its `records.py` says what they hold), one run for each number of GPUs.

Blocks `scaling`, `rival` and `communication` stand between <!-- expertile:parallel NAME --> and
<!-- /expertile:parallel NAME -->. A time counts if its result was right and it is not below its bound: the larger of
the roofline bound of the busiest GPU and of the bytes that leave a GPU at the fastest all-to-all of the run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertile.device import Device
from expertile.lab.race.record import Record, shipped_root
from expertile.lab.report.units import MISSING, markdown_table, percent, significant, times
from expertile.roofline import Bound, Work, bound
from tools.pages.recorded import NOT_MEASURED, ms
from tools.parallel.case import BOTH, FORWARD
from tools.parallel.records import OPS
from tools.parallel.ways import COMMUNICATION, COMPUTE, ONE_GPU, OURS, STEP

BLOCKS = ("scaling", "rival", "communication")
_PASSES = {FORWARD: "forward", BOTH: "forward + backward"}
_OF_PASS = dict(zip(OPS, _PASSES, strict=True))

Key = tuple[tuple[int, ...], str]  # size, scaling


def presets(slug: str, root: str | Path | None = None) -> tuple[str, ...]:
    """The presets of `results/<slug>/`, one for each number of GPUs, fewest first: "parallel-2-gpus" …"""
    folder = (shipped_root() if root is None else Path(root)) / slug
    found = {path.name.split(".")[0][len("2026-01-01-") :] for path in folder.glob("????-??-??-parallel-*-gpus.jsonl")}
    return tuple(sorted(found, key=lambda name: int(name.split("-")[1])))


@dataclass(frozen=True)
class Way:
    """How a case was computed: its records by pass and kind ("step", "compute", "communication")."""

    records: Mapping[tuple[str, str], Record]

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))

    @property
    def name(self) -> str:
        """What the rivals are called; ours is "expertile" in all its forms."""
        return OURS if "combine" in self.first.config else self.first.backend

    @property
    def title(self) -> str:
        config = self.first.config
        if self.name != OURS:
            name = self.name if self.name == ONE_GPU else f"`{self.name}`"
        else:
            name = f"`{config['combine']}`" + (", `max_tokens`" if config["fixed"] else f", chunks={config['chunks']}")
        return name + ", CUDA graph" * (self.first.policy == "graph")


@dataclass(frozen=True)
class Run:
    """The records of one run on `world` GPUs of kind `device`."""

    records: Sequence[Record]
    device: Device
    world: int

    @property
    def messages(self) -> dict[int, float]:
        """Seconds of the all-to-alls of equal parts, by the bytes that leave a GPU."""
        found = (r for r in self.records if r.op == "all_to_all" and r.time_s)
        return {r.shape["leaving_nbytes"]: r.time_s for r in found if r.time_s}

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s that left a GPU in the fastest all-to-all of the run."""
        return max((nbytes / seconds for nbytes, seconds in self.messages.items()), default=None)

    def bound(self, way: Way, name: str) -> Bound:
        """Of pass `name` of a way; the limiter may be "links"."""
        record = way.records[name, STEP]
        chip = bound(Work(record.flops, record.nbytes), self.device, "bf16")
        away, rate = record.details.get("leaving_nbytes", 0), self.bandwidth
        links = away / rate if rate else 0.0
        return Bound(links, "links") if links > chip.seconds else chip

    def seconds(self, way: Way, name: str, kind: str = STEP) -> float | None:
        """Of a pass that counts."""
        step, found = way.records.get((name, STEP)), way.records.get((name, kind))
        if step is None or step.status != "ok" or step.time_s is None or found is None:
            return None
        return None if step.time_s < self.bound(way, name).seconds else found.time_s

    def cases(self) -> dict[Key, list[Way]]:
        """The ways of each race, in the order of the records."""
        found: dict[Key, dict[tuple[str, str], dict[tuple[str, str], Record]]] = {}
        for r in (r for r in self.records if r.op in OPS):
            size = tuple(r.shape[name] for name in ("tokens", "hidden", "intermediate", "experts", "top_k"))
            ways = found.setdefault((size, r.shape["scaling"]), {})
            name = r.backend.partition(":")[0], r.policy
            ways.setdefault(name, {})[_OF_PASS[r.op], r.config["kind"]] = r
        return {key: [Way(records) for records in ways.values()] for key, ways in found.items()}

    def fastest(self, ways: Iterable[Way], name: str) -> Way | None:
        timed = [(s, way) for way in ways if (s := self.seconds(way, name)) is not None]
        return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _ours(ways: Iterable[Way]) -> list[Way]:
    return [way for way in ways if way.name == OURS]


def _case(key: Key) -> str:
    (t, h, i, e, k), scaling = key
    return f"T = {t} {'of each GPU' if scaling == 'weak' else 'in all'}, H = {h}, I = {i}, E = {e}, k = {k}"


def _flops(size: Sequence[int], tokens: int, name: str) -> float:
    """Of the mean GPU's products."""
    _, h, i, _, k = size
    return (18.0 if name == BOTH else 6.0) * tokens * k * h * i


def _scaling(run: Run) -> list[str]:
    body = []
    for key, ways in run.cases().items():
        size, scaling = key
        for name, title in _PASSES.items():
            one = run.fastest((way for way in ways if way.name == ONE_GPU), name)
            ours = run.fastest(_ours(ways), name)
            if one is None or ours is None:
                continue
            alone, together = run.seconds(one, name), run.seconds(ours, name)
            assert alone is not None and together is not None
            speed = alone / together * (run.world if scaling == "weak" else 1)
            least = run.bound(ours, name)
            body.append(
                [
                    _case(key),
                    title,
                    ms(alone),
                    ms(together),
                    ours.title,
                    times(speed),
                    percent(speed / run.world),
                    significant(_flops(size, ours.first.details["tokens_of_gpu"], name) / together / 1e12),
                    ms(least.seconds),
                    least.limiter,
                    percent(least.seconds / together),
                ]
            )
    if not body:
        return []
    header = (
        f"tokens and sizes | pass | 1 GPU, ms | {run.world} GPUs, ms | our fastest | tokens/s | efficiency | "
        "TFLOP/s of a GPU | bound, ms | limited by | of bound"
    )
    return [
        markdown_table(header, body, left=2),
        f"tokens/s: {run.world} GPUs to one; efficiency: that over {run.world}. One GPU holds all experts and "
        "reads all their weights, so with few tokens the efficiency can exceed 100 %. All GPUs are timed at that, each "
        "for itself, in the same rounds.",
    ]


def _rival(run: Run) -> list[str]:
    lines = []
    for key, ways in run.cases().items():
        best = {name: run.fastest(_ours(ways), name) for name in _PASSES}
        body = []
        for way in (w for w in ways if w.name != ONE_GPU and any(run.seconds(w, name) for name in _PASSES)):
            row = [way.title if way.name != OURS else f"expertile, {way.title}"]
            for name in _PASSES:
                seconds, ours = run.seconds(way, name), best[name]
                least = None if ours is None else run.seconds(ours, name)
                row += [ms(seconds), times(seconds / least if seconds and least else None)]
            forward = way.records.get((FORWARD, STEP))
            away = None if forward is None else forward.details["leaving_nbytes"]
            row += [
                MISSING if away is None else significant(away / 1e6),
                f"{way.first.rel_error:.0e}",
                "yes" if way.first.details["same_bits"] else "no",
            ]
            body.append(row)
        if body:
            header = (
                "way | forward, ms | to our fastest | forward + backward, ms | to our fastest | "
                "leaves a GPU forward, MB | largest difference | bits of one GPU"
            )
            lines += [f"**{_case(key)}**", markdown_table(header, body)]
    return lines


def _communication(run: Run) -> list[str]:
    body = []
    for key, ways in run.cases().items():
        for way in _ours(ways):
            for name, title in _PASSES.items():
                whole, compute, alone = (run.seconds(way, name, kind) for kind in (STEP, COMPUTE, COMMUNICATION))
                if whole is None or compute is None or alone is None:
                    continue
                body.append(
                    [
                        _case(key),
                        way.title,
                        title,
                        ms(whole),
                        ms(compute),
                        ms(alone),
                        percent(alone / whole),
                        ms(whole - compute),
                        percent((whole - compute) / whole),
                    ]
                )
    if not body:
        return []
    header = (
        "tokens and sizes | way | pass | step, ms | computation alone, ms | communication alone, ms | of step | "
        "exposed, ms | of step"
    )
    lines = [markdown_table(header, body, left=3)]
    if run.messages:
        rates = [(nbytes, nbytes / seconds) for nbytes, seconds in sorted(run.messages.items())]
        told = [f"{significant(nbytes / 1e6)} MB at {significant(rate / 1e9)} GB/s" for nbytes, rate in rates]
        lines.append("An all-to-all of equal parts, alone, by bytes that leave a GPU: " + ", ".join(told) + ".")
    return lines


def _missing(run: Run) -> str:
    """What has no time in this run, and why."""
    found: dict[str, None] = {}
    for key, ways in run.cases().items():
        for way in ways:
            for (name, kind), record in way.records.items():
                where = f"{_case(key)}, {way.title}"
                if record.status != "ok":
                    found[f"{where} ({record.reason})"] = None
                elif kind == STEP and run.seconds(way, name) is None:
                    refused = f"refused: {ms(record.time_s)} ms is below its bound"
                    found[f"{where}, {_PASSES[name]} ({refused})"] = None
    return f"Without a time: {'; '.join(found)}." if found else ""


def blocks(records: Sequence[Record], device: Device) -> dict[str, str]:
    """Markdown of each block, of the last run for each number of GPUs, on GPUs of kind `device`."""
    last: dict[int, str] = {}
    here = [r for r in records if r.env.gpu == device.name and r.op in (*OPS, "all_to_all")]
    for r in here:
        last[r.shape["gpus"]] = r.run
    found = [_blocks(Run([r for r in here if r.run == run], device, world)) for world, run in sorted(last.items())]
    return {name: "\n\n".join(f[name] for f in found if f[name]) or NOT_MEASURED for name in BLOCKS}


def _blocks(run: Run) -> dict[str, str]:
    first, slug = run.records[0], run.device.slug
    found = {"scaling": _scaling(run), "rival": _rival(run), "communication": _communication(run)}
    versions = f"torch {first.env.torch}, NCCL {first.details['nccl']}"
    day = first.date[:10]
    source = (
        f"One run on {run.world} GPUs, {run.device.name}, bf16, {day} ({versions}): "
        f"`results/{slug}/{day}-parallel-{run.world}-gpus.jsonl`."
    )
    for name, lines in found.items():
        found[name] = [source, *lines] if lines else []
    if found["scaling"] and (missing := _missing(run)):
        found["scaling"].append(missing)
    return {name: "\n\n".join(lines) for name, lines in found.items()}
