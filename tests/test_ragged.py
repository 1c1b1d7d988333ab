import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertile.ragged import offs_from_sizes, sizes_from_offs, tile_waste, tiles_per_group

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@given(SIZES)
def test_offs_and_sizes_are_inverse(sizes):
    offs = offs_from_sizes(sizes)
    assert offs.dtype is torch.int32 and offs[-1] == sum(sizes)
    assert sizes_from_offs(offs) == tuple(sizes)


def test_negative_size_is_named():
    with pytest.raises(ValueError, match="sizes: expected rows per group >= 0, got -2 at group 1"):
        offs_from_sizes([3, -2])


def test_tiles_of_a_published_distribution():
    # Counts and tiles as printed in a published moe-ffn report (8 experts, 16384 tokens).
    assert tiles_per_group((1842, 2341, 1756), 128) == (15, 19, 14)


@given(SIZES, st.sampled_from([16, 64, 128]))
def test_waste_counts_empty_tile_rows(sizes, block):
    waste = tile_waste(sizes, block)
    padded = sum(-(-s // block) * block for s in sizes)
    assert 0 <= waste < 1
    assert padded * (1 - waste) == pytest.approx(sum(sizes))
