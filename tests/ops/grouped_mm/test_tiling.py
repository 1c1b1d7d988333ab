"""Modelled times of tiles: waves, rows that a tile has to spare, dtypes that the model says nothing of."""

import pytest

from expertile.device import Device
from expertile.lab.race.workloads import grouped, ragged_m, wgrad
from expertile.ops.grouped_mm.backends import gluon_hopper
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tiling import Tile, modelled_logs, tile_of
from expertile.ops.grouped_mm.tuned import features_of

H200 = Device.by_name("h200")
HIGH, LOW, WIDE = Tile(128, 128, 64, 128, 1), Tile(64, 128, 64, 64, 1), Tile(128, 256, 64, 128, 1)
TILES = (HIGH, LOW, WIDE)


def features(sizes, k=4096, n=4096, dtype="bf16"):
    return features_of(ragged_m("x", "", tuple(sizes), k, n, dtype).problem("cuda"))


def modelled(f, tiles=TILES):
    """By tile."""
    (logs,) = modelled_logs([f], tiles, H200)
    return dict(zip(tiles, logs, strict=True))


def test_fields_that_are_no_tile():
    assert tile_of({"tuned": False}) is None and tile_of({"block_m": 128}) is None
    assert tile_of({"block_m": 128, "block_n": 256, "block_k": 64}) == WIDE
    assert tile_of(gluon_hopper.Config().__dict__) == Tile(128, 256, 64, 64, 1), "half a tile drops out of split"
    triton = {"block_m": 64, "block_n": 128, "block_k": 64, "blocks_per_sm": 2}
    assert tile_of(triton) == Tile(64, 128, 64, 64, 2)


def test_the_best_tile_is_at_zero_and_the_others_above():
    logs = modelled(features((1024,) * 8))
    assert min(logs.values()) == 0 and logs[LOW] > logs[HIGH]


def test_large_tiles_suit_large_groups_and_low_tiles_small_groups():
    large, small = (modelled(features((rows,) * 64), (WIDE, LOW)) for rows in (4096, 32))
    assert large[WIDE] == 0 < large[LOW] and small[LOW] == 0 < small[WIDE]


@pytest.mark.parametrize("rows", [120, 136])
def test_a_wave_more_costs(rows):
    """16 groups and 8 columns of tiles are one wave of 128 rows up to there, two behind."""
    higher = Tile(256, 128, 64, 256, 1)
    logs = modelled(features((rows,) * 16, n=1024), (HIGH, higher))
    assert (logs[HIGH] < logs[higher]) == (rows == 120)


def test_rows_that_begin_anywhere_want_tiles_with_few_loads():
    """Products hide the loads of a tile of 128x128 only where rows are whole lines of L2 apart."""
    aligned, not_so = (modelled(features((2048,) * 8, k=k, n=1536), (HIGH, WIDE)) for k in (1024, 1000))
    assert not_so[WIDE] == 0 and not_so[HIGH] > aligned[HIGH] + 0.15


def test_groups_that_no_row_can_be_in_do_not_count():
    few, many = (features((1,) * 4 + (0,) * empty) for empty in (0, 124))
    assert modelled(few) == modelled(many)


def test_every_layout_and_no_rows_at_all():
    batched = grouped("x", "", Layout.BATCHED, (64,) * 4, 64, 1024, 512, "bf16").problem("cuda")
    found = [features_of(batched), features_of(wgrad("x", "", (0, 0), 512, 768, "bf16").problem("cuda"))]
    found += [features((0, 0)), features((900, 50, 50)), features((7,), dtype="fp16")]
    for f in found:
        logs = modelled(f)
        assert min(logs.values()) == 0 and max(logs.values()) < 3
    assert not any(modelled(features((64,) * 8, dtype="fp32")).values()), "nothing was fitted to these"


def test_several_problems_are_modelled_as_each_alone():
    """One group with most of the rows, rows that begin anywhere, and many waves among them."""
    found = [features((900, 50, 50)), features((7,)), features((2048,) * 64), features((64,) * 8, k=1000)]
    together = modelled_logs(found, TILES, H200)
    for f, logs in zip(found, together, strict=True):
        assert dict(zip(TILES, logs, strict=True)) == modelled(f)
