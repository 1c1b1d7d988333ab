"""The speed-of-light rows compute what they claim, and count their own work."""

import pytest
import torch

from expertile.lab.baselines import BASELINES, COPY, DENSE
from expertile.lab.operands import make_operands
from expertile.lab.workloads import Workload, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout, Problem

WORKLOADS = [
    ragged_m("m", "t", (24, 0, 40), 64, 32, "bf16"),
    wgrad("k", "t", (24, 0, 40), 16, 32, "bf16"),
    Workload("n", "t", Layout.RAGGED_N, (24, 0, 40), 16, 64, 32, "fp32"),
    Workload("b", "t", Layout.BATCHED, (16, 16), 16, 32, 64, "fp16"),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.name)
def test_passes_its_own_check_with_a_tail(workload, baseline):
    o = make_operands(workload, "cpu", 1, 0 if workload.layout is Layout.BATCHED else 8)
    problem = Problem.from_tensors(o.a, o.b, o.offs)
    verdict = baseline.verify(problem, workload.group_sizes, o)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_dense_has_the_flops_and_copy_the_bytes(workload):
    problem = workload.problem("cpu")
    work = problem.work(workload.group_sizes)
    sizes = workload.group_sizes
    assert DENSE.work(problem, sizes).flops == work.flops > 0
    assert COPY.work(problem, sizes).flops == 0
    assert COPY.work(problem, sizes).nbytes == pytest.approx(work.nbytes, abs=2 * problem.dtype.itemsize)


def test_copy_really_moves_the_bytes():
    workload = WORKLOADS[0]
    o = make_operands(workload, "cpu", 1)
    problem = Problem.from_tensors(o.a, o.b, o.offs)
    copied = COPY.prepare(problem, workload.group_sizes, o)(None)
    assert 2 * copied.nbytes == COPY.work(problem, workload.group_sizes).nbytes
    assert copied.isfinite().all() and copied.float().std() > 0.5


def test_dense_reads_one_weight():
    workload = WORKLOADS[0]
    o = make_operands(workload, "cpu", 1)
    problem = Problem.from_tensors(o.a, o.b, o.offs)
    out = DENSE.prepare(problem, workload.group_sizes, o)(None)
    assert torch.equal(out, o.a @ o.b[0])
