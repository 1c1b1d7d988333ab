"""Where nibbles lie: in an `Int4Weight`, and in the 32-bit words of checkpoints.

A row of K unsigned values 0 … 15 is cut into blocks of 2·half. A block's `half` bytes hold value j in the low nibble of
one byte and value half + j in the high nibble of the same:

    byte j of block i  =  q[2·half·i + j]  |  q[2·half·i + half + j] << 4            j = 0 … half − 1

Every 16 of these bytes are stored in another order, byte 2·t + (0, 8, 1, 9)[s] as number 4·t + s:

    number    0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15
    byte j    0  8  1  9    2 10  3 11    4 12  5 13    6 14  7 15

So the 32-bit word t of 16 bytes is what lane t of four holds of 16 values of K in the first operand of a 16-bit matrix
product (mma.m16n8k16, wgmma): values 2t and 2t + 1, 16 bits apart, and 2t + 8 and 2t + 9, 8 bits above them. One mask
finds the two of one register, a shift by 8 and the same mask those of another, for low and high nibbles alike, with
nothing to permute; and rows of words come from shared memory by ldmatrix. (Words are little-endian.)

A block is 128 values (64 bytes) where K allows it, and 64 values where it doesn't or where groups are of 32: every run
of `half` values has one scale. K is a multiple of 64, so a row is of whole blocks, and a block of whole 16 bytes: no
row has a rest that would need an order of its own.

Checkpoints keep eight values in an int32, value `order[i]` of the eight in bits 4·i … 4·i + 3.
"""

from collections.abc import Sequence

import torch

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def half_block(k: int, group_size: int) -> int:
    """Bytes of a block, 64 or 32: half of the values of K that it holds."""
    return 64 if k % 128 == 0 and group_size % 64 == 0 else 32


def pack(values: torch.Tensor, half: int) -> torch.Tensor:
    """uint8 values 0 … 15 [..., K] -> packed bytes [..., K / 2]; K a multiple of 2 · half."""
    blocks = values.unflatten(-1, (-1, 2, half))
    in_order = blocks[..., 0, :] | (blocks[..., 1, :] << 4)
    # Byte 8 u + 2 t + v of 16 is stored as number 4 t + 2 v + u.
    return in_order.unflatten(-1, (-1, 2, 4, 2)).movedim(-3, -1).flatten(-5)


def unpack(packed: torch.Tensor, half: int) -> torch.Tensor:
    """Packed bytes [..., K / 2] -> uint8 values 0 … 15 [..., K]."""
    in_order = packed.unflatten(-1, (-1, 4, 2, 2)).movedim(-1, -3).flatten(-4)
    blocks = in_order.unflatten(-1, (-1, half))
    return torch.stack([blocks & 15, blocks >> 4], -2).flatten(-3)


def words(packed: torch.Tensor) -> torch.Tensor:
    """Packed bytes [..., K / 2] -> the same as int32 [..., K / 8]; a copy where they start within a word."""
    if packed.storage_offset() % 4 or packed.data_ptr() % 4:
        packed = packed.clone()
    return packed.view(torch.int32)


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
