"""transformers' models with quantised experts, rounded or as gpt-oss stores them, against their values in bfloat16."""

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

import transformers
from safetensors.torch import save_file

from expertile.formats.fp8 import Fp8Blocks, QuantizedBuffers
from expertile.formats.int4.checkpoint import int4_tensors
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.weight_only import quantize
from expertile.integrations.checkpoints import load_model
from expertile.integrations.gpt_oss import load_gpt_oss, load_gpt_oss_experts
from expertile.integrations.transformers import quantize_experts
from tests.support.transformers_models import MODELS, VOCABULARY, make_model, tokens

SIZES = {
    "qwen3_moe": dict(hidden_size=64, moe_intermediate_size=64),
    "mixtral": dict(hidden_size=64, intermediate_size=64),
    "deepseek_v3": dict(hidden_size=64, moe_intermediate_size=64),
    "gpt_oss": dict(hidden_size=64, intermediate_size=64),
}


@pytest.fixture(autouse=True)
def larger(monkeypatch):
    """Sizes that four-bit formats take."""
    for name, (family, options) in list(MODELS.items()):
        monkeypatch.setitem(MODELS, name, (family, options | SIZES[name]))


def dequantised(model, plain):
    """`plain` with the values of the quantised experts of `model`."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, QuantizedBuffers):
                parameter = plain.get_parameter(name)
                values = module.weight.dequantize()
                experts = plain.get_submodule(name.rpartition(".")[0])
                parameter.copy_(values.mT if experts.is_transposed else values)
    return plain


def close(found, expected, tolerance=0.03):
    assert (found.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_fp8", "int4", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_rounded_experts(name, format, tmp_path):
    model = quantize_experts(make_model(name).bfloat16().eval(), format)
    held = [m for m in model.modules() if isinstance(m, QuantizedBuffers)]
    assert len(held) == 4, "two layers, two weights each"
    ids, prompt = tokens(2, 12), tokens(1, 4)
    logits = model(ids).logits
    plain = dequantised(model, make_model(name).bfloat16().eval())
    plain.set_experts_implementation("eager")
    close(logits, plain(ids).logits, 0.15 if "fp8" in format else 0.03)
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    text = model.generate(prompt, **options)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "m.safetensors")
    again = quantize_experts(make_model(name, seed=1).bfloat16().eval(), format)
    from safetensors.torch import load_file

    again.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert torch.equal(again(ids).logits, logits) and torch.equal(again.generate(prompt, **options), text)


def test_training_around_frozen_experts():
    model = quantize_experts(make_model("gpt_oss").bfloat16(), "mxfp4")
    ids = tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    plain = dequantised(model, make_model("gpt_oss").bfloat16())
    plain.set_experts_implementation("eager")
    plain(ids, labels=ids).loss.backward()
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.experts.down_proj_bias"):
        close(model.get_parameter(name).grad, gradients[name], 0.08)


def checkpoint(folder):
    """A folder as gpt-oss is published, of a small model; and the model, its experts' values as they are packed."""
    plain = make_model("gpt_oss").bfloat16().eval()
    tensors = dict(plain.state_dict())
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = Mxfp4Weight.quantize(tensors.pop(name).mT)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = weight.blocks(), weight.scale_bytes()
        with torch.no_grad():
            plain.get_parameter(name).copy_(weight.dequantize().mT)
    plain.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return plain, tensors


def test_gpt_oss_as_it_is_published(tmp_path):
    plain, tensors = checkpoint(tmp_path)
    seen = []
    model = load_gpt_oss(tmp_path, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)] and not any(p.is_meta for p in model.parameters())
    weight = model.model.layers[1].mlp.experts.down_proj.weight
    stored = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(weight.blocks(), tensors[f"{stored}_blocks"])
    assert torch.equal(weight.scale_bytes(), tensors[f"{stored}_scales"])
    ids = tokens(2, 12)
    plain.set_experts_implementation("eager")
    close(model(ids).logits, plain(ids).logits)
    assert model.generate(tokens(1, 4), max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 8)
    assert int(tokens(1, 4).max()) < VOCABULARY


