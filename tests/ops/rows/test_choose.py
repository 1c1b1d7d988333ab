"""The configs that row operators take: they cover the row, fit the machine, and keep registers for what is held."""

import pytest

from expertile.ops.launch.device import Machine
from expertile.ops.rows import choose

H200 = Machine(132, True)
SMEM = 228 * 1024
COLUMNS = (
    1,
    7,
    128,
    200,
    256,
    600,
    768,
    1000,
    1024,
    2000,
    2048,
    3000,
    4096,
    5120,
    7168,
    8191,
    8192,
    12288,
    16384,
    16400,
    20000,
    30000,
    32768,
    50000,
    50257,
    65536,
    100000,
    131072,
    262144,
    300000,
)
CHOICES = {
    "softmax": (lambda *a: choose.forward(*a), 1),
    "layer_norm": (lambda *a: choose.forward(*a, vectors=2), 1),
    "cut_layer_norm": (lambda *a: choose.cut_norm(*a, vectors=2) or choose.forward(*a, vectors=2), 1),
    "rms_norm": (lambda *a: choose.forward(*a, vectors=1), 1),
    "softmax_backward": (choose.softmax_backward, 2),
    "layer_norm_backward": (choose.norm_backward, 2),
    "rms_norm_backward": (lambda *a: choose.norm_backward(*a, vectors=1), 2),
}


@pytest.mark.parametrize("itemsize", (2, 4))
@pytest.mark.parametrize("rows", (1, 5, 1000, 16384))
@pytest.mark.parametrize("name", CHOICES)
def test_fits_the_machine(name, rows, itemsize):
    choice, inputs = CHOICES[name]
    for cols in COLUMNS:
        config = choice(rows, cols, itemsize, H200)
        if config.streamed:
            continue
        pieces = config.pieces(cols)
        assert pieces <= (8 if cols * itemsize % 16 == 0 else 16), (cols, config)
        assert pieces * config.block_cols * config.cluster >= cols, (cols, config)
        tile = config.block_rows * pieces * config.block_cols
        per_thread = tile / (32 * config.num_warps)
        assert per_thread <= 64 or cols <= 128, (cols, config)
        resident = max(1, config.programs_per_sm)
        assert resident * config.num_warps <= 64, (cols, config)
        ahead = tile * itemsize * inputs * (config.num_stages - 1)
        assert resident * (ahead + 2048) <= SMEM, (cols, config)
        assert config.cluster == 1 or config.block_rows <= 4
        if config.cluster > 1 and config.block_rows > 1:
            assert config.block_cols * itemsize >= 32 * 16 * config.num_warps, (cols, config)


def test_norms_of_rows_that_are_cut():
    """Programs that have a row alone, or share it and stay; rows that neither is measured for are not cut."""
    for cols in (256, 1000, 4096, 16384):
        assert choose.cut_norm(4096, cols, 2, H200).cluster == 1
    for cols in (16392, 20000, 32768, 50256, 65536):
        config = choose.cut_norm(4096, cols, 2, H200)
        assert config.cluster > 1 and config.programs_per_sm > 1
        assert choose.cut_norm(4096, cols, 2, H200, inputs=2) is None
        assert choose.cut_norm(4096, cols, 2, Machine(108, False)) is None
    assert choose.cut_norm(4096, 65544, 2, H200) is None


@pytest.mark.parametrize("name", CHOICES)
def test_without_clusters(name):
    for cols in COLUMNS:
        assert CHOICES[name][0](4096, cols, 2, Machine(108, False)).cluster == 1
