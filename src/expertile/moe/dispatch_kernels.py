"""The index tables of a step of expert parallelism, each in one launch; `dispatch_formulas` has what they are.

The host queues many small operators more slowly than a GPU runs them. So a kernel does all that lies between two
permutations, one element of its widest table in each thread.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertile.moe._placement import Placement
from expertile.moe.dispatch_formulas import NO_ROOM
from expertile.moe.permute import Permutation
from expertile.ops.launch.kernels import launch
from expertile.ragged import power_of_two

_BLOCK = 512
_NO_ROOM = tl.constexpr(NO_ROOM)


class _Shape(NamedTuple):
    """What a kernel is compiled for: KEYS = CHUNKS · WORLD segments of a buffer, with gaps behind them if FIXED; a
    program has BLOCK elements."""

    TOP_K: int
    WORLD: int
    CHUNKS: int
    KEYS: int
    FIXED: bool
    BLOCK: int


def _shape(top_k: int, placement: Placement, fixed: bool) -> _Shape:
    return _Shape(top_k, placement.world, placement.chunks, placement.keys, fixed, _BLOCK)


@triton.jit
def _id_and_key(ids_ptr, table_ptr, at, mask, experts):
    """(id, key) of slots; `experts` for an id out of range, which is compared before it is narrowed."""
    found = tl.load(ids_ptr + at, mask=mask, other=-1)
    found = tl.where((found >= 0) & (found < experts), found, experts).to(tl.int32)
    return found, tl.load(table_ptr + found, mask=mask, other=0)


@triton.jit
def _slot_of_row(slots_ptr, offs_ptr, row, mask, capacity, KEYS: tl.constexpr, FIXED: tl.constexpr):
    """(slot in each row of a buffer, 0 in unused ones; which are used)."""
    if FIXED:
        segment = row // capacity
        place = tl.load(offs_ptr + segment - 1, mask=mask & (segment > 0), other=0) + row % capacity
        used = mask & (place < tl.load(offs_ptr + segment, mask=mask, other=0))
    else:
        place = row
        used = mask & (row < tl.load(offs_ptr + KEYS - 1))
    return tl.load(slots_ptr + place, mask=used, other=0), used


@triton.jit
def _row_of_slot(position, key, offs_ptr, capacity, FIXED: tl.constexpr):
    """The row in its buffer of a slot at `position` of the permutation; -1 where it has none."""
    if FIXED:
        start = tl.load(offs_ptr + key - 1, mask=(position >= 0) & (key > 0), other=0)
        within = position - start
        return tl.where((position >= 0) & (within < capacity), key * capacity + within, -1)
    else:
        return position


@triton.jit
def _token_keys_kernel(
    ids_ptr, table_ptr, out_ptr, counts_ptr, pairs, slots, experts, s: tl.constexpr, BINS: tl.constexpr
):
    """`pairs` = T · W, `slots` = T · k. counts [W, 2, CHUNKS] hold zeros before; sums of integers are the same in
    whatever order."""
    i = tl.program_id(0) * s.BLOCK + tl.arange(0, s.BLOCK)
    there = i < pairs
    token, rank = i // s.WORLD, i % s.WORLD
    first = tl.zeros_like(i) + s.CHUNKS
    for j in range(s.TOP_K):
        _, key = _id_and_key(ids_ptr, table_ptr, token * s.TOP_K + j, there, experts)
        hit = there & (key < s.KEYS) & (key % s.WORLD == rank)
        first = tl.where(hit, tl.minimum(first, key // s.WORLD), first)
    goes = first < s.CHUNKS
    going = tl.where(goes, first * s.WORLD + rank, s.KEYS)
    tl.store(out_ptr + i, going, mask=there)
    if counts_ptr is not None:
        rows = tl.histogram(tl.where(goes, going, 0), BINS, mask=goes)
        _, key = _id_and_key(ids_ptr, table_ptr, i, i < slots, experts)
        wanted = (i < slots) & (key < s.KEYS)
        back = tl.histogram(tl.where(wanted, key, 0), BINS, mask=wanted)
        bins = tl.arange(0, BINS)
        to = counts_ptr + bins % s.WORLD * (2 * s.CHUNKS) + bins // s.WORLD
        tl.atomic_add(to, rows, mask=(bins < s.KEYS) & (rows > 0), sem="relaxed")
        tl.atomic_add(to + s.CHUNKS, back, mask=(bins < s.KEYS) & (back > 0), sem="relaxed")


@triton.jit
def _pack_kernel(tensors, scalars, s: tl.constexpr):
    ids_ptr, weights_ptr, table_ptr, slots_ptr, offs_ptr, tokens_ptr, labels_ptr, keys_ptr = tensors
    count, experts, capacity = scalars
    i = tl.program_id(0) * s.BLOCK + tl.arange(0, s.BLOCK)
    there = i < count
    row, j = i // s.TOP_K, i % s.TOP_K
    slot, used = _slot_of_row(slots_ptr, offs_ptr, row, there, capacity, s.KEYS, s.FIXED)
    token = slot // s.WORLD
    expert, key = _id_and_key(ids_ptr, table_ptr, token * s.TOP_K + j, there, experts)
    wanted = used & (key < s.KEYS) & (key % s.WORLD == slot % s.WORLD)
    weight = tl.load(weights_ptr + token * s.TOP_K + j, mask=there, other=0.0)
    tl.store(tokens_ptr + row, token, mask=there & (j == 0))
    tl.store(labels_ptr + row * (2 * s.TOP_K) + j, tl.where(wanted, expert, experts), mask=there)
    tl.store(labels_ptr + row * (2 * s.TOP_K) + s.TOP_K + j, weight.to(tl.int32, bitcast=True), mask=there)
    tl.store(keys_ptr + i, tl.where(wanted, key, s.KEYS), mask=there)


@triton.jit
def _find_kernel(tensors, scalars, s: tl.constexpr):
    """`slots` = T · k, `pairs` = T · W. sent_at is written where it is not the permutation itself."""
    ids_ptr, table_ptr, token_keys_ptr, sent_ptr, sent_offs_ptr, back_ptr, back_offs_ptr = tensors[:7]
    sent_at_ptr, label_at_ptr, returned_at_ptr = tensors[7:]
    slots, pairs, experts, sent_capacity, back_capacity = scalars
    i = tl.program_id(0) * s.BLOCK + tl.arange(0, s.BLOCK)
    if s.FIXED:
        pair = i < pairs
        going = tl.load(token_keys_ptr + i, mask=pair, other=0)
        at = _row_of_slot(tl.load(sent_ptr + i, mask=pair, other=-1), going, sent_offs_ptr, sent_capacity, s.FIXED)
        tl.store(sent_at_ptr + i, at, mask=pair)
    there = i < slots
    _, key = _id_and_key(ids_ptr, table_ptr, i, there, experts)
    wanted = there & (key < s.KEYS)
    goes = i // s.TOP_K * s.WORLD + key % s.WORLD
    row = tl.load(sent_ptr + goes, mask=wanted, other=-1)
    if s.FIXED:
        going = tl.load(token_keys_ptr + goes, mask=wanted, other=0)
        row = _row_of_slot(row, going, sent_offs_ptr, sent_capacity, s.FIXED)
    sends = wanted & (row >= 0)
    label = row * s.TOP_K + i % s.TOP_K
    position = tl.load(back_ptr + label, mask=sends, other=-1)
    returned = _row_of_slot(position, key, back_offs_ptr, back_capacity, s.FIXED)
    if s.FIXED:
        returned = tl.where(wanted & (returned < 0), _NO_ROOM, returned)
    tl.store(label_at_ptr + i, tl.where(sends, label, -1), mask=there)
    tl.store(returned_at_ptr + i, returned, mask=there)


@triton.jit
def _unpack_kernel(tensors, scalars, s: tl.constexpr):
    """`local` experts from `first` on are here."""
    labels_ptr, table_ptr, lengths_ptr, ids_ptr, weights_ptr, keys_ptr = tensors
    count, experts, capacity, first, local = scalars
    i = tl.program_id(0) * s.BLOCK + tl.arange(0, s.BLOCK)
    there = i < count
    row = i // s.TOP_K
    at = row * (2 * s.TOP_K) + i % s.TOP_K
    if s.FIXED:
        segment = row // capacity
    else:
        segment = tl.zeros_like(i)
        end = tl.zeros([], tl.int32)
        for part in range(s.KEYS - 1):
            end += tl.load(lengths_ptr + part % s.WORLD * (2 * s.CHUNKS) + part // s.WORLD)
            segment += (row >= end).to(tl.int32)
    expert, key = _id_and_key(labels_ptr, table_ptr, at, there, experts)
    mine = key < s.KEYS
    weight = tl.load(labels_ptr + at + s.TOP_K, mask=there, other=0).to(tl.float32, bitcast=True)
    tl.store(ids_ptr + i, tl.where(mine, expert - first, local), mask=there)
    tl.store(weights_ptr + i, weight, mask=there)
    tl.store(keys_ptr + i, tl.where(mine, key // s.WORLD * s.WORLD + segment % s.WORLD, s.KEYS), mask=there)


@triton.jit
def _returned_kernel(keys_ptr, slots_ptr, offs_ptr, positions_ptr, out_ptr, count, capacity, s: tl.constexpr):
    i = tl.program_id(0) * s.BLOCK + tl.arange(0, s.BLOCK)
    there = i < count
    slot, used = _slot_of_row(slots_ptr, offs_ptr, i, there, capacity, s.KEYS, s.FIXED)
    position = tl.load(positions_ptr + slot, mask=used, other=0)
    if not s.FIXED and s.CHUNKS > 1:
        chunk = tl.load(keys_ptr + slot, mask=used, other=0) // s.WORLD
        position -= tl.load(offs_ptr + chunk * s.WORLD - 1, mask=used & (chunk > 0), other=0)
    tl.store(out_ptr + i, tl.maximum(position, 0), mask=there)


@triton.jit
def _picked_kernel(values_ptr, at_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(at_ptr + i, mask=i < count, other=-1)
    tl.store(out_ptr + i, tl.load(values_ptr + at, mask=at >= 0, other=0), mask=i < count)


def _run(
    kernel: Any, count: int, tensors: tuple[Tensor | None, ...], scalars: tuple[int, ...], *constants: Any
) -> None:
    """`count` elements, _BLOCK in a program."""
    if count:
        launch(kernel, -(-count // _BLOCK), tensors, scalars, constants, num_warps=4)


def token_keys(topk_ids: Tensor, placement: Placement, counting: bool) -> tuple[Tensor, Tensor | None]:
    (tokens, top_k), device, w, chunks = topk_ids.shape, topk_ids.device, placement.world, placement.chunks
    out = torch.empty((tokens, w), dtype=torch.int32, device=device)
    counts = torch.zeros((2, w, 2, chunks), dtype=torch.int32, device=device) if counting else None
    pairs, slots = tokens * w, tokens * top_k
    _run(
        _token_keys_kernel,
        max(pairs, slots) if counting else pairs,
        (topk_ids.contiguous(), placement.key_table(device), out, counts),
        (pairs, slots, placement.num_experts),
        _shape(top_k, placement, False),
        power_of_two(placement.keys, 32),
    )
    return out, counts


def pack(
    topk_ids: Tensor, topk_weights: Tensor, order: Permutation, placement: Placement, capacity: int | None, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    top_k, device = topk_ids.shape[1], topk_ids.device
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    labels = torch.empty((rows, 2 * top_k), dtype=torch.int32, device=device)
    keys = torch.empty((rows, top_k), dtype=torch.int32, device=device)
    given = (topk_ids.contiguous(), topk_weights.contiguous(), placement.key_table(device), order.slots, order.offs)
    sizes = (rows * top_k, placement.num_experts, capacity or 0)
    shape = _shape(top_k, placement, capacity is not None)
    _run(_pack_kernel, rows * top_k, (*given, tokens, labels, keys), sizes, shape)
    return tokens, labels, keys


def find(
    topk_ids: Tensor,
    token_keys: Tensor,
    sent: Permutation,
    back: Permutation,
    placement: Placement,
    capacities: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    device = topk_ids.device
    label_at = torch.empty(topk_ids.shape, dtype=torch.int32, device=device)
    returned_at = torch.empty_like(label_at)
    fixed = capacities is not None
    sent_at = torch.empty_like(sent.positions) if fixed else sent.positions
    slots, pairs = label_at.numel(), sent_at.numel()
    given = (topk_ids.contiguous(), placement.key_table(device), token_keys)
    orders = (sent.positions, sent.offs, back.positions, back.offs)
    sizes = (slots, pairs, placement.num_experts, *(capacities or (0, 0)))
    count, shape = max(slots, pairs) if fixed else slots, _shape(topk_ids.shape[1], placement, fixed)
    _run(_find_kernel, count, (*given, *orders, sent_at, label_at, returned_at), sizes, shape)
    return sent_at, label_at, returned_at


def unpack(
    labels: Tensor, lengths: Tensor | None, placement: Placement, rank: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    received, top_k, device = labels.shape[0], labels.shape[1] // 2, labels.device
    ids = torch.empty((received, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((received, top_k), dtype=torch.float32, device=device)
    keys, experts = torch.empty_like(ids), placement.experts(rank)
    tensors = (labels, placement.key_table(device), lengths, ids, weights, keys)
    sizes = (ids.numel(), placement.num_experts, capacity or 0, experts.start, placement.groups(rank))
    _run(_unpack_kernel, ids.numel(), tensors, sizes, _shape(top_k, placement, capacity is not None))
    return ids, weights, keys


def returned(
    keys: Tensor, back: Permutation, order: Permutation, placement: Placement, capacity: int | None, rows: int
) -> Tensor:
    out = torch.empty(rows, dtype=torch.int32, device=keys.device)
    tensors, shape = (
        (keys, back.slots, back.offs, order.positions, out),
        _shape(keys.shape[1], placement, capacity is not None),
    )
    _run(_returned_kernel, rows, tensors, (rows, capacity or 0), shape)
    return out


def picked(values: Tensor, at: Tensor) -> Tensor:
    out = torch.empty(at.shape, dtype=values.dtype, device=at.device)
    _run(_picked_kernel, out.numel(), (values, at, out), (out.numel(),), _BLOCK)
    return out
