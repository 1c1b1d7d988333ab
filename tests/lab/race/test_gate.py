"""The gate lets right results through and stops every planted fault."""

import math

import pytest
import torch

from expertile.lab.race.gate import check_parts, full_precision, judge_calls, limits
from expertile.lab.race.operands import make_operands
from expertile.lab.race.reference import limits_of, reference_for
from expertile.lab.race.workloads import grouped, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout, Problem
from tests.ops.grouped_mm.reference import reference as independent

CPU = torch.device("cpu")
SIZES = (40, 0, 33, 70)
TAIL = 8


def workload(layout, dtype="bf16"):
    if layout is Layout.RAGGED_M:
        return ragged_m("w", "test", SIZES, 96, 48, dtype)
    if layout is Layout.RAGGED_K:
        return wgrad("w", "test", SIZES, 32, 48, dtype)
    if layout is Layout.RAGGED_N:
        return grouped("w", "test", layout, SIZES, 32, sum(SIZES), 96, dtype)
    return grouped("w", "test", layout, (24,) * 3, 24, 48, 96, dtype)


class Bench:
    """Operands with a tail, their reference, and a backend built from the package's reference loop."""

    def __init__(self, layout=Layout.RAGGED_M, dtype="bf16", hold_bytes=0.0):
        self.workload = workload(layout, dtype)
        self.operands = make_operands(self.workload, CPU, 7, 0 if layout is Layout.BATCHED else TAIL)
        o = self.operands
        self.sizes = self.workload.group_sizes
        self.problem = Problem.from_tensors(o.a, o.b, o.offs)
        self.reference = reference_for(self.problem, o, self.sizes, hold_bytes)
        right = independent(o.a, o.b, o.offs).to(self.problem.out_dtype)
        self.right = right

    def run(self, out):
        """Correct, and leaves the tail alone: the reference is NaN there."""
        if out is None:
            return self.right.clone()
        live = ~torch.isnan(self.right)
        out[live] = self.right[live]
        return out

    def verdict(self, fault=lambda out: None):
        def run(out):
            result = self.run(out)
            fault(result)
            return result

        return self.judged(run)

    def judged(self, run):
        """`run` into a tensor full of NaN, and once more into one of its own."""
        return judge_calls(lambda: (run(None),), self.reference, limits_of(self.problem, self.sizes), run, CPU)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("hold_bytes", [0.0, 1e9])
def test_a_right_result_passes(layout, dtype, hold_bytes):
    verdict = Bench(layout, dtype, hold_bytes).verdict()
    assert verdict.ok, verdict.reason
    roundoff = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}[dtype]
    assert 0 < verdict.rel_error < roundoff + 1e-6
    assert verdict.checked == 1.0


def one_wrong_element(out):
    out.view(-1)[out.numel() // 3] += 0.5


def one_unwritten_row(out):
    out[5] = math.nan


def infinite_element(out):
    out[3, 2] = math.inf


def swapped_groups(out):
    out[:33], out[40:73] = out[40:73].clone(), out[:33].clone()


def shifted_by_a_row(out):
    out[:40] = out[:40].roll(1, 0)


def scaled(out):
    out *= 1.01


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (one_wrong_element, "largest error of an element|relative error"),
        (one_unwritten_row, "48 of 6864 elements are NaN, infinite or were never written"),
        (infinite_element, "1 of 6864 elements are NaN, infinite"),
        (swapped_groups, "relative error"),
        (shifted_by_a_row, "relative error"),
        (scaled, "relative error 1"),
    ],
)
def test_planted_faults_are_caught(fault, says):
    verdict = Bench().verdict(fault)
    assert not verdict.ok
    assert any(word in verdict.reason for word in says.split("|")), verdict.reason


def check(out, reference, dtype_key, k):
    return check_parts(out, [((...,), reference)], limits(dtype_key, out.dtype, k))


def test_one_wrong_element_among_many_is_caught_by_the_largest_error():
    torch.manual_seed(0)
    right = torch.randn(4000, 1000)
    out = right.to(torch.bfloat16)
    assert check(out, right, "bf16", 128).ok
    out[1234, 567] += 0.25
    verdict = check(out, right, "bf16", 128)
    assert not verdict.ok and verdict.rel_error < limits("bf16", torch.bfloat16, 128).rel_error
    assert "largest error of an element" in verdict.reason


