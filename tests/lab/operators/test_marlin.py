"""Marlin as a rival, without Marlin: the order of weights, scales and biases against its repacking kernel written out
lane by lane, rows aligned to blocks, and both of its operators as the lab calls them, on stand-ins that read that
order."""

from types import SimpleNamespace

import pytest
import torch

from expertile.device import Device
from expertile.formats.int4.weight import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.lab.operators import _marlin, operators, presets
from expertile.lab.operators._plain import codes, packed, scales
from expertile.lab.race.gate import judge

CPU, H200 = torch.device("cpu"), Device.by_name("h200")
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a lane's eight values stands in nibble i


def unpacked(words, n, k):
    """The values [N, K], word after word as the kernel's threads write them."""
    words, values = words.view(-1).tolist(), torch.empty(n, k, dtype=torch.uint8)
    tiles_n = n // 64
    for tile in range(k // 16 * tiles_n):
        first_k, first_n = tile // tiles_n * 16, tile % tiles_n * 64
        for lane in range(32):
            for warp in range(4):
                word = words[128 * tile + 4 * lane + warp]
                for i, value in enumerate(NIBBLES):
                    column = first_n + 16 * warp + lane // 4 + 8 * (value // 4)
                    row = first_k + 2 * (lane % 4) + (0, 1, 8, 9)[value % 4]
                    values[column, row] = word >> 4 * i & 15
    return values


def plain_scales(moved, halves):
    """The inverse of `permuted_scales`, from the lists of columns that Marlin permutes by."""
    if len(moved) == 1:
        return plain_bias(moved)
    if halves:
        moved = moved.view(-1, 4)[:, [0, 2, 1, 3]].reshape(moved.shape)
    columns = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    return moved.view(-1, 64)[:, columns.argsort()].view(moved.shape)


def plain_bias(moved):
    columns = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    return moved.view(-1, 32)[:, columns.argsort()].view(moved.shape)


def gemm(a, out, words, bias, of_groups, *rest):
    """What the operator computes, read from its arguments."""
    workspace, ids, experts, count, weights, block, top_k, weighted, type_id, m, n, k = rest[5:17]
    assert workspace.dtype is torch.int32 and weights.dtype is torch.float32 and (m, k) == tuple(a.shape)
    out.fill_(float("nan"))
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    dequantised = {}
    for i in range(int(count) // block):
        e = int(experts[i])
        if e not in dequantised:
            int4 = type_id == _marlin.UINT4_LESS_8
            q = unpacked(words[e], n, k).int()
            scale = plain_scales(of_groups[e].view(torch.bfloat16 if int4 else torch.uint8), not int4)
            scale = scale.float() if int4 else torch.exp2(scale.float() - 127)
            values = (q - 8).float() if int4 else e2m1[q]
            dequantised[e] = values * scale.t().repeat_interleave(k // scale.shape[0], 1)
        slots = ids[i * block : (i + 1) * block].long()
        slots = slots[slots < m * top_k]
        y = a[slots // top_k].float() @ dequantised[e].t()
        if bias is not None:
            y = y + plain_bias(bias[e]).float()
        out[slots] = (y * weights.view(-1)[slots, None] if weighted else y).to(out.dtype)


def topk_softmax(weights, ids, _, logits, renormalise, bias):
    best = torch.topk(logits, ids.shape[1], 1)
    assert renormalise and bias is None
    ids.copy_(best.indices)
    weights.copy_(torch.softmax(best.values, 1))


def align(ids, experts, block, numbers, groups, count, expert_map):
    flat, filled, of_block = ids.view(-1), [], []
    for e in range(experts):
        slots = (flat == e).nonzero().view(-1).tolist()
        blocks = -(-len(slots) // block)
        filled += slots + [flat.numel()] * (blocks * block - len(slots))
        of_block += [e] * blocks
    assert len(filled) <= numbers.numel() and len(of_block) <= groups.numel() and expert_map is None
    numbers[: len(filled)], groups[: len(of_block)] = torch.tensor(filled), torch.tensor(of_block)
    count.fill_(len(filled))


@pytest.fixture
def marlin(monkeypatch):
    kernels = SimpleNamespace(
        moe_wna16_marlin_gemm=gemm,
        topk_softmax=topk_softmax,
        moe_align_block_size=align,
        moe_sum=lambda y, out: out.copy_(y.float().sum(1)),
    )
    monkeypatch.setattr(_marlin, "load", lambda files: None)
    monkeypatch.setattr(_marlin, "compiled_for", lambda w, fn: fn)
    monkeypatch.setattr(_marlin.torch, "ops", SimpleNamespace(_moe_C=kernels, expertile=torch.ops.expertile))


def small(preset, form=""):
    return next(w for w in presets()[preset]() if w.name.startswith("small") and w.name.endswith(form))


@pytest.mark.parametrize("shape", [(64, 16), (128, 48), (192, 64)])
def test_words_are_those_of_the_repacking_kernel(shape):
    values = torch.randint(0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = _marlin.repack(values)
    assert words.dtype is torch.int32 and words.shape == (shape[1] // 16, 2 * shape[0])
    assert torch.equal(unpacked(words, *shape), values)


def test_scales_and_biases_come_back():
    of_groups = torch.arange(3 * 128, dtype=torch.int32).view(3, 128)
    for halves in (False, True):
        moved = _marlin.permuted_scales(of_groups, halves)
        assert torch.equal(plain_scales(moved, halves), of_groups) and not torch.equal(moved, of_groups)
    assert torch.equal(plain_bias(_marlin.permuted_bias(of_groups)), of_groups)
    # vLLM's marlin_permute_scales: columns of the first lane where a group is all of K.
    assert _marlin.permuted_scales(of_groups[:1], False)[0, :8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert _marlin.permuted_scales(of_groups[:2], False)[0, :8].tolist() == [0, 8, 16, 24, 32, 40, 48, 56]


def test_scalar_types_have_vllms_numbers():
    assert (_marlin.UINT4_LESS_8, _marlin.E2M1) == (1125899907892224, 562949953487106)


def test_rows_are_aligned_to_blocks():
    numbers, groups, count = _marlin.aligned((3, 0, 9, 8), 8, CPU)
    assert numbers.tolist() == [0, 1, 2, *[20] * 5, *range(3, 12), *[20] * 7, *range(12, 20)]
    assert (groups.tolist(), count.tolist()) == ([0, 2, 2, 3], [32])


def test_the_usual_block_is_the_lowest_that_a_group_does_not_fill():
    assert [_marlin.usual_block(8 * rows, 8) for rows in (1, 8, 14, 30, 1000)] == [8, 16, 16, 48, 64]


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_a_product_passes_the_gate(marlin, form):
    w, operator = small("weight-only", form), operators()["weight_only_mm"]
    rival = next(r for r in operator.rivals if r.name == "marlin")
    inputs = operator.make_inputs(w, CPU, 0)
    gate = judge(rival, w, inputs, operator.reference(w, inputs), operator.tolerance(w))
    assert gate.ok, gate.reason


def test_a_layer_passes_the_gate(marlin):
    w, operator = small("gpt-oss"), operators()["moe_mxfp4"]
    rival = next(r for r in operator.rivals if r.name == "marlin")
    inputs = operator.make_inputs(w, CPU, 0)
    gate = judge(rival, w, inputs, operator.reference(w, inputs), operator.tolerance(w))
    assert gate.ok, gate.reason


@pytest.mark.parametrize("quantize", [Int4Weight.quantize, Mxfp4Weight.quantize])
def test_plain_weights_are_the_values_of_a_weight(quantize):
    weight = quantize(torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16))
    both, of_groups = packed(weight), scales(weight)
    for g in range(2):
        q = torch.stack([both[g] & 15, both[g] >> 4], -1).flatten(1)
        assert torch.equal(q, codes(weight, g))
        if isinstance(weight, Int4Weight):
            values = (q.float() - 8) * of_groups[g].float().repeat_interleave(weight.group_size, 1)
            assert torch.equal(values.bfloat16(), weight.dequantize()[g])
    assert of_groups.shape == (2, 64, 128 // weight.group_size)


def test_who_refuses_what():
    found = {r.name: r for o in ("weight_only_mm", "moe_mxfp4", "attention") for r in operators()[o].rivals}
    w = presets()["weight-only"]()[0]
    assert found["bf16"].supports(w, H200) is None
    supports = _marlin.supports("k")
    assert supports(w, H200) is None and "8.0" in supports(w, Device.current("cpu"))
    for name in ("marlin", "fa3"):
        assert ".so in a folder of PYTHONPATH" in found[name].supports(w, H200)
    assert "not installed" in found["humming"].supports(w, H200)


def test_the_presets_hold_every_models_products():
    for preset, projection in (("weight-only", "gate-up"), ("weight-only-down", "down")):
        both = [w for w in presets()[preset]() if not w.name.startswith("small")]
        found, fp8 = ([w for w in both if w.op == op] for op in ("weight_only_mm", "weight_only_mm_fp8"))
        assert len(found) == 2 * 4 * 5 and all(projection in w.name for w in both)
        assert {w["tokens"] // w["groups"] for w in found} == {1, 8, 32, 256, 2048}
        assert {w.name for w in fp8} == {f"{w.name}-fp8" for w in found if w["tokens"] // w["groups"] >= 256}
        assert all(w["k"] % w["group_size"] == 0 for w in found)
    assert [w["tokens"] for w in presets()["gpt-oss"]()][:4] == [1, 8, 64, 2048]
