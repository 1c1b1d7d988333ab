"""Token rounding: the rows of each expert become a whole number of tiles, by dropping or adding tokens.

A grouped product computes tiles of M rows, ceil(n_e / M) * M of them for the n_e rows of expert e: for top-8 of 128
experts and M = 128, 3 % of the rows of 32768 tokens are empty, and 20 % of 4096 tokens'. Token rounding (Guo, Mishra,
Cheng, Stoica, Dao, "SonicMoE", arXiv:2512.14080) changes the routing instead: n_e becomes a multiple of M,

    "down"      M * floor(n_e / M)              the n_e mod M slots of lowest weight are dropped
    "up"        M * ceil(n_e / M)               the best tokens that had not chosen e are added
    "nearest"   whichever is closer; up when equally close
    "adaptive"  whichever moves less routing weight: down costs the sum of the dropped weights, up that of the added

As SonicMoE does, an expert keeps the first n_e' of the tokens that chose it, by weight, and behind them of others, by
score; here those that have it among their next-best `candidates`, so that the routing keeps a static shape, [T, top_k +
candidates] with dropped slots. Where candidates run out, the last tile stays partly empty. An expert with fewer than M
rows loses all of them by "down". `rounding_effect` says what a rounding did, and nothing here is on by default.

A capacity is the same operation with another target: min(n_e, ceil(capacity_factor * T * k / E)) rows, and with both,
the multiple of M below it at most.

On the device one program for each expert finds the target-th largest key among its own by a radix select, then marks
what lies above, ties in slot order. Weights are summed as integers of 2^-24: sums depend on no order and no machine.
"""

from dataclasses import dataclass
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertile.moe.permute import MOST_EXPERTS, check_ids, permutation
from expertile.ops.checks import came, check_integer, check_number
from expertile.ops.launch.device import on_kernels
from expertile.ops.launch.kernels import launch
from expertile.ops.torch_op import define, traced

MODES = ("down", "up", "nearest", "adaptive")
_UNIT = 2.0**24  # weights are summed in units of 1 / _UNIT
_BLOCK = 1024  # rows that a program looks at together


@triton.jit
def _keys(slots_ptr, weights_ptr, row, end, columns, top_k):
    """(slot, key, weight, whether it is one of the token's top_k) of rows of an expert.

    A key orders slots by weight, all candidates behind all others: bits of the weight, which is not negative, with the
    sign bit set for those in front."""
    slot = tl.load(slots_ptr + row, mask=row < end, other=0)
    weight = tl.load(weights_ptr + slot, mask=row < end, other=0.0)
    front = slot % columns < top_k
    bits = tl.abs(weight).to(tl.int32, bitcast=True).to(tl.int64)
    return slot, tl.where(front, bits + 2147483648, bits), weight, front


@triton.jit
def _least_kept(slots_ptr, weights_ptr, start, end, target, columns, top_k, BLOCK: tl.constexpr):
    """(key of the target-th largest row, how many rows with that very key are kept); above all keys for no target."""
    digit = tl.arange(0, 256)
    found = tl.zeros([], tl.int64)
    wanted = tl.maximum(target, 1)
    for place in range(4):
        shift = 24 - 8 * place
        counts = tl.zeros([256], tl.int32)
        for first in range(start, end, BLOCK):
            row = first + tl.arange(0, BLOCK)
            _, key, _, _ = _keys(slots_ptr, weights_ptr, row, end, columns, top_k)
            like = (row < end) & ((key >> (shift + 8)) == (found >> (shift + 8)))
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=like)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        here = tl.max(tl.where(above + counts >= wanted, digit, 0), 0)
        wanted = wanted - tl.sum(tl.where(digit == here, above, 0), 0)
        found = found | (here.to(tl.int64) << shift)
    return tl.where(target > 0, found, 1 << 33), tl.where(target > 0, wanted, 0)


