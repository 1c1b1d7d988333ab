"""Rates of the attention backends, measured: TFLOP/s (useful FLOPs, as `Problem.work` counts them) on one GPU.

`rates.json` has them for (head dimension, causal or not), at each of `lengths`; a shorter row's longer lengths were not
measured. bf16, B=4, H=16, as many keys as queries and key heads as query heads, CUDA graphs, candidates interleaved,
medians; `gluon_hopper` with its default configs. `few_heads` (H=8) are forward rates at 1024, 2048 and 4096, where how
tiles divide among the SMs still tells. Between lengths rates go by the logarithm of the length.

Forward rates at 1024 to 4096, and at 16384 with D=64 (H=4), are of 2026-11-22, from one run that compared
`gluon_hopper`, `sdpa_cudnn` and `sdpa_fa2`; all others, and `triton`'s, of the day before.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from expertile.device import Device
from expertile.ops.attention.problem import Problem

MEASURED_ON = Device.by_name("h200")
DATE = "2026-11-21 and 22"
LARGEST_HEAD_DIM = 128
# Heads of all sequences: FORWARD has 64, FEW_HEADS 32; from the geometric mean on a problem goes by the former.
_FEW = 45

# (head dimension, causal) -> backend -> rate at each of LENGTHS, or of the first of them.
Table = Mapping[tuple[int, bool], Mapping[str, tuple[int, ...]]]
_MEASURED = json.loads(Path(__file__).with_suffix(".json").read_text())
LENGTHS = tuple(_MEASURED["lengths"])


def _table(name: str) -> Table:
    rows = ((key.split(), row) for key, row in _MEASURED[name].items())
    return {(int(dim), bool(causal)): {b: tuple(points) for b, points in row.items()} for (dim, *causal), row in rows}


FORWARD, FEW_HEADS, BACKWARD = map(_table, ("forward", "few_heads", "backward"))


def length(problem: Problem) -> float:
    """The length that a problem's rate is looked up at: the geometric mean of queries and keys of a sequence."""
    return math.sqrt(math.prod(problem.mean_lengths))


def rates(problem: Problem, backward: bool) -> dict[str, float]:
    """Expected TFLOP/s by backend, for `problem` on `MEASURED_ON`; empty for head dimensions above those measured, and
    without backends that were not measured with so few heads.

    Lengths beyond those measured go by the nearest. A head dimension between goes by the next measured above, which
    computes the difference for nothing.
    """
    if problem.head_dim > LARGEST_HEAD_DIM:
        return {}
    dim = 64 if problem.head_dim <= 64 else 128
    row = (BACKWARD if backward else FORWARD)[dim, problem.causal]
    if not backward and problem.batch * problem.heads < _FEW:
        few = FEW_HEADS[dim, problem.causal]
        row = {name: (*row[name][:2], *points, *row[name][5:]) for name, points in few.items()}
    return {name: _at(points, length(problem)) * problem.head_dim / dim for name, points in row.items()}


def _at(points: tuple[int, ...], at: float) -> float:
    known = LENGTHS[: len(points)]
    if at <= known[0] or at >= known[-1]:
        return float(points[0] if at <= known[0] else points[-1])
    i = next(i for i, upper in enumerate(known) if at <= upper)
    share = math.log(at / known[i - 1]) / math.log(known[i] / known[i - 1])
    return points[i - 1] + share * (points[i] - points[i - 1])
