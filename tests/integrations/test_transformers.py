"""transformers' models with experts_implementation="expertile" against "eager": logits, gradients, text, files."""

import copy
import sys

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from transformers.integrations.moe import use_experts_implementation

from expertile.formats.fp8 import Fp8Blocks
from expertile.integrations import transformers as integration
from expertile.moe.experts import moe_mlp
from tests.support.transformers_models import MODELS, make_model, tokens


@pytest.fixture(autouse=True, scope="module")
def registered():
    integration.register()
    integration.register()


def experts_of(model):
    return next(m for name, m in model.named_modules() if name.endswith(".experts"))


def count_calls(monkeypatch, name):
    """A list that grows with every call of `integration.name`."""
    calls, function = [], getattr(integration, name)
    monkeypatch.setattr(integration, name, lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs))
    return calls


def run(model, implementation, ids):
    """(logits, gradients by name) of the language-model loss."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape and found.dtype is expected.dtype
    assert (found.double() - expected.double()).norm() <= tolerance * expected.double().norm() + 1e-12


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name], expected[name], tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_against_eager(name, tmp_path, monkeypatch):
    model = make_model(name)
    ids = tokens(2, 12)
    logits, grads = run(model, "eager", ids)
    calls = count_calls(monkeypatch, "moe_mlp")
    found, found_grads = run(model, "expertile", ids)
    assert len(calls) == 2, "both layers' experts are fused"
    assert_close(found, logits)
    assert any("experts" in n for n in grads) and any(n.endswith(("gate.weight", "router.weight")) for n in grads)
    assert_same(found_grads, grads, 5e-5)

    prompt, options = ids[:, :4], dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    generated = model.eval().generate(prompt, **options)
    assert generated.shape == (2, 9)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation="expertile")
    calls.clear()
    assert torch.equal(again.generate(prompt, **options), generated)
    assert len(calls) == 2 * 5, "two layers, a prompt and four tokens"
    again.set_experts_implementation("eager")
    assert torch.equal(again.generate(prompt, **options), generated)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_checkpointing_changes_no_gradient(name):
    model, ids = make_model(name).train(), tokens(2, 12)
    _, grads = run(model, "expertile", ids)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same(run(model, "expertile", ids)[1], grads)
    model.gradient_checkpointing_disable()
    with torch.autograd.graph.save_on_cpu():
        assert_same(run(model, "expertile", ids)[1], grads)


class Config:
    """What `use_experts_implementation` and the classes below read."""

    def __init__(self, implementation):
        self._experts_implementation = implementation


class Slope(torch.nn.Module):
    """An activation that no kernel has, with a parameter."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.rand(()))

    def forward(self, x):
        return torch.nn.functional.softplus(self.slope * x)


class LoopExperts(torch.nn.Module):
    """Experts of any form transformers knows; `forward` is a plain loop over them, which stands for "eager"."""

    E, H, I = 5, 16, 8

    def __init__(self, config, act_fn=None, transposed=False, gated=True, biased=False, norm=False):
        super().__init__()
        self.form = transposed, gated, biased, norm
        self.num_experts = self.E
        up = "gate_up_proj" if gated else "up_proj"
        for name, rows, cols in ((up, self.I * (1 + gated), self.H), ("down_proj", self.H, self.I)):
            weight = torch.randn(self.E, rows, cols) / cols**0.5
            setattr(self, name, torch.nn.Parameter(weight.transpose(1, 2).contiguous() if transposed else weight))
            if biased:
                setattr(self, f"{name}_bias", torch.nn.Parameter(torch.randn(self.E, rows)))
        self.act_fn = act_fn or Slope()
        if norm:
            self.post_expert_norm = torch.nn.RMSNorm(self.H)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        transposed, gated, biased, norm = self.form
        up, down = (self.gate_up_proj if gated else self.up_proj), self.down_proj
        if not transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        out = torch.zeros_like(hidden_states)
        for e in range(self.E):
            row, j = (top_k_index == e).nonzero(as_tuple=True)
            pre = hidden_states[row] @ up[e]
            pre = pre + (self.gate_up_proj_bias if gated else self.up_proj_bias)[e] if biased else pre
            y = (self._apply_gate(pre) if gated else self.act_fn(pre)) @ down[e]
            y = y + self.down_proj_bias[e] if biased else y
            y = self.post_expert_norm(y) if norm else y
            out = out.index_add(0, row, y * top_k_weights[row, j, None])
        return out


