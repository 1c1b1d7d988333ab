"""The index tables of a step of expert parallelism in plain torch; `dispatch_kernels` has each in one launch.

Ids out of range are dropped slots here. Lengths: T tokens, k slots of each, W ranks, S rows sent, N rows received.
`capacity` is the room of each segment of a buffer, one for each key (`Placement`); None: segments without gaps.
"""

import torch
from torch import Tensor

from expertile.moe._placement import Placement
from expertile.moe.permute import Permutation

NO_ROOM = -2  # a slot whose row did not fit; -1: a slot that was dropped


def _ids_and_keys(ids: Tensor, placement: Placement) -> tuple[Tensor, Tensor]:
    """int32 ids, `num_experts` for those out of range, and their keys."""
    experts = placement.num_experts
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts).to(torch.int32)
    return ids, placement.key_table(ids.device)[ids]


def _slots_of_rows(order: Permutation, capacity: int | None, rows: int) -> tuple[Tensor, Tensor]:
    """(slot in each of a buffer's first `rows` rows, 0 in unused ones; which are used)."""
    offs = order.offs
    row = torch.arange(rows, device=offs.device, dtype=torch.int32)
    if capacity is None:
        return order.slots[:rows], row < offs[-1]
    segment = row // capacity
    place = torch.cat([offs.new_zeros(1), offs])[segment] + row % capacity
    used = place < offs[segment]
    return torch.where(used, order.slots[torch.where(used, place, 0)], 0), used


def rows_of_slots(positions: Tensor, key: Tensor, offs: Tensor, capacity: int | None) -> Tensor:
    """The row in its buffer of each slot at `positions` of a permutation by `key`; -1 where it has none."""
    if capacity is None:
        return positions
    starts = torch.cat([offs.new_zeros(1), offs])
    within = positions - starts[key]
    return torch.where((positions >= 0) & (within < capacity), key * capacity + within, -1)


def token_keys(topk_ids: Tensor, placement: Placement, counting: bool) -> tuple[Tensor, Tensor | None]:
    """(keys [T, W] int32, counts [2, W, 2, chunks] int32 if `counting`).

    The key is that under which a token goes to a rank, of the first chunk that needs it; `placement.keys`: it does not
    go there. Counts are, in the first half, how many rows go to a rank and how many slots it has, in each chunk; the
    second half is room for what the other ranks say."""
    w = placement.world
    _, key = _ids_and_keys(topk_ids, placement)
    ranks = torch.arange(w, device=key.device, dtype=torch.int32)
    # The mark of a dropped slot is `chunks` chunks on: later than all of them.
    chunk = torch.where((key % w)[..., None] == ranks, (key // w)[..., None], placement.chunks).amin(1)
    keys = torch.where(chunk < placement.chunks, chunk * w + ranks, placement.keys)
    if not counting:
        return keys, None
    counts = keys.new_zeros((2, w, 2, placement.chunks))
    for i, found in enumerate((keys.flatten().long(), key.flatten().long())):
        number = torch.zeros(placement.keys + 1, dtype=torch.int64, device=key.device)
        number.scatter_add_(0, found, torch.ones_like(found))
        counts[0, :, i] = number[:-1].view(-1, w).t()
    return keys, counts


def pack(
    topk_ids: Tensor, topk_weights: Tensor, order: Permutation, placement: Placement, capacity: int | None, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [S], labels [S, 2k], keys of the labels' slots [S, k]) of S = `rows` rows of the send buffer; `order` is
    the permutation of `token_keys`."""
    w = placement.world
    slots, used = _slots_of_rows(order, capacity, rows)
    token, rank = slots // w, slots % w
    ids, key = _ids_and_keys(topk_ids, placement)
    key = key[token]
    there = used[:, None] & (key < placement.keys) & (key % w == rank[:, None])
    ids = torch.where(there, ids[token], placement.num_experts)
    labels = torch.cat([ids, topk_weights[token].view(torch.int32)], 1)
    return token, labels, torch.where(there, key, placement.keys)


def find(
    topk_ids: Tensor,
    token_keys: Tensor,
    sent: Permutation,
    back: Permutation,
    placement: Placement,
    capacities: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sent_at, label_at, returned_at) of `Outgoing`. `sent` and `back` are the permutations of `token_keys` and of the
    labels' keys, whose segments have room for capacities[0] and capacities[1]."""
    top_k, w = topk_ids.shape[1], placement.world
    _, key = _ids_and_keys(topk_ids, placement)
    room = (None, None) if capacities is None else capacities
    sent_at = rows_of_slots(sent.positions, token_keys, sent.offs, room[0])
    row = sent_at.gather(1, (key % w).long())
    slot = row * top_k + torch.arange(top_k, device=row.device, dtype=torch.int32)
    wanted = key < placement.keys
    label_at = torch.where((row >= 0) & wanted, slot, -1)
    position = torch.where(label_at >= 0, back.positions.flatten()[label_at], -1)
    returned_at = rows_of_slots(position, key, back.offs, room[1])
    if capacities is not None:
        returned_at = torch.where((returned_at < 0) & wanted, NO_ROOM, returned_at)
    return sent_at, label_at, returned_at


def unpack(
    labels: Tensor, lengths: Tensor | None, placement: Placement, rank: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, weights, keys), each [N, k], of labels [N, 2k] as received by `rank`: which of its groups (their number:
    none), the weight, and the key (chunk, rank they came from) under which its result goes back. Rows come in segments
    of `capacity`; or of lengths[r, 0, c] for chunk c and rank r, [W, 2, chunks]."""
    received, top_k = labels.shape[0], labels.shape[1] // 2
    weights = labels[:, top_k:].contiguous().view(torch.float32)
    w, experts = placement.world, placement.experts(rank)
    if capacity is None:
        assert lengths is not None
        sources = torch.arange(placement.keys, device=labels.device, dtype=torch.int32) % w
        source = sources.repeat_interleave(lengths[:, 0].t().flatten(), output_size=received)
    else:
        source = torch.arange(received, device=labels.device, dtype=torch.int32) // capacity % w
    ids, key = _ids_and_keys(labels[:, :top_k], placement)
    mine = key < placement.keys
    key = torch.where(mine, key // w * w + source[:, None], placement.keys)
    return torch.where(mine, ids - experts.start, placement.groups(rank)), weights, key


def returned(
    keys: Tensor, back: Permutation, order: Permutation, placement: Placement, capacity: int | None, rows: int
) -> Tensor:
    """[rows] int32: the row, among those of its chunk, of the expert rows `order` in each row of the return buffer,
    which holds the slots in the order `back`, the permutation of their `keys` [N, k]; 0 in unused ones."""
    slots, used = _slots_of_rows(back, capacity, rows)
    position = order.positions.flatten()[slots]
    if capacity is None:
        starts = torch.cat([back.offs.new_zeros(1), back.offs])[:: placement.world]
        position = position - starts[(keys.flatten()[slots] // placement.world).clamp(max=placement.chunks)]
    return torch.where(used, position, 0).clamp(min=0)


def picked(values: Tensor, at: Tensor) -> Tensor:
    """values.flatten()[at], and 0 where `at` is -1."""
    return torch.cat([values.flatten(), values.new_zeros(1)])[at]  # the last is what index -1 finds
