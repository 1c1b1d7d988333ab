"""Blocks `decode` and `sonic` of docs/results/moe.md: the presets moe-decode and moe-sonic from their records.

A preset may be measured in several runs, and in part: each of its workloads counts as its last run has it, and is
compared with what that run measured of it, under CUDA-graph replay. A record whose shape is not the preset's is of an
earlier preset and left out. `small`, which is there for CPUs, has no line.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from expertile.lab.operators import presets
from expertile.lab.operators.moe import size, used
from expertile.lab.race.operator import Workload
from expertile.lab.race.record import Record
from expertile.lab.report.contest import Contest
from expertile.lab.report.rows import rows
from expertile.lab.report.units import MISSING, cell, listed, markdown_table, micros, percent, significant
from tools.pages.recorded import OURS, counts, recorded, to_ours

PRESETS = ("moe-decode", "moe-sonic")
_COMPILED = ("torch.compile", "torch.compile-index-add")
_TRAIN = "-train"


class Measured(NamedTuple):
    """A workload of a preset, and what one run has measured of it: nothing, if it has no rows."""

    workload: Workload
    contest: Contest


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
        last = {r.backend: r for r in of_it if r.run == runs[-1]}
        found.append(Measured(w, Contest(w.name, "graph", rows(last.values()))))
    return found


def _decode(found: Sequence[Measured]) -> list[str]:
    body, sources = [], []
    for workload, contest in found:
        ours, (tokens, _, _, experts, _) = contest.timed(OURS), size(workload)
        if ours is None or not counts(workload.name):
            continue
        sources.append(ours)
        copy = contest.timed("copy")
        body.append(
            [
                cell(workload.name.removesuffix(f"-tokens{tokens}")),
                str(tokens),
                f"{used(workload)} of {experts}",
                micros(ours.time_s),
                significant((ours.gbps or 0.0) / 1e3),
                percent(copy.seconds / ours.seconds if copy else None),
                percent(ours.bound_s / ours.seconds),
                to_ours(contest.fastest(lambda row: row.backend in _COMPILED), ours),
                to_ours(contest.timed("transformers"), ours),
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
    missing = [f"`{workload.name}`" for workload, contest in found if contest.of(OURS) is None]
    if missing:
        lines.append(f"Of the preset's workloads without a record yet: {listed(missing)}.")
    for workload, contest in found:
        ours = contest.of(OURS)
        if ours and not ours.timed:
            lines.append(f"`{workload.name}` has no time ({ours.status}): {cell(ours.reason)}.")
    return lines


def _sonic(found: Sequence[Measured]) -> list[str]:
    by_name = {workload.name: contest for workload, contest in found}
    body, sources = [], []
    for workload, contest in found:
        if workload.name.endswith(_TRAIN) or not counts(workload.name):
            continue
        both = (contest, by_name[workload.name + _TRAIN])
        timed = [ours for each in both if (ours := each.timed(OURS))]
        if timed:
            sources += timed
            columns = [column for each in both for column in _speed(each)]
            body.append([", ".join(map(str, size(workload))), *columns])
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


def _speed(contest: Contest) -> list[str]:
    """ms, TFLOP/s, share of `dense`, and the fastest other."""
    ours, dense = contest.timed(OURS), contest.timed("dense")
    other = contest.fastest(lambda row: not row.backend.startswith(OURS))
    if ours is None or not ours.tflops:
        met = contest.of(OURS)
        return ["not measured" if met is None else cell(met.status), MISSING, MISSING, MISSING]
    share = ours.tflops / dense.tflops if dense and dense.tflops else None
    against = MISSING if other is None else f"`{other.backend}` {to_ours(other, ours)}"
    return [significant(ours.seconds * 1e3), significant(ours.tflops), percent(share), against]


def _sonicmoe(found: Sequence[Measured]) -> list[str]:
    """Why the library whose sizes these are has no time, in the words of the records."""
    theirs = [row for _, contest in found if (row := contest.of("sonicmoe"))]
    reasons = list(dict.fromkeys(cell(r.reason) for r in theirs if r.status != "ok"))
    if not reasons or any(r.status == "ok" for r in theirs):
        return []
    return [f"SonicMoE itself is an optional peer of the preset and took no part: {'; '.join(reasons)}."]
