"""backend="measure": the first call with a new problem races its candidates on copies of the caller's operands.

The winner is kept for the process, for up to 4096 problems. A race takes seconds, most of them for compiling: each
candidate runs in a CUDA graph over as many copies as fill L2 three times, `_SCREEN` times, and those within 15 % of the
fastest `_FINAL` times more; candidates take turns. `expertile tune` measures many problems at once and keeps them on
disk. (Events around single calls took the wrong one of products of 5 to 30 µs: docs/notes/grouped_mm.md.)
"""

import statistics
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from expertile.timers import Sampler, Timer, quick_collections

MEASURE = "measure"
_SCREEN, _FINAL, _WITHIN = 3, 9, 1.15
_MOST = 4096
_winners: dict[Hashable, Any] = {}

P = TypeVar("P")  # a backend with a config
S = TypeVar("S")  # operands


def winner(
    key: Hashable,
    candidates: Callable[[], Sequence[P]],
    sets: Callable[[], Sequence[S]],
    run: Callable[[P, S], object],
    timer: Timer,
) -> P:
    """The fastest of `candidates` by `timer`, with `run(candidate, operands)` on `sets` in turn; raced once for `key`.

    The first candidate is taken unmeasured, and not kept, while a CUDA graph is captured. Of the others, one that fails
    is left out with a warning; the first one's errors are the caller's.
    """
    if key in _winners:
        found: P = _winners[key]
        return found
    able = list(candidates())
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return able[0]
    inputs = sets()
    run(able[0], inputs[0])
    samplers: dict[P, Sampler] = {}
    if len(able) > 1:
        with quick_collections():  # one before each graph
            prepared = {c: _prepared(c, inputs, run, timer) for c in able}
        samplers = {c: sampler for c, sampler in prepared.items() if sampler is not None}
    for rounds in (_SCREEN, _FINAL):
        if len(samplers) < 2:
            break
        times: dict[P, list[float]] = {c: [] for c in samplers}
        for _ in range(rounds):
            for c, sampler in samplers.items():
                times[c].append(sampler())
        seconds = {c: statistics.median(each) for c, each in times.items()}
        least = min(seconds.values())
        samplers = {c: samplers[c] for c in sorted(seconds, key=seconds.__getitem__) if seconds[c] <= least * _WITHIN}
    while len(_winners) >= _MOST:
        _winners.pop(next(iter(_winners)))
    _winners[key] = next(iter(samplers), able[0])
    return _winners[key]


def _prepared(candidate: P, inputs: Sequence[S], run: Callable[[P, S], object], timer: Timer) -> Sampler | None:
    try:
        return timer.prepare(lambda i: run(candidate, inputs[i]), len(inputs))
    except Exception as error:  # Triton's errors have no common base with CUDA's
        warnings.warn(f"backend='measure' leaves out {candidate}: {error}", stacklevel=4)
        return None