@pytest.mark.parametrize("layout", [Layout.RAGGED_M, Layout.RAGGED_N])
def test_overwriting_the_tail_is_caught(layout):
    def fault(out):
        (out[-1:] if layout is Layout.RAGGED_M else out[:, -1:]).fill_(0.0)

    verdict = Bench(layout).verdict(fault)
    assert not verdict.ok and "past offs[-1] were overwritten" in verdict.reason


def test_reading_the_tail_as_summands_is_caught():
    bench = Bench(Layout.RAGGED_K)
    o, start = bench.operands, sum(SIZES[:-1])
    extra = (o.a[:, start:].float() @ o.b[start:].float()).to(torch.bfloat16)
    assert not bench.verdict(lambda out: out[-1].copy_(extra)).ok


def test_an_empty_group_of_a_weight_gradient_must_be_zero():
    assert not Bench(Layout.RAGGED_K).verdict(lambda out: out[1].fill_(1e-6)).ok


def test_faults_of_the_allocating_path_are_caught():
    bench = Bench()

    def run(out):
        result = bench.run(out)
        if out is None:
            result[0] = 0.0
        return result

    verdict = bench.judged(run)
    assert not verdict.ok and verdict.reason.startswith("without out: ")


def test_writing_elsewhere_than_out_is_caught():
    bench = Bench()
    verdict = bench.judged(lambda out: bench.run(None))
    assert not verdict.ok and "never written" in verdict.reason


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (torch.zeros(3, 48, dtype=torch.bfloat16), r"expected [151, 48]"),
        (torch.zeros(151, 48), "torch.bfloat16, got"),
        ([1], "expected a tensor, got list"),
    ],
)
def test_wrong_kinds_of_result(result, says):
    bench = Bench()
    run = lambda out: bench.run(out) if out is not None else result  # noqa: E731
    verdict = bench.judged(run)
    assert not verdict.ok and says in verdict.reason


def test_accumulating_in_bfloat16_is_too_coarse():
    bench = Bench()
    o = bench.operands

    def coarse(out):
        start = 0
        for g, size in enumerate(SIZES):
            rows = slice(start, start + size)
            acc = torch.zeros(size, 48, dtype=torch.bfloat16)
            for k in range(0, 96, 8):
                acc += o.a[rows, k : k + 8] @ o.b[g, k : k + 8]
            out[rows] = acc
            start += size

    assert not bench.verdict(coarse).ok


def test_tf32_does_not_pass_as_float32():
    bench = Bench(dtype="fp32")

    def truncate(out):
        bits = out.view(torch.int32) & ~0x1FFF
        out.copy_(torch.where(torch.isnan(out), out, bits.view(torch.float32)))

    assert bench.verdict().ok
    assert not bench.verdict(truncate).ok


def test_sampled_rows_still_find_whole_faults(monkeypatch):
    monkeypatch.setattr("expertile.lab.race.reference._FLOPS", {"cpu": 0.6e6})
    bench = Bench()
    good = bench.verdict()
    assert good.ok and 0.3 < good.checked < 0.6
    assert not bench.verdict(swapped_groups).ok
    assert not bench.verdict(one_unwritten_row).ok  # every element must be written, sampled or not


def test_limits_grow_with_the_sum_and_the_coarseness():
    assert limits("bf16", torch.bfloat16, 4096).rel_error == pytest.approx(2**-8, rel=0.02)
    assert limits("fp32", torch.float32, 4096).rel_error < 2e-5
    assert limits("tf32", torch.float32, 4096).rel_error > 1.9e-3
    assert limits("bf16", torch.bfloat16, 4096).max_error == 8 * limits("bf16", torch.bfloat16, 4096).rel_error
    with pytest.raises(ValueError, match="dtype_key: expected fp32"):
        limits("int8", torch.bfloat16, 1)
    with pytest.raises(ValueError, match="out_dtype: expected one of"):
        limits("bf16", torch.int8, 1)


def test_all_zero_reference_allows_only_zero():
    zero = torch.zeros(4, 4)
    assert check(zero, zero, "fp32", 1).ok
    assert not check(zero + 1e-20, zero, "fp32", 1).ok


def test_nothing_is_fine():
    assert check(torch.zeros(0, 3), torch.zeros(0, 3), "fp32", 1).ok


def test_full_precision_restores_what_was_set():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
