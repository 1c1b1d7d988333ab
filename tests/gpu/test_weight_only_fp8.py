"""scaled_grouped_mm with weights in 4 bits on a real GPU: every backend and config over the shared case table."""

import pytest
import torch

import expertile as xt
from expertile.device import Device
from expertile.ops.weight_only_mm.backends import BACKENDS
from tests.ops.weight_only_mm.fp8_cases import CASES, LARGE, check, make, poisoned_out, problem_of


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_every_config(backend, case):
    device, operands = Device.current(), make(case, "cuda")
    problem = problem_of(case, operands)
    if (reason := backend.supports(problem, device)) is not None:
        pytest.skip(reason)
    for config in backend.configs(problem, device):
        out = poisoned_out(case, "cuda")
        assert backend.run(problem, operands, config, out) is out
        try:
            check(case, out, operands)
        except AssertionError as e:
            raise AssertionError(f"{backend.name} {config}: {e}") from None


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_auto(case):
    o = make(case, "cuda")
    out = xt.scaled_grouped_mm(o.a, o.w, o.scale_a, offs=o.offs, bias=o.bias)
    out[sum(case.sizes) :] = float("nan")  # left as it comes
    check(case, out, o)


def test_in_a_graph():
    o = make(LARGE[0], "cuda")
    xt.scaled_grouped_mm(o.a, o.w, o.scale_a, offs=o.offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = xt.scaled_grouped_mm(o.a, o.w, o.scale_a, offs=o.offs)
    graph.replay()
    out[sum(LARGE[0].sizes) :] = float("nan")
    check(LARGE[0], out, o)
