"""The configs of `gluon_int4`, and its tiles by format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from expertile.ops.weight_only_mm.problem import WeightOnlyProblem

# Scales that multiply a weight where it is unpacked, and what unpacking 64 x 128 weights takes a scheduler, in clocks.
IN_UNPACKING = ("fused", "mxfp4")
UNPACKING = {"fused": 154, "mxfp4": 230, "sum": 174, "weight": 174}


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule.

    block_m: rows of `a` in a tile, a power of two from 8 to 256.
    cols: rows of w, columns of the result, that one consumer multiplies: 64 or 128.
    consumers: 2 or 4 warpgroups, each with its own columns of the tile.
    block_k: depth of a stage, 128 or 256.
    scale: "mxfp4" for weights of that format, and for no others. Of INT4 "fused" scales each weight
        where it is unpacked, which takes bfloat16, groups along K and no zero points; "sum" the product of each group
        of K in float32; "weight" the unpacked weights. In any case one activation alone meets each weight as
        `dequantize` of its class rounds it.
    slab: values of K unpacked for one run of products, twice (low and high nibbles): 32, or 64 where groups allow it;
        of MXFP4 as well, where 64 takes block_k from 128.
    group_m: rows of tiles that share one pass over a group's weights.
    split_k: programs that share a tile's steps.
    store_parts: pieces in which a tile's result leaves.
    tails: a tile that has at most half of its rows is multiplied as half a tile. Takes an even number of store_parts,
        and tiles of at least 16 rows.
    ordered: consumers queue their products by an ordered barrier. Takes two of them, and scale "fused" or "mxfp4".
    """

    block_m: int = 16
    cols: int = 128
    consumers: int = 2
    block_k: int = 128
    num_stages: int = 8
    scale: str = "sum"
    slab: int = 64
    group_m: int = 16
    split_k: int = 1
    store_parts: int = 1
    tails: bool = False
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.tails and (self.store_parts % 2 or self.block_m < 16):
            raise ValueError(f"tails: expected an even number of store_parts and block_m from 16, got {self}")
        if self.ordered and (self.consumers != 2 or self.scale not in IN_UNPACKING):
            raise ValueError(f'ordered: expected two consumers and scale "fused" or "mxfp4", got {self}')

    @property
    def format(self) -> str:
        """Of the weights that it takes."""
        return "mxfp4" if self.scale == "mxfp4" else "int4"

    @property
    def pairs(self) -> bool:
        """Whether two blocks of MXFP4 are unpacked at a time."""
        return self.format == "mxfp4" and self.slab == 64

    @property
    def block_n(self) -> int:
        """Columns of the result in a tile."""
        return self.consumers * self.cols

    def smem_bytes(self, problem: WeightOnlyProblem) -> int:
        """Shared memory of one program, bytes (barriers and alignment rounded up to 2 KiB)."""
        p = problem
        layout = p.layout_of_weight
        scales = self.block_k // layout.span * self.block_n * layout.scale_itemsize * (2 if p.has_zeros else 1)
        stage = self.block_m * self.block_k * 2 + self.block_n * self.block_k // 2 + scales
        itemsize = 4 if self.split_k > 1 else p.out_dtype.itemsize
        return self.num_stages * stage + self.block_m // self.store_parts * self.block_n * itemsize + 2048

    def registers(self, problem: WeightOnlyProblem) -> int:
        """About how many registers a consumer's thread fills."""
        p = problem
        slab = self.slab if self.pairs else min(self.slab, p.half)
        of_sum = self.cols * self.block_m // 128
        sums = 1 + max(1, self.block_k // p.group_size) if self.scale == "sum" and p.group_size < p.k else 1
        # The slab that is multiplied and the one that is unpacked; half a slab's registers before that.
        unpacked = self.cols * slab // 128 * (1 if self.block_k == 2 * slab else 2)
        # A thread's rows, cols / 32 of them, have two factors and a summand each, where scaled weights have two scales.
        scales = self.cols // 32 if self.scale in IN_UNPACKING else 0
        groups = max(32, 1 << (p.groups - 1).bit_length())
        plan = groups // 32 * (2 if groups <= 128 else 1)
        return of_sum * sums + unpacked + scales + plan + 36


_FUSED = (
    Config(8, 128, 2, 128, 10, "fused", ordered=True),
    Config(16, 128, 2, 128, 9, "fused", ordered=True),
    Config(16, 128, 2, 256, 5, "fused", ordered=True),
    Config(16, 64, 2, 256, 8, "fused", ordered=True),
    Config(32, 128, 2, 128, 8, "fused", ordered=True),
    Config(32, 128, 2, 128, 8, "fused", ordered=True, store_parts=2, tails=True),
    Config(64, 128, 2, 128, 5, "fused", ordered=True),
    Config(64, 128, 2, 128, 5, "fused", ordered=True, store_parts=2, tails=True),
    Config(128, 64, 2, 128, 5, "fused", ordered=True, store_parts=2),
    Config(128, 128, 2, 128, 4, "fused", slab=32, ordered=True, store_parts=4),
)
_MXFP4 = tuple(replace(tile, scale="mxfp4", slab=slab) for tile in _FUSED for slab in (64, 32) if slab <= tile.slab)
_UNFUSED = (
    Config(8, 128, 2, 128, 10),
    Config(16, 128, 2, 128, 9),
    Config(16, 128, 2, 256, 5),
    Config(16, 64, 4, 128, 9),
    Config(16, 64, 2, 256, 8),
    Config(32, 128, 2, 128, 8),
    Config(32, 64, 4, 128, 8),
    Config(32, 128, 2, 128, 8, store_parts=2, tails=True),
    Config(32, 64, 4, 128, 8, store_parts=2, tails=True),
    Config(64, 128, 2, 128, 6),
    Config(64, 128, 2, 128, 5, store_parts=2, tails=True),
    Config(64, 128, 2, 128, 6, "weight"),
    Config(64, 128, 2, 256, 3, "weight", slab=32, store_parts=2),
    Config(128, 64, 2, 128, 5, store_parts=2),
    Config(128, 128, 2, 128, 4, "weight", slab=32, store_parts=4),
    Config(128, 128, 2, 256, 2, "weight", slab=32, store_parts=4),
    Config(256, 64, 2, 128, 3, "weight", store_parts=8),
)


def tiles(problem: WeightOnlyProblem) -> tuple[Config, ...]:
    """Tiles for weights of the problem's format, of which `gluon_int4` makes configs."""
    if problem.format == "mxfp4":
        return _MXFP4
    return _FUSED if _fuses(problem) else _UNFUSED


def _fuses(problem: WeightOnlyProblem) -> bool:
    """Whether scales may be fused into unpacking: zero points take its addition, float16 has no room for a scale."""
    return problem.dtype is torch.bfloat16 and not problem.has_zeros and problem.group_size < problem.k