@triton.jit
def _target(fronts, rows, capacity, dropped, added, MODE: tl.constexpr, TILE: tl.constexpr):
    """Rows that an expert keeps of `rows`, `fronts` of which are not candidates."""
    down = fronts // TILE * TILE
    up = tl.cdiv(fronts, TILE) * TILE
    if MODE == "none":
        return tl.minimum(fronts, capacity)
    if MODE == "down":
        target = down
    elif MODE == "up":
        target = up
    elif MODE == "nearest":
        target = tl.where((fronts - down) * 2 >= TILE, up, down)
    else:
        target = tl.where(added <= dropped, up, down)
    return tl.minimum(tl.minimum(target, rows), capacity // TILE * TILE)


@triton.jit
def _round_kernel(tensors, scalars, MODE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    slots_ptr, offs_ptr, weights_ptr, ids_ptr = tensors
    experts, columns, top_k, capacity = scalars
    expert = tl.program_id(0)
    start = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_ptr + expert)
    fronts = tl.zeros([], tl.int32)
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        _, _, _, front = _keys(slots_ptr, weights_ptr, row, end, columns, top_k)
        fronts += tl.sum(((row < end) & front).to(tl.int32), 0)
    dropped = tl.zeros([], tl.int64)
    added = tl.zeros([], tl.int64)
    # "adaptive" looks at what rounding down would drop and what rounding up would add before the last turn writes.
    for turn in range(0 if MODE == "adaptive" else 2, 3):
        target = _target(fronts, end - start, capacity, dropped, added, MODE, TILE)
        target = tl.where(turn == 0, fronts // TILE * TILE, target)
        target = tl.where(turn == 1, tl.minimum(tl.cdiv(fronts, TILE) * TILE, end - start), target)
        least, ties = _least_kept(slots_ptr, weights_ptr, start, end, target, columns, top_k, BLOCK)
        seen = tl.zeros([], tl.int32)
        for first in range(start, end, BLOCK):
            row = first + tl.arange(0, BLOCK)
            slot, key, weight, front = _keys(slots_ptr, weights_ptr, row, end, columns, top_k)
            there = row < end
            tie = (there & (key == least)).to(tl.int32)
            kept = there & ((key > least) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= ties)))
            seen += tl.sum(tie, 0)
            if MODE == "adaptive":
                units = (tl.abs(weight) * UNIT).to(tl.int64)
                dropped += tl.sum(tl.where(there & front & (kept == 0) & (turn == 0), units, 0), 0)
                added += tl.sum(tl.where(kept & (front == 0) & (turn == 1), units, 0), 0)
            tl.store(ids_ptr + slot, tl.where(kept, expert, experts), mask=there & (turn == 2))


def _capacity(tokens: int, top_k: int, num_experts: int, capacity_factor: float | None) -> int:
    """Most rows of an expert; T * k where nothing limits them, and more than any target then."""
    if capacity_factor is None:
        return 2**30
    return min(2**30, ceil(capacity_factor * tokens * top_k / num_experts))