def test_errors(tmp_path):
    _, tensors = checkpoint(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=f"{name}_scales: expected a tensor of that name, got none"):
        load_gpt_oss_experts(make_model("gpt_oss"), {k: v for k, v in tensors.items() if k != f"{name}_scales"})
    with pytest.raises(ValueError, match=rf"{name}: scales: expected bytes below 255"):
        bad = torch.full_like(tensors[f"{name}_scales"], 255)
        load_gpt_oss_experts(make_model("gpt_oss"), tensors | {f"{name}_scales": bad})
    with pytest.raises(ValueError, match=rf"{name}: expected \[4, 128, 64\] values, got \[4, 64, 64\]"):
        cut = {f"{name}_{kind}": tensors[f"{name}_{kind}"][:, :64] for kind in ("blocks", "scales")}
        load_gpt_oss_experts(make_model("gpt_oss"), tensors | cut)
    with pytest.raises(ValueError, match="model: expected experts with gate_up_proj"):
        quantize_experts(transformers.PreTrainedModel(transformers.PretrainedConfig()), "mxfp4")
    with pytest.raises(ValueError, match="model: expected experts"):
        load_gpt_oss_experts(torch.nn.Linear(2, 2), {})
    others = torch.nn.Module()  # as Llama 4's, which lie otherwise
    others.gate_up_proj, others.down_proj = (torch.nn.Parameter(torch.empty(1, 2, 2)) for _ in range(2))
    with pytest.raises(ValueError, match="model: expected experts"):
        load_gpt_oss_experts(others, {})
    with pytest.raises(ValueError, match="model: expected a torch.nn.Module, got NoneType"):
        quantize_experts(None, "mxfp4")
    with pytest.raises(ValueError, match="format: expected one of mxfp4, mxfp4_fp8, int4, fp8, got 'nf4'"):
        quantize_experts(make_model("mixtral"), "nf4")


def test_a_loaded_model_is_what_transformers_loads(tmp_path):
    """Bit for bit: buffers, what stays in float32, and how it generates."""
    stored = make_model("deepseek_v3").bfloat16()
    for name, buffer in stored.named_buffers():
        if "correction" in name:
            buffer.normal_()
    stored.generation_config.eos_token_id = [2, 5]
    stored.save_pretrained(tmp_path)
    found = load_model(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="expertile"
    )
    kept = expected.state_dict()
    assert found.state_dict().keys() == kept.keys()
    assert all(torch.equal(t, kept[n]) and t.dtype == kept[n].dtype for n, t in found.state_dict().items())
    assert kept["model.layers.0.mlp.gate.e_score_correction_bias"].any()
    assert found.generation_config.eos_token_id == [2, 5]


