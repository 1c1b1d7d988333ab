import copy
import io
import math
import pickle

import pytest
import torch

from expertile.formats.fp8 import E4M3_MAX, Fp8Blocks, QuantizedBuffers, aligned_offs
from expertile.formats.int4 import Int4Weight
from expertile.moe import moe_mlp
from expertile.ragged import offs_from_sizes

BLOCKS = [(1, 128), (128, 128), (1, 32)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(3, 256), (130, 200), (2, 129, 131), (1, 1)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_round_trip(block, shape, power_of_two):
    x = normal(*shape) * torch.exp2(normal(*shape[:-1], 1) * 8)
    q = Fp8Blocks.quantize(x, block, power_of_two)
    assert q.values.shape == x.shape and q.values.is_contiguous() and q.scales.dtype is torch.float32
    assert q.scales.shape == (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))
    y = q.dequantize()
    assert y.shape == x.shape
    scale = q.scales.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    scale = scale.repeat_interleave(block[1], -1)[..., : shape[-1]]
    # half a step of 3 mantissa bits; below 2^-6 the steps stay as they are there
    assert bool(((y - x).abs() <= 2.0**-4 * torch.maximum(x.abs(), 2.0**-6 * scale) * 1.0001).all())
    assert (q.values.float().abs() <= E4M3_MAX).all()


