"""Where nibbles lie: in an `Int4Weight`, and in the 32-bit words of checkpoints.

A row of K unsigned values 0 … 15 is cut into blocks of 2·half. Byte j of a block's `half` bytes holds value j in its
low nibble and value half + j in its high one:

    byte j of block i  =  q[2·half·i + j]  |  q[2·half·i + half + j] << 4

so one `& 15` and one `>> 4` of contiguous bytes give two contiguous runs of K, each ready to be an operand of a matrix
product, with nothing to interleave. A block is 128 values (64 bytes) where K allows it, and 64 values where it doesn't
or where groups are of 32: every run of `half` values has one scale.

Checkpoints keep eight values in an int32, value `order[i]` of the eight in bits 4·i … 4·i + 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def half_block(k: int, group_size: int) -> int:
    """Bytes of a block, 64 or 32: half of the values of K that it holds."""
    return 64 if k % 128 == 0 and group_size % 64 == 0 else 32


def pack(values: torch.Tensor, half: int) -> torch.Tensor:
    """uint8 values 0 … 15 [..., K] -> packed bytes [..., K / 2]; K a multiple of 2 · half."""
    blocks = values.unflatten(-1, (-1, 2, half))
    return (blocks[..., 0, :] | (blocks[..., 1, :] << 4)).flatten(-2)


def unpack(packed: torch.Tensor, half: int) -> torch.Tensor:
    """Packed bytes [..., K / 2] -> uint8 values 0 … 15 [..., K]."""
    blocks = packed.unflatten(-1, (-1, half))
    return torch.stack([blocks & 15, blocks >> 4], -2).flatten(-3)


def pack_words(values: torch.Tensor, dim: int, order: Sequence[int] = IN_ORDER) -> torch.Tensor:
    """Values 0 … 15 -> int32 with `dim` an eighth as long (rounded up; the last word is filled with zeros)."""
    values = values.movedim(dim, -1).to(torch.int32)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = torch.zeros_like(values[..., 0])
    for i, j in enumerate(order):
        words |= values[..., j] << (4 * i)
    return words.movedim(-1, dim).contiguous()


def unpack_words(words: torch.Tensor, dim: int, order: Sequence[int] = IN_ORDER) -> torch.Tensor:
    """int32 words -> uint8 values 0 … 15 with `dim` eight times as long."""
    words = words.movedim(dim, -1)
    values = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for i, j in enumerate(order):
        values[..., j] = ((words >> (4 * i)) & 15).to(torch.uint8)
    return values.flatten(-2).movedim(-1, dim)
