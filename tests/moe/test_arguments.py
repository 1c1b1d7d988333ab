"""What the layer's functions refuse: each argument that does not fit is named, with what came."""

import pytest
import torch

import expertile as xt
from expertile import moe
from expertile.moe.lora import Adapter, Lora

X, GATE_UP, DOWN = torch.randn(5, 8), torch.randn(4, 32, 8), torch.randn(4, 8, 16)
IDS, WEIGHTS = torch.randint(0, 4, (5, 2), dtype=torch.int32), torch.rand(5, 2)


def layer(**options):
    return xt.MoE(8, 16, 4, 2, **options)


def mlp(**changes):
    return xt.moe_mlp(X, GATE_UP, DOWN, IDS, WEIGHTS, **changes)


def config(**changes):
    return xt.ParallelConfig(**{"num_experts": 4, "top_k": 2, "hidden_size": 8, **changes})


REFUSED = [
    (
        lambda: xt.moe_mlp(X, GATE_UP, DOWN, IDS, WEIGHTS.to("meta")),
        r"topk_weights: expected shape \[5, 2\], floating point, on cpu, got .* on meta",
    ),
    (lambda: mlp(lora=1), "lora: expected a Lora or None, got int"),
    (lambda: mlp(lora=Lora(gate_up=3)), "lora.gate_up: expected an Adapter or None, got int"),
    (lambda: mlp(lora=Lora(down=Adapter(None, None, 1.0))), "lora.down.a: expected two dimensions, .*, got NoneType"),
    (lambda: mlp(interleaved="yes"), "interleaved: expected True or False, got 'yes'"),
    (lambda: mlp(batch_invariant=None), "batch_invariant: expected True or False, got None"),
    (lambda: layer()(None), r"x: expected shape \[..., 8\], got NoneType"),
    (lambda: layer().logits(None), r"x: expected shape \[..., 8\], got NoneType"),
    (lambda: layer().logits(X[:, :7]), r"x: expected shape \[..., 8\], got \[5, 7\]"),
    (lambda: layer().add_lora(1.5), "rank: expected an integer of at least 1, got 1.5"),
    (lambda: layer().add_lora(2, alpha="a"), "alpha: expected a finite number, got 'a'"),
    (lambda: layer().add_lora(2, targets=3), "targets: expected gate_up, down or both, got 3"),
    (lambda: layer().add_lora(2, dtype=torch.int8), "dtype: expected None or one of .*, got torch.int8"),
    (lambda: moe.load_balancing_loss(None, IDS, 4), r"scores: expected shape \[5, 4\], got NoneType"),
    (lambda: moe.load_balancing_loss(WEIGHTS, None, 4), "topk_ids: expected a torch.Tensor, got NoneType"),
    (lambda: moe.z_loss([1]), r"logits: expected shape \[T, E\], got list"),
    (lambda: moe.expert_statistics(None), r"counts: expected shape \[E\], integers, got NoneType"),
    (lambda: moe.tokens_per_expert(IDS, None), "num_experts: expected an integer of at least 1, got None"),
    (lambda: moe.permutation(IDS, 1.5), "num_experts: expected an integer of at least 1, got 1.5"),
    (lambda: moe.round_groups(IDS, None, 4), r"topk_weights: expected shape \[5, 2\], float32, got NoneType"),
    (lambda: moe.round_groups(IDS, WEIGHTS, 4, tile=1.5), "tile: expected an integer of at least 1, got 1.5"),
    (lambda: moe.round_groups(IDS, WEIGHTS, 4, top_k="a"), "top_k: expected an integer of at least 0, got 'a'"),
    (lambda: moe.round_groups(IDS, WEIGHTS, 4, capacity_factor="a"), "capacity_factor: expected a finite number"),
    (lambda: moe.rounding_effect(None, None, None, 4), "topk_ids: expected a torch.Tensor, got NoneType"),
    (lambda: moe.rounding_effect(IDS, WEIGHTS, IDS[:3], 4), r"rounded_ids: expected shape \[5, 2\] .*, got \[3, 2\]"),
    (lambda: config(num_experts=None).check(1), "num_experts: expected an integer of at least 1, got None"),
    (lambda: config(top_k="a").check(1), "top_k: expected an integer of at least 1, got 'a'"),
    (lambda: config(dtype="x").check(1), "dtype: expected a floating-point dtype, got 'x'"),
    (lambda: xt.ExpertParallel(None), "config: expected a ParallelConfig, got NoneType"),
    (lambda: xt.ExpertParallelMoE(None), "moe: expected a MoE, got NoneType"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_errors_are_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
