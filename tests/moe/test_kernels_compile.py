"""The layer's own kernels compile for GPUs that need not be here: they fit and do not spill."""

import pytest
import torch
import triton

from expertile.moe import _few, _select, dispatch_kernels, permute, rounding, router
from expertile.moe._placement import Placement
from tests.support.aot import resources
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

ROUTERS = {
    "qwen3": router.RouterConfig(128, 8),
    "deepseek-v3": router.RouterConfig(256, 8, score="sigmoid", scale=2.5, num_groups=8, top_groups=4),
}


def compiled(arch, launch, *args):
    with compile_only(arch) as kernels:
        launch(*args)
    return {k.metadata.name: resources(k, arch) for k in kernels}


def assert_sound(found, *names):
    assert tuple(found) == names
    for each in found.values():
        assert each.spills == 0 and each.fits, str(each)


@pytest.mark.parametrize("arch, experts", [(80, 128), (90, 2048)])
def test_permutation(arch, experts):
    found = compiled(arch, permute._on_device, torch.empty(4096, 8, dtype=torch.int32), experts)
    assert_sound(found, "_count_kernel", "_scan_kernel", "_place_kernel")


def test_permutation_of_few_slots():
    assert_sound(compiled(90, permute._on_device, torch.empty(128, 8, dtype=torch.int32), 128), "_sort_kernel")


@pytest.mark.parametrize("arch, model", [(80, "qwen3"), (90, "qwen3"), (90, "deepseek-v3")])
def test_router(arch, model, monkeypatch):
    monkeypatch.setattr(_select, "on_kernels", lambda x: True)
    config = ROUTERS[model]
    plan, logits = router.plan_of(config), torch.empty(4096, config.num_experts, dtype=torch.bfloat16)
    bias = torch.empty(config.num_experts) if config.score == "sigmoid" else None
    assert_sound(compiled(arch, _select._select_on_device, logits, bias, True, plan), "route_kernel")
    ids, dweights = torch.empty(4096, 8, dtype=torch.int32), torch.empty(4096, 8)
    assert_sound(compiled(arch, _select.select_backward, logits, ids, dweights, None, plan), "route_backward_kernel")


def test_rounding(monkeypatch):
    monkeypatch.setattr(rounding, "on_kernels", lambda x: True)
    ids, weights = torch.empty(4096, 9, dtype=torch.int32), torch.empty(4096, 9)
    order = permute.Permutation(*permute._empty(ids, 128))
    monkeypatch.setattr(rounding, "permutation", lambda *args: order)
    assert_sound(compiled(90, rounding._rounded, ids, weights, 128, 8, 128, "adaptive", None), "_round_kernel")


@pytest.mark.parametrize("arch, chunks, capacity", [(80, 1, 4096), (90, 4, None), (90, 1, None)])
def test_tables_of_expert_parallelism(arch, chunks, capacity):
    make, placement = dispatch_kernels, Placement(128, 8, chunks)
    ids, weights = torch.empty(512, 8, dtype=torch.int32), torch.empty(512, 8)
    order = permute.Permutation(*permute._empty(torch.empty(4096, 8, dtype=torch.int32), placement.keys))
    lengths = None if capacity else torch.empty((8, 2, chunks), dtype=torch.int32)

    def launch():
        keys, _ = make.token_keys(ids, placement, capacity is None)
        _, labels, _ = make.pack(ids, weights, order, placement, capacity, 4096)
        make.find(ids, keys, order, order, placement, (512, capacity) if capacity else None)
        _, floats, keys = make.unpack(labels, lengths, placement, 1, capacity)
        make.picked(floats, make.returned(keys, order, order, placement, capacity, 4096))

    names = ("token_keys", "pack", "find", "unpack", "returned", "picked")
    assert_sound(compiled(arch, launch), *(f"_{name}_kernel" for name in names))


def flat(*shape):
    """A bfloat16 tensor with nothing behind it."""
    return torch.empty(1, dtype=torch.bfloat16).as_strided(shape, (0,) * len(shape))


# Qwen3's sizes and gpt-oss's, which end within a tile.
@pytest.mark.parametrize(
    "arch, tokens, bias, hidden, inner",
    [(80, 1, True, 2048, 768), (90, 1, False, 2048, 768), (90, 4, True, 2880, 2880)],
)
def test_few_tokens(arch, tokens, bias, hidden, inner, monkeypatch):
    monkeypatch.setattr(_few, "supports_pdl", lambda x: arch >= 90)
    biases = (flat(128, 2 * inner), flat(128, hidden)) if bias else (None, None)
    ids, weights = torch.empty(tokens, 8, dtype=torch.int32), torch.empty(tokens, 8)
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    gate_up, down = flat(128, 2 * inner, hidden), flat(128, hidden, inner)
    found = compiled(arch, _few.mlp, x, gate_up, down, ids, weights, *biases, "swiglu", bias)
    assert_sound(found, "up_kernel", "down_kernel")
    for kernel in found.values():
        # Programmatic dependent launch is Hopper's.
        for instruction in ("wait", "launch_dependents"):
            assert (f"griddepcontrol.{instruction}" in kernel.ptx) == (arch >= 90)
        assert kernel.opcodes["LDGSTS"], "weights are not read ahead"


@pytest.mark.parametrize("arch", [80, 90])
def test_router_of_few_tokens(arch, monkeypatch):
    monkeypatch.setattr(_few, "supports_pdl", lambda x: arch >= 90)
    x = torch.empty(2, 2048, dtype=torch.bfloat16)
    assert_sound(compiled(arch, _few.logits, x, flat(128, 2048), None), "logits_kernel")
