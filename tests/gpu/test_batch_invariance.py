"""Batch invariance on a GPU: the fuzz's forms, a few cases of each, and every config that claims equal bits."""

import pytest
import torch

from expertile.moe import MoE
from tools.batch_invariance.configs import configs
from tools.batch_invariance.fuzz import FORMS, PER_POOL, bits, fuzz


@pytest.mark.parametrize("number", range(len(FORMS)), ids=[f.name for f in FORMS])
def test_cases(number):
    result = fuzz(torch.device("cuda"), False, number * PER_POOL, 40, 60.0)
    assert result["cases"] and not result["errors"] and not result["failures"], result


def test_configs_give_equal_bits():
    found = configs(torch.device("cuda"), False)
    assert found and not [line for line in found if line.get("differing") or "error" in line]


def test_graphs_and_growing_batches():
    layer = MoE(512, 256, 32, 4, device="cuda", dtype=torch.bfloat16, batch_invariant=True).requires_grad_(False)
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    whole = layer(x)
    for count in (1, 2, 4, 5, 16, 33, 128, 1000):
        assert torch.equal(bits(layer(x[:count])), bits(whole[:count])), count
    row = x[:1].clone()
    layer(row)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(row)
    for t in (5, 700):
        row.copy_(x[t : t + 1])
        graph.replay()
        assert torch.equal(bits(out), bits(whole[t : t + 1])), t
