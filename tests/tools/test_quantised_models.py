"""tools/quantised_models.py: the replaced experts compute what they replace; a small model keeps its tokens."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from expertile import grouped_mm

pytest.importorskip("transformers", minversion="5.0")  # experts as one module, weights stacked

_PATH = Path(__file__).parents[2] / "tools" / "quantised_models.py"
_SPEC = importlib.util.spec_from_file_location("quantised_models", _PATH)
tool = sys.modules["quantised_models"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)

SMALL = tool.Shape(layers=2, hidden=128, experts=4, vocabulary=64)


def exact(weights):
    return lambda x, offs: grouped_mm(x, weights.transpose(-2, -1), offs=offs)


def test_experts_in_the_place_of_others_compute_the_same():
    model = tool.build(SMALL, torch.device("cpu"))
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 1], [3, 1], [1, 0]] * 3)  # expert 2 has no rows
    weights = torch.rand(9, 2).bfloat16()
    with torch.no_grad():
        want, got = experts(x, ids, weights), tool.QuantisedExperts(experts, exact)(x, ids, weights)
    assert (got - want).float().norm() <= 1e-2 * want.float().norm()


def test_fp8_keeps_the_tokens_and_four_bits_are_told_for_each_way():
    model = tool.build(SMALL, torch.device("cpu"))
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0))
    before = [layer.mlp.experts for layer in model.model.layers]
    shares = tool.kept(model, tool.WAYS, tokens)
    assert shares["fp8"] >= 0.99
    assert {f"int4 group {g}" for g in (32, 64, 128)} | {"int4 per channel"} < set(shares)
    assert {"mxfp4", "mxfp4, e4m3 activations", "int4 group 128, e4m3 activations"} < set(shares)
    assert all(0.8 < share <= 1 for share in shares.values())
    assert [layer.mlp.experts for layer in model.model.layers] == before

    def lost(weights):
        return lambda x, offs: -exact(weights)(x, offs)

    assert (
        tool.kept(tool.build(tool.Shape(2, 128, 4, 2, 64, 0.02), torch.device("cpu")), {"lost": lost}, tokens)["lost"]
        < 0.9
    )


def test_errors_by_format():
    g = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(size, generator=g).bfloat16() for size in ((64, 256), (2, 128, 256)))
    offs = torch.tensor([40, 64], dtype=torch.int32)
    want = exact(weights)(x, offs).float()

    def error(way):
        return float((way(weights)(x, offs).float() - want).norm() / want.norm())

    errors = {name: error(way) for name, way in tool.WAYS.items()}
    fine = [errors[name] for name in ("fp8", *(f"int4 group {size}" for size in (32, 64, 128)), "int4 per channel")]
    assert fine == sorted(fine) and fine[0] < 0.05
    assert 0.10 < errors["mxfp4"] < 0.13 and errors["mxfp4"] < errors["mxfp4, e4m3 activations"] < 0.14
