"""Adapters of experts: values and gradients against float64 autograd of a loop over experts with merged weights."""

import pytest
import torch

from expertile.formats.weight_only import quantize
from expertile.moe import _frozen
from expertile.moe._base_products import BaseProducts
from expertile.moe.expert_weights import Experts
from expertile.moe.experts import moe_mlp
from expertile.moe.layer import MoE
from expertile.moe.lora import Adapter, Lora
from expertile.ops.gathered_mm.activation import activate, split
from expertile.ops.grouped_mm.api import grouped_mm
from tests.moe.test_experts import make, naive

HIDDEN, INNER, EXPERTS = 128, 64, 5
BOTH = ("gate_up", "down")


def adapters(rank=4, names=BOTH, seed=1, dtype=torch.float32):
    """Factors by weight and part, drawn so that the delta is as large as the weight; leaves."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    made = {}
    for name in names:
        out, columns = shapes[name]
        made[name, "a"] = torch.randn(EXPERTS * rank, columns, generator=g) / columns**0.5
        made[name, "b"] = torch.randn(out, EXPERTS * rank, generator=g) / rank**0.5
    return {key: t.to(dtype).requires_grad_() for key, t in made.items()}


def lora_of(leaves, scale=0.5):
    return Lora(**{n: Adapter(leaves[n, "a"], leaves[n, "b"], scale) for n in BOTH if (n, "a") in leaves})


def delta(a, b, scale):
    """PEFT's `get_delta_weight`, written as it lays the factors out: A by expert, B by rank."""
    a = a.reshape(EXPERTS, -1, a.shape[1])
    return torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], -1, EXPERTS), a) * scale


def truth(ids, operands, leaves, dy, scale=0.5, **form):
    """(out, gradients by name) in float64 of the weights with the adapters' deltas added."""
    wide = {n: None if t is None else t.detach().double().requires_grad_() for n, t in operands.items()}
    factors = {key: t.detach().double().requires_grad_() for key, t in leaves.items()}
    merged = dict(wide)
    for name in BOTH:
        if (name, "a") in factors:
            merged[name] = wide[name].detach() + delta(factors[name, "a"], factors[name, "b"], scale)
    out = naive(ids, merged, **form)
    wanted = {n: wide[n] for n in ("x", "topk_weights", "gate_up_bias", "down_bias") if wide[n] is not None} | factors
    return out, dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dy.double()), strict=True))


def run(ids, operands, leaves, dy, weights=None, function=moe_mlp, **form):
    own = {n: t if t is None or n in BOTH else t.detach().clone().requires_grad_() for n, t in operands.items()}
    gate_up, down = weights or (own["gate_up"], own["down"])
    biases = {n: own[n] for n in ("gate_up_bias", "down_bias")}
    out = function(own["x"], gate_up, down, ids, own["topk_weights"], lora=lora_of(leaves), **biases, **form)
    wanted = {n: t for n, t in own.items() if t is not None and n not in BOTH} | leaves
    return out, dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dy), strict=True))


def assert_alike(found, expected, tolerance):
    (out, grads), (true, true_grads) = found, expected
    assert grads.keys() == true_grads.keys()
    for name, mine, right in [("out", out, true), *((n, grads[n], true_grads[n]) for n in grads)]:
        error = (mine.double() - right).norm() / right.norm()
        assert error <= tolerance, f"{name}: {error:.2e}"


