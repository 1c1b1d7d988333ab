"""The Mixture-of-Experts layer on a GPU: its kernels against the CPU's, values and gradients, graphs, compilation."""

import pytest
import torch

from expertile.formats.weight_only import quantize
from expertile.moe import _few
from expertile.moe.experts import moe_mlp
from expertile.moe.layer import MoE
from expertile.moe.permute import permutation
from expertile.moe.rounding import MODES, round_groups
from expertile.moe.router import RouterConfig, route
from expertile.ops.gathered_mm.problem import ACTIVATIONS
from tests.moe.test_experts import NAMES, make, naive
from tests.moe.test_permute import draw

ROUTERS = {
    "qwen3": RouterConfig(128, 8),
    "mixtral": RouterConfig(8, 2, order="topk_then_softmax", normalize=False),
    "gpt-oss": RouterConfig(128, 4, order="topk_then_softmax", normalize=False),
    "deepseek-v2": RouterConfig(160, 6, normalize=False, scale=16.0, num_groups=8, top_groups=3, group_score="max"),
    "deepseek-v3": RouterConfig(256, 8, score="sigmoid", scale=2.5, num_groups=8, top_groups=4),
    "kimi": RouterConfig(384, 8, score="sigmoid"),
    "many": RouterConfig(1000, 10),
    "rounded": RouterConfig(128, 8, rounding="nearest", candidates=2),
}


