"""The reference against float64 written apart from it; in float64 itself against the same more closely."""

from dataclasses import replace

import pytest
import torch

from expertile.ops.backend import NoConfig
from expertile.ops.gathered_mm import reference
from tests.ops.gathered_mm.cases import BACKWARD, CASES, expected, make, run_case
from tests.ops.grouped_mm.reference import reference as grouped_reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    run_case(reference.BACKEND, case, NoConfig())


@pytest.mark.parametrize("case", [c for c in CASES if c.product is BACKWARD], ids=str)
def test_dpre_over_pre(case):
    run_case(reference.BACKEND, case, NoConfig(), overwrite_pre=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_float64(case, monkeypatch):
    def product(a, b, offs, bias=None):
        return grouped_reference(a, b, offs, bias, torch.float64)

    monkeypatch.setattr(reference, "grouped_mm", product)
    problem, operands = make(case)
    values = {name: getattr(operands, name) for name in ("a", "b", "bias", "pre", "weights")}
    cast = replace(operands, **{name: x.double() for name, x in values.items() if x is not None})
    for got, want in zip(reference.compute(problem, cast), expected(case, operands), strict=True):
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, equal_nan=True)
