"""The reference against float64 written apart from it, and `exact` against the same more closely."""

import pytest
import torch

from expertile.ops.backend import NoConfig
from expertile.ops.gathered_mm import reference
from tests.ops.gathered_mm.cases import BACKWARD, CASES, expected, make, run_case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    run_case(reference.BACKEND, case, NoConfig())


@pytest.mark.parametrize("case", [c for c in CASES if c.product is BACKWARD], ids=str)
def test_dpre_over_pre(case):
    run_case(reference.BACKEND, case, NoConfig(), overwrite_pre=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case):
    problem, operands = make(case)
    for got, want in zip(reference.exact(problem, operands), expected(case, operands), strict=True):
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, equal_nan=True)