def assert_same(found, expected):
    for name in ("offs", "rows", "slots", "positions"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


@pytest.mark.parametrize(
    "tokens, top_k, experts, dropped",
    [
        (1, 1, 1, 0),
        (1, 8, 128, 0),
        (16, 8, 256, 0.2),
        (128, 8, 128, 0),
        (129, 8, 128, 0.1),
        (4096, 1, 8, 0),
        (5000, 3, 11, 0.5),
        (32768, 8, 128, 0.01),
        (3001, 10, 1000, 0),
        (2000, 2, 2048, 0.1),
    ],
)
def test_permutation(tokens, top_k, experts, dropped):
    for dtype in (torch.int32, torch.int64):
        ids = draw(tokens, top_k, experts, dropped, dtype=dtype)
        assert_same(permutation(ids.cuda(), experts), permutation(ids, experts))


def test_permutation_of_one_expert_and_of_none():
    for ids in (torch.full((20000, 1), 3), torch.full((3000, 2), 7), torch.full((300, 2), 7)):
        assert_same(permutation(ids.cuda(), 7), permutation(ids, 7))


def captured(function):
    """`function` in a CUDA graph: (graph, what it returned)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


@pytest.mark.parametrize("tokens", [64, 4096])
def test_permutation_in_a_graph(tokens):
    ids = draw(tokens, 4, 32, 0.1).cuda()
    graph, out = captured(lambda: permutation(ids, 32))
    for seed in (1, 2):
        other = draw(tokens, 4, 32, 0.3, seed)
        ids.copy_(other)
        graph.replay()
        assert_same(out, permutation(other, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", ROUTERS.values(), ids=ROUTERS)
def test_router(config, dtype):
    torch.manual_seed(0)
    logits = torch.randn(3000, config.num_experts).to(dtype)
    bias = torch.randn(config.num_experts) / 8 if config.score == "sigmoid" else None
    results, grads = [], []
    for device in ("cpu", "cuda"):
        x = logits.to(device).requires_grad_()
        found = route(x, config, bias=None if bias is None else bias.to(device))
        g = torch.linspace(-1, 1, found.topk_weights.numel(), device=device).view_as(found.topk_weights)
        loss = (found.topk_weights * g).sum() + found.scores.square().sum()
        grads.append(torch.autograd.grad(loss, x)[0].cpu())
        results.append([t.detach().cpu() for t in (found.topk_ids, found.topk_weights, found.scores)])
    same = (results[0][0] == results[1][0]).all(1)
    # Scores that are computed, and not read, may differ in the last bit, and so may the order of near ties.
    computed = bias is not None or config.num_groups is not None or config.rounding is not None
    assert same.float().mean() > (0.995 if computed else 0.999999)
    torch.testing.assert_close(results[0][1][same], results[1][1][same], rtol=1e-5, atol=1e-6 * config.scale)
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-5, atol=1e-6)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(grads[0][same], grads[1][same], rtol=tolerance, atol=tolerance * 0.1 * config.scale)


def test_router_ties_and_nan():
    x = torch.randint(-2, 3, (500, 100)).float()
    x[7, 5] = float("nan")
    for logits in (x, x.bfloat16(), x.half()):
        config = RouterConfig(100, 9)
        assert torch.equal(route(logits.cuda(), config).topk_ids.cpu(), route(logits, config).topk_ids)


@pytest.mark.parametrize("mode", [*MODES, None])
def test_rounding(mode):
    torch.manual_seed(0)
    weights, ids = (torch.randn(6000, 40) - torch.arange(40) * 0.05).softmax(1).topk(6)
    ids = ids.int()
    for factor in (None, 0.8):
        form = {"top_k": 4, "tile": 128, "mode": mode, "capacity_factor": factor}
        found = round_groups(ids.cuda(), weights.cuda(), 40, **form)
        assert torch.equal(found.cpu(), round_groups(ids, weights, 40, **form))


SIZES = {
    "small": dict(tokens=77, top_k=2, experts=5, hidden=64, inner=32),
    "odd": dict(tokens=50, top_k=3, experts=4, hidden=72, inner=40),
    "prefill": dict(tokens=2048, top_k=8, experts=32, hidden=512, inner=256),
    "decode": dict(tokens=4, top_k=8, experts=64, hidden=512, inner=256),
    "one expert": dict(tokens=300, top_k=1, experts=1, hidden=256, inner=128),
}
FORMS = {
    "swiglu": dict(activation="swiglu", interleaved=False),
    "gpt_oss": dict(activation="gpt_oss", interleaved=True),
    "geglu": dict(activation="geglu", interleaved=False),
    "reglu": dict(activation="reglu", interleaved=True),
}


def on_gpu(ids, operands):
    return ids.cuda(), {n: None if t is None else t.cuda() for n, t in operands.items()}


def run(ids, operands, dy, function=moe_mlp, **form):
    leaves = {n: None if t is None else t.detach().clone().requires_grad_() for n, t in operands.items()}
    out = function(topk_ids=ids, **leaves, **form)
    given = [t for t in leaves.values() if t is not None]
    return [out, *torch.autograd.grad(out, given, dy)]


def expected(ids, operands, dy, **form):
    wide = {n: None if t is None else t.detach().double().requires_grad_() for n, t in operands.items()}
    out = naive(ids, wide, **form)
    given = [t for t in wide.values() if t is not None]
    return [out, *torch.autograd.grad(out, given, dy.double())]


def assert_close(found, truth, tolerance):
    for a, b in zip(found, truth, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm() + 1e-9


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(size, form):
    ids, operands = on_gpu(*make(**SIZES[size], biased=True, dropped=0.1, dtype=torch.bfloat16))
    dy = torch.randn_like(operands["x"])
    found = run(ids, operands, dy, **FORMS[form])
    assert_close(found, expected(ids, operands, dy, **FORMS[form]), 1.5e-2)
    again = run(ids, operands, dy, **FORMS[form])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 3e-3), (torch.float32, 1e-4)], ids=str)
def test_other_dtypes(dtype, tolerance):
    ids, operands = on_gpu(*make(**SIZES["prefill"], dtype=dtype))
    dy = torch.randn_like(operands["x"])
    assert_close(run(ids, operands, dy), expected(ids, operands, dy), tolerance)


def test_all_dropped_and_nobody_there():
    ids, operands = on_gpu(*make(**SIZES["small"], biased=True, dtype=torch.bfloat16))
    found = run(torch.full_like(ids, 5), operands, torch.ones_like(operands["x"]))
    assert not any(t.any() for t in found)
    ids, operands = on_gpu(*make(**SIZES["small"] | {"tokens": 0}, biased=True, dtype=torch.bfloat16))
    assert not any(t.any() for t in run(ids, operands, torch.ones_like(operands["x"])))


FEW = {
    "even": dict(top_k=4, experts=12, hidden=1024, inner=1024, dtype=torch.bfloat16),
    "odd": dict(top_k=3, experts=5, hidden=200, inner=72, dropped=0.2, dtype=torch.float16),
}


# Sizes of no whole tile, dropped slots, several tokens of an expert; from five tokens on the general way alone.
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", FEW)
@pytest.mark.parametrize("form, biased", [("swiglu", False), ("gpt_oss", True), ("geglu", True), ("reglu", False)])
def test_few_tokens(tokens, size, form, biased, monkeypatch):
    ids, operands = on_gpu(*make(tokens, **FEW[size], biased=biased))
    assert _few.serves(operands["x"], ids, operands["gate_up"], operands["down"]) == (tokens <= 4)
    graph, out = captured(lambda: moe_mlp(topk_ids=ids, **operands, **FORMS[form]))
    for seed in (1, 2):
        ids.copy_(draw(tokens, FEW[size]["top_k"], FEW[size]["experts"], FEW[size].get("dropped", 0), seed))
        operands["x"].normal_()
        graph.replay()
        truth = naive(ids, {n: None if t is None else t.double() for n, t in operands.items()}, **FORMS[form])
        assert torch.equal(out, moe_mlp(topk_ids=ids, **operands, **FORMS[form]))
        with monkeypatch.context() as m:
            m.setattr(_few, "serves", lambda *operands: False)
            general = moe_mlp(topk_ids=ids, **operands, **FORMS[form])
        assert_close([out, general], [truth, truth], 1.5e-2)
        assert_close([out], [general.double()], 1.5e-2)


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("experts, hidden, biased", [(128, 2048, False), (64, 2880, True), (11, 72, True)])
def test_logits_of_few_tokens(tokens, experts, hidden, biased):
    torch.manual_seed(0)
    layer = MoE(hidden, 32, experts, 2, router_bias=biased, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        assert _few.reads_router(x, layer.router, layer.router_bias)
        truth = x.double() @ layer.router.double().t() + (0 if not biased else layer.router_bias.double())
        assert_close([layer.logits(x)], [truth], 4e-3)


@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 128])
def test_layer_in_a_graph(tokens):
    torch.manual_seed(0)
    layer = MoE(512, 256, 64, 8, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(tokens, 512, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        graph, out = captured(lambda: layer(x))
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(out, layer(x))


def test_training_step_in_a_graph():
    torch.manual_seed(0)
    layer = MoE(256, 128, 16, 4, bias=True, dtype=torch.bfloat16, device="cuda", capacity_factor=1.5)
    x = torch.randn(1000, 256, dtype=torch.bfloat16, device="cuda")

    def step():
        return torch.autograd.grad(layer(x).float().square().sum(), [*layer.parameters()])

    graph, grads = captured(step)
    x.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(grads, step(), strict=True))


def test_nothing_waits_for_the_gpu():
    layer = MoE(256, 128, 16, 4, dtype=torch.bfloat16, device="cuda", rounding="adaptive", tile=64)
    x = torch.randn(1000, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiles_whole():
    torch.manual_seed(0)
    layer = MoE(256, 128, 16, 4, bias=True, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(500, 256, dtype=torch.bfloat16, device="cuda")
    results = []
    for f in (layer, compiled):
        out = f(x)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [*layer.parameters()])])
    for a, b in zip(*results, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()


def test_memory_kept_for_the_backward_pass():
    tokens, top_k, inner = 4096, 8, 256
    ids, operands = on_gpu(*make(tokens, top_k, 32, 512, inner, dtype=torch.bfloat16))
    operands["x"].requires_grad_()
    moe_mlp(topk_ids=ids, **operands)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = moe_mlp(topk_ids=ids, **operands)
    kept = torch.cuda.memory_allocated() - before
    slots = tokens * top_k
    assert kept <= out.nbytes + slots * (2 * inner * 2 + 3 * 4) + 2**16


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("format", ["fp8", "mxfp4_fp8"])
@pytest.mark.parametrize("form", ["swiglu", "gpt_oss"])
def test_fp8(form, format, tokens):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 tensor cores")
    ids, operands = on_gpu(*make(tokens, 4, 8, 512, 288, biased=True, dropped=0.1, dtype=torch.bfloat16))
    blocks = {n: quantize(operands[n], format) for n in ("gate_up", "down")}
    exact = operands | {n: b.dequantize(torch.bfloat16) for n, b in blocks.items()}
    dy = torch.randn_like(operands["x"])
    truth = dict(zip(("out", *NAMES), expected(ids, {n: exact[n] for n in NAMES}, dy, **FORMS[form]), strict=True))
    leaves = {n: t.detach().clone().requires_grad_() for n, t in operands.items() if n not in blocks}
    out = moe_mlp(topk_ids=ids, **leaves, **blocks, **FORMS[form])
    grads = dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], dy), strict=True))
    assert_close([out, *grads.values()], [truth["out"], *(truth[n] for n in grads)], 0.07)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("form", [{}, dict(activation="gpt_oss", interleaved=True)], ids=["swiglu", "gpt_oss"])
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_four_bit_weights(format, form, tokens):
    ids, operands = on_gpu(*make(tokens, 4, 8, 512, 256, biased=True, dropped=0.1, dtype=torch.bfloat16))
    packed = {n: quantize(operands[n], format) for n in ("gate_up", "down")}
    values = {n: w.dequantize() for n, w in packed.items()}
    names = ("x", "topk_weights", "gate_up_bias", "down_bias")
    ours = {n: operands[n].clone().requires_grad_() for n in names}
    exact = {n: operands[n].double().requires_grad_() for n in names}
    truth = naive(ids, {n: w.double() for n, w in values.items()} | exact, **form)
    out = moe_mlp(topk_ids=ids, **ours, **packed, **form)
    with torch.no_grad():
        assert torch.equal(moe_mlp(topk_ids=ids, **ours, **packed, **form), out)
    dy = torch.randn_like(out)
    grads = torch.autograd.grad(out, [*ours.values()], dy)
    expected_grads = torch.autograd.grad(truth, [*exact.values()], dy.double())
    assert_close([out, *grads], [truth, *expected_grads], 3e-2)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_that_is_not_a_number_stays_none(activation, tokens):
    """Clamps and maxima must not make a number of it: not of the result, and not of the gradient."""
    hidden, inner, experts = 128, 64, 4
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate_up = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / 12
    down = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / 8
    gate_up[1, :inner] = float("nan")
    ids = torch.arange(tokens, device="cuda", dtype=torch.int32).view(-1, 1) % experts
    ids = ids + 1 if tokens == 1 else ids
    y = moe_mlp(x, gate_up, down, ids, torch.ones_like(ids).float(), activation=activation)
    y.sum().backward()
    hit = (ids == 1).flatten()
    assert y[hit].isnan().all() and x.grad[hit].isnan().all()
    assert not y[~hit].isnan().any() and not x.grad[~hit].isnan().any()
