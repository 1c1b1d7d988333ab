import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends.loop import BACKEND
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import offs_from_sizes
from tests.ops.grouped_mm.cases import CASES
from tests.support.run_case import run_case


@pytest.mark.parametrize("sizes_known", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, sizes_known):
    run_case(BACKEND, case, sizes_known=sizes_known)


def test_takes_every_case():
    problem = Problem(
        Layout.RAGGED_M, 4, 100, 37, 51, torch.float32, torch.bfloat16, (2, 7), (9, 3, 5), False, False, True
    )
    assert BACKEND.supports(problem, Device.by_name("h200")) is None


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16])
def test_bias_of_another_dtype_is_added_before_rounding(bias_dtype):
    gen = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 8, generator=gen).bfloat16(), torch.randn(2, 8, 4, generator=gen).bfloat16()
    bias, offs = torch.randn(2, 4, generator=gen).to(bias_dtype), offs_from_sizes([2, 4])
    problem = Problem.from_tensors(a, b, offs, bias)
    out = BACKEND.run(problem, Operands(a, b, offs, bias), NoConfig(), None)
    want = torch.cat([a[:2].float() @ b[0].float() + bias[0], a[2:].float() @ b[1].float() + bias[1]])
    assert torch.equal(out, want.bfloat16())


def test_writes_nothing_but_the_products(monkeypatch):
    """No concatenation and no copy: only torch.mm with the views of `out`, one for each group that has rows."""
    calls = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, out: calls.append(out.data_ptr()) or real(x, y, out=out))
    a, b, offs = torch.randn(7, 8), torch.randn(3, 8, 4), offs_from_sizes([2, 0, 5])
    out = torch.empty(7, 4)
    BACKEND.run(Problem.from_tensors(a, b, offs), Operands(a, b, offs), NoConfig(), out)
    assert calls == [out.data_ptr(), out[2:].data_ptr()]