def case(dtype=torch.float32, biased=False, dropped=0.1, **more):
    ids, operands = make(11, 2, EXPERTS, HIDDEN, INNER, biased, dropped, dtype=dtype, **more)
    operands["topk_weights"] = operands["topk_weights"].float()
    return ids, operands, torch.randn(operands["x"].shape, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("names", [BOTH, ("gate_up",), ("down",)])
@pytest.mark.parametrize("activation, interleaved, biased", [("swiglu", False, False), ("gpt_oss", True, True)])
def test_frozen_dense_weights(names, activation, interleaved, biased):
    ids, operands, dy = case(biased=biased)
    leaves, form = adapters(names=names), {"activation": activation, "interleaved": interleaved}
    assert_alike(run(ids, operands, leaves, dy, **form), truth(ids, operands, leaves, dy, **form), 1e-5)


@pytest.mark.parametrize("rank", [1, 3, 16, 24])
def test_any_rank(rank):
    ids, operands, dy = case()
    leaves = adapters(rank)
    assert_alike(run(ids, operands, leaves, dy), truth(ids, operands, leaves, dy), 1e-5)


@pytest.mark.parametrize("format, tolerance", [("int4", 1e-2), ("mxfp4", 1e-2), ("mxfp4_fp8", 6e-2), ("fp8", 6e-2)])
def test_frozen_quantised_weights(format, tolerance):
    ids, operands, dy = case(torch.bfloat16)
    weights = [quantize(operands[n], format) for n in BOTH]
    values = operands | {n: w.dequantize(torch.float32) for n, w in zip(BOTH, weights, strict=True)}
    leaves = adapters(dtype=torch.float32)  # PEFT keeps them in float32
    found = run(ids, operands, leaves, dy, weights)
    assert all(grad.dtype is torch.float32 for name, grad in found[1].items() if name in leaves)
    assert_alike(found, truth(ids, values, leaves, dy), tolerance)


def test_the_formula_in_float64():
    ids, operands, dy = case(torch.float64)
    leaves = adapters(2, dtype=torch.float64)
    operands["topk_weights"] = operands["topk_weights"].double()
    assert_alike(run(ids, operands, leaves, dy), truth(ids, operands, leaves, dy), 1e-12)


def test_without_gradients_and_with_few_tokens():
    ids, operands, dy = case(dropped=0)
    leaves = adapters()
    right, _ = truth(ids, operands, leaves, dy)
    with torch.no_grad():
        x, gate_up, down, weights = (operands[n] for n in ("x", "gate_up", "down", "topk_weights"))
        for tokens in (1, 11):
            found = moe_mlp(x[:tokens], gate_up, down, ids[:tokens], weights[:tokens], lora=lora_of(leaves))
            torch.testing.assert_close(found.double(), right[:tokens], rtol=1e-4, atol=1e-4)
        assert moe_mlp(x[:0], gate_up, down, ids[:0], weights[:0], lora=lora_of(leaves)).shape == (0, HIDDEN)


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_compiled(format):
    dtype = torch.float32 if format is None else torch.bfloat16
    ids, operands, dy = case(dtype)
    weights = None if format is None else [quantize(operands[n], format) for n in BOTH]
    leaves = adapters()
    compiled = torch.compile(moe_mlp, backend="aot_eager", fullgraph=True)
    eager = run(ids, operands, leaves, dy, weights)
    expected = eager[0].double(), {n: g.double() for n, g in eager[1].items()}
    assert_alike(run(ids, operands, leaves, dy, weights, compiled), expected, 1e-5 if format is None else 1e-2)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("format", [None, "int4", "mxfp4", "mxfp4_fp8", "fp8"])
def test_compiled_into_the_layer_of_eager_calls(format, wanted):
    """Not into its products one by one: on a GPU those are other kernels than eager calls run."""
    torch.compiler.reset()
    called = []

    def backend(graph, _):
        called.extend(str(n.target) for n in graph.graph.nodes if "expertile" in str(n.target))
        return graph

    ids, operands, _ = case(torch.bfloat16)
    weights = [operands[n] if format is None else quantize(operands[n], format) for n in BOTH]
    leaves, x = adapters(), operands["x"].requires_grad_(wanted)
    compiled = torch.compile(moe_mlp, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(wanted):
        compiled(x, *weights, ids, operands["topk_weights"], lora=lora_of(leaves))
    assert called == ["expertile.moe_frozen.default"]


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("format", [None, "mxfp4", "fp8"])
def test_the_operator_and_functional_gradients(format, adapted):
    ids, operands, dy = case(torch.bfloat16, biased=True)
    weights = [operands[n] if format is None else quantize(operands[n], format) for n in BOTH]
    leaves = adapters(dtype=torch.bfloat16) if adapted or format is None else {}
    biases = {n: operands[n] for n in ("gate_up_bias", "down_bias")}

    def layer(x, topk_weights, *factors):
        lora = lora_of(dict(zip(leaves, factors, strict=True))) if leaves else None
        return moe_mlp(x, *weights, ids, topk_weights, lora=lora, **biases)

    inputs = [operands["x"].requires_grad_(), operands["topk_weights"].requires_grad_(), *leaves.values()]
    expected = torch.autograd.grad(layer(*inputs), inputs, dy)
    found = torch.func.vjp(layer, *(t.detach() for t in inputs))[1](dy)
    torch.testing.assert_close(found, expected)

    experts = Experts(*weights, *biases.values(), "swiglu", False)
    factors: list = [None] * 4
    if leaves:
        lora = lora_of(leaves)
        factors = [t.detach() for part in (lora.gate_up, lora.down) for t in part.factors(EXPERTS, torch.bfloat16)]
    arguments = [*inputs[:2], *biases.values(), *(t if t is None else t.requires_grad_() for t in factors), ids]
    packed = _frozen._packed(*BaseProducts.parts(experts))
    tests = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    given = (*arguments, *packed, "swiglu", False, 0.5, 0.5, True)
    torch.library.opcheck(torch.ops.expertile.moe_frozen.default, given, test_utils=tests)


@pytest.mark.parametrize("compiled", [False, True])
def test_where_the_product_adds_the_adapters_sum_to_pre(compiled, monkeypatch):
    """As on sm_90: pre then holds its delta, which the backward pass, an operator of its own, must not add again."""

    def gated_up(base, x, order, bias, form, more):
        u, factor = more
        pre = base.up(x, order, bias) + grouped_mm(u, factor.transpose(1, 2), offs=order.offs)
        return activate(*split(pre, form[1]), form[0]), pre

    ids, operands, dy = case(biased=True)
    leaves = adapters()
    expected = truth(ids, operands, leaves, dy)
    monkeypatch.setattr(BaseProducts, "gated_up", gated_up)
    monkeypatch.setattr(BaseProducts, "gates", lambda *_: True)
    torch.compiler.reset()
    function = torch.compile(moe_mlp, backend="aot_eager", fullgraph=True) if compiled else moe_mlp
    assert_alike(run(ids, operands, leaves, dy, function=function), expected, 1e-5)


def test_a_checkpoint_gives_the_same_bits():
    ids, operands, dy = case()
    leaves = adapters()

    def again(*arguments, **options):
        return torch.utils.checkpoint.checkpoint(moe_mlp, *arguments, use_reentrant=False, **options)

    expected, found = run(ids, operands, leaves, dy), run(ids, operands, leaves, dy, function=again)
    assert torch.equal(found[0], expected[0]) and all(torch.equal(found[1][n], g) for n, g in expected[1].items())


def test_under_autocast():
    ids, operands, dy = case()
    leaves = adapters()
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = run(ids, operands, leaves, dy.bfloat16())
    assert out.dtype is torch.bfloat16 and grads["x"].dtype is torch.float32
    assert_alike((out, grads), truth(ids, operands, leaves, dy), 3e-2)


def test_no_second_derivative():
    ids, operands, dy = case()
    leaves = adapters()
    x = operands["x"].requires_grad_()
    out = moe_mlp(x, operands["gate_up"], operands["down"], ids, operands["topk_weights"], lora=lora_of(leaves))
    (dx,) = torch.autograd.grad(out, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="only the first derivative"):
        dx.sum().backward()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a, b: Lora(), "lora: expected an adapter"),
        (lambda a, b: Lora(Adapter(a[:-1], b, 1.0)), r"lora.gate_up.a: expected \[5 r, 128\], got \[19, 128\]"),
        (lambda a, b: Lora(Adapter(a, b.t(), 1.0)), r"lora.gate_up.b: expected \[128, 20\], got \[20, 128\]"),
        (lambda a, b: Lora(Adapter(a.int(), b, 1.0)), r"lora.gate_up.a: expected two dimensions, floating point"),
        (lambda a, b: Lora(down=Adapter(a, b, 1.0)), r"lora.down.a: expected \[5 r, 64\], got \[20, 128\]"),
    ],
)
def test_bad_adapters(change, message):
    ids, operands, _ = case()
    leaves = adapters()
    lora = change(leaves["gate_up", "a"], leaves["gate_up", "b"])
    with pytest.raises(ValueError, match=message):
        moe_mlp(operands["x"], operands["gate_up"], operands["down"], ids, operands["topk_weights"], lora=lora)


