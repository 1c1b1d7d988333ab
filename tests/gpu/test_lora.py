"""Adapters of experts on a GPU: values and gradients over every kind of frozen weights, graphs, compilation."""

import pytest
import torch

from expertile.formats.weight_only import quantize
from expertile.moe.experts import moe_mlp
from tests.gpu.test_moe import captured
from tests.moe.test_experts import make
from tests.moe.test_lora import BOTH, EXPERTS, HIDDEN, INNER, adapters, assert_alike, run, truth


def case(tokens, biased=False):
    ids, operands = make(tokens, 2, EXPERTS, HIDDEN, INNER, biased, 0.1, dtype=torch.bfloat16)
    operands = {n: None if t is None else t.cuda() for n, t in operands.items()}
    operands["topk_weights"] = operands["topk_weights"].float()
    dy = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16().cuda()
    return ids.cuda(), operands, dy


def leaves_of(rank, dtype=torch.float32):
    return {key: t.detach().to("cuda", dtype).requires_grad_() for key, t in adapters(rank).items()}


@pytest.mark.parametrize("format, tolerance", [(None, 2e-2), ("int4", 2e-2), ("mxfp4", 2e-2), ("fp8", 8e-2)])
@pytest.mark.parametrize("tokens, rank", [(3, 4), (700, 16), (3000, 32)])
@pytest.mark.parametrize("activation, interleaved, biased", [("swiglu", False, False), ("gpt_oss", True, True)])
def test_values_and_gradients(format, tolerance, tokens, rank, activation, interleaved, biased):
    ids, operands, dy = case(tokens, biased)
    weights = None if format is None else [quantize(operands[n], format) for n in BOTH]
    values = operands
    if weights is not None:
        values = operands | {n: w.dequantize(torch.float32) for n, w in zip(BOTH, weights, strict=True)}
    leaves, form = leaves_of(rank), {"activation": activation, "interleaved": interleaved}
    assert_alike(run(ids, operands, leaves, dy, weights, **form), truth(ids, values, leaves, dy, **form), tolerance)


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_the_same_bits_and_graphs(format):
    ids, operands, dy = case(512)
    weights = None if format is None else [quantize(operands[n], format) for n in BOTH]
    leaves = leaves_of(16, torch.bfloat16)

    def step():
        out, grads = run(ids, operands, leaves, dy, weights)
        return [out.detach(), *grads.values()]

    first, second = step(), step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    graph, results = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_compiled():
    ids, operands, dy = case(300)
    leaves = leaves_of(16)
    eager = run(ids, operands, leaves, dy)
    found = run(ids, operands, leaves, dy, function=torch.compile(moe_mlp, fullgraph=True))
    assert_alike(found, (eager[0].double(), {n: g.double() for n, g in eager[1].items()}), 2e-2)
