from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from expertile.device import Device
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends.torch_grouped import BACKEND
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import offs_from_sizes
from tests.ops.grouped_mm.cases import CASES, make
from tests.support.run_case import run_case

H200, A100, CPU = Device.by_name("h200"), Device.by_name("a100"), Device.current("cpu")
BF16 = torch.bfloat16
PLAIN = Problem(Layout.RAGGED_M, 4, 100, 64, 128, BF16, BF16, (128, 1), (64 * 128, 1, 128))
WGRAD = Problem(Layout.RAGGED_K, 4, 64, 32, 100, BF16, BF16, (1, 64), (32, 1))
RAGGED_N = Problem(Layout.RAGGED_N, 4, 64, 64, 128, BF16, BF16, (64 * 128, 128, 1), (1, 128))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    run_case(BACKEND, case)


@pytest.mark.parametrize("case", [c for c in CASES if c.past and not c.bias], ids=str)
def test_past_the_end_is_left_alone_when_the_host_does_not_know_the_sizes(case):
    run_case(BACKEND, case, sizes_known=False)


def reaches_torch(case):
    return 0 not in case.shapes[2] and not (case.layout is Layout.RAGGED_K and case.total == 0)


@pytest.mark.parametrize("case", [c for c in CASES if reaches_torch(c)], ids=str)
def test_refuses_exactly_what_torch_refuses_on_the_cpu(case):
    a, b, offs, bias = make(case)
    problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
    try:
        F.grouped_mm(a, b, offs=offs, bias=bias, out_dtype=case.out_dtype)
        refused = None
    except RuntimeError as error:
        refused = str(error)
    assert (BACKEND.supports(problem, CPU) is None) == (refused is None), refused


def test_calls_the_original_when_torch_is_patched_with_ours(monkeypatch):
    def ours(*args, **kwargs):
        raise AssertionError("called itself")

    a, b, offs = torch.randn(8, 16), torch.randn(2, 16, 24), offs_from_sizes([3, 5])
    want = F.grouped_mm(a, b, offs=offs)
    monkeypatch.setattr(F, "grouped_mm", ours)
    monkeypatch.setattr(torch, "_grouped_mm", ours)
    got = BACKEND.run(Problem.from_tensors(a, b, offs), Operands(a, b, offs), NoConfig(), None)
    assert torch.equal(got, want)


def test_result_without_out():
    a, b, offs = torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 24).bfloat16(), offs_from_sizes([3, 5])
    result = BACKEND.run(Problem.from_tensors(a, b, offs), Operands(a, b, offs), NoConfig(), None)
    assert torch.equal(result, F.grouped_mm(a, b, offs=offs))


@pytest.mark.parametrize(
    "problem, device, reason",
    [
        (PLAIN, H200, None),
        (WGRAD, H200, None),
        (replace(PLAIN, has_bias=True), H200, "no bias"),
        (replace(PLAIN, out_dtype=torch.float32), H200, "out_dtype must be"),
        (replace(PLAIN, a_strides=(129, 1)), H200, "a: strides must be multiples of 16 bytes, got 258 bytes"),
        (replace(PLAIN, b_strides=(0, 0, 0)), H200, "b: rows or columns must be contiguous"),
        (replace(PLAIN, a_strides=(256, 2)), H200, "a: rows or columns must be contiguous"),
        (replace(PLAIN, a_aligned=False), H200, "a: base address"),
        (replace(PLAIN, b_aligned=False), H200, "b: base address"),
        (replace(PLAIN, a_aligned=False), CPU, None),
        (replace(PLAIN, groups=1024), H200, "at most 1023 groups"),
        (replace(PLAIN, groups=1024), A100, None),
        (replace(PLAIN, b_strides=(64 * 128 + 4, 1, 128)), H200, "b: the stride between groups"),
        (PLAIN, Device.by_name("v100"), "needs sm_80"),
        # what the kernel asserts on the device: known sizes decide, unknown ones are refused
        (replace(PLAIN, a_strides=(1, 104)), H200, "group sizes must be known multiples of 8"),
        (replace(PLAIN, a_strides=(1, 104), group_sizes=(8, 16, 72, 3)), H200, None),
        (replace(PLAIN, a_strides=(1, 104), group_sizes=(8, 17, 72, 3)), H200, "got 8, 17, 72, 3"),
        (replace(PLAIN, a_strides=(1, 104)), A100, None),
        (replace(WGRAD, a_strides=(104, 1), group_sizes=(8, 16, 72, 4)), H200, None),
        (replace(WGRAD, a_strides=(104, 1), group_sizes=(8, 0, 72, 4)), H200, "empty groups"),
        (replace(WGRAD, group_sizes=(3, 0, 72, 4)), H200, None),
        (RAGGED_N, H200, "group sizes must be known"),
        (replace(RAGGED_N, group_sizes=(8, 0, 40, 3)), H200, None),
    ],
)
def test_supports(problem, device, reason):
    got = BACKEND.supports(problem, device)
    assert got is None if reason is None else got is not None and reason in got, got
