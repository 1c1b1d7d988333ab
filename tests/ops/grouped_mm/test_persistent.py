"""The host side of the persistent schedule; its device side is tested through the kernels in test_triton_interpret."""

import random

import pytest
import torch

from expertile.ops.grouped_mm.persistent import RAGGED, Tiles, best_group_m, mean_tile_extents, tiles_bound
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch.device import current_device, program_count


def problem(layout, groups, m, n, k):
    return Problem(layout, groups, m, n, k, torch.bfloat16, torch.bfloat16, (k, 1), (n * k, 1, k))


def tiles(extent, block):
    return (extent + block - 1) // block


@pytest.mark.parametrize("seed", range(20))
def test_tiles_bound_is_never_below_the_true_number(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([0, 0, 1, 63, 64, 65, rng.randrange(500)]) for _ in range(rng.randrange(1, 40))]
    other, groups = rng.randrange(1, 400), len(sizes)
    by_rows = sum(tiles(s, 64) for s in sizes) * tiles(other, 32)
    assert by_rows <= tiles_bound(Tiles("m", 32, 64, 32, 64), groups, sum(sizes), other)
    assert by_rows <= tiles_bound(Tiles("n", 32, 32, 64, 64), groups, other, sum(sizes))


def test_tiles_bound_is_exact_without_ragged_tiles():
    assert tiles_bound(Tiles("k", 32, 64, 32, 64), 3, 100, 70) == 3 * 2 * 3
    assert tiles_bound(Tiles("none", 32, 64, 32, 64), 3, 100, 70) == 3 * 2 * 3


def test_program_count():
    cpu = torch.device("cpu")
    assert program_count(cpu, 1) == 1
    assert program_count(cpu, 0) == 1  # an empty grid is not a launch
    assert 1 < program_count(cpu, 10**6) < 10


def test_current_device_needs_no_gpu_for_cpu_tensors():
    with current_device(torch.device("cpu")):
        assert not torch.cuda.is_initialized()


def test_every_layout_has_a_name_for_the_kernels():
    assert set(RAGGED) == set(Layout)


def test_mean_tile_extents():
    assert mean_tile_extents(problem(Layout.RAGGED_M, 4, 400, 64, 32)) == (100, 64)
    assert mean_tile_extents(problem(Layout.RAGGED_N, 4, 64, 400, 32)) == (64, 100)
    assert mean_tile_extents(problem(Layout.RAGGED_K, 4, 64, 32, 400)) == (64, 32)
    assert mean_tile_extents(problem(Layout.RAGGED_M, 4, 0, 64, 32)) == (1, 64)


def test_panels_cover_all_rows_while_their_part_of_a_stays_in_l2():
    p = problem(Layout.RAGGED_M, 8, 8 * 2048, 14336, 4096)
    assert best_group_m(p, 128, 256, 132, 60 * 2**20) == 16


def test_panels_are_no_taller_than_a_group_needs():
    assert best_group_m(problem(Layout.RAGGED_M, 128, 128, 1536, 2048), 64, 128, 132, 60 * 2**20) == 1
    assert best_group_m(problem(Layout.RAGGED_M, 8, 8 * 200, 1536, 2048), 128, 128, 132, 60 * 2**20) == 2


def test_panels_shrink_where_a_would_fall_out_of_l2():
    wide = problem(Layout.RAGGED_M, 1, 65536, 65536, 8192)
    assert best_group_m(wide, 128, 128, 132, 20 * 2**20) < best_group_m(wide, 128, 128, 132, 10**10)
