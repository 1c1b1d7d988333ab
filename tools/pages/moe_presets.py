"""Blocks `decode` and `sonic` of docs/results/moe.md: the presets moe-decode and moe-sonic from their records.

A preset may be measured in several runs, and in part: each of its workloads counts as its last run has it, and is
compared with what that run measured of it, under CUDA-graph replay. A record whose shape is not the preset's is of an
earlier preset and left out. `small`, which is there for CPUs, has no line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from expertile.lab.operators import presets
from expertile.lab.operators.moe import size, used
from expertile.lab.race.operator import Workload
from expertile.lab.race.record import BASELINES, Record
from expertile.lab.report.units import MISSING, cell, listed, markdown_table, micros, percent, significant
from tools.pages.recorded import OURS, recorded, to_ours

PRESETS = ("moe-decode", "moe-sonic")
_COMPILED = ("torch.compile", "torch.compile-index-add")
_TRAIN = "-train"


@dataclass(frozen=True)
class Measured:
    """A workload of a preset and its records by backend, all of one run; without any it has not been measured."""

    workload: Workload
    records: Mapping[str, Record]

    def ok(self, backend: str) -> Record | None:
        """A record with a time that counts."""
        record = self.records.get(backend)
        return record if record is not None and record.status == "ok" else None

    def fastest(self, *names: str) -> Record | None:
        """Of the backends named, those with a time."""
        return min((r for name in names if (r := self.ok(name))), key=lambda r: r.time_s or 0.0, default=None)

    @property
    def rivals(self) -> list[str]:
        """Neither ours nor a baseline."""
        return [name for name in self.records if name not in BASELINES and not name.startswith(OURS)]


def blocks(records: Iterable[Record], gpu: str) -> dict[str, list[str]]:
    """Paragraphs of each block from the records of the GPU called `gpu`; none for a preset without a time of ours."""
    here = [r for r in records if r.env.gpu == gpu and r.policy == "graph"]
    decode, sonic = (measured(here, preset) for preset in PRESETS)
    return {"decode": _decode(decode), "sonic": _sonic(sonic)}


def measured(records: Sequence[Record], preset: str) -> list[Measured]:
    """Every workload of `preset`, in its order, with the records of the last run that has a time of ours for it, or of
    the last run that met it."""
    found = []
    for w in presets()[preset]():
        of_it = [
            r
            for r in records
            if (r.op, r.workload, r.dtype) == (w.op, f"{preset}/{w.name}", w.dtype) and dict(r.shape) == w.shape()
        ]
        runs = [r.run for r in of_it if r.backend == OURS and r.status == "ok"] or [r.run for r in of_it]
        found.append(Measured(w, {r.backend: r for r in of_it if r.run == runs[-1]}))
    return found


def _shown(workload: Workload) -> bool:
    return not workload.name.startswith("small")


def _decode(found: Sequence[Measured]) -> list[str]:
    body, sources = [], []
    for m in found:
        ours, (tokens, _, _, experts, _) = m.ok(OURS), size(m.workload)
        if ours is None or not ours.time_s or not _shown(m.workload):
            continue
        sources.append(ours)
        copy = m.ok("copy")
        share = copy.time_s / ours.time_s if copy and copy.time_s else None
        body.append(
            [
                cell(m.workload.name.removesuffix(f"-tokens{tokens}")),
                str(tokens),
                f"{used(m.workload)} of {experts}",
                micros(ours.time_s),
                significant((ours.gbps or 0.0) / 1e3),
                percent(share),
                percent(ours.bound_s / ours.time_s),
                to_ours(m.fastest(*_COMPILED), ours),
                to_ours(m.ok("transformers"), ours),
            ]
        )
    if not body:
        return []
    lead = (
        f"{recorded(sources)} Time under CUDA-graph replay, inputs out of cache. *Of `copy`*: the time of copying as "
        "many bytes, in the same run, as a share of ours. *torch.compile* (the faster of its two ways to combine) and "
        "*transformers*: how many times as long."
    )
    header = "model | tokens | experts touched | µs | TB/s | of `copy` | of bound | torch.compile | transformers"
    return [lead, markdown_table(header, body), *_without_a_time(found)]


def _without_a_time(found: Sequence[Measured]) -> list[str]:
    """Which workloads have no record of ours, and which one that says why there is no time."""
    lines = []
    missing = [f"`{m.workload.name}`" for m in found if OURS not in m.records]
    if missing:
        lines.append(f"Of the preset's workloads without a record yet: {listed(missing)}.")
    for m in found:
        if OURS in m.records and m.ok(OURS) is None:
            record = m.records[OURS]
            lines.append(f"`{m.workload.name}` has no time ({record.status}): {cell(record.reason)}.")
    return lines


def _sonic(found: Sequence[Measured]) -> list[str]:
    by_name = {m.workload.name: m for m in found}
    body, sources = [], []
    for m in found:
        name = m.workload.name
        if name.endswith(_TRAIN) or not _shown(m.workload):
            continue
        both = (m, by_name[name + _TRAIN])
        times = [ours for each in both if (ours := each.ok(OURS))]
        if times:
            sources += times
            columns = [column for each in both for column in _speed(each)]
            body.append([", ".join(map(str, size(m.workload))), *columns])
    if not body:
        return []
    lead = (
        f"{recorded(sources)} Time under CUDA-graph replay; *training* is forward and backward in one call. *Of "
        "`dense`*: TFLOP/s as a share of those of the same products, in the same run, with all rows against one "
        "expert's weights. *Fastest other*: how many times as long as ours."
    )
    header = ["T, H, I, E, k", "forward, ms", "TFLOP/s", "of `dense`", "fastest other"]
    header += ["training, ms", *header[2:]]
    return [lead, markdown_table(header, body), *_sonicmoe(found)]


def _speed(m: Measured) -> list[str]:
    """ms, TFLOP/s, share of `dense`, and the fastest other."""
    ours, dense, other = m.ok(OURS), m.ok("dense"), m.fastest(*m.rivals)
    if ours is None or not ours.time_s or not ours.tflops:
        met = m.records.get(OURS)
        return ["not measured" if met is None else cell(met.status), MISSING, MISSING, MISSING]
    share = None if dense is None or not dense.tflops else ours.tflops / dense.tflops
    against = MISSING if other is None else f"`{other.backend}` {to_ours(other, ours)}"
    return [significant(ours.time_s * 1e3), significant(ours.tflops), percent(share), against]


def _sonicmoe(found: Sequence[Measured]) -> list[str]:
    """Why the library whose sizes these are has no time, in the words of the records."""
    theirs = [r for m in found if (r := m.records.get("sonicmoe"))]
    reasons = list(dict.fromkeys(cell(r.reason) for r in theirs if r.status != "ok"))
    if not reasons or any(r.status == "ok" for r in theirs):
        return []
    return [f"SonicMoE itself is an optional peer of the preset and took no part: {'; '.join(reasons)}."]
