"""Which rows go to which rank and where they come back: the plan of one step of expert parallelism.

Rank p of W holds the experts E·p//W … E·(p+1)//W, and cuts them into `chunks` runs. A token is sent to a rank ONCE,
however many of its experts are there, in the first chunk that needs it; for each of its experts one row comes back.
All orders are stable sorts of keys, made on the device:

    send buffer     tokens by (chunk, rank they go to), then by token
    receive buffer  the same rows by (chunk, rank they come from)
    expert rows     `permutation` of the experts' ids in the receive buffer: a chunk is a run of them
    return buffer   slots by (chunk, rank they go back to), then by place in the receive buffer; the sender works the
                    same order out from its send buffer, so that nothing but the rows themselves travels back

How long a buffer is: exactly what it holds, which the host must know (counts are exchanged; one wait for the GPU), or
`capacity` rows for each rank, which it knows beforehand. Then nothing waits, unused rows carry ids of no expert, and
what does not fit is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch

from expertile.moe.permute import Permutation, permutation


@dataclass(frozen=True)
class Placement:
    """Which rank, and which chunk there, holds each of `num_experts` experts."""

    num_experts: int
    world: int
    chunks: int = 1

    def experts(self, rank: int) -> range:
        """The experts of a rank; ranks differ by one at most."""
        return range(self.num_experts * rank // self.world, self.num_experts * (rank + 1) // self.world)

    def chunk_bounds(self, rank: int) -> tuple[int, ...]:
        """[chunks + 1] bounds of the chunks among a rank's own experts."""
        count = len(self.experts(rank))
        return tuple(count * c // self.chunks for c in range(self.chunks + 1))

    @property
    def keys(self) -> int:
        """How many pairs (chunk, rank) there are; also the key of a dropped slot."""
        return self.chunks * self.world

    @cached_property
    def key_of(self) -> tuple[int, ...]:
        """[E + 1]: chunk · W + rank of each expert; `keys` for the id E of a dropped slot."""
        found = []
        for rank in range(self.world):
            bounds = self.chunk_bounds(rank)
            for chunk in range(self.chunks):
                found += [chunk * self.world + rank] * (bounds[chunk + 1] - bounds[chunk])
        return (*found, self.keys)

    @cache  # noqa: B019  small, few are ever made, and CUDA graphs read it: none may be dropped
    def key_table(self, device: torch.device) -> torch.Tensor:
        """`key_of` on a device, int32."""
        return torch.tensor(self.key_of, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Segments:
    """A buffer of rows in segments, one for each key: what `permutation` orders, at its true or its full length.

    items: [S] int32, the slot in each row; 0 in an unused one.
    used: [S] bool.
    positions: of each slot its row; -1 where it has none.
    counts: [keys] int32, the used rows of each segment.
    overflow: 0-dim int64, the slots that did not fit; None without a capacity.
    """

    items: torch.Tensor
    used: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    overflow: torch.Tensor | None

    @staticmethod
    def of(key: torch.Tensor, keys: int, capacity: int | None, rows: int) -> Segments:
        """Segments of the slots of key [n, m] int32, of `capacity` rows each; or without gaps and `rows` rows."""
        order = permutation(key, keys)
        counts = torch.diff(order.offs, prepend=order.offs.new_zeros(1))
        if capacity is None:
            used = torch.arange(rows, device=key.device) < order.offs[-1]
            return Segments(order.slots[:rows], used, order.positions, counts, None)
        starts = order.offs - counts
        place = torch.arange(capacity, device=key.device, dtype=torch.int32)
        used = place < counts[:, None]
        items = order.slots[torch.where(used, starts[:, None] + place, 0).flatten()]
        within = order.positions - starts[key.clamp(max=keys - 1)]
        fits = (order.positions >= 0) & (within < capacity)
        positions = torch.where(fits, key * capacity + within, -1)
        overflow = (counts - capacity).clamp(min=0).sum()
        return Segments(items, used.flatten(), positions, counts.clamp(max=capacity), overflow)


@dataclass(frozen=True)
class Outgoing:
    """The sender's half of a plan, before any rank has heard of another. T tokens, S rows sent.

    tokens: [S] int32, the token of each row sent; 0 in unused rows.
    sent_at: [T, W] int32, the row in which a token is sent to a rank; -1: not.
    label_at: [T, k] int32, the place of each slot among the labels sent, row · k + j; -1: dropped.
    returned_at: [T, k] int32, the row of the return buffer of each slot; -1: dropped.
    labels: [S, 2k] int32: a row's k global ids, E where the expert is not there, and its k weights as bits.
    counts: [2, chunks, W] int32: rows sent, and rows that come back.
    lost: [T] bool, tokens of which something did not fit; overflow: how many slots. None without a capacity.
    """

    tokens: torch.Tensor
    sent_at: torch.Tensor
    label_at: torch.Tensor
    returned_at: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    lost: torch.Tensor | None
    overflow: torch.Tensor | None


def outgoing(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, placement: Placement, capacity: int | None, max_tokens: int
) -> Outgoing:
    """Plan what is sent. topk_ids [T, k] int32, T at least 1. Waits for nothing; with no capacity, buffers are of the
    greatest length they could need, to be cut when the counts are known."""
    (tokens, top_k), e, w = topk_ids.shape, placement.num_experts, placement.world
    device = topk_ids.device
    key = placement.key_table(device)[topk_ids]
    ranks = torch.arange(w, device=device, dtype=torch.int32)
    here = (key % w)[..., None] == ranks
    # The mark of a dropped slot is `chunks` chunks on: later than all of them.
    chunk = torch.where(here, (key // w)[..., None], placement.chunks).amin(1)
    token_key = torch.where(chunk < placement.chunks, chunk * w + ranks, placement.keys)
    sent = Segments.of(token_key, placement.keys, None if capacity is None else min(capacity, max_tokens),
                       tokens * min(w, top_k))  # fmt: skip
    token, rank = sent.items // w, sent.items % w
    there = sent.used[:, None] & (key[token] < placement.keys) & (key[token] % w == rank[:, None])
    ids = torch.where(there, topk_ids[token], e)
    back = Segments.of(placement.key_table(device)[ids], placement.keys, capacity, tokens * top_k)
    row = sent.positions.gather(1, (key % w).long())
    slot = row * top_k + torch.arange(top_k, device=device, dtype=torch.int32)
    label_at = torch.where((row >= 0) & (key < placement.keys), slot, -1)
    returned_at = torch.where(label_at >= 0, back.positions.flatten()[label_at], -1)
    lost = overflow = None
    if capacity is not None:
        missing = (returned_at < 0) & (key < placement.keys)
        lost, overflow = missing.any(1), missing.sum()
    labels = torch.cat([ids, topk_weights[token].view(torch.int32)], 1)
    counts = torch.stack([sent.counts, back.counts]).view(2, placement.chunks, w)
    return Outgoing(token, sent.positions, label_at, returned_at, labels, counts, lost, overflow)


@dataclass(frozen=True)
class Splits:
    """Rows to and from each rank in each chunk, on the host: chunks × W. `rows_to` are tokens sent, `rows_from` tokens
    received, `slots_to` expert rows returned to their owner, `slots_from` those that come back."""

    rows_to: list[list[int]]
    rows_from: list[list[int]]
    slots_to: list[list[int]]
    slots_from: list[list[int]]

    @staticmethod
    def full(placement: Placement, capacity: int, max_tokens: int) -> Splits:
        """Those of fixed-size buffers."""
        rows = [[min(capacity, max_tokens)] * placement.world] * placement.chunks
        slots = [[capacity] * placement.world] * placement.chunks
        return Splits(rows, rows, slots, slots)

    @staticmethod
    def counted(sent: list[list[list[int]]], received: list[list[list[int]]]) -> Splits:
        """From counts [2, chunks, W] as sent, and as all ranks sent them here."""
        return Splits(sent[0], received[0], received[1], sent[1])


def starts(splits: list[list[int]]) -> list[int]:
    """[chunks + 1] rows at which each chunk of a buffer starts, and its length."""
    found = [0]
    for chunk in splits:
        found.append(found[-1] + sum(chunk))
    return found


@dataclass(frozen=True)
class Incoming:
    """The expert rank's half of a plan. N rows received, R expert rows.

    ids, weights: [N, k] int32 and float32: which of this rank's experts each slot is for (their number: none), and
        its weight.
    order: `permutation` of ids; its rows are rows of the receive buffer.
    return_rows: the expert row in each row of the return buffer; 0 in unused ones.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    order: Permutation
    return_rows: torch.Tensor


def incoming(
    labels: torch.Tensor, lengths: torch.Tensor, splits: Splits, placement: Placement, rank: int, capacity: int | None
) -> Incoming:
    """Plan the experts' work for labels [N, 2k] as received, N at least 1; `lengths` [chunks, W] is
    `splits.rows_from` on the device (not used with a capacity)."""
    received, top_k, device = labels.shape[0], labels.shape[1] // 2, labels.device
    ids, weights = labels[:, :top_k], labels[:, top_k:].contiguous().view(torch.float32)
    keys, w, experts = placement.keys, placement.world, placement.experts(rank)
    if capacity is None:
        sources = torch.arange(keys, device=device, dtype=torch.int32) % w
        source = sources.repeat_interleave(lengths.flatten(), output_size=received)
    else:
        source = torch.arange(received, device=device, dtype=torch.int32) // splits.rows_from[0][0]
    key = placement.key_table(device)[ids]
    mine = key < keys
    key = torch.where(mine, key // w * w + source[:, None], keys)
    back = Segments.of(key, keys, capacity, starts(splits.slots_to)[-1])
    kept = mine if capacity is None else back.positions >= 0
    own = torch.where(kept, ids - experts.start, len(experts))
    order = permutation(own, len(experts))
    return Incoming(own, weights, order, order.positions.flatten()[back.items].clamp(min=0))
