"""The order of gluon_int4's configs: tiles follow the rows, known and unknown, and a recorded run."""

from dataclasses import replace

import pytest

from expertile.device import Device
from expertile.ops.weight_only_mm.backends import _gluon_config as model
from expertile.ops.weight_only_mm.backends._gluon_config import Config
from expertile.ops.weight_only_mm.backends.gluon_int4 import BACKEND
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem
from tests.ops.weight_only_mm.cases import of_shape

H200 = Device.by_name("h200")


def _first(problem: WeightOnlyProblem) -> Config:
    return BACKEND.configs(problem, H200)[0]


def _tile(config: Config) -> tuple[int, int, int, int]:
    return config.block_m, config.cols, config.consumers, config.block_k


# µs of gluon_int4 on an H200, 32 equal groups, N = 4096, K = 7168, group 128: (rows each, config, time).
RECORDED = (
    (16, Config(16, 128, 2, 256, 5), 134.0),
    (16, Config(16, 128, 2, 128, 9), 146.5),
    (32, Config(16, 128, 2, 256, 5), 249.4),
    (32, Config(32, 128, 2, 128, 8), 168.6),
    (32, Config(32, 64, 4, 128, 8), 164.5),
    (64, Config(32, 128, 2, 128, 8), 333.0),
    (64, Config(64, 128, 2, 128, 5), 220.7),
    (64, Config(64, 128, 2, 128, 5, "weight"), 232.0),
    (64, Config(128, 128, 2, 128, 4, "weight", slab=32, store_parts=4), 347.2),
    (64, Config(128, 64, 2, 128, 5, store_parts=2), 360.1),
    (64, Config(256, 64, 2, 128, 3, "weight", store_parts=8), 599.2),
    # Of another day, on which scales on sums and on weights took 1.04 (16 rows) to 1.14 times as long: divided by that.
    (16, Config(16, 128, 2, 128, 9, "fused", ordered=True), 128.8),
    (32, Config(32, 128, 2, 128, 8, "fused", ordered=True), 145.4),
    (64, Config(64, 128, 2, 128, 5, "fused", ordered=True), 191.5),
    (128, Config(128, 128, 2, 128, 4, "fused", slab=32, ordered=True, store_parts=4), 318.1),
)


@pytest.mark.parametrize(("rows", "config", "us"), RECORDED, ids=str)
def test_modelled_times_are_near_recorded_ones(rows: int, config: Config, us: float) -> None:
    problem = of_shape(32, rows, 4096, 7168)
    assert model.seconds(problem, H200, config, (rows,) * 32) * 1e6 == pytest.approx(us, rel=0.08)


def test_known_rows_choose_the_tile() -> None:
    problem = of_shape(32, 16, 4096, 7168)
    assert _tile(_first(replace(problem, group_sizes=(16,) * 32))) == (16, 128, 2, 256)
    # Half of the groups above 16 rows: two tiles of 16 for each are more than one of 32.
    assert _first(replace(problem, group_sizes=(12, 20) * 16)).block_m == 32


def test_unknown_rows_of_16_take_tiles_that_may_be_half_full() -> None:
    """H200: 135 us where all groups have 16 rows (tiles of 16: 126), 151 where half have more (187)."""
    config = _first(of_shape(32, 16, 4096, 7168))
    assert config.block_m == 32 and config.tails
    assert _first(of_shape(32, 17, 4096, 7168)).block_m == 32


def test_split_where_few_groups_may_have_rows() -> None:
    """Equal groups make a tile for each multiprocessor; four of the eight, for every other one."""
    assert _first(of_shape(8, 4, 4096, 14336)).split_k > 1
    assert _first(of_shape(32, 1, 4096, 7168)).split_k == 1


@pytest.mark.parametrize(("rows", "groups"), [(0, 4), (7, 1), (7, 3), (512, 32), (33, 512)])
def test_possible_sizes(rows: int, groups: int) -> None:
    for sizes in model.routings_of(replace(of_shape(groups, 1, 64, 128), m=rows)):
        assert len(sizes) == groups and min(sizes) >= 0
        assert abs(sum(sizes) - rows) <= groups
    known = (rows,) + (0,) * (groups - 1)
    assert model.routings_of(replace(of_shape(groups, 1, 64, 128), m=rows, group_sizes=known)) == (known,)


def test_many_rows_liked_unequally_leave_groups_empty() -> None:
    _, alike, liked = model.routings_of(of_shape(8, 4, 64, 128))
    assert min(alike) > 0 and 0 in liked and max(liked) > 2 * max(alike)


def test_half_tiles_cost_what_lower_ones_do() -> None:
    problem = of_shape(32, 16, 4096, 7168)
    low, high = Config(16, 128, 2, 128, 8), Config(32, 128, 2, 128, 8, store_parts=2)
    halved = replace(high, tails=True)
    assert model.seconds(problem, H200, halved, (16,) * 32) == model.seconds(problem, H200, low, (16,) * 32)
    assert model.seconds(problem, H200, halved, (17,) * 32) == model.seconds(problem, H200, high, (17,) * 32)
    mixed = [model.seconds(problem, H200, c, (12, 20) * 16) for c in (halved, high, low)]
    assert mixed[0] < min(mixed[1:])
