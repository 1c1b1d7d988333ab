"""Which rank holds which expert."""

from dataclasses import dataclass
from functools import cache, cached_property

import torch


@dataclass(frozen=True)
class Placement:
    """Which rank, and which chunk there, holds each of `num_experts` experts."""

    num_experts: int
    world: int
    chunks: int = 1

    def experts(self, rank: int) -> range:
        """The experts of a rank: ⌈E/W⌉, fewer or none on the last ones, as DTensors are sharded."""
        return range(self.num_experts)[self.most * rank : self.most * (rank + 1)]

    @property
    def most(self) -> int:
        """Experts of the rank that has most, the first."""
        return -(-self.num_experts // self.world)

    def groups(self, rank: int) -> int:
        """Groups of rows in a rank's products: its experts; one, without rows, where it has none."""
        return max(1, len(self.experts(rank)))

    def chunk_bounds(self, rank: int) -> tuple[int, ...]:
        """[chunks + 1] bounds of the chunks among a rank's own experts."""
        count = len(self.experts(rank))
        return tuple(count * c // self.chunks for c in range(self.chunks + 1))

    @property
    def keys(self) -> int:
        """How many pairs (chunk, rank) there are; also the key of a dropped slot."""
        return self.chunks * self.world

    def nearly_all_sent(self, top_k: int) -> bool:
        """Whether a token of evenly routed slots goes to four fifths at least of the min(W, k) ranks it can go to."""
        return self.world * (1 - (1 - 1 / self.world) ** top_k) >= 0.8 * min(self.world, top_k)

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
