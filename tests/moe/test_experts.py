"""moe_mlp on the CPU: values and gradients against float64 autograd of a loop over experts; edges, tracing, errors."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.formats.weight_only import quantize
from expertile.moe.experts import moe_mlp
from expertile.moe.lora import Adapter, Lora
from expertile.ops.gathered_mm.problem import ACTIVATIONS
from expertile.ops.quantize.api import quantize_activations, quantize_per_row
from tests.moe.test_permute import draw
from tests.ops.gathered_mm.cases import clamped

NAMES = ("x", "gate_up", "down", "topk_weights", "gate_up_bias", "down_bias")


def make(tokens=13, top_k=2, experts=5, hidden=16, inner=8, biased=False, dropped=0.0, seed=0, dtype=torch.float32):
    """(topk_ids, the differentiable operands in the order of NAMES)."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(dtype)

    operands = {
        "x": normal(tokens, hidden),
        "gate_up": normal(experts, 2 * inner, hidden) / hidden**0.5,
        "down": normal(experts, hidden, inner) / inner**0.5,
        "topk_weights": torch.rand(tokens, top_k, generator=g),
        "gate_up_bias": normal(experts, 2 * inner) if biased else None,
        "down_bias": normal(experts, hidden) if biased else None,
    }
    return draw(tokens, top_k, experts, dropped, seed), operands


def gated(pre, activation, interleaved):
    """The activations as their papers write them."""
    gate, up = (pre[..., 0::2], pre[..., 1::2]) if interleaved else pre.chunk(2, -1)
    if activation == "gpt_oss":
        gate, up = clamped(gate, -math.inf, 7), clamped(up, -7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    f = {"swiglu": F.silu, "geglu": lambda z: F.gelu(z, approximate="tanh"), "reglu": F.relu}[activation]
    return f(gate) * up


def naive(topk_ids, operands, activation="swiglu", interleaved=False):
    """A loop over experts, on whatever dtype the operands have."""
    x, gate_up, down, weights, up_bias, down_bias = (operands[n] for n in NAMES)
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        tokens, j = (topk_ids == e).nonzero(as_tuple=True)
        pre = x[tokens] @ gate_up[e].t() + (0 if up_bias is None else up_bias[e])
        y = gated(pre, activation, interleaved) @ down[e].t() + (0 if down_bias is None else down_bias[e])
        out = out.index_add(0, tokens, weights[tokens, j, None].to(y.dtype) * y)
    return out


def truth(topk_ids, operands, dy, **form):
    """(out, gradients by name) in float64."""
    wide = {n: None if t is None else t.detach().double().requires_grad_() for n, t in operands.items()}
    out = naive(topk_ids, wide, **form)
    names = [n for n in NAMES if wide[n] is not None]
    return out, dict(zip(names, torch.autograd.grad(out, [wide[n] for n in names], dy.double()), strict=True))


def run(topk_ids, operands, dy, function=moe_mlp, **form):
    """The same by `function`."""
    leaves = {n: None if t is None else t.detach().clone().requires_grad_() for n, t in operands.items()}
    x, gate_up, down, weights, up_bias, down_bias = (leaves[n] for n in NAMES)
    out = function(x, gate_up, down, topk_ids, weights, gate_up_bias=up_bias, down_bias=down_bias, **form)
    names = [n for n in NAMES if leaves[n] is not None]
    return out, dict(zip(names, torch.autograd.grad(out, [leaves[n] for n in names], dy), strict=True))


def assert_right(topk_ids, operands, tolerance=1e-5, function=moe_mlp, **form):
    dy = torch.randn(operands["x"].shape, generator=torch.Generator().manual_seed(5)).to(operands["x"].dtype)
    found, expected = run(topk_ids, operands, dy, function, **form), truth(topk_ids, operands, dy, **form)
    for name, a, b in (("out", found[0], expected[0]), *((n, found[1][n], g) for n, g in expected[1].items())):
        assert a.shape == b.shape and a.dtype is (operands["x"] if name == "out" else operands[name]).dtype, name
        assert (a.double() - b).norm() <= tolerance * b.norm() + 1e-12, name
    return found


@pytest.mark.parametrize("biased, dropped", [(False, 0.0), (True, 0.3)], ids=["plain", "biased, dropped"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients(activation, interleaved, biased, dropped):
    ids, operands = make(biased=biased, dropped=dropped)
    assert_right(ids, operands, activation=activation, interleaved=interleaved)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)], ids=str)