def make_experts(act_fn=None, **form):
    """A LoopExperts, decorated as transformers decorates its models'."""
    attributes = dict(transposed="is_transposed", gated="has_gate", biased="has_bias", norm="has_post_expert_norm")
    options = {attributes[key]: value for key, value in form.items()}
    cls = use_experts_implementation(type("Experts", (LoopExperts,), {}), **options)
    torch.manual_seed(0)
    return cls(Config("eager"), act_fn, **form)


def routed(count, dropped=True):
    """(x, ids, weights); with `dropped` some ids are no expert's."""
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(count, LoopExperts.E + dropped, generator=g).topk(2, 1).indices
    x = torch.randn(count, LoopExperts.H, generator=g).requires_grad_()
    return x, ids, torch.rand(count, 2, generator=g).requires_grad_()


def values_and_gradients(experts, implementation, inputs):
    experts.config._experts_implementation = implementation
    x, ids, weights = inputs
    out = experts(x, ids, weights)
    wanted = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    return {"out": out, **dict(zip(wanted, torch.autograd.grad(out.square().sum(), wanted.values()), strict=True))}


FORMS = [{}, dict(transposed=True, biased=True), dict(gated=False), dict(gated=False, transposed=True, biased=True)]
if "has_post_expert_norm" in use_experts_implementation.__kwdefaults__:
    FORMS.append(dict(norm=True, biased=True))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("count", [0, 9])
def test_experts_with_a_gate_of_their_own(form, count):
    experts = make_experts(**form)
    assert integration.fused_gate(experts) is None
    inputs = routed(count)
    assert_same(values_and_gradients(experts, "expertile", inputs), values_and_gradients(experts, "eager", inputs))


def test_a_shared_parameter_is_not_reached_by_rows_without_an_expert(monkeypatch):
    """What lies past the last expert's rows is unspecified; here it is NaN."""
    gathered_mm = integration.gathered_mm

    def poisoned(x, b, rows, offs, **options):
        out = gathered_mm(x, b, rows, offs, **options)
        return torch.where(torch.arange(out.shape[0])[:, None] < offs[-1], out, float("nan"))

    monkeypatch.setattr(integration, "gathered_mm", poisoned)
    experts, inputs = make_experts(gated=False), routed(9)
    found = values_and_gradients(experts, "expertile", inputs)
    assert_same(found, values_and_gradients(experts, "eager", inputs))


@pytest.mark.parametrize(
    "activation, expected",
    [
        ("silu", "swiglu"),
        ("swish", "swiglu"),
        ("gelu_pytorch_tanh", "geglu"),
        ("relu", "reglu"),
        ("gelu", None),
        ("relu2", None),
        (torch.nn.functional.silu, "swiglu"),
        (torch.tanh, None),
    ],
)
def test_which_activations_are_fused(activation, expected):
    from transformers.activations import ACT2FN

    experts = make_experts(ACT2FN[activation] if isinstance(activation, str) else activation)
    assert integration.fused_gate(experts) == (None if expected is None else (expected, False))
    inputs = routed(9)
    assert_same(values_and_gradients(experts, "expertile", inputs), values_and_gradients(experts, "eager", inputs))


def test_a_gate_with_other_constants_is_not_fused(monkeypatch):
    model = make_model("gpt_oss")
    experts = experts_of(model)
    assert integration.fused_gate(experts) == ("gpt_oss", True)
    for module in model.modules():
        if type(module) is type(experts):
            module.limit = 0.125  # so low that it is reached
    ids = tokens(1, 8)
    logits, grads = run(model, "eager", ids)
    calls = count_calls(monkeypatch, "moe_mlp")
    found, found_grads = run(model, "expertile", ids)
    assert not calls
    assert_close(found, logits)
    assert_same(found_grads, grads, 5e-5)


