"""Adapters of transformers' experts: the factors as PEFT lays them out, by hand and through PEFT itself."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from expertile.formats.fp8 import QuantizedBuffers
from expertile.integrations.peft import use_adapters
from expertile.integrations.transformers import experts_forward, quantize_experts
from expertile.moe.lora import Adapter, Lora
from tests.integrations.test_quantised_experts import SIZES, close
from tests.support.transformers_models import MODELS, make_model, tokens

RANK, SCALE = 4, 0.5


@pytest.fixture(autouse=True)
def larger(monkeypatch):
    """Sizes that four-bit formats take."""
    for name, (family, options) in list(MODELS.items()):
        monkeypatch.setitem(MODELS, name, (family, options | SIZES[name]))


def experts_of(model):
    return [m for m in model.modules() if all(hasattr(m, n) for n in ("has_gate", "is_transposed", "down_proj"))]


def delta(a, b, experts, transposed):
    """The sum that PEFT adds to a weight, by its own formula."""
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
    return torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", b, a)


@pytest.mark.parametrize("name", MODELS)
def test_factors_as_peft_lays_them_out(name):
    torch.manual_seed(0)
    experts = experts_of(make_model(name))[0]
    for parameter in experts.parameters():
        parameter.requires_grad_(False)
    count, adapters = experts.down_proj.shape[0], {}
    for weight in ("gate_up_proj", "down_proj"):
        shape = getattr(experts, weight).shape
        columns, out = shape[1:] if experts.is_transposed else reversed(shape[1:])
        a, b = torch.randn(count * RANK, columns) / columns**0.5, torch.randn(out, RANK * count) / RANK**0.5
        adapters[weight] = Adapter(a.requires_grad_(), b.requires_grad_(), SCALE)
    hidden = torch.randn(7, 64)
    ids, weights = torch.rand(7, count).topk(2).indices, torch.rand(7, 2)
    lora = Lora(adapters["gate_up_proj"], adapters["down_proj"])
    leaves = [x for adapter in adapters.values() for x in (adapter.a, adapter.b)]
    found = experts_forward(experts, hidden, ids, weights, lora=lora)
    grads = torch.autograd.grad(found.square().sum(), leaves)
    merged = {}
    for weight, adapter in adapters.items():
        merged[weight] = getattr(experts, weight) + SCALE * delta(adapter.a, adapter.b, count, experts.is_transposed)
    expected = torch.func.functional_call(experts, merged, (hidden, ids, weights))
    close(found, expected, 1e-5)
    for mine, true in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        close(mine, true, 1e-5)


def adapted(name, dtype=torch.float32, quantised=None):
    peft = pytest.importorskip("peft", minversion="0.17")
    torch.manual_seed(0)
    targets = ["gate_up_proj", "down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=[], target_parameters=targets)
    model = peft.get_peft_model(make_model(name).to(dtype), config)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.copy_(torch.randn(p.shape, generator=g) / 8)
    return model if quantised is None else quantize_experts(model, quantised)


@pytest.mark.parametrize("name", MODELS)
def test_through_peft(name):
    model, plain = use_adapters(adapted(name)), adapted(name)
    ids = tokens(2, 12)
    outs = [m(ids, labels=ids) for m in (model, plain)]
    for out in outs:
        out.loss.backward()
    close(outs[0].logits, outs[1].logits, 1e-4)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in n for n in trained)
    for n, p in plain.named_parameters():
        if p.requires_grad:
            close(trained[n].grad, p.grad, 1e-3)
    with model.disable_adapter(), plain.disable_adapter():
        close(model(ids).logits, plain(ids).logits, 1e-4)
    close(model.merge_and_unload()(ids).logits, outs[1].logits, 1e-4)


def test_what_is_around_a_model_saves_what_it_wants():
    class Around(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.base_model, self.set_experts_implementation = model, model.set_experts_implementation

        def save_pretrained(self):
            return "adapters"

    around = quantize_experts(Around(make_model("qwen3_moe").bfloat16()), "mxfp4")
    assert around.save_pretrained() == "adapters"
    with pytest.raises(ValueError, match="save_pretrained: expected experts in floating point"):
        around.base_model.save_pretrained("nowhere")


def test_through_peft_over_quantised_experts(tmp_path):
    model = use_adapters(adapted("qwen3_moe", torch.bfloat16, "mxfp4"))
    plain = adapted("qwen3_moe", torch.bfloat16)
    held = {n: m.weight.dequantize() for n, m in model.named_modules() if isinstance(m, QuantizedBuffers)}
    assert len(held) == 4
    with torch.no_grad():
        for n, values in held.items():
            plain.get_parameter(n).copy_(values)
    ids = tokens(2, 12)
    outs = [m(ids, labels=ids) for m in (model, plain)]
    for out in outs:
        out.loss.backward()
    close(outs[0].logits, outs[1].logits)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert all(gradients[n] is not None for n, p in plain.named_parameters() if p.requires_grad)
    for n, p in plain.named_parameters():
        if p.requires_grad:
            close(gradients[n], p.grad, 0.08)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 8 and all("lora_" in n for n in saved)
    with model.disable_adapter():
        assert not torch.equal(model(ids).logits, outs[0].logits)
    model.base_model.set_adapter([])
    with pytest.raises(ValueError, match="adapters of quantised experts: expected one active adapter"):
        model(ids)


def test_a_model_without_adapters_of_experts():
    pytest.importorskip("peft", minversion="0.17")
    with pytest.raises(ValueError, match="model: expected adapters of the gate_up_proj"):
        use_adapters(make_model("mixtral"))