def test_a_correction_bias_by_its_other_name_and_by_none(tmp_path):
    stored = make_model("deepseek_v3").bfloat16()
    tensors = dict(stored.state_dict())
    biases = [name for name in tensors if "correction" in name]
    values = {name: tensors.pop(name).float().normal_() for name in biases}
    stored.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="e_score_correction_bias: expected a tensor of that name"):
        load_model(tmp_path)
    renamed = {name.replace(".mlp.gate.", ".mlp."): t for name, t in values.items()}  # as EXAONE-MoE's and Ernie's
    save_file(tensors | renamed, tmp_path / "model.safetensors")
    found = load_model(tmp_path).state_dict()
    assert values and all(torch.equal(found[name], t) for name, t in values.items())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_stacked_experts_in_fp8(name, tmp_path):
    plain = make_model(name).eval()
    for parameter in plain.parameters():  # and not the buffers
        parameter.data = parameter.data.bfloat16()
    tensors, path = dict(plain.state_dict()), tmp_path / "model.safetensors"
    stacked = [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    rounded = {n: Fp8Blocks.quantize(tensors[n], (128, 128)) for n in stacked}
    plain.config.save_pretrained(tmp_path)
    scales = {f"{n}_scale_inv": w.scales for n, w in rounded.items()}
    save_file(tensors | {n: w.values for n, w in rounded.items()} | scales, path)
    model, ids = load_model(tmp_path), tokens(2, 12)
    for m in (model, plain):
        m.set_attn_implementation("eager")
    assert torch.equal(model(ids).logits, quantize_experts(plain, "fp8")(ids).logits)
    for wrong in (stacked[0], "model.layers.0.self_attn.q_proj.weight"):
        save_file(tensors | {wrong: tensors[wrong].to(torch.int8)}, path)
        with pytest.raises(ValueError, match=f"{wrong}: expected floating point in 16 bits or more"):
            load_model(tmp_path)


def test_a_checkpoint_without_its_head(tmp_path):
    stored = make_model("qwen3_moe").bfloat16()
    tensors = {k: v for k, v in stored.state_dict().items() if k != "lm_head.weight"}
    stored.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight: expected a tensor of that name"):
        load_model(tmp_path)
    stored.config.tie_word_embeddings = True
    stored.config.save_pretrained(tmp_path)
    tied = load_model(tmp_path)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_sizes_that_do_not_fit_leave_the_model_alone(monkeypatch):
    family, options = MODELS["qwen3_moe"]
    monkeypatch.setitem(MODELS, "qwen3_moe", (family, options | {"moe_intermediate_size": 48}))
    model, ids = make_model("qwen3_moe").bfloat16(), tokens(1, 4)
    before = model(ids).logits
    with pytest.raises(ValueError, match="multiple of 64"):
        quantize_experts(model, "int4")
    assert torch.equal(model(ids).logits, before)


def test_quantised_experts_have_no_file_of_transformers(tmp_path):
    checkpoint(tmp_path)
    for made in (quantize_experts(make_model("gpt_oss").bfloat16(), "mxfp4"), load_gpt_oss(tmp_path)):
        with pytest.raises(ValueError, match="save_pretrained: expected experts in floating point"):
            made.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def one_by_one(name, kind, folder):
    """A folder with the experts of a small model stored one linear layer each, as they are published; and the model in
    bfloat16."""
    plain = make_model(name).eval()
    for parameter in plain.parameters():  # and not the buffers
        parameter.data = parameter.data.bfloat16()
    parts = (("w1", "w3"), ("w2",)) if name == "mixtral" else (("gate_proj", "up_proj"), ("down_proj",))
    tensors = dict(plain.state_dict())
    for full in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        w, names = tensors.pop(full), parts[full.endswith("down_proj")]
        stem = full.rpartition(".")[0]
        made = w if kind == "dense" else quantize(w, "int4" if kind == "gptq_v2" else kind)
        entries = [[f"{stem}.{e}.{part}" for part in names] for e in range(w.shape[0])]
        if int4 := {"int4": "gptq", "gptq_v2": "gptq_v2"}.get(kind):
            tensors |= int4_tensors(made, entries, int4)
        for e, entry in enumerate([] if int4 else entries):
            rows = w.shape[1] // len(entry)
            for i, linear in enumerate(entry):
                half = slice(i * rows, (i + 1) * rows)
                if kind == "dense":
                    tensors[f"{linear}.weight"] = w[e, half]
                elif kind == "fp8":
                    tensors[f"{linear}.weight"] = made.values[e, half]
                    tensors[f"{linear}.weight_scale_inv"] = made.scales[e, half.start // 128 : -(-half.stop // 128)]
                else:
                    found = made.to_compressed_tensors(e)
                    tensors |= {f"{linear}.{n}": t[half] for n, t in found.items()}
    if name == "mixtral":
        tensors = {n.replace(".mlp.", ".block_sparse_moe."): t for n, t in tensors.items()}
    if kind == "gptq_v2":
        plain.config.quantization_config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": kind}
    plain.config.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return plain


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", ["dense", "mxfp4", "int4", "gptq_v2", "fp8"])
def test_experts_stored_one_by_one(name, kind, tmp_path, monkeypatch):
    family, options = MODELS[name]
    size = "intermediate_size" if name == "mixtral" else "moe_intermediate_size"
    monkeypatch.setitem(MODELS, name, (family, options | {size: 128}))
    plain, seen = one_by_one(name, kind, tmp_path), []
    model = load_model(tmp_path, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)] and not any(p.is_meta for p in model.parameters())
    assert any(isinstance(m, QuantizedBuffers) for m in model.modules()) == (kind != "dense")
    plain.set_experts_implementation("expertile")
    model.set_attn_implementation("eager")
    expected = plain if kind == "dense" else quantize_experts(plain, "int4" if kind == "gptq_v2" else kind)
    ids = tokens(2, 12)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    if kind == "dense":
        rounded = load_model(tmp_path, format="mxfp4")
        rounded.set_attn_implementation("eager")
        assert torch.equal(rounded(ids).logits, quantize_experts(plain, "mxfp4")(ids).logits)
    elif kind == "fp8":
        with pytest.raises(ValueError, match="expected weights in int4 or floating point, got fp8"):
            load_model(tmp_path, format="int4")
