import pytest
import torch

from expertile.formats.int4.packing import half_block, pack, pack_words, unpack, unpack_words, words


@pytest.mark.parametrize(
    "k, group, half",
    [(256, 128, 64), (256, 64, 64), (256, 256, 64), (256, 32, 32), (192, 64, 32), (192, 192, 32), (64, 64, 32)],
)
def test_every_run_of_half_a_block_has_one_scale(k, group, half):
    assert half_block(k, group) == half
    assert k % (2 * half) == 0 and group % half == 0


@pytest.mark.parametrize("half", [32, 64])
def test_where_nibbles_lie(half):
    """Low nibbles come half a block before high ones; bytes as `packing` lists them."""
    q = torch.randint(0, 16, (2, 3, 4 * half)).to(torch.uint8)
    packed = pack(q, half)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, 2 * half)
    for block in range(2):
        for j in range(half):
            stored = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15].index(j % 16) + j // 16 * 16
            byte, first = packed[1, 2, block * half + stored], 2 * half * block + j
            assert byte == q[1, 2, first] + 16 * q[1, 2, first + half]
    assert torch.equal(unpack(packed, half), q)


@pytest.mark.parametrize("dim, shape", [(0, (24, 3)), (1, (3, 24)), (1, (3, 21))])
def test_words_there_and_back(dim, shape):
    q = torch.randint(0, 16, shape)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    back = unpack_words(pack_words(q, dim, order), dim, order)
    assert torch.equal(back.narrow(dim, 0, shape[dim]), q.to(torch.uint8))


def test_words_are_the_same_bytes_wherever_they_start():
    packed = pack(torch.randint(0, 16, (2, 3, 128)).to(torch.uint8), 64)
    assert words(packed).data_ptr() == packed.data_ptr()
    unaligned = torch.cat([torch.zeros(1, dtype=torch.uint8), packed.flatten()])[1:].view(packed.shape)
    assert torch.equal(words(unaligned), words(packed)) and words(packed).shape == (2, 3, 16)
    low = (words(packed)[0, 0, 1] & 0x000F000F).item()
    assert low == unpack(packed, 64)[0, 0, 2] | int(unpack(packed, 64)[0, 0, 3]) << 16
