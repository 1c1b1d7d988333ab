"""The backends that a CPU runs, over the shared case table."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig
from expertile.ops.weight_only_mm.backends import BACKENDS, by_name, triton_int4
from tests.ops.weight_only_mm.cases import CASES, FP32, check, make, poisoned_out, problem_of


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["loop", "dequant"])
def test_case(name, case):
    backend, operands = by_name(name), make(case)
    problem = problem_of(case, operands)
    assert backend.supports(problem, Device.current("cpu")) is None
    out = poisoned_out(case)
    assert backend.run(problem, operands, NoConfig(), out) is out
    check(case, out, operands, **({"limit": 2e-6} if name == "loop" and case.out_dtype is FP32 else {}))


def test_loop_reads_sizes_that_the_problem_lacks():
    case = CASES[0]
    operands, out = make(case), poisoned_out(case)
    by_name("loop").run(replace(problem_of(case, operands), group_sizes=None), operands, NoConfig(), out)
    check(case, out, operands)


def test_names():
    assert [b.name for b in BACKENDS] == ["gluon_int4", "triton_int4", "gluon_w4a8", "dequant", "loop"]
    with pytest.raises(ValueError, match="backend: expected one of .*triton_int4.*, got 'abacus'"):
        by_name("abacus")


def test_dequant_does_not_fill_the_memory():
    problem = replace(problem_of(CASES[0], make(CASES[0])), groups=256, n=8192, k=8192)
    reason = by_name("dequant").supports(problem, Device.by_name("rtx 4090"))
    assert reason == "its dequantised weights take 32.0 GiB, more than a quarter of the memory"


def test_configs_follow_the_rows():
    b200, problem = Device.by_name("b200"), problem_of(CASES[0], make(CASES[0]))
    by_rows = [
        triton_int4.configs(replace(problem, groups=8, m=8 * rows, n=4096, k=4096, group_sizes=None), b200)[0].block_m
        for rows in (1, 16, 32, 64, 2048)
    ]
    assert by_rows == sorted(by_rows) and by_rows[:2] == [16, 16] and by_rows[-1] >= 128


@pytest.mark.parametrize("name", ["zeros", "mxfp4-empty-bias"])
def test_torch_dispatch_of_dequantize(name):
    w = make(next(c for c in CASES if c.name == name)).w
    fields = (w.packed, w.scales, w.zeros, w.format, w.group_size, w.shape[2])
    got = torch.ops.expertile.weight_only_dequantize(*fields, torch.float32)
    assert torch.equal(got, w.dequantize(torch.float32))
    part = torch.ops.expertile.weight_only_dequantize(*fields, torch.float32, 128, w.shape[2])
    assert torch.equal(part, got[..., 128:])
    torch.library.opcheck(torch.ops.expertile.weight_only_dequantize, (*fields, torch.bfloat16))
