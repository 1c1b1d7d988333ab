"""The table's own check must notice every kind of wrong result."""

import pytest
import torch

from expertile.ops.grouped_mm.problem import Layout
from tests.ops.grouped_mm.cases import CASES, LARGE, STORAGES, Case, check, expected, make

CASE = Case("checked", Layout.RAGGED_M, (20, 0, 30), n=24, k=32, past=6)


@pytest.fixture
def want():
    return expected(CASE, *make(CASE))


def test_accepts_the_rounded_result(want):
    check(CASE, want.to(torch.bfloat16), want)


def test_finds_one_wrong_element(want):
    out = want.to(torch.bfloat16)
    out[17, 5] += 0.5
    with pytest.raises(AssertionError, match="error"):
        check(CASE, out, want)


def test_finds_a_slightly_wrong_whole(want):
    with pytest.raises(AssertionError, match="Frobenius"):
        check(CASE, (want * 1.01).to(torch.bfloat16), want)


def test_finds_an_unwritten_element(want):
    out = want.to(torch.bfloat16)
    out[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="1 elements are NaN"):
        check(CASE, out, want)


def test_finds_a_write_past_the_last_group(want):
    out = want.to(torch.bfloat16)
    out[50, 3] = 0.0
    with pytest.raises(AssertionError, match="1 elements past the end"):
        check(CASE, out, want)


def test_finds_a_wrong_dtype_and_shape(want):
    with pytest.raises(AssertionError, match="dtype"):
        check(CASE, want.float(), want)
    with pytest.raises(AssertionError, match="shape"):
        check(CASE, want.to(torch.bfloat16)[:-1], want)


def test_finds_nonzero_where_zeros_are_due():
    case = Case("zeros", Layout.RAGGED_K, (0, 0), m=4, n=4)
    want = torch.zeros(2, 4, 4, dtype=torch.float64)
    check(case, want.to(torch.bfloat16), want)
    with pytest.raises(AssertionError, match="error"):
        check(case, want.to(torch.bfloat16) + 1, want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operands_have_the_shapes_and_storage_promised(case):
    a, b, offs, bias = make(case)
    assert (tuple(a.shape), tuple(b.shape)) == case.shapes[:2]
    assert (offs is None) == (case.layout is Layout.BATCHED)
    if offs is not None:
        assert offs.dtype is torch.int32 and int(offs[-1]) == sum(case.sizes)
    assert (bias is not None) == case.bias
    for tensor, storage in ((a, case.a_storage), (b, case.b_storage)):
        if storage == "scalar":
            assert set(tensor.stride()) == {0}
        if storage == "shifted":
            assert tensor.data_ptr() % 16 != 0
        if storage == "odd":
            assert tensor.stride(-2) * tensor.element_size() % 16 != 0


def test_the_table_covers_its_dimensions():
    assert {c.layout for c in CASES} == set(Layout)
    assert {c.a_storage for c in CASES} | {c.b_storage for c in CASES} == set(STORAGES)
    assert {c.dtype for c in CASES} == {torch.bfloat16, torch.float16, torch.float32}
    names = [c.name for c in CASES + LARGE]
    assert len(set(names)) == len(names)