def test_a_gate_put_on_one_module_is_respected():
    experts = experts_of(make_model("mixtral"))
    assert integration.fused_gate(experts) == ("swiglu", False)
    experts._apply_gate = lambda pre: pre.chunk(2, -1)[0]
    assert integration.fused_gate(experts) is None


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "own", "function"])
def test_compiled_into_the_operators_of_eager_calls(name):
    made = {"own": dict(transposed=True, biased=True), "function": dict(act_fn=torch.nn.functional.silu)}
    experts = make_experts(**made[name]) if name in made else experts_of(make_model(name))
    experts.config._experts_implementation = "expertile"
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x, ids, weights = torch.randn(6, width), torch.randint(4, (6, 2)), torch.rand(6, 2)
    called = []

    def backend(graph, _):
        called.extend(str(n.target) for n in graph.graph.nodes if "expertile" in str(n.target))
        return graph

    compiled = torch.compile(experts, backend=backend, fullgraph=True)
    assert_close(compiled(x, ids, weights), experts(x, ids, weights))
    composed = ["moe_permutation", "gathered_mm", "grouped_mm", "combine"]
    expected = composed if integration.fused_gate(experts) is None else ["moe_mlp"]
    assert called == [f"expertile.{name}.default" for name in expected]


def test_under_autocast():
    experts, (x, ids, weights) = make_experts(biased=True), routed(9)
    experts.config._experts_implementation = "expertile"
    expected = experts(x, ids, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts(x, ids, weights)
    assert out.dtype is torch.bfloat16
    assert_close(out.float(), expected, 2e-2)
    out.sum().backward()
    assert experts.down_proj.grad.dtype is torch.float32


def make_fp8_experts(**changes):
    """transformers' FP8Experts of a small Mixtral, and the weights that it holds, in float32."""
    from transformers.integrations import finegrained_fp8

    config = copy.deepcopy(make_model("mixtral").config)
    config.hidden_size, config.intermediate_size, config._experts_implementation = 128, 256, "expertile"
    cls = use_experts_implementation(
        type("FP8", (finegrained_fp8.FP8Experts,), {}), experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    experts = cls(config, block_size=changes.pop("block_size", (128, 128)), **changes)
    g, wide = torch.Generator().manual_seed(2), []
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(experts, name).shape
        w = Fp8Blocks.quantize(torch.randn(shape, generator=g) / shape[-1] ** 0.5, (128, 128))
        getattr(experts, name).data = w.values
        getattr(experts, f"{name}_scale_inv").data = w.scales
        wide.append(w.values.float() * w.scales.repeat_interleave(128, 1).repeat_interleave(128, 2))
    return experts, wide


def test_fp8_experts():
    experts, (gate_up, down) = make_fp8_experts()
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]]), torch.full((5, 2), 0.5)
    out = experts(x, ids, weights)
    expected = moe_mlp(x, gate_up, down, ids, weights)
    assert_close(out, expected, 0.08)  # activations rounded to e4m3, twice
    (found,) = torch.autograd.grad(out.sum(), x)
    assert_close(found, torch.autograd.grad(expected.sum(), x)[0], 0.08)
    compiled = torch.compile(experts, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, ids, weights), out)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"activation_scheme": "static"}, "'dynamic'.*'static'.*set_experts_implementation"),
        ({"block_size": (64, 128)}, "blocks of.*64, 128"),
    ],
)
def test_fp8_experts_that_are_refused(changes, words):
    experts, _ = make_fp8_experts(**changes)
    with pytest.raises(ValueError, match=words):
        experts(torch.randn(1, 128), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


@pytest.mark.parametrize("version", ["4.57.1", "5.6.0", "5.0.0.dev0"])
def test_an_old_transformers_is_refused(version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=f"5.7 or later.*got {version}.*pip install"):
        integration.register()


def test_a_missing_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers is not installed: pip install"):
        integration.register()
