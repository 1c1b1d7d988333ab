"""A step of expert parallelism taken apart: its collectives alone, and its computation alone, on the same buffers.

`Recorder` keeps what a step posted and received. `communicate` posts it all again and waits; `Silent` gives the step
what the recorded one received, so that its plans, gathers, products and sums run on the same data.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from expertile.moe.dispatch import Outgoing, Splits, outgoing, token_keys
from expertile.moe.exchange import Exchange, Lengths, Step, Travelling


@dataclass(frozen=True)
class _Post:
    travelling: int
    chunk: int
    rows: torch.Tensor
    arriving: Lengths
    leaving: Lengths


class Recorder(Exchange):
    """An exchange that keeps the last step: what came of exchanging counts; buffers and posts in the order they were
    made; `forward`: how many posts there were at the end of the forward pass (`mark`)."""

    def __init__(self, real: Exchange):
        super().__init__(real.members, real.placement, real.capacity, real.max_tokens)
        self.travelling: list[Travelling] = []
        self.posts: list[_Post] = []
        self.forward = 0
        self.lengths: torch.Tensor | None = None
        self.splits: Splits | None = None

    def mark(self) -> None:
        """The forward pass ends here."""
        self.forward = len(self.posts)

    def step(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[Step, Travelling]:
        self.travelling, self.posts = [], []
        return super().step(x, topk_ids, topk_weights)

    def plan(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, meanwhile: Callable[[Outgoing], None]
    ) -> tuple[Outgoing, torch.Tensor | None, Splits]:
        sent, self.lengths, self.splits = super().plan(topk_ids, topk_weights, meanwhile)
        return sent, self.lengths, self.splits

    def start(self, what: str, like: torch.Tensor, arriving: Lengths) -> Travelling:
        self.travelling.append(super().start(what, like, arriving))
        return self.travelling[-1]

    def post(self, travelling: Travelling, chunk: int, rows: torch.Tensor, arriving: Lengths, leaving: Lengths) -> None:
        rows = rows.contiguous()
        index = next(i for i, t in enumerate(self.travelling) if t is travelling)
        self.posts.append(_Post(index, chunk, rows, arriving, leaving))
        super().post(travelling, chunk, rows, arriving, leaving)

    def leaving_nbytes(self, forward: bool) -> int:
        """Bytes of the posted rows that go to other ranks, unused room included."""
        total = 0
        for post in self.posts[: self.forward] if forward else self.posts:
            row = post.rows[0].numel() * post.rows.element_size() if len(post.rows) else 0
            total += row * sum(n for r, n in enumerate(post.leaving[post.chunk]) if r != self.members.rank)
        return total


def communicate(recorded: Recorder, forward: bool) -> None:
    """All collectives of the recorded step at once, one after the other on the group's stream; the current stream waits
    for them. Their rows are those of the step."""
    world, works = recorded.members.world, []
    if recorded.capacity is None:
        counts = torch.empty((world, 2, recorded.placement.chunks), dtype=torch.int32, device=recorded.device)
        works.append(
            dist.all_to_all_single(torch.empty_like(counts), counts, group=recorded.members.group, async_op=True)
        )
    again = [Travelling(t.buffer, [None] * len(t.pieces), t.what) for t in recorded.travelling]
    for post in recorded.posts[: recorded.forward] if forward else recorded.posts:
        Exchange.post(recorded, again[post.travelling], post.chunk, post.rows, post.arriving, post.leaving)
    for work in works:
        recorded.members.wait(work, recorded.device is not None and recorded.device.type == "cuda")
    for travelling in again:
        Exchange.arrive(recorded, travelling)


class Silent(Exchange):
    """An exchange of which everything has arrived already: as recorded."""

    def __init__(self, recorded: Recorder):
        super().__init__(recorded.members, recorded.placement, recorded.capacity, recorded.max_tokens)
        self.recorded = recorded
        self.started = 0

    def step(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[Step, Travelling]:
        self.started = 0
        return super().step(x, topk_ids, topk_weights)

    def plan(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, meanwhile: Callable[[Outgoing], None]
    ) -> tuple[Outgoing, torch.Tensor | None, Splits]:
        if self.capacity is not None:
            return super().plan(topk_ids, topk_weights, meanwhile)
        lengths, splits = self.recorded.lengths, self.recorded.splits
        assert lengths is not None and splits is not None
        keys, _ = token_keys(topk_ids, self.placement, True)
        sent = outgoing(topk_ids, topk_weights, keys, self.placement, None, topk_ids.shape[0])
        meanwhile(sent)
        return sent, lengths, splits

    def start(self, what: str, like: torch.Tensor, arriving: Lengths) -> Travelling:
        found = self.recorded.travelling[self.started]
        if found.what != what:
            raise ValueError(f"what: expected {found.what!r}, the next buffer of the recorded step, got {what!r}")
        self.started += 1
        return Travelling(found.buffer, [None] * len(arriving), what)

    def post(self, travelling: Travelling, chunk: int, rows: torch.Tensor, arriving: Lengths, leaving: Lengths) -> None:
        rows.contiguous()

    def arrive(self, travelling: Travelling, chunk: int | None = None) -> torch.Tensor:
        return travelling.buffer
