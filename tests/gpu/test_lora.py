"""Adapters of experts on a GPU: values and gradients over every kind of frozen weights, graphs, compilation."""

import pytest
import torch
import torch.nn.functional as F

from expertile.formats.weight_only import quantize
from expertile.moe.experts import moe_mlp
from expertile.moe.lora import Adapter, Lora
from expertile.moe.permute import permutation
from expertile.ops.gathered_mm.api import gathered_mm
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.low_rank import api as low_rank
from expertile.ops.low_rank import joined
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


@pytest.mark.parametrize(
    "format, tolerance", [(None, 2e-2), ("int4", 2e-2), ("mxfp4", 2e-2), ("mxfp4_fp8", 8e-2), ("fp8", 8e-2)]
)
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


@pytest.mark.parametrize("compiled", [False, True])
def test_wide_experts_with_few_rows(compiled):
    """Some 200 rows of an expert and 1536 columns, where a gated backward without adapters is composed."""
    hidden, inner, rank = 512, 1536, 16
    ids, operands = make(500, 2, EXPERTS, hidden, inner, False, 0.1, dtype=torch.bfloat16)
    operands = {n: None if t is None else t.cuda() for n, t in operands.items()}
    operands["topk_weights"] = operands["topk_weights"].float()
    g, leaves = torch.Generator().manual_seed(1), {}
    for name, (out, columns) in {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}.items():
        leaves[name, "a"] = torch.randn(EXPERTS * rank, columns, generator=g) / columns**0.5
        leaves[name, "b"] = torch.randn(out, EXPERTS * rank, generator=g) / rank**0.5
    leaves = {key: t.cuda().requires_grad_() for key, t in leaves.items()}
    dy = torch.randn(500, hidden, generator=g).bfloat16().cuda()
    function = torch.compile(moe_mlp, fullgraph=True) if compiled else moe_mlp
    found = run(ids.cuda(), operands, leaves, dy, function=function)
    assert_alike(found, truth(ids.cuda(), operands, leaves, dy), 2e-2)


@pytest.mark.parametrize("format", [None, "mxfp4", "mxfp4_fp8"])
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


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="sm_90")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rank", [16, 96])
def test_products_with_a_second_pair(rank, interleaved):
    """[a | u] @ [w | b] against the products by themselves; weights stored either way."""
    ids, operands, dy = case(700)
    x, gate_up, down, weights = (operands[n] for n in ("x", "gate_up", "down", "topk_weights"))
    o = permutation(ids, EXPERTS)
    used = int(o.offs[-1])

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    def near(found, wanted):
        error = (found[:used].float() - wanted[:used].float()).norm() / wanted[:used].float().norm()
        assert error < 1e-2, float(error)

    u, b1, a2 = normal(o.rows.shape[0], rank), normal(EXPERTS, 2 * INNER, rank), normal(EXPERTS, rank, INNER)
    form = ("swiglu", interleaved)
    act, pre = joined.gated(x, gate_up.transpose(1, 2), o.rows, o.offs, None, form, (u, b1.transpose(1, 2)))
    want = gathered_mm(x, gate_up.transpose(1, 2), o.rows, o.offs)
    want = want.float() + grouped_mm(u, b1.transpose(1, 2), offs=o.offs).float()
    near(pre, want)
    near(act, low_rank.activated(pre, None, None, None, o.offs, form)[0])
    for w in (gate_up, gate_up.transpose(1, 2).contiguous().transpose(1, 2)):
        near(
            joined.product(want.bfloat16(), w, o.offs, (u, normal_a := normal(EXPERTS, rank, HIDDEN))),
            grouped_mm(want.bfloat16(), w, offs=o.offs).float() + grouped_mm(u, normal_a, offs=o.offs).float(),
        )
    dpre, act_w, dweights = joined.gated_backward(dy, down, o.rows, o.slots, weights, pre, o.offs, form, False, (u, a2))
    grad = gathered_mm(dy, down, o.rows, o.offs)
    wide = 32 if rank == 16 else 128  # its kernel takes powers of two
    more = F.pad(u, (0, wide - rank)), F.pad(a2, (0, 0, 0, wide - rank))
    right = low_rank.backward(grad, pre, None, None, *more, o.slots, o.positions, weights, o.offs, form)
    near(dpre, right[0])
    near(act_w, right[1])
    assert (dweights - right[2]).norm() < 1e-2 * right[2].norm()  # a sum of I products, each rounded on one side


def test_a_graph_that_is_kept():
    ids, operands, dy = case(300)
    leaves = [*leaves_of(16).values()]
    lora = Lora(Adapter(*leaves[:2], 0.5), Adapter(*leaves[2:], 0.5))
    x, gate_up, down, weights = (operands[n] for n in ("x", "gate_up", "down", "topk_weights"))
    out = moe_mlp(x, gate_up, down, ids, weights, lora=lora)
    first, second = (torch.autograd.grad(out, leaves, dy, retain_graph=keep) for keep in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiled():
    ids, operands, dy = case(300)
    leaves = leaves_of(16)
    eager = run(ids, operands, leaves, dy)
    found = run(ids, operands, leaves, dy, function=torch.compile(moe_mlp, fullgraph=True))
    assert_alike(found, (eager[0].double(), {n: g.double() for n, g in eager[1].items()}), 2e-2)