def test_low_precision(dtype, tolerance):
    ids, operands = make(tokens=40, biased=True, dropped=0.2, dtype=dtype)
    assert_right(ids, operands, tolerance, activation="swiglu")


@pytest.mark.parametrize("tokens, top_k, experts", [(1, 1, 1), (1, 4, 4), (9, 1, 6)])
def test_edges(tokens, top_k, experts):
    ids, operands = make(tokens, top_k, experts, biased=True)
    assert_right(ids, operands)
    assert_right(torch.full_like(ids[:, :1], experts - 1), operands | {"topk_weights": operands["topk_weights"][:, :1]})


def test_all_dropped_and_nobody_there():
    ids, operands = make(biased=True)
    out, grads = run(torch.full_like(ids, 5), operands, torch.ones(13, 16))
    assert not out.any() and not any(g.any() for g in grads.values())
    ids, operands = make(tokens=0, biased=True)
    for dtype in (torch.float32, torch.float64):
        out, grads = run(ids, {n: t.to(dtype) for n, t in operands.items()}, torch.ones(0, 16, dtype=dtype))
        assert out.shape == (0, 16) and not any(g.any() for g in grads.values())
        assert grads["gate_up"].shape == (5, 16, 16)


def test_equal_inputs_give_equal_bits():
    ids, operands = make(tokens=50, biased=True, dropped=0.1, dtype=torch.bfloat16)
    dy = torch.randn(50, 16).to(torch.bfloat16)
    first, second = run(ids, operands, dy), run(ids, operands, dy)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


def test_only_what_is_needed_is_computed():
    ids, operands = make(biased=True)
    x = operands["x"].requires_grad_()
    out = moe_mlp(x, operands["gate_up"], operands["down"], ids, operands["topk_weights"])
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape  # and an expanded gradient
    with torch.no_grad():
        assert not moe_mlp(x, operands["gate_up"], operands["down"], ids, operands["topk_weights"]).requires_grad