def _in_torch(
    topk_ids: Tensor, weights: Tensor, num_experts: int, top_k: int, tile: int, mode: str, capacity: int
) -> Tensor:
    columns = topk_ids.shape[1]
    expert = topk_ids.flatten().long()
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    front = torch.arange(expert.numel(), device=expert.device) % columns < top_k
    weight = weights.flatten().abs()
    key = weight.view(torch.int32).long() + front.long() * 2**31
    by_key = torch.sort(key, descending=True, stable=True).indices
    order = by_key[torch.sort(expert[by_key], stable=True).indices]
    whose = expert[order]
    total = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert.device)
    rows = total.scatter_add(0, expert, torch.ones_like(expert))
    fronts = total.scatter_add(0, expert, front.long())
    rank = torch.arange(expert.numel(), device=expert.device) - (rows.cumsum(0) - rows)[whose]
    down, up = fronts // tile * tile, (fronts + tile - 1) // tile * tile
    if mode == "none":
        target = fronts.clamp(max=capacity)
    else:
        if mode == "adaptive":
            units = (weight[order] * _UNIT).long()
            dropped = total.scatter_add(0, whose, units * ((rank >= down[whose]) & (rank < fronts[whose])))
            added = total.scatter_add(0, whose, units * ((rank >= fronts[whose]) & (rank < up[whose])))
            target = torch.where(added <= dropped, up, down)
        else:
            nearest = torch.where((fronts - down) * 2 >= tile, up, down)
            target = {"down": down, "up": up, "nearest": nearest}[mode]
        target = torch.minimum(target, rows).clamp(max=capacity // tile * tile)
    kept = (rank < target[whose]) & (whose < num_experts)
    ids = torch.empty_like(expert).scatter_(0, order, torch.where(kept, whose, num_experts))
    return ids.view(topk_ids.shape).to(torch.int32)


def _rounded(
    topk_ids: Tensor, weights: Tensor, num_experts: int, top_k: int, tile: int, mode: str, capacity_factor: float | None
) -> Tensor:
    tokens, columns = topk_ids.shape
    capacity = _capacity(tokens, top_k, num_experts, capacity_factor)
    if topk_ids.numel() == 0:
        return topk_ids.to(torch.int32, copy=True)
    if not on_kernels(topk_ids) or num_experts > MOST_EXPERTS:
        return _in_torch(topk_ids, weights, num_experts, top_k, tile, mode, capacity)
    order = permutation(topk_ids, num_experts)
    ids = torch.full(topk_ids.shape, num_experts, dtype=torch.int32, device=topk_ids.device)
    tensors, scalars = (order.slots, order.offs, weights.contiguous(), ids), (num_experts, columns, top_k, capacity)
    constants = (mode, tile, _BLOCK, _UNIT)
    launch(_round_kernel, num_experts, tensors, scalars, constants, num_warps=4)
    return ids


_call = define("moe_round_groups", _rounded, fake=lambda ids, *_: ids.new_empty(ids.shape, dtype=torch.int32))


def round_groups(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    *,
    top_k: int | None = None,
    tile: int = 128,
    mode: str | None = "nearest",
    capacity_factor: float | None = None,
) -> Tensor:
    """topk_ids with slots dropped, or candidates taken, so that each expert's rows are a multiple of `tile`; or, where
    rows are added and its candidates are too few, all rows there are.

    Args:
        topk_ids: [T, columns] int32 or int64, all columns distinct within a token; num_experts = dropped already.
        topk_weights: [T, columns] float32, not negative: the weight of each slot if it is kept.
        top_k: the first top_k columns are the routing, the others candidates that rounding may add; all by default.
        tile: M.
        mode: "down", "up", "nearest" or "adaptive"; None rounds nothing and drops only for the capacity.
        capacity_factor: at most ceil(capacity_factor * T * top_k / num_experts) rows for an expert; None: any.

    Returns:
        [T, columns] int32: the slots kept, and num_experts for all others. No host synchronisation; deterministic.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    top_k = _check(topk_ids, topk_weights, num_experts, top_k, tile)
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode: expected None or one of {MODES}, got {mode!r}")
    if capacity_factor is not None:
        check_number("capacity_factor", capacity_factor, 0)
    arguments = (topk_ids, topk_weights.detach(), num_experts, top_k, tile, mode or "none", capacity_factor)
    return (_call if traced(topk_ids) else _rounded)(*arguments)


def _check(topk_ids: Tensor, topk_weights: Tensor, num_experts: int, top_k: int | None, tile: int) -> int:
    """top_k, all columns by default, of a routing that fits together."""
    check_ids(topk_ids, num_experts)
    right = isinstance(topk_weights, Tensor) and topk_weights.shape == topk_ids.shape
    if not right or topk_weights.dtype is not torch.float32:
        raise ValueError(f"topk_weights: expected shape {list(topk_ids.shape)}, float32, got {came(topk_weights)}")
    check_integer("tile", tile, 1)
    if top_k is None:
        return topk_ids.shape[1]
    check_integer("top_k", top_k, 0)
    if top_k > topk_ids.shape[1]:
        raise ValueError(f"top_k: expected 0 … {topk_ids.shape[1]}, got {top_k}")
    return top_k


@dataclass(frozen=True)
class RoundingEffect:
    """What a rounding did to a routing. Shares of weight are of the sum of all weights before.

    Attributes:
        rows_before: rows of the grouped products.
        rows_after: the same, rounded.
        tiles_before: their tiles of `tile` rows.
        tiles_after: the same, rounded.
        tile_use_before: rows / (tiles * tile); 1 for no tile.
        tile_use_after: the same, rounded.
        slots_dropped: slots of the top-k that lost their row.
        slots_added: candidates that got one.
        weight_dropped: share of weight of the slots dropped.
        weight_added: share of weight of the slots added.
        tokens_changed: share of tokens that lost or gained an expert.
        tokens_without_expert: share of tokens that no expert is left to.
        largest_loss: the largest share of its own weight that one token lost.
    """

    rows_before: int
    rows_after: int
    tiles_before: int
    tiles_after: int
    tile_use_before: float
    tile_use_after: float
    slots_dropped: int
    slots_added: int
    weight_dropped: float
    weight_added: float
    tokens_changed: float
    tokens_without_expert: float
    largest_loss: float


def rounding_effect(
    topk_ids: Tensor,
    topk_weights: Tensor,
    rounded_ids: Tensor,
    num_experts: int,
    *,
    top_k: int | None = None,
    tile: int = 128,
) -> RoundingEffect:
    """Compare `rounded_ids`, what `round_groups` returned for the first three arguments, with the routing before it.

    Waits for the GPU. ValueError as there, and for `rounded_ids` of another shape."""
    top_k = _check(topk_ids, topk_weights, num_experts, top_k, tile)
    check_ids(rounded_ids, num_experts)
    if rounded_ids.shape != topk_ids.shape:
        raise ValueError(f"rounded_ids: expected shape {list(topk_ids.shape)} as topk_ids, got {came(rounded_ids)}")
    ids, rounded, weights = topk_ids.cpu().long(), rounded_ids.cpu().long(), topk_weights.cpu().double()
    before = (ids >= 0) & (ids < num_experts) & (torch.arange(ids.shape[1], device=ids.device) < top_k)
    after = (rounded >= 0) & (rounded < num_experts)
    dropped, added = before & ~after, after & ~before
    total, own = float(weights[before].sum()), (weights * before).sum(1)
    lost = torch.where(own > 0, (weights * dropped).sum(1) / own, 0.0)

    def tiles(mask: Tensor) -> tuple[int, int, float]:
        sizes = torch.bincount(ids[mask], minlength=num_experts)
        count, rows = int(((sizes + tile - 1) // tile).sum()), int(sizes.sum())
        return rows, count, rows / (count * tile) if count else 1.0

    rows_before, tiles_before, use_before = tiles(before)
    rows_after, tiles_after, use_after = tiles(after)

    def share(mask: Tensor) -> float:
        return float(mask.double().mean()) if mask.numel() else 0.0

    return RoundingEffect(
        rows_before,
        rows_after,
        tiles_before,
        tiles_after,
        use_before,
        use_after,
        int(dropped.sum()),
        int(added.sum()),
        float(weights[dropped].sum()) / total if total else 0.0,
        float(weights[added].sum()) / total if total else 0.0,
        share((dropped | added).any(1)),
        share(before.any(1) & ~after.any(1)),
        float(lost.max()) if lost.numel() else 0.0,
    )
