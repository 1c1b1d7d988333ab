"""The speed-of-light rows compute what they claim, and count their own work."""

import pytest
import torch

from expertile.lab.race.baselines import BASELINE_NAMES, BASELINES, COPIES, COPY, DENSE, Copy, copy_work
from expertile.lab.race.operands import make_operands
from expertile.lab.race.workloads import Workload, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout, Problem

WORKLOADS = [
    ragged_m("m", "t", (24, 0, 40), 64, 32, "bf16"),
    wgrad("k", "t", (24, 0, 40), 16, 32, "bf16"),
    Workload("n", "t", Layout.RAGGED_N, (24, 0, 40), 16, 64, 32, "fp32"),
    Workload("b", "t", Layout.BATCHED, (16, 16), 16, 32, 64, "fp16"),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: f"{b.name}{b.way}")
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
    copies = [b for b in BASELINES if b.name == COPY]
    assert [b.config for b in copies] == [{"way": "memcpy"}, {"way": "kernel"}] and DENSE.config == {}
    for copy in copies:
        assert copy.work(problem, sizes).flops == 0
        assert work.nbytes <= copy.work(problem, sizes).nbytes < work.nbytes + 8


def test_names_are_those_of_the_baselines():
    assert tuple(dict.fromkeys(b.name for b in BASELINES)) == BASELINE_NAMES


@pytest.mark.parametrize("copy", COPIES, ids=lambda c: c.way)
@pytest.mark.parametrize("nbytes", [8.0, 1001.0, 4096.0])
def test_every_way_to_copy_really_moves_the_bytes(copy, nbytes):
    run = copy.run(nbytes, torch.device("cpu"))
    first, kept = run(None), run(None)
    assert 2 * first.nbytes == copy_work(nbytes).nbytes and nbytes <= copy_work(nbytes).nbytes < nbytes + 8
    assert torch.equal(first, kept) and first.data_ptr() != kept.data_ptr()
    assert first.view(torch.float32).isfinite().all() and first.any()
    out = torch.zeros_like(first)
    assert run(out) is out and torch.equal(out, first)


def test_a_copy_that_leaves_a_word_out_is_wrong():
    def most(source, out):
        out[:-1] = source[:-1]
        return out

    verdict = Copy("most", most).gate(400.0, torch.device("cpu"))
    assert not verdict.ok and "differs" in verdict.reason


def test_dense_reads_one_weight():
    workload = WORKLOADS[0]
    o = make_operands(workload, "cpu", 1)
    problem = Problem.from_tensors(o.a, o.b, o.offs)
    out = DENSE.prepare(problem, workload.group_sizes, o)(None)
    assert torch.equal(out, o.a @ o.b[0])
