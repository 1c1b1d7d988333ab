"""Rates of the attention backends, measured: TFLOP/s (useful FLOPs, as `Problem.work` counts them) on one GPU.

bf16, B=4, H=16, as many keys as queries and key heads as query heads, CUDA graphs, candidates interleaved, medians;
`gluon_hopper` with its default configs. Between lengths rates go by the logarithm of the length.

Forward rates at 1024 to 4096 (H=16 and 8), and at 16384 with D=64 (H=4), are of 2026-11-22, from one run that compared
`gluon_hopper`, `sdpa_cudnn` and `sdpa_fa2`; all others, and `triton`'s, of the day before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from expertile.device import Device
from expertile.ops.attention.problem import Problem

MEASURED_ON = Device.by_name("h200")
DATE = "2026-11-21 and 22"
LENGTHS = (256, 512, 1024, 2048, 4096, 16384)
LARGEST_HEAD_DIM = 128
# Heads of all sequences: FORWARD has 64, FEW_HEADS 32; from the geometric mean on a problem goes by the former.
_FEW = 45

# (head dimension, causal) -> backend -> rate at each of LENGTHS; a shorter row's longer lengths were not measured.
Table = Mapping[tuple[int, bool], Mapping[str, tuple[int, ...]]]
FORWARD: Table = {
    (64, False): {
        "gluon_hopper": (128, 243, 354, 430, 496, 534),
        "sdpa_cudnn": (132, 264, 378, 449, 452, 470),
        "sdpa_fa2": (113, 231, 262, 288, 284, 293),
        "triton": (127, 268, 344, 386, 407),
    },
    (64, True): {
        "gluon_hopper": (64, 134, 255, 325, 419, 485),
        "sdpa_cudnn": (60, 129, 232, 336, 408, 448),
        "sdpa_fa2": (52, 111, 149, 215, 263, 272),
        "triton": (55, 131, 189, 270, 335),
    },
    (128, False): {
        "gluon_hopper": (208, 383, 487, 618, 636, 604),
        "sdpa_cudnn": (205, 413, 549, 645, 617, 629),
        "sdpa_fa2": (172, 283, 315, 343, 312, 306),
        "triton": (191, 312, 386, 443, 479),
    },
    (128, True): {
        "gluon_hopper": (106, 222, 324, 498, 605, 624),
        "sdpa_cudnn": (95, 194, 325, 459, 539, 586),
        "sdpa_fa2": (74, 135, 182, 250, 284, 301),
        "triton": (92, 156, 246, 345, 425),
    },
}
# Rates at 1024, 2048 and 4096, where how tiles divide among the SMs still tells.
FEW_HEADS: Table = {
    (64, False): {"gluon_hopper": (315, 411, 462), "sdpa_cudnn": (330, 429, 466), "sdpa_fa2": (252, 282, 293)},
    (64, True): {"gluon_hopper": (216, 339, 367), "sdpa_cudnn": (174, 285, 373), "sdpa_fa2": (129, 175, 233)},
    (128, False): {"gluon_hopper": (466, 592, 634), "sdpa_cudnn": (496, 621, 611), "sdpa_fa2": (304, 338, 308)},
    (128, True): {"gluon_hopper": (320, 410, 561), "sdpa_cudnn": (248, 399, 520), "sdpa_fa2": (146, 206, 270)},
}
BACKWARD: Table = {
    (64, False): {
        "gluon_hopper": (131, 251, 342, 402, 400, 428),
        "sdpa_cudnn": (124, 239, 333, 409, 417, 435),
        "sdpa_fa2": (84, 147, 206, 243, 244, 263),
        "triton": (127, 219, 243, 263),
    },
    (64, True): {
        "gluon_hopper": (64, 139, 249, 303, 384, 415),
        "sdpa_cudnn": (59, 116, 196, 292, 370, 422),
        "sdpa_fa2": (42, 75, 129, 179, 223, 251),
        "triton": (57, 100, 142, 190),
    },
    (128, False): {
        "gluon_hopper": (182, 312, 422, 476, 483, 496),
        "sdpa_cudnn": (170, 289, 422, 511, 512, 537),
        "sdpa_fa2": (104, 168, 223, 247, 252, 280),
        "triton": (135, 181, 212, 227),
    },
    (128, True): {
        "gluon_hopper": (91, 182, 267, 363, 440, 485),
        "sdpa_cudnn": (84, 149, 264, 385, 461, 499),
        "sdpa_fa2": (53, 90, 146, 205, 238, 266),
        "triton": (66, 94, 144, 194),
    },
}


def length(problem: Problem) -> float:
    """The length that a problem's rate is looked up at: the geometric mean of queries and keys of a sequence."""
    p = problem
    q, k = (p.q_rows / p.batch, p.k_rows / p.batch) if p.packed and p.batch else (p.q_len, p.k_len)
    return math.sqrt(q * k)


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
