"""Groups of rows that lie one after another in one tensor: `offs`, group sizes, and the tiles they need.

`offs` [G] int32 holds the END row of each group, with no leading zero, as `torch.nn.functional.grouped_mm` takes it;
group g is rows offs[g-1] : offs[g].
"""

from collections.abc import Iterable, Sequence

import torch


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`, itself one. (Triton's own costs an operator's call 2 us
    on the host.) A kernel compiled for it serves all smaller sizes: the larger `least`, the fewer are compiled."""
    return max(least, 1 << max(0, n - 1).bit_length())


def offs_from_sizes(sizes: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """`sizes` (rows of each group) -> offs [G] int32 on `device`. ValueError if a size is negative."""
    if any(s < 0 for s in sizes):
        worst = min(range(len(sizes)), key=sizes.__getitem__)
        raise ValueError(f"sizes: expected rows per group >= 0, got {sizes[worst]} at group {worst}")
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def sizes_from_offs(offs: torch.Tensor) -> tuple[int, ...]:
    """offs [G] -> rows of each group, as host integers. Synchronises when `offs` lives on a GPU."""
    ends = offs.tolist()
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def tiles_per_group(sizes: Iterable[int], block_m: int) -> tuple[int, ...]:
    """Row tiles of height `block_m` that each group needs: ceil(size / block_m)."""
    return tuple(-(-s // block_m) for s in sizes)


def tile_waste(sizes: Sequence[int], block_m: int) -> float:
    """Share of tile rows that hold no useful row: 1 - useful / (tiles * block_m); 0 for no rows at all."""
    padded = sum(tiles_per_group(sizes, block_m)) * block_m
    return 1.0 - sum(sizes) / padded if padded else 0.0
