"""Which rows go to which rank and where they come back: the plan of one step of expert parallelism.

Experts lie as torch.chunk cuts them, n = ⌈E/W⌉ to a rank: rank p of W holds n·p … n·(p+1), the last ones fewer or
none, and cuts them into `chunks` runs. A token is sent to a rank ONCE, however many of its experts are there, in the
first chunk that needs it; for each of its experts one row comes back. All orders are stable sorts of keys, made on the
device:

    send buffer     tokens by (chunk, rank they go to), then by token
    receive buffer  the same rows by (chunk, rank they come from)
    expert rows     `permutation` of the experts' ids in the receive buffer: a chunk is a run of them
    return buffer   slots by (chunk, rank they go back to), then by place in the receive buffer; the sender works the
                    same order out from its send buffer, so that nothing but the rows themselves travels back

A buffer is as long as what it holds, which the host must know (counts are exchanged; one wait for the GPU), or has
`capacity` rows for each rank: then nothing waits, unused rows carry ids of no expert, and what does not fit is counted.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertile.moe import dispatch_formulas, dispatch_kernels
from expertile.moe._placement import Placement
from expertile.moe.permute import Permutation, permutation
from expertile.ops.launch.device import on_kernels


def _maker(x: Tensor) -> Any:
    """The module that makes the index tables for tensors like x."""
    return dispatch_kernels if on_kernels(x) else dispatch_formulas


@dataclass(frozen=True)
class Outgoing:
    """The sender's half of a plan, before any rank has heard of another. T tokens, S rows sent.

    tokens: [S] int32, the token of each row sent; 0 in unused rows.
    sent_at: [T, W] int32, the row in which a token is sent to a rank; -1: not.
    label_at: [T, k] int32, the place of each slot among the labels sent, row · k + j; -1: dropped, or no room.
    returned_at: [T, k] int32, the row of the return buffer of each slot; -1: dropped; -2: no room.
    labels: [S, 2k] int32: a row's k global ids, E where the expert is not there, and its k weights as bits.
    lost: [T] bool, tokens of which something did not fit; overflow: how many slots. None where everything must fit.
    """

    tokens: Tensor
    sent_at: Tensor
    label_at: Tensor
    returned_at: Tensor
    labels: Tensor
    lost: Tensor | None
    overflow: Tensor | None


def token_keys(topk_ids: Tensor, placement: Placement, counting: bool) -> tuple[Tensor, Tensor | None]:
    """What a plan begins with, and counts to be exchanged: see `dispatch_formulas.token_keys`. topk_ids [T, k] int32
    or int64, ids out of range are dropped slots; T at least 1."""
    keys, counts = _maker(topk_ids).token_keys(topk_ids, placement, counting)
    return keys, counts


def outgoing(
    topk_ids: Tensor, topk_weights: Tensor, keys: Tensor, placement: Placement, capacity: int | None, max_tokens: int
) -> Outgoing:
    """Plan what is sent; topk_weights [T, k] float32, `keys` by `token_keys`. Waits for nothing; with no capacity,
    buffers are of the greatest length they could need, to be cut when the counts are known."""
    tokens, top_k = topk_ids.shape
    make, segments = _maker(topk_ids), placement.keys
    capacities = None if capacity is None else (min(capacity, max_tokens), capacity)
    sent = permutation(keys, segments)
    rows = tokens * min(placement.world, top_k) if capacities is None else segments * capacities[0]
    token, labels, label_keys = make.pack(
        topk_ids, topk_weights, sent, placement, None if capacities is None else capacities[0], rows
    )
    back = permutation(label_keys, segments)
    sent_at, label_at, returned_at = make.find(topk_ids, keys, sent, back, placement, capacities)
    lost = overflow = None
    if capacity is not None and _may_overflow(capacity, max_tokens, top_k):
        missing = returned_at == dispatch_formulas.NO_ROOM
        lost, overflow = missing.any(1), missing.sum()
    return Outgoing(token, sent_at, label_at, returned_at, labels, lost, overflow)


def _may_overflow(capacity: int, max_tokens: int, top_k: int) -> bool:
    """Whether something may not fit: not if all slots of a rank find room, though all went to one."""
    return capacity < max_tokens * top_k


@dataclass(frozen=True)
class Splits:
    """Rows to and from each rank in each chunk, on the host: chunks × W. `rows_to` are tokens sent, `rows_from` tokens
    received, `slots_to` expert rows returned to their owner, `slots_from` those that come back."""

    rows_to: list[list[int]]
    rows_from: list[list[int]]
    slots_to: list[list[int]]
    slots_from: list[list[int]]

    @staticmethod
    def full(placement: Placement, capacity: int, max_tokens: int) -> "Splits":
        """Those of fixed-size buffers."""
        rows = [[min(capacity, max_tokens)] * placement.world] * placement.chunks
        slots = [[capacity] * placement.world] * placement.chunks
        return Splits(rows, rows, slots, slots)

    @staticmethod
    def counted(counts: list[list[list[list[int]]]]) -> "Splits":
        """From the counts of `token_keys`, their second half as all ranks sent it here."""
        # By rank, then rows and slots, then chunk; becomes rows and slots by chunk, then rank.
        (rows_to, slots_from), (rows_from, slots_to) = (
            [[list(ranks) for ranks in zip(*(rank[what] for rank in half), strict=True)] for what in (0, 1)]
            for half in counts
        )
        return Splits(rows_to, rows_from, slots_to, slots_from)


def starts(splits: list[list[int]]) -> list[int]:
    """[chunks + 1] rows at which each chunk of a buffer starts, and its length."""
    found = [0]
    for chunk in splits:
        found.append(found[-1] + sum(chunk))
    return found


@dataclass(frozen=True)
class Incoming:
    """The expert rank's half of a plan. N rows received, R expert rows.

    ids, weights: [N, k] int32 and float32: which of this rank's groups each slot is for (their number: none), and
        its weight.
    order: `permutation` of ids; its rows are rows of the receive buffer.
    return_rows: the expert row, counted from the first of its chunk, in each row of the return buffer; 0 in unused
        ones.
    """

    ids: Tensor
    weights: Tensor
    order: Permutation
    return_rows: Tensor


def incoming(
    labels: Tensor,
    lengths: Tensor | None,
    splits: Splits,
    placement: Placement,
    rank: int,
    capacity: int | None,
    max_tokens: int | None,
) -> Incoming:
    """Plan the experts' work for labels [N, 2k] as received, N at least 1; `lengths` [W, 2, chunks] is the second half
    of the exchanged counts on the device (not used with a capacity)."""
    make, experts, top_k = _maker(labels), placement.groups(rank), labels.shape[1] // 2
    ids, weights, keys = make.unpack(
        labels, lengths, placement, rank, None if capacity is None else splits.rows_from[0][0]
    )
    back = permutation(keys, placement.keys)
    if capacity is not None and max_tokens is not None and _may_overflow(capacity, max_tokens, top_k):
        fits = dispatch_formulas.rows_of_slots(back.positions, keys, back.offs, capacity) >= 0
        ids = torch.where(fits, ids, experts)
    order = permutation(ids, experts)
    rows = starts(splits.slots_to)[-1]
    return Incoming(ids, weights, order, make.returned(keys, back, order, placement, capacity, rows))


def own_slots(dslots: Tensor, sent: Outgoing) -> Tensor:
    """[T, k] from what comes back for the labels as they were sent [S, k]; 0 for dropped slots."""
    return _maker(dslots).picked(dslots, sent.label_at)
