"""The loop, on the CPU, over the shared case table, and against the package's own reference."""

import pytest
import torch

from expertile.device import Device
from expertile.ops.scaled_grouped_mm.backends.loop import BACKEND
from tests.ops.scaled_grouped_mm.cases import CASES, check, expected, make, poisoned_out, problem_of
from tests.ops.scaled_grouped_mm.reference import reference

CPU = Device.current("cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    operands = make(case)
    problem = problem_of(case, operands)
    out = poisoned_out(case)
    assert BACKEND.run(problem, operands, BACKEND.configs(problem, CPU)[0], out) is out
    check(case, out, operands, limit=2e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case):
    o = make(case)
    want, size = expected(case, o)
    for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 2e-6)):
        got = reference(o.a, o.b, o.scale_a, o.scale_b, o.offs, o.bias, dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert bool(((got.double() - want).abs() <= limit * size + 1e-30)[~want.isnan()].all())
