"""batch_invariant=True: a token's bits in every batch, with any neighbours and on any number of ranks."""

import json
import traceback
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4 import Int4Weight
from expertile.moe import MoE, moe_mlp
from expertile.moe.parallel_layer import ExpertParallelMoE
from expertile.moe.router import RouterConfig, route
from expertile.ops.any_weight import grouped_mm
from tests.moe import parallel_worker
from tests.moe.test_parallel import outcome_of
from tools.batch_invariance.__main__ import main
from tools.batch_invariance.fuzz import FORMS, PER_POOL, Cases, bits, fuzz

H, I, E, K = 40, 24, 8, 3
LAYERS = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid", "shared_intermediate_size": 20, "num_groups": 4, "top_groups": 2},
    "biases": {
        "bias": True,
        "router_bias": True,
        "interleaved": True,
        "activation": "gpt_oss",
        "order": "topk_then_softmax",
    },
    "float32 router": {"router_dtype": torch.float32, "activation": "geglu"},
}


def layer_of(options, dtype, **more):
    torch.manual_seed(3)
    return MoE(H, I, E, K, dtype=dtype, **options, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_token_in_any_batch(options, dtype):
    layer, x = layer_of(options, dtype, batch_invariant=True), torch.randn(300, H).to(dtype)
    with torch.no_grad():
        whole, routing = layer(x, return_routing=True)
        usual = layer_of(options, dtype)(x)
        torch.testing.assert_close(whole, usual, rtol=3e-2, atol=3e-2 if dtype is not torch.float32 else 1e-5)
        for t in (0, 1, 7, 150, 299):
            out, alone = layer(x[t : t + 1], return_routing=True)
            assert torch.equal(bits(out), bits(whole[t : t + 1]))
            assert torch.equal(alone.topk_ids, routing.topk_ids[t : t + 1])
            assert torch.equal(bits(alone.topk_weights), bits(routing.topk_weights[t : t + 1]))
            assert torch.equal(bits(alone.scores), bits(routing.scores[t : t + 1]))
        for count in (2, 3, 16, 17, 129, 300):
            at = torch.randperm(300)[:count]
            assert torch.equal(bits(layer(x[at])), bits(whole[at]))


def test_training_gives_the_bits_of_inference_and_each_token_its_gradient():
    layer, x = layer_of(LAYERS["sigmoid"], torch.bfloat16, batch_invariant=True), torch.randn(50, H).bfloat16()
    dy = torch.randn(50, H).bfloat16()

    def gradient(rows, grads):
        rows = rows.clone().requires_grad_()
        out = layer(rows)
        return out.detach(), torch.autograd.grad(out, rows, grads)[0]

    out, dx = gradient(x, dy)
    with torch.no_grad():
        assert torch.equal(bits(out), bits(layer(x)))
    at = torch.randperm(50)[:9]
    part, dpart = gradient(x[at], dy[at])
    assert torch.equal(bits(part), bits(out[at])) and torch.equal(bits(dpart), bits(dx[at]))


def test_dropped_ids_and_what_stands_beside():
    x, gate_up, down = torch.randn(60, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    ids = torch.rand(60, E).argsort(1)[:, :K].to(torch.int32)
    ids[torch.rand(60, K) < 0.3] = -1
    weights = torch.rand(60, K).requires_grad_()
    out = moe_mlp(x, gate_up, down, ids, weights, batch_invariant=True)
    (dweights,) = torch.autograd.grad(out.square().sum(), weights)
    beside = torch.where(torch.arange(60)[:, None] % 2 == 0, x, torch.full_like(x, torch.nan))
    other = moe_mlp(beside, gate_up, down, ids, weights, batch_invariant=True)
    assert torch.equal(bits(other[::2]), bits(out[::2]))
    few = weights[20:24].detach().requires_grad_()
    part = moe_mlp(x[20:24], gate_up, down, ids[20:24], few, batch_invariant=True)
    assert torch.equal(bits(part), bits(out[20:24]))
    (dfew,) = torch.autograd.grad(part.square().sum(), few)
    assert torch.equal(bits(dfew), bits(dweights[20:24]))


def test_products_where_blas_has_several_ways():
    torch.manual_seed(0)
    x, w = torch.randn(300, 1024), torch.randn(1, 512, 1024).transpose(1, 2)
    out = grouped_mm(x[None], w, batch_invariant=True)[0]
    alone = [grouped_mm(x[None, t : t + 1], w, batch_invariant=True)[0] for t in range(40)]
    assert torch.equal(bits(torch.cat(alone)), bits(out[:40]))
    view = torch.randn(300, 1027)
    view[:, 1:-2] = x  # rows that start anywhere
    assert torch.equal(bits(grouped_mm(view[None, :, 1:-2], w, batch_invariant=True)[0]), bits(out))


def test_tensors_that_lie_elsewhere_than_new_ones():
    a, b, offs = torch.randn(5, K), torch.randn(2, K, H), torch.tensor([2, 5], dtype=torch.int32)
    wanted = grouped_mm(a, b, offs=offs, batch_invariant=True)
    with torch.device("meta"):
        assert torch.equal(grouped_mm(a, b, offs=offs, batch_invariant=True), wanted)


def test_compiled():
    layer, x = layer_of({}, torch.float32, batch_invariant=True), torch.randn(9, H)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(bits(compiled(x)), bits(layer(x)))
    rows = x.clone().requires_grad_()
    compiled(rows).sum().backward()
    eager = x.clone().requires_grad_()
    layer(eager).sum().backward()
    assert torch.equal(bits(rows.grad), bits(eager.grad))


def test_what_cannot_be():
    b = torch.randn(2, 128, 128)
    offs = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="batch_invariant: .* 2-D b"):
        grouped_mm(torch.randn(8, 4), torch.randn(4, 8), offs=offs, batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant: .* Int4Weight"):
        grouped_mm(torch.randn(4, 128), Int4Weight.quantize(b), offs=offs, batch_invariant=True)
    with pytest.raises(ValueError, match="torch_grouped cannot take .* batch_invariant"):
        grouped_mm(
            torch.randn(4, 128).bfloat16(), b.bfloat16(), offs=offs, backend="torch_grouped", batch_invariant=True
        )
    x, ids = torch.randn(4, 128), torch.zeros(4, 1, dtype=torch.int32)
    gate_up = torch.randn(2, 256, 128)
    fp8 = [Fp8Blocks.quantize(w, block=(128, 128)) for w in (gate_up, b)]
    with pytest.raises(ValueError, match="batch_invariant: .* Fp8Blocks"):
        moe_mlp(x, *fp8, ids, torch.ones(4, 1), batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant: .*float64"):
        moe_mlp(x.double(), gate_up.double(), b.double(), ids, torch.ones(4, 1), batch_invariant=True)
    for options in ({"capacity_factor": 1.0}, {"rounding": "nearest"}):
        with pytest.raises(ValueError, match=f"batch_invariant: expected {next(iter(options))} None"):
            MoE(H, I, E, K, batch_invariant=True, **options)
        with pytest.raises(ValueError, match="batch_invariant"):
            route(torch.randn(3, E), RouterConfig(E, K, **options), batch_invariant=True)


def of_ranks(rank, world, folder):
    """The process of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=40)
    )
    found = ""
    try:
        one_process(rank, world)
    except Exception:
        found = traceback.format_exc()
    torch.save({"bits": found}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def one_process(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        whole = layer_of(LAYERS["sigmoid"] | {"bias": True}, dtype, batch_invariant=True)
        torch.manual_seed(8)
        x = torch.randn(20, H).to(dtype)
        mine = slice(rank * 20 // world, (rank + 1) * 20 // world)
        for options in ({}, {"chunks": 2}, {"max_tokens": 20}):
            layer = ExpertParallelMoE(whole, **options)
            assert layer.batch_invariant
            with torch.no_grad():
                assert torch.equal(bits(layer(x[mine])), bits(whole(x)[mine])), f"{dtype} {options}"
        out = layer(x[mine].clone().requires_grad_())
        assert torch.equal(bits(out.detach()), bits(whole(x)[mine].detach()))
        out.sum().backward()
        partial_sums = partial(ExpertParallelMoE, whole, combine="partial")
        parallel_worker.raises(ValueError, "batch_invariant: expected combine ordered", partial_sums)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_number_of_ranks(world, tmp_path):
    found, codes = outcome_of(of_ranks, world, str(tmp_path))
    assert codes == [0] * world and all(not any(words.values()) for words in found), found


def test_fuzz_sees_every_form_and_finds_what_differs():
    for number in range(len(FORMS)):
        result = fuzz(torch.device("cpu"), True, number * PER_POOL, 8, 60.0)
        assert result["cases"] == 8 and not result["failures"] and not result["errors"], result
    cases = Cases(0, torch.device("cpu"), True)
    cases.out[5, 3] ^= 1  # one bit of one token
    found = [cases.case(n) for n in range(40)]
    assert any(int(wrong) for _, wrong in found) and not all(int(wrong) for _, wrong in found)


def test_the_tool_writes_what_it_found(tmp_path):
    words = [
        "--device",
        "cpu",
        "--cases",
        "3",
        "--first",
        "498",
        "--rounds",
        "3",
        "--out",
        str(tmp_path / "found.json"),
    ]
    assert main(words) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["configs"] and all(line["differing"] == 0 for line in found["configs"])
    assert (found["fuzz"]["cases"], found["fuzz"]["pools"], found["fuzz"]["num_failures"]) == (3, 2, 0)
    assert all(line["ratio"] > 0 and line["rounds"] == 3 for line in found["cost"])
