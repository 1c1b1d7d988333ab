"""What each rank of a run does: one race after the other, in the order of their weight."""

import gc
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.parallel.case import FORWARD, SCALINGS, Case, Job, Size, make
from tools.parallel.records import Emit, Records
from tools.parallel.team import Call, Team
from tools.parallel.ways import COMPILED, ONE_GPU, OURS, TORCH, Ready, Way, prepare

LARGE = Size(16384, 4096, 1024, 128, 8)
QWEN = Size(8192, 2048, 768, 128, 8)  # Qwen3-30B-A3B
DECODE = Size(64, 2048, 768, 128, 8)  # the same model
SIZES = ("large", "qwen", "decode")
_SMALL, _SMALL_DECODE = Size(48, 32, 16, 8, 2), Size(4, 32, 16, 8, 2)  # what a CPU computes in a moment

# Shares of the time limit that must be left: to begin a race, to prepare more than its first ways, or to compile.
_FOR_RACE, _FOR_MORE, _FOR_COMPILING = 0.12, 0.18, 0.35
_ESSENTIAL = 3  # ways
_RACE_SHARE = 0.08  # of the time limit, at most


@dataclass(frozen=True)
class Options:
    """out: the file. ranks: GPUs at most. seconds: the time limit in all. quick: fewer ways, sizes and rounds. only: of
    `SIZES`, those to measure; none: all."""

    out: Path = Path("out/parallel.jsonl")
    ranks: int = 2
    seconds: float = 110.0
    quick: bool = False
    device: str = "cuda"
    only: tuple[str, ...] = ()


def jobs(options: Options) -> tuple[Job, ...]:
    """By weight, the most important first; decode last, whose graphs may cost the GPU and so all that follows.
    ValueError for an unknown size in `only`, or none that is measured on the device."""
    unknown = [name for name in options.only if name not in SIZES]
    if unknown:
        raise ValueError(f"only: expected some of {', '.join(SIZES)}, got {', '.join(unknown)}")
    gpu = options.device == "cuda"
    large, decode = (LARGE, DECODE) if gpu else (_SMALL, _SMALL_DECODE)
    sizes = {"large": large}
    if gpu and ("qwen" in options.only or not options.quick):
        sizes["qwen"] = QWEN
    scalings = SCALINGS[:1] if options.quick else SCALINGS
    found = [(name, Job(size, scaling)) for name, size in sizes.items() for scaling in scalings]
    found.append(("decode", Job(decode, passes=(FORWARD,), decode=True)))
    chosen = tuple(job for name, job in found if name in (options.only or SIZES))
    if not chosen:
        raise ValueError(f"only: expected a size that is measured on {options.device}, got {', '.join(options.only)}")
    return chosen


def ways(job: Job, options: Options) -> tuple[Way, ...]:
    """By weight, the first three first."""
    gpu = options.device == "cuda"
    if job.decode:
        found = [
            Way(ONE_GPU, graph=gpu),
            Way(OURS, fixed=True, graph=gpu),
            Way(TORCH),
            Way(OURS, combine="partial", fixed=True, graph=gpu),
            Way(OURS),
        ]
        return (*found, *((Way(ONE_GPU), Way(OURS, fixed=True)) if gpu else ()))
    found = [Way(ONE_GPU), Way(OURS), Way(TORCH), Way(OURS, combine="partial"), Way(OURS, 4)]
    if job.scaling == "weak" and not options.quick:
        found += [Way(OURS, 2), Way(OURS, 4, "partial"), Way(OURS, 2, "partial")]
        found += [Way(COMPILED)] if gpu else []
    return tuple(found)


def run(team: Team, options: Options, emit: Emit) -> None:
    """All jobs, as far as the time goes. `emit` takes the records on rank 0."""
    records = Records(team, emit)
    for job in jobs(options):
        if team.leader_says(team.remaining() < _FOR_RACE * options.seconds):
            records.skipped(job, ways(job, options), "no time left")
            continue
        lost = False
        try:
            case = make(job, team.rank, team.world, team.device)
            team.synchronize()
            reason = ""
        except Exception as error:
            reason = _said(error)
            lost = _lost(team)
        said = team.gather([reason, lost])
        if any(reason for reason, _ in said):
            records.skipped(job, ways(job, options), "; ".join(r for r, _ in said if r))
        else:
            lost = _race(team, options, case, records)
            del case
        if any(team.gather(lost or any(x for _, x in said))):
            _progress(team, f"{job.size} {job.scaling}: a GPU no longer answers; the run ends")
            return
        gc.collect()
        if team.device.type == "cuda":
            torch.cuda.empty_cache()


