"""Shrinking keeps what decides the code of a kernel; without a GPU nothing is compiled."""

import pytest
import torch

from expertile.lab.bench.precompile import Job, precompile, shrink
from expertile.lab.race.workloads import grouped, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout


@pytest.mark.parametrize(
    "workload",
    [
        ragged_m("a", "p", (1000,) * 100, 7168, 2880, "bf16"),
        ragged_m("b", "p", (1001, 0, 7), 14336, 4097, "fp16", b_layout="kn"),
        ragged_m("c", "p", (1,), 300, 64, "bf16"),
        ragged_m("e", "p", (0, 1, 0), 4096, 512, "bf16"),
        wgrad("f", "p", (4096,) * 64, 4096, 11008, "bf16"),
        grouped("g", "p", Layout.BATCHED, (5000,) * 40, 5000, 1536, 2048, "bf16"),
        grouped("h", "p", Layout.RAGGED_N, (50, 60), 640, 110, 2048, "bf16", b_layout="kn"),
    ],
    ids=lambda w: w.name,
)
def test_what_decides_the_code_is_kept(workload):
    small = shrink(workload)
    assert (small.layout, small.dtype, small.a_layout, small.b_layout) == (
        workload.layout,
        workload.dtype,
        workload.a_layout,
        workload.b_layout,
    )
    pairs = [(small.m, workload.m), (small.n, workload.n), (small.k, workload.k), (small.groups, workload.groups)]
    for less, size in pairs:
        assert (less == 1) == (size == 1) and (less % 16 == 0) == (size % 16 == 0)
    assert max(32, 1 << (small.groups - 1).bit_length()) == max(32, 1 << (workload.groups - 1).bit_length())
    ragged = {Layout.RAGGED_M: "m", Layout.RAGGED_K: "k", Layout.RAGGED_N: "n"}.get(workload.layout)
    for field in {"m", "n", "k"} - {ragged}:
        assert (getattr(small, field) - getattr(workload, field)) % 256 == 0 and getattr(small, field) < 512
    assert small.memory_nbytes <= 600e6


def test_like_workloads_share_their_work():
    assert shrink(ragged_m("a", "p", (64,) * 8, 4096, 1024, "bf16")) == shrink(
        ragged_m("b", "q", (128,) * 12, 8192, 14336, "bf16", routing="r")
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles where there is a GPU")
def test_without_a_gpu_nothing_is_compiled():
    assert precompile([Job(ragged_m("a", "p", (8,), 64, 64, "bf16"), "triton_tma", None)], 10.0) == set()
