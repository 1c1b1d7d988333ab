"""backend="measure": the first call with a new problem races its candidates on the caller's own operands.

The winner is kept for the process, for up to 4096 problems. A race takes seconds, most of them for compiling: each
candidate runs once unmeasured, then `_SCREEN` times, and those within 15 % of the fastest `_FINAL` times more. L2 is
overwritten before every call, and candidates take turns, as in the lab. `expertile tune` measures many problems at once
and keeps them on disk.
"""

import statistics
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

MEASURE = "measure"
_SCREEN, _FINAL, _WITHIN = 5, 15, 1.15
_MOST = 4096
_winners: dict[Hashable, Any] = {}

P = TypeVar("P")  # a backend with a config
Times = Callable[[Sequence[P], Callable[[P], object], int], dict[P, list[float]]]


def winner(
    key: Hashable, candidates: Callable[[], Sequence[P]], run: Callable[[P], object], time: Times[P] | None = None
) -> P:
    """The fastest of `candidates` by `run(candidate)`, raced once for each `key`.

    The first candidate is taken unmeasured, and not kept, while a CUDA graph is captured. Of the others, one that fails
    is left out with a warning; the first one's errors are the caller's.
    """
    if key in _winners:
        found: P = _winners[key]
        return found
    able = list(candidates())
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return able[0]
    run(able[0])
    able[1:] = [c for c in able[1:] if _runs(c, run)]
    time = _gpu_times if time is None else time
    for rounds in (_SCREEN, _FINAL):
        if len(able) == 1:
            break
        seconds = {c: statistics.median(each) for c, each in time(able, run, rounds).items()}
        least = min(seconds.values())
        able = sorted((c for c in able if seconds[c] <= least * _WITHIN), key=seconds.__getitem__)
    while len(_winners) >= _MOST:
        _winners.pop(next(iter(_winners)))
    _winners[key] = able[0]
    return able[0]


def _runs(candidate: P, run: Callable[[P], object]) -> bool:
    try:
        run(candidate)
    except Exception as error:  # Triton's errors have no common base with CUDA's
        warnings.warn(f"backend='measure' leaves out {candidate}: {error}", stacklevel=4)
        return False
    return True


def _gpu_times(candidates: Sequence[P], run: Callable[[P], object], rounds: int) -> dict[P, list[float]]:
    """Seconds of each candidate's calls on the GPU, with nothing of the operands left in L2."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    marks: dict[P, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {c: [] for c in candidates}
    for _ in range(rounds):
        for c in candidates:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()  # the host queues the call meanwhile, so that its own time is not measured
            start.record()
            run(c)
            end.record()
            marks[c].append((start, end))
    torch.cuda.synchronize()
    return {c: [1e-3 * start.elapsed_time(end) for start, end in each] for c, each in marks.items()}
