import json

import pytest
import torch

from expertile.formats.int4 import Int4Weight
from expertile.formats.int4.checkpoint import FORMATS, int4_tensors, load_int4, save_int4
from tests.formats.int4.layers import awq, compressed, dense, gptq, random_layer

NAMES = [f"model.layers.0.mlp.experts.{e}.down_proj" for e in range(3)]
GATE_UP = [(f"experts.{e}.gate_proj", f"experts.{e}.up_proj") for e in range(2)]


def checkpoint(build, names, **options):
    tensors, layers = {}, {}
    for i, name in enumerate(names):
        layers[name] = random_layer(16, 128, 64, seed=i, low=1)
        tensors |= {f"{name}.{field}": x for field, x in build(*layers[name], **options).items()}
    return tensors, layers


@pytest.mark.parametrize("build, format", [(gptq, "gptq"), (awq, "awq"), (compressed, "compressed-tensors")])
def test_formats_are_told_apart(build, format):
    tensors, layers = checkpoint(build, NAMES)
    want = torch.stack([dense(*layers[name]) for name in NAMES])
    for given in (None, format):
        assert torch.equal(load_int4(tensors, NAMES, format=given).dequantize(torch.float32), want)


def test_gptq_v2_has_to_be_named():
    tensors, layers = checkpoint(gptq, NAMES, version=2)
    want = torch.stack([dense(*layers[name]) for name in NAMES])
    assert torch.equal(load_int4(tensors, NAMES, format="gptq_v2").dequantize(torch.float32), want)
    assert not torch.equal(load_int4(tensors, NAMES).dequantize(torch.float32), want)


def test_gate_and_up_are_rows_of_one_expert():
    tensors, layers = checkpoint(compressed, [n for pair in GATE_UP for n in pair])
    w = load_int4(tensors, GATE_UP, dtype=torch.bfloat16)
    assert w.shape == (2, 32, 128) and w.dtype == torch.bfloat16
    bf16 = {name: dense(q, s.bfloat16(), z) for name, (q, s, z) in layers.items()}
    want = torch.stack([torch.cat([bf16[gate], bf16[up]]) for gate, up in GATE_UP])
    assert torch.equal(w.dequantize(torch.float32), want)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("names", [NAMES[:2], GATE_UP], ids=["one", "parts"])
def test_files_there_and_back(tmp_path, format, names):
    pytest.importorskip("safetensors")
    w = Int4Weight.quantize(torch.randn(2, 16, 256), 64, symmetric=False, dtype=torch.float16)
    w = Int4Weight.of_values(w.values(), w.scales, w.zeros.clamp(1, 15), 64)
    save_int4(tmp_path / "a.safetensors", w, names, format)
    got = load_int4(tmp_path / "a.safetensors", names, format=format)
    assert torch.equal(got.packed, w.packed) and torch.equal(got.scales, w.scales) and torch.equal(got.zeros, w.zeros)


@pytest.mark.parametrize("source", ["list", "folder", "index"])
def test_several_files(tmp_path, source):
    pytest.importorskip("safetensors")
    w = Int4Weight.quantize(torch.randn(2, 16, 128), 64, dtype=torch.float16)
    files = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    for i, file in enumerate(files):
        one = Int4Weight(w.packed[i : i + 1], w.scales[i : i + 1], None, 64)
        save_int4(file, one, NAMES[i : i + 1], "awq")
    if source == "index":
        index = {"weight_map": {f"{NAMES[i]}.qweight": file.name for i, file in enumerate(files)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "other.safetensors").write_text("not one of the model's")
    got = load_int4(files if source == "list" else tmp_path, NAMES[:2])
    assert torch.equal(got.packed, w.packed) and got.zeros is None


def test_symmetric_beside_asymmetric_experts():
    symmetric = awq(*random_layer(16, 128, 64, low=8, high=8))
    other = awq(*random_layer(16, 128, 64))
    tensors = {f"{n}.{f}": x for n, layer in zip(NAMES[:2], (symmetric, other), strict=True) for f, x in layer.items()}
    w = load_int4(tensors, NAMES[:2])
    assert (w.zeros[0] == 8).all() and not (w.zeros[1] == 8).all()


def test_errors_name_the_layer(tmp_path):
    tensors, _ = checkpoint(awq, NAMES)
    with pytest.raises(ValueError, match="elsewhere: expected weight_packed .* got no tensor of that name"):
        load_int4(tensors, ["elsewhere"])
    tensors[f"{NAMES[1]}.scales"] = tensors[f"{NAMES[1]}.scales"][:, :7]
    with pytest.raises(ValueError, match="experts.1.down_proj: scales: expected shape"):
        load_int4(tensors, NAMES, format="awq")
    with pytest.raises(
        ValueError, match="format: expected one of gptq, gptq_v2, awq, compressed-tensors, got 'marlin'"
    ):
        load_int4(tensors, NAMES, format="marlin")
    w = Int4Weight.quantize(torch.randn(2, 16, 128))
    with pytest.raises(ValueError, match="names: expected 2, one for each expert, got 3"):
        int4_tensors(w, NAMES, "awq")
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match="source: expected a folder with safetensors files"):
        load_int4(tmp_path, NAMES)
