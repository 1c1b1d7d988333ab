"""Experts of checkpoints in every format, one weight after the other, against what was stored."""

from collections.abc import Mapping
from weakref import finalize

import pytest
import torch

from expertile.formats.checkpoint import load
from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4 import Int4Weight
from expertile.formats.int4.checkpoint import FORMATS, int4_tensors, load_int4, save_int4
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.formats.weight_only import quantize

LAYERS, EXPERTS, N, K = 3, 4, 256, 128
PARTS = ("gate_proj", "up_proj")


def names(layer):
    return [[f"layers.{layer}.experts.{e}.{part}" for part in PARTS] for e in range(EXPERTS)]


WANTED = {f"layers.{layer}": names(layer) for layer in range(LAYERS)}


def weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {key: (torch.randn(EXPERTS, N, K, generator=g) / 8).bfloat16() for key in WANTED}


def stored(kind):
    """(tensors by name, the values of each weight in float32)."""
    tensors, values = {}, {}
    for key, w in weights().items():
        if kind in FORMATS:
            made = Int4Weight.quantize(w, 32, symmetric=False)
            tensors |= int4_tensors(made, WANTED[key], kind)
        else:
            made = {"mxfp4": Mxfp4Weight.quantize, "fp8": lambda w: Fp8Blocks.quantize(w, (128, 128))}.get(
                kind, lambda w: w
            )(w)
            for e, entry in enumerate(WANTED[key]):
                for i, name in enumerate(entry):
                    tensors |= {f"{name}.{n}": t for n, t in linear(made, e, i).items()}
        values[key] = made.float() if isinstance(made, torch.Tensor) else made.dequantize(torch.float32)
    return tensors, values


def linear(weight, expert, part):
    """The tensors of one of two linear layers under one another."""
    half = slice(part * N // 2, (part + 1) * N // 2)
    if isinstance(weight, Mxfp4Weight):
        return {n: t[half] for n, t in weight.to_compressed_tensors(expert).items()}
    if isinstance(weight, Fp8Blocks):
        scales = weight.scales[expert, part : part + 1]
        return {"weight": weight.values[expert, half], "weight_scale_inv": scales}
    return {"weight": weight[expert, half]}


@pytest.mark.parametrize(
    "kind, type_",
    [*((f, Int4Weight) for f in FORMATS), ("mxfp4", Mxfp4Weight), ("fp8", Fp8Blocks), ("dense", torch.Tensor)],
)
def test_weights_as_they_are_stored(kind, type_):
    tensors, values = stored(kind)
    seen, int4 = [], kind if kind == "gptq_v2" else None
    for key, weight in load(tensors, WANTED, int4=int4, progress=lambda done, of: seen.append((done, of))):
        assert isinstance(weight, type_)
        found = weight.float() if type_ is torch.Tensor else weight.dequantize(torch.float32)
        assert torch.equal(found, values[key])
    assert seen == [(1, LAYERS), (2, LAYERS), (3, LAYERS)]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_fp8", "int4", "fp8"])
def test_weights_rounded_on_the_way(format):
    tensors, values = stored("dense")
    for key, weight in load(tensors, WANTED, format=format):
        expected = quantize(values[key].bfloat16(), format)
        assert type(weight) is type(expected)
        assert torch.equal(weight.dequantize(torch.float32), expected.dequantize(torch.float32))


def test_mxfp4_in_the_order_of_fp8_activations():
    tensors, values = stored("mxfp4")
    for key, weight in load(tensors, WANTED, format="mxfp4_fp8"):
        assert isinstance(weight, Mxfp4Fp8Weight) and torch.equal(weight.dequantize(torch.float32), values[key])


class Disk(Mapping):
    """Tensors that are made anew when they are read; `most` bytes of them were alive at a time."""

    def __init__(self, tensors):
        self.tensors, self.alive, self.most = tensors, 0, 0

    def __getitem__(self, name):
        read = self.tensors[name].clone()
        self.alive += read.nbytes
        self.most = max(self.most, self.alive)
        finalize(read.untyped_storage(), self.freed, read.nbytes)
        return read

    def freed(self, nbytes):
        self.alive -= nbytes

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_no_more_is_read_than_one_weight():
    tensors, _ = stored("mxfp4")
    disk = Disk(tensors)
    assert len(dict(load(disk, WANTED))) == LAYERS
    layer = sum(t.nbytes for n, t in tensors.items() if n.startswith("layers.0."))
    assert 0 < disk.most <= layer < sum(t.nbytes for t in tensors.values()) / 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda folder: dict(load(None, WANTED)), "source: expected tensors by name, .*, got NoneType"),
        (lambda folder: dict(load(folder / "text", WANTED)), "source: expected a safetensors file, got .*text: "),
        (lambda folder: dict(load(folder, WANTED)), "source: expected an object with a weight_map in .*index.json"),
        (lambda folder: dict(load({}, None)), "weights: expected the names of layers by a key, got NoneType"),
        (lambda folder: dict(load({}, {"a": "layers.0"})), "names: expected a list .*, got 'layers.0'"),
        (lambda folder: load_int4({}, None), "names: expected a list .*, got None"),
        (
            lambda folder: save_int4(folder / "x", torch.zeros(1), ["a"], "gptq"),
            "weight: expected an Int4Weight, got Ten",
        ),
        (lambda folder: Mxfp4Weight.from_compressed_tensors(None), "tensors: expected tensors by name, got NoneType"),
    ],
)
def test_what_is_no_checkpoint_is_named(call, message, tmp_path):
    (tmp_path / "text").write_text("these are no tensors")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_errors():
    tensors, _ = stored("mxfp4")
    with pytest.raises(ValueError, match=r"layers.0.experts.0.* expected weights in int4 or floating point, got mxfp4"):
        dict(load(tensors, WANTED, format="int4"))
    name = "layers.1.experts.2.up_proj"
    with pytest.raises(ValueError, match=f"{name}: weight_packed: expected a tensor of that name"):
        dict(load({n: t for n, t in tensors.items() if n != f"{name}.weight_packed"}, WANTED))
    mixed = {n: t for n, t in tensors.items() if not n.startswith(f"{name}.")} | {
        f"{name}.weight": torch.zeros(N // 2, K)
    }
    with pytest.raises(ValueError, match="expected one format, got Mxfp4Weight, Tensor"):
        dict(load(mixed, WANTED))
    with pytest.raises(ValueError, match="experts.0.gate_proj: expected weight .*, weight_packed .* got no tensor"):
        dict(load({}, WANTED))
    for dtype in (torch.int8, torch.float8_e5m2):  # scaled by what nobody here reads
        with pytest.raises(ValueError, match=rf"{name}.weight: expected floating point in 16 bits or more.* {dtype}"):
            dict(load(mixed | {f"{name}.weight": torch.zeros(N // 2, K).to(dtype)}, WANTED))
    fp8, _ = stored("fp8")
    with pytest.raises(ValueError, match=r"gate_proj.weight_scale_inv: expected \[1, 1\], a scale for each"):
        dict(load({n: t for n, t in fp8.items() if not n.endswith("scale_inv")}, WANTED))
