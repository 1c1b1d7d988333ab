"""The MoE module: values and gradients against the formula, the habits of a module, FSDP2, errors."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from expertile.formats.weight_only import quantize
from expertile.moe.experts import moe_mlp
from expertile.moe.layer import MoE
from expertile.moe.losses import load_balancing_loss, z_loss
from expertile.moe.router import RouterConfig
from expertile.moe.statistics import tokens_per_expert
from tests.moe.test_experts import gated
from tests.moe.test_experts import naive as naive_experts
from tests.moe.test_router import naive as naive_route

KINDS = {
    "qwen3": dict(),
    "deepseek-v3": dict(
        score="sigmoid", num_groups=4, top_groups=2, scale=2.5, shared_intermediate_size=12, router_dtype=torch.float32
    ),
    "gpt-oss": dict(
        activation="gpt_oss", interleaved=True, bias=True, router_bias=True, order="topk_then_softmax", normalize=False
    ),
}


def make(kind="qwen3", **more):
    torch.manual_seed(0)
    return MoE(16, 8, 8, 2, **{**KINDS[kind], **more})


def naive(layer, x):
    """The formula, on whatever dtype x has."""
    p = {n: t.to(x.dtype) for n, t in layer.named_parameters()}
    tokens = x.reshape(-1, x.shape[-1])
    ids, weights = naive_route(F.linear(tokens, p["router"], p.get("router_bias")), layer.config, layer.correction_bias)
    operands = {n: p.get(n) for n in ("gate_up", "down", "gate_up_bias", "down_bias")}
    out = naive_experts(ids, {"x": tokens, "topk_weights": weights, **operands}, layer.activation, layer.interleaved)
    if "shared_down" in p:
        pre = tokens @ p["shared_gate_up"].t()
        out = out + gated(pre, layer.activation, layer.interleaved) @ p["shared_down"].t()
    return out.view(x.shape)


def gradients(layer, out, dy):
    return dict(
        zip((n for n, _ in layer.named_parameters()), torch.autograd.grad(out, [*layer.parameters()], dy), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_formula(kind):
    layer = make(kind)
    if layer.correction_bias is not None:
        layer.correction_bias.normal_(std=0.1)
    x, dy = torch.randn(3, 7, 16), torch.randn(3, 7, 16)
    out = layer(x)
    wide = naive(layer, x.double())
    torch.testing.assert_close(out.double(), wide, rtol=1e-4, atol=1e-5)
    expected = gradients(layer, wide, dy.double())
    for name, grad in gradients(layer, out, dy).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_losses_train_the_router():
    layer = make()
    x = torch.randn(40, 16)
    out, routing = layer(x, return_routing=True)
    loss = load_balancing_loss(routing.scores, routing.topk_ids, 8) + z_loss(layer.logits(x))
    grads = torch.autograd.grad(loss, [layer.router, layer.gate_up], allow_unused=True)
    assert grads[0].abs().sum() > 0 and grads[1] is None and out.shape == x.shape


def test_habits_of_a_module():
    layer = make("deepseek-v3", dtype=torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert "num_experts=8, top_k=2, activation=swiglu, score=sigmoid" in repr(layer) and "groups=2 of 4" in repr(layer)
    assert layer.state_dict().keys() == {
        "router",
        "gate_up",
        "down",
        "shared_gate_up",
        "shared_down",
        "correction_bias",
    }
    empty = make("deepseek-v3", dtype=torch.bfloat16, device="meta")
    assert empty.router.is_meta and empty.correction_bias.is_meta
    other = empty.to_empty(device="cpu")
    other.reset_parameters()
    assert not other.correction_bias.any() and other.gate_up.abs().max() <= 0.25
    other.load_state_dict(layer.state_dict())
    x = torch.randn(9, 16).to(torch.bfloat16)
    assert torch.equal(layer(x), other(x)) and torch.equal(layer(x), layer(x))
    adapted = make("deepseek-v3", dtype=torch.bfloat16, device="meta").add_lora(2).to_empty(device="cpu")
    adapted.reset_parameters()
    assert not adapted.down_lora_b.any() and 0 < adapted.down_lora_a.abs().max() <= adapted.down_lora_a.shape[1] ** -0.5
    assert layer.float()(x.float()).dtype is torch.float32
    assert layer(x.float()[:0]).shape == (0, 16) and layer(x.float()[0]).shape == (16,)


def test_the_correction_moves_towards_idle_experts():
    layer = make("deepseek-v3")
    x = torch.randn(200, 16) + 1.0

    def spread():
        counts = tokens_per_expert(layer(x, return_routing=True)[1].topk_ids, 8)
        return counts, float(counts.float().std())

    before = spread()[1]
    for _ in range(60):
        layer.update_correction_bias(spread()[0], rate=0.01)
    assert spread()[1] < before / 2
    with pytest.raises(ValueError, match="correction_bias: expected a layer with sigmoid scores"):
        make().update_correction_bias(torch.ones(8))


def test_the_correction_stays_float32():
    layer = make("deepseek-v3")
    layer.correction_bias.copy_(0.5 + torch.arange(8) * 1e-3)
    kept = layer.correction_bias.clone()
    for cast in (layer.bfloat16, lambda: layer.to(torch.float16), lambda: torch.nn.Sequential(layer).half()):
        cast()
        assert layer.gate_up.dtype is not torch.float32
        assert layer.correction_bias.dtype is torch.float32 and torch.equal(layer.correction_bias, kept)
    assert layer.to("meta", torch.bfloat16).correction_bias.is_meta
    layer = layer.to_empty(device="cpu").bfloat16()
    layer.load_state_dict({n: t.bfloat16() for n, t in layer.state_dict().items()}, assign=True)
    layer.correction_bias.fill_(1.0)
    counts = torch.tensor([1.0, 3.0] * 4)
    for _ in range(100):
        layer.update_correction_bias(counts)
    torch.testing.assert_close(layer.correction_bias, 1.0 + torch.tensor([0.1, -0.1] * 4))


def test_dtypes_that_differ():
    x = torch.randn(9, 16)
    half = make(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x: expected torch.bfloat16, the dtype of gate_up, got torch.float32"):
        half(x)
    with pytest.raises(ValueError, match="x: expected torch.float32, the dtype of gate_up, got torch.bfloat16"):
        make()(x.bfloat16())
    half.router = torch.nn.Parameter(half.router.float())
    with pytest.raises(ValueError, match="router: expected torch.bfloat16, x's dtype, or a .*, got torch.float32"):
        half(x.bfloat16())
    exact = F.linear(x.bfloat16().float(), half.router)
    half.router_dtype = torch.float32
    assert half(x.bfloat16()).dtype is torch.bfloat16 and torch.equal(half.logits(x.bfloat16()), exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(half.logits(x.bfloat16()), exact), "router_dtype holds under autocast"
        assert half(x).dtype is torch.bfloat16
        half.router_dtype = None
        assert half.logits(x).dtype is torch.bfloat16


def test_compiles_whole_and_checkpoints():
    from torch.utils.checkpoint import checkpoint

    layer = make("gpt-oss", capacity_factor=1.0)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        x, dy = torch.randn(tokens, 16), torch.randn(tokens, 16)
        expected = gradients(layer, layer(x), dy)
        for out in (compiled(x), checkpoint(layer, x, use_reentrant=False)):
            torch.testing.assert_close(gradients(layer, out, dy), expected)


def test_fsdp2():
    """Sharded, gathered for the pass, gradients reduced: the same values as before."""
    plain, sharded = make(), make()
    x, dy = torch.randn(9, 16), torch.randn(9, 16)
    expected = plain(x)
    expected.backward(dy)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        out = sharded(x)
        out.backward(dy)
        assert torch.equal(out, expected)
        for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(p, torch.distributed.tensor.DTensor), name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(top_k=9), ValueError, "top_k: expected 1 … 8, the experts there are, got 9"),
        (dict(hidden_size=None), ValueError, "hidden_size: expected an integer of at least 1, got None"),
        (dict(intermediate_size=0), ValueError, "intermediate_size: expected an integer of at least 1, got 0"),
        (dict(shared_intermediate_size=1.5), ValueError, "shared_intermediate_size: expected an integer .*, got 1.5"),
        (dict(router_dtype=torch.int8), ValueError, "router_dtype: expected None or one of .*, got torch.int8"),
        (dict(dtype="float32"), ValueError, "dtype: expected None or one of .*, got 'float32'"),
        (dict(bias=None), ValueError, "bias: expected True or False, got None"),
        (dict(interleaved="yes"), ValueError, "interleaved: expected True or False, got 'yes'"),
        (dict(activation="gelu"), ValueError, "activation: expected one of .*, got 'gelu'"),
        (dict(temperature=2), TypeError, "temperature"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        MoE(**{"hidden_size": 16, "intermediate_size": 8, "num_experts": 8, "top_k": 2, **change})


@pytest.mark.parametrize(
    "counts, rate, message",
    [
        (None, 1e-3, r"counts: expected \[8\] on cpu, got NoneType"),
        (torch.tensor(3.0), 1e-3, r"counts: expected \[8\] on cpu, got \[\] torch.float32"),
        (torch.ones(2, 8), 1e-3, r"counts: expected \[8\] on cpu, got \[2, 8\] torch.float32"),
        (torch.ones(8, device="meta"), 1e-3, r"counts: expected \[8\] on cpu, got .* on meta"),
        (torch.ones(8), None, "rate: expected a finite number, got None"),
        (torch.ones(8), math.nan, "rate: expected a finite number, got nan"),
    ],
)
def test_what_moves_no_correction_bias(counts, rate, message):
    layer = MoE(16, 8, 8, 2, score="sigmoid")
    with pytest.raises(ValueError, match=message):
        layer.update_correction_bias(counts, rate)
    assert (layer.correction_bias == 0).all()


def test_wrong_input():
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 16\], got \[3, 8\]"):
        make()(torch.zeros(3, 8))
    assert make().config == RouterConfig(8, 2)


@pytest.mark.parametrize("more", [{}, {"router_dtype": torch.float32}], ids=["", "router_dtype"])
@pytest.mark.parametrize("shape", [(2, 3, 16), (0, 3, 16), (16,)], ids=str)
def test_logits_of_any_shape(shape, more):
    layer, x = make(batch_invariant=True, router_bias=True, **more), torch.randn(shape)
    logits = layer.logits(x)
    assert logits.shape == (*shape[:-1], 8)
    torch.testing.assert_close(logits, F.linear(x, layer.router, layer.router_bias))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_fp8", "int4", "fp8"])
def test_quantised_experts(format):
    """The layer's routing with moe_mlp of the quantised weights; its state comes back; all else keeps its gradients."""
    torch.manual_seed(3)
    made = dict(activation="gpt_oss", interleaved=True, bias=True, router_bias=True, dtype=torch.bfloat16)
    layer, other = (MoE(128, 64, 8, 2, **made) for _ in range(2))
    up, down = quantize(layer.gate_up.detach(), format), quantize(layer.down.detach(), format)
    x = torch.randn(3, 5, 128).bfloat16()
    assert layer.quantize_experts(format) is layer
    out, routing = layer(x, return_routing=True)
    biases = dict(gate_up_bias=layer.gate_up_bias, down_bias=layer.down_bias)
    form = dict(activation="gpt_oss", interleaved=True)
    want = moe_mlp(x.view(-1, 128), up, down, routing.topk_ids, routing.topk_weights, **biases, **form)
    assert torch.equal(out, want.view(x.shape))
    other.quantize_experts(format).load_state_dict(layer.state_dict())
    assert torch.equal(other(x), out) and torch.equal(copy.deepcopy(layer)(x), out)
    empty = MoE(128, 64, 8, 2, device="meta", **made).quantize_experts(format)
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(x), out)
    assert sum(p.numel() for n, p in layer.named_parameters() if n in ("gate_up", "down")) == 0
    out.float().square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    layer.reset_parameters()
    assert torch.equal(layer.down.weight.scales, down.scales)
    with pytest.raises(ValueError, match="gate_up, down: expected weights that are not quantised"):
        layer.quantize_experts(format)
    with pytest.raises(ValueError, match="format: expected one of mxfp4, mxfp4_fp8, int4, fp8, got 'int3'"):
        MoE(128, 64, 8, 2).quantize_experts("int3")


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
def test_a_float32_layer_with_experts_in_four_bits(format):
    """16-bit x it takes with a router_dtype, and others by autocast or cast as a whole."""
    layer, x = MoE(128, 64, 4, 2, router_dtype=torch.float32).quantize_experts(format), torch.randn(3, 128)
    with pytest.raises(ValueError, match="x: expected bfloat16 or float16 beside .*Weight, got torch.float32"):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    if format == "int4":
        with pytest.raises(
            ValueError, match="gate_up: expected scales of dtype torch.float16 as x has .* torch.bfloat"
        ):
            layer(x.half())
    close = dict(rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer(x.bfloat16()), layer.bfloat16()(x.bfloat16()), **close)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_fp8", "int4"])
def test_quantised_experts_compile(format):
    layer = MoE(128, 64, 4, 2, dtype=torch.bfloat16).quantize_experts(format)
    x = torch.randn(6, 128).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_a_batch_of_gradients_at_once(name):
    layer, x = make(name), torch.randn(3, 16, requires_grad=True)
    wanted, grads = (x, layer.gate_up, layer.router), torch.randn(2, 3, 16)
    batch = torch.autograd.grad(layer(x), wanted, grads, is_grads_batched=True)
    for i, grad in enumerate(grads):
        for found, expected in zip(batch, torch.autograd.grad(layer(x), wanted, grad), strict=True):
            torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-5)
    assert not any(g.requires_grad for g in batch)
