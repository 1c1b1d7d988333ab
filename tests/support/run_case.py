"""One case of the shared table through one backend on the CPU."""

from typing import Any

import pytest

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.problem import Problem
from tests.ops.grouped_mm.cases import Case, check, expected, make, poisoned_out


def run_case(backend: Backend, case: Case, config: Any = None, sizes_known: bool = True) -> None:
    """Run `case` into a poisoned output and check it; skip where the backend says that it can't."""
    a, b, offs, bias = make(case)
    problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
    if not sizes_known:
        problem = problem.with_sizes(None)
    device = Device.current("cpu")
    reason = backend.supports(problem, device)
    if reason is not None:
        pytest.skip(reason)
    out = poisoned_out(case)
    config = backend.configs(problem, device)[0] if config is None else config
    result = backend.run(problem, Operands(a, b, offs, bias), config, out)
    assert result is out
    check(case, out, expected(case, a, b, offs, bias))