def _race(team: Team, options: Options, case: Case, records: Records) -> bool:
    """Prepare the ways of a job, time those that are right, and make their records. Whether a GPU was lost. An
    exception in the timing passes through, after the records: the ranks are no longer in step."""
    work = {gpus: case.work(gpus) for gpus in {1, case.world}}
    ready, calls = _prepared(team, options, case, records)
    if any(part["lost"] for parts in ready.values() for part in parts):
        for way, parts in ready.items():
            records.step(case, work, way, parts, {})
        return True
    messages = _messages(case, team)
    timed = calls | {("bandwidth", str(nbytes)): call for nbytes, call in messages.items()}
    gc.collect()
    try:
        timings = team.race(timed, 5 if options.quick else 15, _RACE_SHARE * options.seconds)
    except Exception as error:
        for way, parts in ready.items():
            records.step(case, work, way, parts, {}, f"the race failed: {_said(error)}")
        raise
    for nbytes in messages:
        if timing := timings.get(("bandwidth", str(nbytes))):
            records.all_to_all(case, nbytes // team.world * (team.world - 1), timing)
    for way, parts in ready.items():
        of_way = {key[1:]: timings[key] for key in calls if key[0] == str(way) and timings}
        records.step(case, work, way, parts, of_way)
    _progress(team, f"{case.job.size} {case.job.scaling}: timed")
    return False


def _prepared(
    team: Team, options: Options, case: Case, records: Records
) -> tuple[dict[Way, list[dict[str, Any]]], dict[tuple[str, ...], Call]]:
    """What each rank said of each way that there was time for, until one lost its GPU; and the calls of those that are
    right, by way, pass and kind."""
    ready: dict[Way, list[dict[str, Any]]] = {}
    calls: dict[tuple[str, ...], Call] = {}
    for index, way in enumerate(ways(case.job, options)):
        share = _FOR_COMPILING if way.name == COMPILED else _FOR_MORE if index >= _ESSENTIAL else 0.0
        if team.leader_says(team.remaining() < share * options.seconds):
            records.skipped(case.job, [way], "no time left")
            continue
        found, lost = Ready(), False
        try:
            found = prepare(way, case)
            team.synchronize()
        except Exception as error:
            found.reason, found.calls, lost = f"failed: {_said(error)}", {}, _lost(team)
        said = {"errors": found.errors, "reason": found.reason, "bits": found.bits, "leaving": found.leaving}
        ready[way] = team.gather({**said, "lost": lost})
        _progress(team, f"{case.job.size} {case.job.scaling}: {way}: {found.reason or 'right'}")
        if any(part["lost"] for part in ready[way]):
            break
        if not any(part["reason"] for part in ready[way]):
            calls |= {(str(way), *key): call for key, call in found.calls.items()}
    return ready, calls


def _messages(case: Case, team: Team) -> dict[int, Call]:
    """All-to-alls of the lengths of this job, in equal parts: a row for each token and rank, and one for each slot."""
    if team.world == 1:
        return {}
    x = case.tokens()["x"]
    found: dict[int, Call] = {}
    for rows in (len(x) * min(team.world, case.job.size.top_k), len(x) * case.job.size.top_k):
        sent = x.new_ones((-(-rows // team.world) * team.world, x.shape[1]))
        found[sent.numel() * sent.element_size()] = partial(dist.all_to_all_single, torch.empty_like(sent), sent)
    return found


def _said(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = ", ".join([*getattr(error, "__notes__", ()), f"{Path(where.filename).name}:{where.lineno}"])
    return f"{type(error).__name__}: {first} ({place})"


def _lost(team: Team) -> bool:
    """Whether this rank's GPU context can't be used any more."""
    try:
        team.synchronize()
    except Exception:
        return True
    return False


def _progress(team: Team, text: str) -> None:
    if team.rank == 0:
        print(f"{time.monotonic() - team.started:6.1f} s  {text}", flush=True)
