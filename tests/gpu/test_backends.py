"""Every backend, with every config it offers, over the shared case table on a real GPU."""

import pytest
import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.problem import Problem
from tests.ops.grouped_mm.cases import CASES, LARGE, check, expected, make, poisoned_out


def _run(backend, case, config_index=None):
    """Run one backend over a case with its default config, or with each of the others in turn."""
    device = Device.current()
    a, b, offs, bias = make(case, "cuda")
    problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
    if backend.supports(problem, device) is not None:
        return False
    configs = backend.configs(problem, device)
    want = expected(case, a, b, offs, bias)
    for config in configs[:1] if config_index is None else configs[1:]:
        out = poisoned_out(case, "cuda")
        backend.run(problem, Operands(a, b, offs, bias), config, out)
        try:
            check(case, out, want)
        except AssertionError as e:
            raise AssertionError(f"{backend.name} {config}: {e}") from None
    return True


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small(backend, case):
    if not _run(backend, case):
        pytest.skip(f"{backend.name} does not take this case")


SOME = [c for c in CASES if c.name.endswith(("plain", "empty-groups", "wgrad", "-bias"))]


@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.peer], ids=lambda b: b.name)
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name.endswith(("plain", "empty-groups", "wgrad", "-bias"))], ids=str
)
def test_every_config(backend, case):
    if not _run(backend, case, config_index="others"):
        pytest.skip(f"{backend.name} does not take this case")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(backend, case):
    try:
        if not _run(backend, case):
            pytest.skip(f"{backend.name} does not take this case")
    finally:
        torch.cuda.empty_cache()
