"""Records as the generated blocks of hand-written pages read them: looked up by name, compared within one run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from expertile.lab.measure.env import Env
from expertile.lab.race.record import Record, read, shipped_root
from expertile.lab.report.units import MISSING, cell, percent, significant, times

OURS, NOT_MEASURED = "expertile", "Not measured yet."
KERNELS = ("gluon_hopper", "triton_tma", "triton_pointer")  # ours among the backends of grouped products

Times = Mapping[tuple[str, str, str, str], Record]  # (op, workload, backend, policy)


def shipped(presets: Iterable[str], slug: str, root: str | Path | None = None) -> list[Record]:
    """Every record of `presets` in `results/<slug>/`, preset by preset, oldest file first."""
    folder = (shipped_root() if root is None else Path(root)) / slug
    return [r for name in presets for path in sorted(folder.glob(f"????-??-??-{name}.jsonl")) for r in read(path)]


def counts(workload: str) -> bool:
    """Whether a workload counts in a table: one named `small` is there for CPUs, and would flatter a mean."""
    return not workload.rpartition("/")[2].startswith("small")


def by_name(records: Sequence[Record]) -> Times:
    """Of records of one name the last counts."""
    return {(r.op, r.workload, r.backend, r.policy): r for r in records}


def ok(found: Times, op: str, workload: str, backend: str, policy: str = "graph") -> Record | None:
    """A record with a time that counts."""
    record = found.get((op, workload, backend, policy))
    return record if record is not None and record.status == "ok" else None


def versions(env: Env) -> list[str]:
    """torch, Triton and expertile of a machine, as far as they are known."""
    return [f"{name} {value}" for name in ("torch", "triton", "expertile") if (value := getattr(env, name))]


def ms(seconds: float | None) -> str:
    return MISSING if seconds is None else significant(seconds * 1e3)


def percents(shares: Sequence[float]) -> str:
    """The range of shares of one: "71 % to 93 %"."""
    if not shares:
        return MISSING
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"


def to_ours(record: Record | None, ours: Record) -> str:
    """How many times as long as ours."""
    return MISSING if record is None or not record.time_s or not ours.time_s else times(record.time_s / ours.time_s)


def recorded(records: Sequence[Record]) -> str:
    """Where, when and with what: "Recorded on NVIDIA H200, 2026-01-02, torch 2.11, triton 3.6." Days and versions in
    the order of the records, each once; `records` must not be empty."""
    facts = list(dict.fromkeys(r.date[:10] for r in records))
    for name, values in (("torch", (r.env.torch for r in records)), ("triton", (r.env.triton for r in records))):
        facts += [f"{name} {cell(value)}" for value in dict.fromkeys(values) if value]
    return f"Recorded on {cell(records[0].env.gpu)}, {', '.join(facts)}."
