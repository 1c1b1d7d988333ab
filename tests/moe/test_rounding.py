"""Token rounding on the CPU: every mode against its definition, expert by expert; what is reported; errors."""

from math import ceil

import pytest
import torch

from expertile.moe.rounding import MODES, round_groups, rounding_effect
from expertile.moe.router import RouterConfig, route


def draw(tokens, columns, experts, top_k, seed=0, dropped=0.0):
    """Ids and weights of a router with candidates: descending in each token, with ties between tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) - torch.arange(experts) * 0.1
    weights, ids = (logits.mul(4).round() / 4).softmax(1).topk(columns)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < dropped, experts, ids)
    return ids.to(torch.int32), weights


def naive(ids, weights, experts, top_k, tile, mode, capacity=10**9):
    """The definition: rank the slots of each expert, keep the first `target` of them."""
    kept = torch.full_like(ids, experts)
    for e in range(experts):
        slots = (ids.flatten() == e).nonzero().flatten().tolist()
        weight, columns = weights.flatten().tolist(), ids.shape[1]
        ranked = sorted(slots, key=lambda s: (s % columns >= top_k, -weight[s], s))
        fronts = sum(s % columns < top_k for s in slots)
        down, up = fronts // tile * tile, ceil(fronts / tile) * tile
        target = {"down": down, "up": up, "nearest": up if 2 * (fronts - down) >= tile else down}.get(mode)
        if mode == "adaptive":
            lost, gained = (sum(weight[s] for s in ranked[a:b]) for a, b in ((down, fronts), (fronts, up)))
            target = up if gained <= lost + 1e-6 else down
        limit = capacity if mode is None else capacity // tile * tile
        for s in ranked[: min(fronts if mode is None else target, limit)]:
            kept.view(-1)[s] = e
    return kept


CASES = [(60, 3, 5, 2, 8), (40, 4, 6, 2, 16), (50, 2, 4, 2, 4), (33, 3, 3, 1, 1), (300, 2, 2, 1, 128)]


@pytest.mark.parametrize("mode", [*MODES, None])
@pytest.mark.parametrize("tokens, columns, experts, top_k, tile", CASES)
def test_definition(tokens, columns, experts, top_k, tile, mode):
    ids, weights = draw(tokens, columns, experts, top_k, dropped=0.1)
    found = round_groups(ids, weights, experts, top_k=top_k, tile=tile, mode=mode)
    assert torch.equal(found, naive(ids, weights, experts, top_k, tile, mode)) and found.dtype is torch.int32
    factor = 0.6
    found = round_groups(ids, weights, experts, top_k=top_k, tile=tile, mode=mode, capacity_factor=factor)
    capacity = ceil(factor * tokens * top_k / experts)
    assert torch.equal(found, naive(ids, weights, experts, top_k, tile, mode, capacity))


def test_modes_fill_tiles():
    ids, weights = draw(200, 4, 5, 2)
    sizes = {
        m: torch.bincount(round_groups(ids, weights, 5, top_k=2, tile=16, mode=m).flatten(), minlength=6)[:5]
        for m in MODES
    }
    before = torch.bincount(ids[:, :2].flatten(), minlength=5)
    assert all((s % 16 == 0).all() for s in sizes.values())
    assert (sizes["down"] <= before).all() and (sizes["up"] >= before).all()
    assert ((sizes["nearest"] - before).abs() <= 8).all()


@pytest.mark.parametrize("mode", ["up", "nearest", "adaptive"])
@pytest.mark.parametrize("candidates", [1, 2, 6])
def test_an_expert_that_fills_no_tile_has_taken_all_its_candidates(mode, candidates):
    short = 0
    for seed in range(6):
        logits = torch.randn(100, 8, generator=torch.Generator().manual_seed(seed))
        plain = route(logits, RouterConfig(8, 2 + candidates, order="topk_then_softmax"))
        found = route(logits, RouterConfig(8, 2, rounding=mode, tile=16, candidates=candidates))
        rows = torch.bincount(found.topk_ids.flatten(), minlength=9)[:8]
        there = torch.bincount(plain.topk_ids.flatten(), minlength=8)
        assert ((rows % 16 == 0) | (rows == there)).all()
        short += int((rows % 16 != 0).sum())
    assert short == 0 or candidates < 6
    assert short > 0 or candidates > 1  # 100 / 8 candidates are too few to be sure of 16 rows


def test_nothing_to_do_and_nothing_there():
    ids, weights = torch.zeros(8, 1, dtype=torch.int32), torch.rand(8, 1)
    for mode in MODES:
        assert torch.equal(round_groups(ids, weights, 2, tile=4, mode=mode), ids)
        empty = round_groups(ids[:0], weights[:0], 2, tile=4, mode=mode)
        assert empty.shape == (0, 1)


def test_effect():
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 2]], dtype=torch.int32)  # the second column: candidates
    weights = torch.tensor([[0.5, 0.2], [0.2, 0.2], [0.3, 0.1], [0.4, 0.3]])
    rounded = torch.tensor([[0, 1], [3, 3], [0, 3], [1, 3]], dtype=torch.int32)
    effect = rounding_effect(ids, weights, rounded, 3, top_k=1, tile=2)
    assert (effect.rows_before, effect.rows_after, effect.tiles_before, effect.tiles_after) == (4, 4, 3, 2)
    assert (effect.tile_use_before, effect.tile_use_after) == (4 / 6, 1.0)
    assert (effect.slots_dropped, effect.slots_added) == (1, 1)
    assert effect.weight_dropped == pytest.approx(0.2 / 1.4) and effect.weight_added == pytest.approx(0.2 / 1.4)
    assert (effect.tokens_changed, effect.tokens_without_expert, effect.largest_loss) == (0.5, 0.25, 1.0)
    ids[0, 0] = rounded[0, 0] = rounded[1, 0] = -1  # dropped, as 3 is
    with torch.device("meta"):  # of what nobody says where it is to be
        effect = rounding_effect(ids, weights, rounded, 3, top_k=1, tile=2)
    assert (effect.rows_before, effect.rows_after, effect.slots_dropped) == (3, 3, 1)


def test_of_the_router():
    """Dropped slots weigh nothing, kept candidates carry what their score gives, gradients follow."""
    logits = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    plain = route(logits, RouterConfig(6, 2))
    for mode in MODES:
        config = RouterConfig(6, 2, rounding=mode, tile=16, candidates=2)
        found = route(logits, config)
        kept = found.topk_ids < 6
        sizes = torch.bincount(found.topk_ids[kept], minlength=6)
        assert found.topk_ids.shape[1] == (2 if mode == "down" else 4) and (sizes % 16 == 0).all()
        assert ((found.topk_weights > 0) == kept).all()
        both = kept[:, :2]
        assert torch.equal(found.topk_weights[:, :2][both], plain.topk_weights[both])
        assert mode == "down" or kept[:, 2:].any()
        (grad,) = torch.autograd.grad(found.topk_weights[:, -1].sum(), logits)
        assert torch.equal(grad.any(1), kept[:, -1])


def test_operator():
    ids, weights = draw(20, 3, 4, 2)
    torch.library.opcheck(torch.ops.expertile.moe_round_groups, (ids, weights, 4, 2, 8, "adaptive", None))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mode="middle"), "mode: expected None or one of .*, got 'middle'"),
        (dict(tile=0), "tile: expected .*at least 1, got 0"),
        (dict(top_k=3), "top_k: expected 0 … 2, got 3"),
        (dict(topk_weights=torch.zeros(3, 2)), r"topk_weights: expected shape \[4, 2\], float32, got \[3, 2\]"),
    ],
)
def test_errors(change, message):
    arguments = {"topk_ids": torch.zeros(4, 2, dtype=torch.int32), "topk_weights": torch.zeros(4, 2), **change}
    with pytest.raises(ValueError, match=message):
        round_groups(num_experts=3, **arguments)