def test_weights_that_are_trained():
    ids, operands, _ = case()
    lora = lora_of(adapters())
    x, gate_up, down, weights = (operands[n] for n in ("x", "gate_up", "down", "topk_weights"))
    with pytest.raises(ValueError, match="batch_invariant: expected False with lora"):
        moe_mlp(x, gate_up, down, ids, weights, lora=lora, batch_invariant=True)
    with pytest.raises(ValueError, match="down: expected a frozen weight under lora"):
        moe_mlp(x, gate_up, down.requires_grad_(), ids, weights, lora=lora)
    with torch.no_grad():
        moe_mlp(x, gate_up, down, ids, weights, lora=lora)


@pytest.mark.parametrize("targets", [BOTH, ("gate_up",), ("down",)])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("format", ["int4", "mxfp4", "mxfp4_fp8", "fp8"])
def test_adapters_of_zeros_change_nothing(format, activation, targets):
    torch.manual_seed(0)
    layer = MoE(128, 256, EXPERTS, 2, activation=activation, dtype=torch.bfloat16).quantize_experts(format)
    x = torch.randn(50, 128).bfloat16()
    before = layer(x)
    assert torch.equal(layer.add_lora(4, targets=targets)(x), before)
    assert layer(x[:0]).shape == (0, 128)


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_a_layer_with_adapters(format):
    torch.manual_seed(0)
    dtype = torch.float32 if format is None else torch.bfloat16
    layer = MoE(HIDDEN, INNER, EXPERTS, 2, bias=True, dtype=dtype)
    if format is not None:
        layer.quantize_experts(format)
    x = torch.randn(9, HIDDEN, dtype=dtype)
    before = layer(x)
    assert layer.add_lora(4, alpha=8) is layer and layer.lora_scale == 2
    torch.testing.assert_close(layer(x), before, rtol=2e-2, atol=2e-2)  # B is zero
    trained = {n for n, p in layer.named_parameters() if p.requires_grad}
    assert trained == {"router", *(f"{n}_lora_{part}" for n in BOTH for part in "ab")}
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(12):
        loss = (layer(x) - 1).float().square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0] and layer.down_lora_b.any()
    other = MoE(HIDDEN, INNER, EXPERTS, 2, bias=True, dtype=dtype)
    if format is not None:
        other.quantize_experts(format)
    other.add_lora(4, alpha=8).load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and "lora" in repr(layer)


def test_adapters_that_cannot_be():
    layer = MoE(HIDDEN, INNER, EXPERTS, 2)
    with pytest.raises(ValueError, match="rank: expected an integer of at least 1, got 0"):
        layer.add_lora(0)
    with pytest.raises(ValueError, match="targets: expected gate_up, down or both"):
        layer.add_lora(4, targets=("router",))
    layer.add_lora(4, targets=("down",))
    assert layer.lora.gate_up is None and layer.lora.down.a.shape == (4 * EXPERTS, INNER)
    with pytest.raises(ValueError, match="add_lora: expected a layer without adapters"):
        layer.add_lora(4)
