"""Fill Triton's on-disk cache in parallel, before anything is timed: compiling is most of what tuning waits for. A
kernel's code hardly depends on sizes. So every pair of workload and config is run once, on a smaller workload with the
same remainders, by processes of their own. Whatever they cannot do is compiled where it is needed."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from expertile.lab.race.operands import make_operands
from expertile.lab.race.workloads import RAGGED_DIM, GroupedWorkload
from expertile.lab.report.rows import by
from expertile.ops.grouped_mm.backends import by_name
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import power_of_two

_BLOCK = 256  # every tile size divides it, so remainders by any tile are kept
_PROCESS_BYTES = 2 << 30  # device memory that one process may take, its context included


@dataclass(frozen=True)
class Job:
    """One backend with one config on one workload."""

    workload: GroupedWorkload
    backend: str
    config: Any


def shrink(workload: GroupedWorkload) -> GroupedWorkload:
    """A small workload that needs the same code: kept are dtype, memory order, K and N modulo any tile size, the power
    of two that holds the groups, and whether integers are 1 or multiples of 16, on which Triton specialises."""
    w = workload
    m, n, k = (x if x < _BLOCK else _BLOCK + x % _BLOCK for x in (w.m, w.n, w.k))
    groups = _like(w.groups, power_of_two(w.groups, 32))
    sizes = (16,) * (groups - 1)
    fields: dict[str, Any] = {"name": "shrunk", "preset": "", "routing": "", "note": "", "m": m, "n": n, "k": k}
    if w.layout is Layout.BATCHED:
        return replace(w, **fields, group_sizes=(m,) * groups)
    total = sum(w.group_sizes)
    sizes = (0,) * (groups - 1) + (1,) if total == 1 else (*sizes, 16 + (total % 16 != 0))
    fields[RAGGED_DIM[w.layout]] = sum(sizes)
    return replace(w, **fields, group_sizes=sizes)


def _like(count: int, power: int) -> int:
    """`power`, or the number below it, whichever is a multiple of 16 or not as `count` is; 1 for 1."""
    return count if count == 1 else power - (count % 16 != 0)


def precompile(jobs: Sequence[Job], seconds: float) -> set[Job]:
    """Compile what `jobs` need, in their order, for at most about `seconds`; returns those that are done. A job that
    fails counts as done: its measurement will say why. Nothing happens without a CUDA device."""
    if not torch.cuda.is_available() or not jobs:
        return set()
    small = by(jobs, lambda job: Job(shrink(job.workload), job.backend, job.config))
    free, _ = torch.cuda.mem_get_info()
    cores = len(os.sched_getaffinity(0))
    unique = list(small)
    count = max(1, min(cores, int(free // _PROCESS_BYTES), len(unique)))
    done: set[Job] = set()
    deadline = time.monotonic() + seconds
    # A process that a kernel takes down is replaced and its job never answers: the deadline ends the wait.
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        answers = pool.imap_unordered(_compile, list(enumerate(unique)))
        for _ in unique:
            try:
                index, usable = answers.next(max(0.01, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            if usable:
                done.update(small[unique[index]])
    pool.join()  # their contexts must be off the device before anything is timed
    return done


def _compile(numbered: tuple[int, Job]) -> tuple[int, bool]:
    """Run a job once; its number, and whether this process can go on."""
    number, job = numbered
    torch.set_num_threads(1)
    try:
        operands = make_operands(job.workload, "cuda", seed=0)
        problem = Problem.from_tensors(operands.a, operands.b, operands.offs)
        with torch.no_grad():
            by_name(job.backend).run(problem, operands, job.config, None)
        torch.cuda.synchronize()
    except Exception:
        try:
            torch.cuda.synchronize()
        except Exception:
            return number, False  # the context is lost, and every later job here fails: none of them counts as done
    return number, True
