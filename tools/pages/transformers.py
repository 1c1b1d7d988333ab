"""The figures of docs/results/transformers.md, put between <!-- expertile:transformers layers --> and its end, from the
records that tools/measure_transformers.py makes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from expertile.device import Device
from expertile.lab.race.record import BASELINES, Record
from expertile.lab.report.rows import by
from expertile.lab.report.units import MISSING, cell, error, listed, markdown_table, percent, times
from expertile.roofline import Work, bound
from tools.pages.recorded import NOT_MEASURED, OURS, ms

PRESETS = ("transformers",)
_KINDS = (  # with a backward pass, in a CUDA graph, and how the text calls them
    (False, False, "(forward, called from Python)"),
    (False, True, "(forward, in a CUDA graph)"),
    (True, False, "(forward and backward)"),
)


@dataclass(frozen=True, order=True)
class Race:
    """One case of a model under one policy: the records by implementation. `both`: with a backward pass."""

    both: bool
    tokens: int
    graph: bool
    records: Mapping[str, Record] = field(compare=False)

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))

    @property
    def title(self) -> str:
        return f"{self.tokens}{', with backward' * self.both}{', CUDA graph' * self.graph}"

    @property
    def seconds(self) -> dict[str, float]:
        """By implementation, ours among them, or nothing."""
        found = {name: r.time_s for name, r in self.records.items() if r.status == "ok" and r.time_s is not None}
        return found if OURS in found else {}


def races(records: Iterable[Record]) -> dict[str, list[Race]]:
    """By model, in the order of the records; of records of one name the last counts."""
    rivals = [r for r in records if r.op in ("experts", "experts_train") and r.backend not in BASELINES]
    by_model: dict[str, list[Race]] = {}
    for (model, _, policy), of_race in by(rivals, lambda r: (r.shape["model"], r.workload, r.policy)).items():
        first = of_race[0]
        race = Race(
            first.op == "experts_train", first.shape["tokens"], policy == "graph", {r.backend: r for r in of_race}
        )
        by_model.setdefault(model, []).append(race)
    return by_model


def _table(found: Sequence[Race], device: Device) -> str:
    others = list(dict.fromkeys(name for race in found for name in race.seconds if name != OURS))
    body = []
    for race in sorted(found):
        seconds, first = race.seconds, race.first
        if not seconds:
            continue
        least, ours = bound(Work(first.flops, first.nbytes), device, "bf16"), seconds[OURS]
        row = [race.title, ms(least.seconds), least.limiter, ms(ours)]
        row.append(percent(least.seconds / ours))
        for name in others:
            there = name in seconds
            row += [ms(seconds[name]), times(seconds[name] / ours)] if there else [MISSING, MISSING]
        body.append(row)
    columns = [column for name in others for column in (f"`{name}`, ms", "to ours")]
    return markdown_table(["tokens", "bound, ms", "limited by", "expertile, ms", "of bound", *columns], body)


def _model(name: str, found: Sequence[Race], device: Device) -> list[str]:
    shape = next((race.first.shape for race in found if "hidden" in race.first.shape), {})
    names = (("H", "hidden"), ("I", "intermediate"), ("E", "experts"), ("k", "top_k"))
    sizes = "".join(f", {letter} = {shape[key]}" for letter, key in names if key in shape)
    reasons = [
        f"{race.title}: `{name}` has no time: {cell(record.reason)}"
        for race in sorted(found)
        for name, record in race.records.items()
        if record.status != "ok"
    ]
    return [f"**{name}**{sizes}", _table(found, device), *reasons]


def _summary(found: Sequence[Race]) -> list[str]:
    """The range of the fastest other's time to ours, for each kind of call, and the largest errors."""
    ranges = []
    for both, graph, words in _KINDS:
        timed = [race.seconds for race in found if (race.both, race.graph) == (both, graph)]
        ratios = [min(s for n, s in t.items() if n != OURS) / t[OURS] for t in timed if len(t) > 1]
        if ratios:
            ranges.append(f"{times(min(ratios))} to {times(max(ratios))} {words}")
    if not ranges:
        return []
    errors = [(name, r.rel_error) for race in found for name, r in race.records.items() if r.rel_error is not None]
    ours = [e for name, e in errors if name == OURS]
    others = [e for name, e in errors if name != OURS]
    worst = [f"{error(max(found))} of {whose}" for found, whose in ((ours, OURS), (others, "the others")) if found]
    return [
        f"The time of the fastest of transformers' own, to ours: {listed(ranges)}.",
        f"Largest relative error against float32: {listed(worst)}.",
    ]


def blocks(records: Sequence[Record], device: Device) -> dict[str, str]:
    """Markdown of the block, of the records measured on `device`."""
    by_model = races(r for r in records if r.env.gpu == device.name)
    found = [race for of_model in by_model.values() for race in of_model]
    if not any(race.seconds for race in found):
        return {"layers": NOT_MEASURED}
    first = found[0].first
    versions = (("transformers", {**first.details, **first.config}.get("transformers")), ("torch", first.env.torch))
    told = "".join(f", {name} {version}" for name, version in versions if version)
    day = first.date[:10]
    lines = [f"{device.name}{told}, {day}: `results/{device.slug}/{day}-transformers.jsonl`."]
    for name, of_model in by_model.items():
        lines += _model(name, of_model, device)
    return {"layers": "\n\n".join([*lines, *_summary(found)])}