@pytest.mark.parametrize("shape", [(2, 256, 128), (130, 200)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantised_once(shape, dtype):
    """Scales that 16 bits do not hold."""
    q = Fp8Blocks.quantize(normal(*shape) * 1e-5, (128, 128))
    assert torch.equal(q.dequantize(dtype), q.dequantize().to(dtype))


def test_error_of_normal_data():
    x = normal(512, 1024)
    for block in ((1, 128), (128, 128)):
        q = Fp8Blocks.quantize(x, block)
        error = ((q.dequantize() - x).norm() / x.norm()).item()
        assert 0.024 < error < 0.028, error
        assert (q.values.float().abs() == E4M3_MAX).any(-1).all() or block != (1, 128)


def test_powers_of_two():
    x = normal(64, 512) * torch.exp2(normal(64, 1) * 6)
    exact, rounded = (Fp8Blocks.quantize(x, power_of_two=p).scales for p in (False, True))
    assert (torch.frexp(rounded)[0] == 0.5).all()
    assert ((rounded >= exact) & (rounded < 2 * exact)).all()
    q = Fp8Blocks.quantize(torch.full((1, 128), E4M3_MAX / 8), power_of_two=True)
    assert q.scales.item() == 0.125 and (q.dequantize() == E4M3_MAX / 8).all()


def test_zeros_tiny_and_non_finite_blocks():
    x = torch.zeros(4, 128)
    x[1] = 1e-44
    x[2, 5] = float("nan")
    x[3, 7] = float("inf")
    q = Fp8Blocks.quantize(x)
    assert q.scales[0].item() == 1 and (q.dequantize()[:2].abs() <= 1e-43).all()
    assert q.scales[2].isnan().all() and q.scales[3].isinf().all()
    assert q.scales[1].item() > 0


def test_bfloat16_input_is_its_float32():
    x = normal(5, 300).bfloat16()
    one, other = Fp8Blocks.quantize(x), Fp8Blocks.quantize(x.float())
    assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    assert torch.equal(one.scales, other.scales)


def test_transposed_is_exact():
    q = Fp8Blocks.quantize(normal(2, 200, 300), (128, 128))
    t = q.transposed()
    assert t.values.is_contiguous() and t.values.shape == (2, 300, 200)
    assert torch.equal(t.dequantize(), q.dequantize().transpose(1, 2))
    assert torch.equal(t.scales, Fp8Blocks.quantize(normal(2, 200, 300).transpose(1, 2), (128, 128)).scales)
    with pytest.raises(ValueError, match=r"block: expected a square one, .*got \(1, 128\)"):
        Fp8Blocks.quantize(normal(2, 256)).transposed()


@pytest.mark.parametrize("sizes, past", [((5, 0, 128, 129), 0), ((0, 0), 3), ((300,), 7), ((128, 128), 0)])
def test_tokens(sizes, past):
    x = normal(sum(sizes) + past, 24)
    x[sum(sizes) :] = float("nan")
    offs = offs_from_sizes(sizes)
    q, ends = Fp8Blocks.quantize_tokens(x, offs)
    assert ends.dtype is torch.int32 and ends.tolist() == aligned_offs(offs).tolist()
    room = (x.shape[0] + 127 * len(sizes)) // 128 * 128
    assert q.values.shape == (24, room) and q.scales.shape == (24, room // 128) and ends[-1] <= room
    y = q.dequantize()
    end = 0
    for g, size in enumerate(sizes):
        begin = int(ends[g - 1]) if g else 0
        assert ends[g] - begin == -(-size // 128) * 128
        group = Fp8Blocks.quantize(torch.nn.functional.pad(x[end : end + size].t(), (0, -size % 128)))
        assert torch.equal(y[:, begin : ends[g]], group.dequantize())
        end += size
    assert (y[:, end if not sizes else int(ends[-1]) :] == 0).all()


WEIGHTS = {
    "fp8": lambda seed: Fp8Blocks.quantize(normal(2, 130, 128, seed=seed), (128, 128)),
    "fp8 tokens": lambda seed: Fp8Blocks.quantize(normal(5, 200, seed=seed)),
    "int4": lambda seed: Int4Weight.quantize(normal(2, 24, 128, seed=seed), 64),
    "int4 zeros": lambda seed: Int4Weight.quantize(normal(2, 24, 128, seed=seed), 32, symmetric=False),
}


def same(a, b):
    assert type(a) is type(b)
    for x, y in zip(a.__reduce__()[1], b.__reduce__()[1], strict=True):
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        else:
            assert x == y
    return True


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_are_saved_loaded_pickled_and_copied(kind):
    weight, file = WEIGHTS[kind](0), io.BytesIO()
    torch.save({"weight": weight, "step": 3}, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True)["weight"], weight)
    assert same(pickle.loads(pickle.dumps(weight)), weight)
    copied = copy.deepcopy(weight)
    assert same(copied, weight) and copied.scales.data_ptr() != weight.scales.data_ptr()
    assert weight.to("cpu") is weight and weight.to("meta").scales.is_meta


def test_a_weight_that_does_not_fit_together_is_not_loaded():
    weight = WEIGHTS["int4"](0)
    state = pickle.dumps((weight.packed, weight.scales[:, :1].contiguous(), None, 64))
    with pytest.raises(ValueError, match="scales: expected shape"):
        Int4Weight(*pickle.loads(state))
    kind, arguments = weight.__reduce__()
    with pytest.raises(ValueError, match="group_size: expected"):
        kind(*arguments[:-1], 96)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_modules_hold_weights(kind):
    weight, other = WEIGHTS[kind](0), WEIGHTS[kind](1)
    model = torch.nn.Sequential(QuantizedBuffers(weight), torch.nn.Linear(2, 2))
    for convert in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.float()):
        assert same(convert(model)[0].weight, weight)
    state = model.state_dict()
    assert all(torch.is_tensor(t) for t in state.values()) and "0.scales" in state
    model.load_state_dict(torch.nn.Sequential(QuantizedBuffers(other), torch.nn.Linear(2, 2)).state_dict())
    assert same(model[0].weight, other)
    assert same(copy.deepcopy(model)[0].weight, other)
    assert same(pickle.loads(pickle.dumps(model))[0].weight, other)  # as a process that is spawned gets it
    empty = copy.deepcopy(model).to("meta")
    assert empty[0].weight.scales.is_meta and empty[0].weight.scales.dtype is weight.scales.dtype
    empty.to_empty(device="cpu").load_state_dict(state)
    assert same(empty[0].weight, weight)
    assert repr(weight) in repr(QuantizedBuffers(weight))


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_layer_of_held_weights_computes_the_same_compiled_too(kind):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            make = (lambda w: Fp8Blocks.quantize(w, (128, 128))) if kind == "fp8" else Int4Weight.quantize
            self.up = QuantizedBuffers(make(normal(3, 256, 128, seed=1)))
            self.down = QuantizedBuffers(make(normal(3, 128, 128, seed=2)))

        def forward(self, x, ids, weights):
            return moe_mlp(x, self.up.weight, self.down.weight, ids, weights)

    layer, x = Layer(), normal(6, 128).bfloat16()
    ids, weights = torch.randint(0, 3, (6, 2)), torch.rand(6, 2)
    want = moe_mlp(x, layer.up.weight, layer.down.weight, ids, weights)
    with torch.no_grad():
        assert torch.equal(layer(x, ids, weights), want)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, ids, weights)
    assert (compiled - want).norm() <= 1e-2 * want.norm()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_reprs_are_one_short_line(kind):
    text = repr(WEIGHTS[kind](0))
    assert "\n" not in text and len(text) < 120 and "tensor(" not in text
    assert str(list(WEIGHTS[kind](0).__reduce__()[1][0].shape[:-1]))[:-1] in text and "cpu" in text
