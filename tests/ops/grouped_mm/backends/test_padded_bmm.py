from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends.padded_bmm import BACKEND
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import offs_from_sizes
from tests.ops.grouped_mm.cases import CASES, Case
from tests.support.run_case import run_case

EQUAL = (
    Case("m-equal", Layout.RAGGED_M, (16, 16, 16), n=24, k=32, past=5),
    Case("m-equal-bias", Layout.RAGGED_M, (16, 16, 16), n=24, k=32, past=5, bias=True),
    Case("n-equal", Layout.RAGGED_N, (16, 16, 16), m=24, k=32, past=5),
    Case("k-equal", Layout.RAGGED_K, (16, 16, 16), m=24, n=32, past=5, a_storage="column", b_storage="row"),
)


@pytest.mark.parametrize("sizes_known", [True, False])
@pytest.mark.parametrize("case", CASES + EQUAL, ids=str)
def test_case(case, sizes_known):
    run_case(BACKEND, case, sizes_known=sizes_known)


@pytest.mark.parametrize("name", ["m-ragged-tiles-of-k", "n-odd-sizes"])
def test_what_memory_held_gets_into_no_row(name, monkeypatch):
    """Where padding is left as it comes, the matrix units of some CPUs carry its NaN into the row before it."""
    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **more: real(x, *size, **more).fill_(float("nan")))
    run_case(BACKEND, next(case for case in CASES if case.name == name))


def test_equal_groups_are_multiplied_in_place(monkeypatch):
    seen = {}
    real = torch.bmm

    def bmm(x, y, out):
        seen.update(a=x.data_ptr(), out=out.data_ptr(), shape=tuple(x.shape))
        return real(x, y, out=out)

    monkeypatch.setattr(torch, "bmm", bmm)
    a, b, offs = torch.randn(14, 8), torch.randn(3, 8, 4), offs_from_sizes([4, 4, 4])
    out = torch.empty(14, 4)
    BACKEND.run(Problem.from_tensors(a, b, offs), Operands(a, b, offs), NoConfig(), out)
    assert seen == {"a": a.data_ptr(), "out": out.data_ptr(), "shape": (3, 4, 8)}


def test_refuses_padding_that_does_not_fit():
    skewed = Problem(
        Layout.RAGGED_M,
        256,
        65536,
        4096,
        7168,
        torch.bfloat16,
        torch.bfloat16,
        (7168, 1),
        (7168 * 4096, 1, 7168),
        group_sizes=(65536,) + (0,) * 255,
    )
    h200 = Device.by_name("h200")
    # 256 x 65536 rows of (7168 + 4096) bfloat16
    assert "65536 rows takes 378 GB" in BACKEND.supports(skewed, h200)
    assert BACKEND.supports(replace(skewed, group_sizes=(256,) * 256), h200) is None
    assert BACKEND.supports(replace(skewed, group_sizes=None), h200) is None
