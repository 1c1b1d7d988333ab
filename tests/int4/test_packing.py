import pytest
import torch

from expertile.int4.packing import half_block, pack, pack_words, unpack, unpack_words


@pytest.mark.parametrize(
    "k, group, half",
    [(256, 128, 64), (256, 64, 64), (256, 256, 64), (256, 32, 32), (192, 64, 32), (192, 192, 32), (64, 64, 32)],
)
def test_every_run_of_half_a_block_has_one_scale(k, group, half):
    assert half_block(k, group) == half
    assert k % (2 * half) == 0 and group % half == 0


@pytest.mark.parametrize("half", [32, 64])
def test_low_nibbles_come_half_a_block_before_high_ones(half):
    q = torch.randint(0, 16, (2, 3, 4 * half)).to(torch.uint8)
    packed = pack(q, half)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, 2 * half)
    for block in range(2):
        for j in (0, 1, half - 1):
            byte, first = packed[1, 2, block * half + j], 2 * half * block + j
            assert byte == q[1, 2, first] + 16 * q[1, 2, first + half]
    assert torch.equal(unpack(packed, half), q)


@pytest.mark.parametrize("dim, shape", [(0, (24, 3)), (1, (3, 24)), (1, (3, 21))])
def test_words_there_and_back(dim, shape):
    q = torch.randint(0, 16, shape)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    back = unpack_words(pack_words(q, dim, order), dim, order)
    assert torch.equal(back.narrow(dim, 0, shape[dim]), q.to(torch.uint8))
