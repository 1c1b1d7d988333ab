"""Expert parallelism measured by two processes on gloo: ways, their parts, races."""

from dataclasses import replace

import pytest
import torch

from tests.moe.test_parallel import outcome_of
from tests.tools.parallel import worker
from tools.parallel.case import BOTH, FORWARD, Case, Job, Size
from tools.parallel.run import DECODE, LARGE, QWEN, Options, jobs, ways
from tools.parallel.ways import COMPILED, ONE_GPU, OURS, TORCH, Way


def test_two_ranks(tmp_path):
    found, codes = outcome_of(worker.work, 2, str(tmp_path))
    assert codes == [0, 0]
    for rank, words in enumerate(found):
        failed = {check.__name__: words.get(check.__name__, "was not reached") for check in worker.CHECKS}
        assert not any(failed.values()), f"rank {rank}: " + "\n".join(f"{n}: {w}" for n, w in failed.items() if w)


def test_the_most_important_comes_first():
    full = jobs(Options())
    assert [job.size for job in full] == [LARGE, LARGE, QWEN, QWEN, DECODE] and full[0].scaling == "weak"
    first = ways(full[0], Options())
    assert {way.name for way in first[:3]} == {ONE_GPU, OURS, TORCH} and first[-1] == Way(COMPILED)
    assert {(w.chunks, w.combine) for w in first if w.name == OURS} == {
        (chunks, combine) for chunks in (1, 2, 4) for combine in ("ordered", "partial")
    }
    decode = ways(full[-1], Options())
    assert Way(OURS, fixed=True, graph=True) in decode and full[-1].passes == (FORWARD,)
    assert not any(
        w.graph or w.name == COMPILED for job in jobs(Options(device="cpu")) for w in ways(job, Options(device="cpu"))
    )
    assert len(jobs(Options(quick=True))) < len(full)


def test_only_the_sizes_that_are_named():
    def sizes(*only, **options):
        return [job.size for job in jobs(Options(only=only, **options))]

    assert sizes("decode") == [DECODE] and sizes("qwen", quick=True) == [QWEN]
    assert sizes("decode", "large") == [LARGE, LARGE, DECODE]
    with pytest.raises(ValueError, match="only: expected some of large, qwen, decode, got Qwen"):
        sizes("decode", "Qwen")
    with pytest.raises(ValueError, match="only: expected a size that is measured on cpu, got qwen"):
        sizes("qwen", device="cpu")


def test_work_is_that_of_the_busiest_rank():
    ids = torch.zeros(12, 2, dtype=torch.int32)
    ids[:2, 1] = 3
    none = torch.empty(0)
    case = Case(Job(Size(6, 8, 4, 4, 2)), 0, 2, none, none, {"ids": ids}, {})
    rows, used = 24 - 2, 1  # of rank 0, which holds experts 0 and 1
    two = case.work(2)
    assert two[FORWARD].flops == 6 * rows * 8 * 4 and two[BOTH].flops == 3 * two[FORWARD].flops
    assert two[FORWARD].nbytes == 2 * (2 * 6 * 8 + used * 3 * 8 * 4)
    one = case.work(1)  # this rank's six tokens, experts 0 and 3
    assert one[FORWARD].flops == 6 * 12 * 8 * 4 and one[FORWARD].nbytes == 2 * (2 * 6 * 8 + 2 * 3 * 8 * 4)
    divided = replace(case, job=replace(case.job, scaling="strong"))
    assert divided.work(2)[FORWARD].nbytes == 2 * (2 * 3 * 8 + used * 3 * 8 * 4)
