"""The speed-of-light rows compute what they claim, and count their own work."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.operators.grouped_mm import grouped_mm
from expertile.lab.race.baselines import COPIES, Copy, copy_work
from expertile.lab.race.case import Case, Site
from expertile.lab.race.record import BASELINES, COPY, DENSE
from expertile.lab.race.workloads import grouped, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout

WORKLOADS = [
    ragged_m("m", "t", (24, 0, 40), 64, 32, "bf16"),
    wgrad("k", "t", (24, 0, 40), 16, 32, "bf16"),
    grouped("n", "t", Layout.RAGGED_N, (24, 0, 40), 16, 64, 32, "fp32"),
    grouped("b", "t", Layout.BATCHED, (16, 16), 16, 32, 64, "fp16"),
]


def candidates(workload, seed=1):
    """`dense` and both ways to copy, checked on operands with a tail."""
    case = Case(workload, Site(Device.current("cpu"), torch.device("cpu")), grouped_mm(()))
    return case, list(case.candidates(BASELINES, seed))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_passes_its_own_check_with_a_tail(workload):
    case, found = candidates(workload)
    assert [c.name for c in found] == [DENSE, COPY, COPY] and case.names == BASELINES
    for candidate in found:
        assert candidate.status == "ok", candidate.reason


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_dense_has_the_flops_and_copy_the_bytes(workload):
    case, (dense, *copies) = candidates(workload)
    work = workload.problem("cpu").work(workload.group_sizes)
    assert dense.work.flops == case.work.flops == work.flops > 0
    assert [b.config for b in copies] == [{"way": "memcpy"}, {"way": "kernel"}] and dense.config == {}
    for copy in copies:
        assert copy.work.flops == 0
        assert work.nbytes <= copy.work.nbytes < work.nbytes + 8


@pytest.mark.parametrize("copy", COPIES, ids=lambda c: c.way)
@pytest.mark.parametrize("nbytes", [8.0, 1001.0, 4096.0])
def test_every_way_to_copy_really_moves_the_bytes(copy, nbytes):
    call = copy.call(nbytes, torch.device("cpu"))
    first, kept = call(), call()
    assert 2 * first.nbytes == copy_work(nbytes).nbytes and nbytes <= copy_work(nbytes).nbytes < nbytes + 8
    assert torch.equal(first, kept) and first.data_ptr() != kept.data_ptr()
    assert first.view(torch.float32).isfinite().all() and first.any()
    out = torch.zeros_like(first)
    assert copy.move(first, out) is out and torch.equal(out, first)


def test_a_copy_that_leaves_a_word_out_is_wrong():
    def most(source, out):
        out[:-1] = source[:-1]
        return out

    verdict = Copy("most", most).check(400.0, torch.device("cpu"))
    assert not verdict.ok and "differs" in verdict.reason


def test_dense_reads_one_weight():
    case, (dense, *_) = candidates(WORKLOADS[0])
    inputs = case.input_sets(1)[0]
    (out,) = dense.bind(inputs, "eager")()
    assert torch.equal(out, inputs[0] @ inputs[1][0])
