"""Rows to other ranks and back: the collectives of expert parallelism, and errors that name a rank.

Every collective is asynchronous. On a GPU it runs on the process group's own stream, after what the current stream was
given so far, and `arrive` makes the current stream wait for it; on a CPU threads of the group run it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from expertile.moe._members import Members
from expertile.moe._placement import Placement
from expertile.moe.dispatch import Incoming, Outgoing, Splits, incoming, outgoing, starts, token_keys

Lengths = list[list[int]]


@dataclass(frozen=True)
class Step:
    """The plan of one call; `rows` are sent."""

    sent: Outgoing
    arrived: Incoming
    splits: Splits
    rows: int


@dataclass(frozen=True)
class Travelling:
    """Rows on their way: the buffer they arrive in; by chunk the collective and the rows it still reads."""

    buffer: torch.Tensor
    pieces: list[tuple[dist.Work, torch.Tensor] | None]
    what: str


class Exchange:
    """What travels between the ranks of `members`, which hold the experts as `placement` says.

    capacity: slots of a return buffer for each pair of ranks; None: as many as there are.
    max_tokens: the most tokens of a rank; used with a capacity.
    device: that of the last call's tokens.
    overflow: [1] int64 on that device: slots that found no room so far; None without a capacity.
    """

    def __init__(self, members: Members, placement: Placement, capacity: int | None, max_tokens: int | None):
        self.members = members
        self.placement = placement
        self.capacity = capacity
        self.max_tokens = max_tokens
        self.device: torch.device | None = None
        self.overflow: torch.Tensor | None = None

    def post(self, travelling: Travelling, chunk: int, rows: torch.Tensor, arriving: Lengths, leaving: Lengths) -> None:
        """Send `rows`, chunk `chunk` of a buffer, in lengths leaving[chunk] to each rank; lengths arriving[chunk] come
        into their place in the travelling buffer."""
        rows, out = rows.contiguous(), travelling.buffer
        if len(arriving) > 1:
            first = starts(arriving)
            out = out[first[chunk] : first[chunk + 1]]
        # A capacity's segments are all alike, for which there is a plainer collective.
        here, there = (None, None) if self.capacity is not None else (arriving[chunk], leaving[chunk])
        with self.members.named(travelling.what):
            work = dist.all_to_all_single(out, rows, here, there, group=self.members.group, async_op=True)
        travelling.pieces[chunk] = (work, rows)

    def start(self, what: str, like: torch.Tensor, arriving: Lengths) -> Travelling:
        """A buffer for rows like those of `like`, to which chunks are posted."""
        buffer = like.new_empty((sum(map(sum, arriving)), *like.shape[1:]))
        return Travelling(buffer, [None] * len(arriving), what)

    def send(self, what: str, rows: torch.Tensor, arriving: Lengths, leaving: Lengths) -> Travelling:
        """All chunks of `rows` at once."""
        travelling = self.start(what, rows, arriving)
        self.post_all(travelling, rows, arriving, leaving)
        return travelling

    def post_all(self, travelling: Travelling, rows: torch.Tensor, arriving: Lengths, leaving: Lengths) -> None:
        """`post` of every chunk of `rows`."""
        for chunk, (start, end) in enumerate(pairwise(starts(leaving))):
            whole = end - start == rows.shape[0]
            self.post(travelling, chunk, rows if whole else rows[start:end], arriving, leaving)

    def arrive(self, travelling: Travelling, chunk: int | None = None) -> torch.Tensor:
        """The buffer, when a chunk of it, or all, has come."""
        with self.members.named(travelling.what):
            for c in range(len(travelling.pieces)) if chunk is None else (chunk,):
                piece = travelling.pieces[c]
                if piece is not None:
                    self.members.wait(piece[0], travelling.buffer.is_cuda)
                    travelling.pieces[c] = None
        return travelling.buffer

    def plan(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, meanwhile: Callable[[Outgoing], None]
    ) -> tuple[Outgoing, torch.Tensor | None, Splits]:
        """This rank's half of the plan for topk_ids [T, k] and topk_weights [T, k] float32, T at least 1; the counts
        of the other ranks, [W, 2, chunks]; and all lengths. Waits for the GPU unless there is a capacity; `meanwhile`
        is called before the host waits, to queue what needs the rank's own half alone."""
        placement = self.placement
        if self.capacity is not None:
            assert self.max_tokens is not None
            keys, _ = token_keys(topk_ids, placement, False)
            sent = outgoing(topk_ids, topk_weights, keys, placement, self.capacity, self.max_tokens)
            if self.overflow is None or self.overflow.device != topk_ids.device:
                with torch.inference_mode(False):  # later steps may be of training
                    self.overflow = torch.zeros(1, dtype=torch.int64, device=topk_ids.device)
            if sent.overflow is not None:
                self.overflow += sent.overflow
            meanwhile(sent)
            return sent, None, Splits.full(placement, self.capacity, self.max_tokens)
        if topk_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "max_tokens: expected a number in the capture of a CUDA graph, which cannot wait, got None"
            )
        # The counts travel first: what the host waits for is on its way while it queues all the rest.
        keys, counts = token_keys(topk_ids, placement, True)
        assert counts is not None
        mine, theirs = counts.unbind()
        with self.members.named("exchanging counts"):
            work = dist.all_to_all_single(theirs, mine, group=self.members.group, async_op=True)
            self.members.wait(work, theirs.is_cuda)
            copied = self.members.copy_to_host(counts)
        sent = outgoing(topk_ids, topk_weights, keys, placement, None, topk_ids.shape[0])
        meanwhile(sent)
        with self.members.named("exchanging counts"):
            return sent, theirs, Splits.counted(copied())

    def step(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[Step, Travelling]:
        """The plan of a call, and the rows of x [T, H] on their way to the experts."""
        self.device = x.device
        early: list[torch.Tensor] = []

        def gather(sent: Outgoing) -> None:
            if self.capacity is not None or self.placement.nearly_all_sent(topk_ids.shape[1]):
                early.append(x.index_select(0, sent.tokens))

        sent, lengths, splits = self.plan(topk_ids, topk_weights, gather)
        count = sum(map(sum, splits.rows_to))
        labels = self.send("sending labels", sent.labels[:count], splits.rows_from, splits.rows_to)
        rows = early[0] if early else x.index_select(0, sent.tokens[:count])
        travelling = self.send("dispatch", rows, splits.rows_from, splits.rows_to)
        arrived = incoming(
            self.arrive(labels), lengths, splits, self.placement, self.members.rank, self.capacity, self.max_tokens
        )
        return Step(sent, arrived, splits, count), travelling