def test_what_is_kept_is_x_the_pre_activation_and_the_routing():
    ids, operands = make(tokens=64, biased=True)
    kept = []
    leaves = {n: t.requires_grad_() for n, t in operands.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        moe_mlp(
            *(leaves[n] for n in NAMES[:3]),
            ids,
            leaves["topk_weights"],
            gate_up_bias=leaves["gate_up_bias"],
            down_bias=leaves["down_bias"],
        )
    given = {t.data_ptr() for t in (*leaves.values(), ids)}
    new = [t for t in kept if t.data_ptr() not in given]
    slots = ids.numel()
    assert sorted(t.numel() * t.element_size() for t in new) == sorted(
        [slots * 16 * 4, 5 * 4, slots * 4, slots * 4, slots * 4]
    )


def test_weights_of_any_floating_dtype_and_bigger_ids():
    ids, operands = make()
    args = [operands[n] for n in NAMES[:3]]
    weights = operands["topk_weights"].to(torch.bfloat16)
    expected = moe_mlp(*args, ids, weights.float())
    assert torch.equal(moe_mlp(*args, ids.long(), weights), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype):
    ids, operands = make(biased=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = run(ids, {n: t.to(dtype) for n, t in operands.items()}, torch.ones(13, 16, dtype=torch.bfloat16))
    assert out.dtype is torch.bfloat16 and grads["gate_up"].dtype is dtype


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    ids, operands = make(biased=True, dropped=0.2)

    def again(*args, **kwargs):
        return checkpoint(moe_mlp, *args, **kwargs, use_reentrant=False)

    dy = torch.randn(13, 16)
    first, second = run(ids, operands, dy), run(ids, operands, dy, again)
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


def test_operators():
    ids, operands = make(biased=True)  # nothing dropped: rows past the end are whatever was there
    leaves = [operands[n].requires_grad_() for n in NAMES]
    torch.library.opcheck(torch.ops.expertile.moe_mlp, (*leaves, ids, "geglu", True, True, False))
    arguments = (*(t.detach() for t in leaves[:4]), None, None, ids, "geglu", True, False, True)
    torch.library.opcheck(torch.ops.expertile.moe_mlp, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_weights_stored_by_columns_are_too(compiled):
    ids, operands = make(biased=True)
    run = torch.compile(moe_mlp, fullgraph=True, backend="aot_eager") if compiled else moe_mlp
    stored = {"gate_up": operands["gate_up"].mT.contiguous().mT, "down": operands["down"].mT.contiguous().mT}
    assert_right(ids, operands | stored, function=run)
    leaves = [w.requires_grad_() for w in stored.values()]
    x, _, _, weights, *biases = operands.values()
    out = run(x, *leaves, ids, weights, gate_up_bias=biases[0], down_bias=biases[1])
    for grad, leaf in zip(torch.autograd.grad(out.square().sum(), leaves), leaves, strict=True):
        assert grad.stride() == leaf.stride()


def test_compiles_whole():
    compiled = torch.compile(moe_mlp, fullgraph=True, dynamic=True)
    for tokens in (6, 11):
        ids, operands = make(tokens, biased=True)
        assert_right(ids, operands, function=compiled)


@pytest.mark.parametrize("format", ["fp8", "mxfp4_fp8"])
@pytest.mark.parametrize("activation, interleaved", [("swiglu", True), ("gpt_oss", False), ("gpt_oss", True)])
def test_fp8(activation, interleaved, format, monkeypatch):
    """Close to the MLP of the dequantised weights, and its gradients exactly those of `moe_mlp` on them."""
    torch._dynamo.reset()  # of what it compiled again torch lets no graph be walked twice
    monkeypatch.setattr("expertile.ops.weight_only_mm.api._RANGE_BYTES", 2)
    ids, operands = make(24, hidden=256, inner=160, biased=True, dropped=0.1)
    blocks = {n: quantize(operands[n], format) for n in ("gate_up", "down")}
    operands |= {n: b.dequantize(torch.float32) for n, b in blocks.items()}
    dy = torch.randn(24, 256)
    expected, grads = truth(ids, operands, dy, activation=activation, interleaved=interleaved)

    def fp8(x, _, __, ids, weights, **kwargs):
        return moe_mlp(x, blocks["gate_up"], blocks["down"], ids, weights, **kwargs)

    for function in (fp8, torch.compile(fp8, fullgraph=True, backend="aot_eager")):
        leaves = {n: operands[n].clone().requires_grad_() for n in NAMES}
        out = function(
            leaves["x"],
            None,
            None,
            ids,
            leaves["topk_weights"],
            gate_up_bias=leaves["gate_up_bias"],
            down_bias=leaves["down_bias"],
            activation=activation,
            interleaved=interleaved,
        )
        assert (out.double() - expected).norm() < 0.05 * expected.norm()
        names = ("x", "topk_weights", "gate_up_bias", "down_bias")
        inputs = [leaves[n] for n in names]
        # The second walk needs what the first one left: pre is overwritten by the last alone.
        for walk in (torch.autograd.grad(out, inputs, dy, retain_graph=True), torch.autograd.grad(out, inputs, dy)):
            for name, grad in zip(names, walk, strict=True):
                # The gradients are taken at the pre-activation that FP8 gave.
                assert (grad.double() - grads[name]).norm() < 0.06 * grads[name].norm(), name


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
@pytest.mark.parametrize("format", ["fp8", "mxfp4_fp8"])
def test_fp8_rounds_activations_of_both_products_and_nothing_else(format, activation):
    """One expert for all: x and act in e4m3, a scale for each 128 or, beside 4 bits, for each row (of what is not made
    and rounded by one kernel); the products of these exact."""
    _, operands = make(9, experts=1, hidden=256, inner=160)
    x, up, down = operands["x"], *(quantize(operands[n], format) for n in ("gate_up", "down"))
    out = moe_mlp(x, up, down, torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1), activation=activation)
    first, second = (w.dequantize(torch.float32)[0].t() for w in (up, down))
    of_x = quantize_activations if format == "fp8" else quantize_per_row
    of_act = quantize_activations if activation == "swiglu" else of_x
    act = gated(of_x(x).dequantize() @ first, activation, False)
    expected = of_act(act).dequantize() @ second
    assert (out - expected).norm() < 2e-3 * expected.norm()
    assert (gated(x @ first, activation, False) @ second - expected).norm() > 1e-2 * expected.norm()


@pytest.mark.parametrize("activation, interleaved", [("swiglu", False), ("gpt_oss", True)])
def test_int4(activation, interleaved):
    ids, operands = make(24, hidden=128, inner=64, biased=True, dropped=0.1, dtype=torch.bfloat16)
    int4 = {n: Int4Weight.quantize(operands[n], 64) for n in ("gate_up", "down")}
    form = {"activation": activation, "interleaved": interleaved}
    exact = {n: t.double() for n, t in (operands | {n: w.dequantize() for n, w in int4.items()}).items()}
    expected = naive(ids, exact, **form)
    out = moe_mlp(**operands | int4, topk_ids=ids, **form)
    assert (out.double() - expected).norm() < 1.5e-2 * expected.norm() and out.dtype is torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_int4_under_the_other_autocast(adapted, compiled):
    """Products are in the dtype of the scales, the result in autocast's."""
    ids, operands = make(24, hidden=128, inner=64, biased=True, dtype=torch.float16)
    operands |= {n: Int4Weight.quantize(operands[n], 64) for n in ("gate_up", "down")}
    operands["x"].requires_grad_()
    pair = (torch.randn(5 * 4, 128) / 128**0.5, torch.randn(128, 4 * 5))
    lora = Lora(gate_up=Adapter(*pair, 0.25)) if adapted else None
    wanted = moe_mlp(**operands, topk_ids=ids, lora=lora)
    with torch.autocast("cpu", torch.bfloat16):
        out = (torch.compile(moe_mlp, fullgraph=True) if compiled else moe_mlp)(**operands, topk_ids=ids, lora=lora)
    assert torch.equal(out, wanted.bfloat16())
    grads = [torch.autograd.grad(y.float().sum(), operands["x"])[0] for y in (out, wanted)]
    torch.testing.assert_close(*grads)


def quantised(operands, format):
    make = Mxfp4Weight.quantize if format == "mxfp4" else partial(Int4Weight.quantize, group_size=32)
    return {n: make(operands[n]) for n in ("gate_up", "down")}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
@pytest.mark.parametrize("activation, interleaved", [("swiglu", False), ("gpt_oss", True)])
def test_four_bit_weights(activation, interleaved, format, compiled, monkeypatch):
    """The result, and the gradients of x, routing weights and biases, the weights dequantised in several ranges."""
    monkeypatch.setattr("expertile.ops.weight_only_mm.api._RANGE_BYTES", 2)
    ids, operands = make(24, hidden=192, inner=160 if format == "mxfp4" else 64, biased=True, dropped=0.1)
    operands = {n: t.bfloat16() if n != "topk_weights" else t for n, t in operands.items()}
    weights, form = quantised(operands, format), {"activation": activation, "interleaved": interleaved}
    names = ("x", "topk_weights", "gate_up_bias", "down_bias")

    def leaves(of, dtype=None):
        return {n: of[n].detach().to(dtype or of[n].dtype).requires_grad_() for n in names}

    def call(ids, x, topk_weights, gate_up_bias, down_bias):
        return moe_mlp(x, *weights.values(), ids, topk_weights, gate_up_bias=gate_up_bias, down_bias=down_bias, **form)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    dense = {n: w.dequantize(torch.float64) for n, w in weights.items()}
    ours, exact = leaves(operands), leaves(operands, torch.float64)
    expected = naive(ids, operands | dense | exact, **form)
    out = run(ids, **ours)
    assert (out.double() - expected).norm() < 1.5e-2 * expected.norm() and out.dtype is torch.bfloat16
    with torch.no_grad():
        assert torch.equal(run(ids, **ours), out)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = torch.autograd.grad(out, [ours[n] for n in names], grad)
    want = torch.autograd.grad(expected, [exact[n] for n in names], grad.double())
    for name, g, w in zip(names, got, want, strict=True):
        assert (g.double() - w).norm() < 3e-2 * w.norm(), name
        assert g.dtype is ours[name].dtype


def test_few_tokens_with_four_bit_weights():
    ids, operands = make(1, hidden=64, inner=32, dtype=torch.bfloat16)
    weights = quantised(operands, "mxfp4")
    exact = {
        n: t.double() for n, t in (operands | {n: w.dequantize() for n, w in weights.items()}).items() if t is not None
    }
    out = moe_mlp(**operands | weights, topk_ids=ids)
    expected = naive(ids, {**dict.fromkeys(operands), **exact})
    assert (out.double() - expected).norm() < 1.5e-2 * expected.norm()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=torch.zeros(13, 4, 4)), r"x: expected \[T, H\], .* got \[13, 4, 4\]"),
        (dict(x=torch.zeros(13, 16, dtype=torch.int32)), "x: .* got .* torch.int32"),
        (dict(gate_up=[1]), r"gate_up, down: expected two of one class \(Tensor, Fp8Blocks, .* got list and Tensor"),
        (dict(gate_up=torch.zeros(5, 16, 15)), r"gate_up: expected shape \[E, 2I, 16\] for x \[13, 16\]"),
        (dict(gate_up=torch.zeros(5, 15, 16)), r"gate_up: expected shape \[E, 2I, 16\]"),
        (dict(down=torch.zeros(5, 16, 9)), r"down: expected shape \[5, 16, 8\], got \[5, 16, 9\]"),
        (dict(down=torch.zeros(5, 16, 8, dtype=torch.float16)), "down: expected .* torch.float32 on cpu, got .*16"),
        (dict(gate_up_bias=torch.zeros(5, 8)), r"gate_up_bias: expected \[5, 16\] torch.float32"),
        (dict(down_bias=torch.zeros(4, 16)), r"down_bias: expected \[5, 16\]"),
        (dict(topk_ids=torch.zeros(12, 2, dtype=torch.int32)), r"topk_ids: expected \[13, k\] .* got \[12, 2\]"),
        (dict(topk_weights=torch.zeros(13, 3)), r"topk_weights: expected shape \[13, 2\], .* got \[13, 3\]"),
        (dict(activation="relu"), "activation: expected one of .*, got 'relu'"),
        (dict(topk_ids=torch.full((13, 2), 6)), "topk_ids: expected -1 … 5 .* got 6"),
        (dict(topk_ids=torch.full((13, 2), -2)), "topk_ids: expected -1 … 5 .* got -2"),
    ],
)
def test_errors(change, message):
    ids, operands = make()
    with pytest.raises(ValueError, match=message):
        moe_mlp(**{**operands, "topk_ids": ids, **change})


def test_both_weights_round_activations_or_neither():
    ids, operands = make(hidden=64, inner=32, dtype=torch.bfloat16)
    weights = quantised(operands, "mxfp4")
    with pytest.raises(ValueError, match="expected two of one class .*, got Mxfp4Weight and Mxfp4Fp8Weight"):
        moe_mlp(**operands | weights | {"down": Mxfp4Fp8Weight.of(weights["down"])}, topk_ids=ids)
