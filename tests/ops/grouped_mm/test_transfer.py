"""Expected times follow the neighbours' measurements and the geometry of tiles."""

from dataclasses import dataclass

import pytest

from expertile.device import Device
from expertile.lab.workloads import ragged_m
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.transfer import Rival, expected_seconds, seconds_at, shape_seconds
from expertile.ops.grouped_mm.tuned import Measured, Timed, features_of

H200 = Device.by_name("h200")


@dataclass(frozen=True)
class Config:
    block_m: int = 128
    block_n: int = 128
    group_m: int = 8


def rival(name="ours", **config):
    backend = Backend(name, "", lambda p, d: None, lambda p, d: (Config(),), lambda *a: a[1].a)
    return Rival(backend, Config(**config))


def features(rows=8192, groups=8, k=4096, n=4096):
    return features_of(ragged_m("x", "", (rows // groups,) * groups, k, n, "bf16").problem("cuda"))


def timed(seconds, name="ours", **config):
    return Timed(name, {"block_m": 128, "block_n": 128, "group_m": 8, **config}, seconds)


def test_a_measured_problem_gives_its_own_times():
    near = [(0.0, Measured(features(), "graph", (timed(1e-3), timed(2e-3, block_m=64))))]
    assert expected_seconds([rival(), rival(block_m=64)], features(), near, H200) == pytest.approx([1e-3, 2e-3])


def test_the_nearer_counts_more():
    near = [(0.5, Measured(features(), "graph", (timed(1e-3),))), (3.0, Measured(features(), "graph", (timed(4e-3),)))]
    (seconds,) = expected_seconds([rival()], features(), near, H200)
    assert 1e-3 < seconds < 1.2e-3


def test_times_scale_with_the_work():
    near = [(1.0, Measured(features(), "graph", (timed(1e-3),)))]
    (seconds,) = expected_seconds([rival()], features(rows=16384), near, H200)
    assert seconds == pytest.approx(2e-3, rel=0.1)


def test_raster_order_is_matched_loosely_and_missing_ones_were_slower():
    measured = Measured(features(), "graph", (timed(1e-3), timed(2e-3, "theirs")))
    assert seconds_at(measured, rival(group_m=2)) == 1e-3
    assert seconds_at(measured, rival(block_m=64)) > 1.05e-3
    assert seconds_at(measured, rival("theirs", block_m=64)) > 2e-3
    assert seconds_at(measured, rival("unknown")) is None
    near = [(0.0, measured)]
    assert expected_seconds([rival("unknown")], features(), near, H200) == [None]


@pytest.mark.parametrize("tile", [(128, 256, 1), (64, 128, 2)])
def test_shape_never_shrinks_with_more_rows(tile):
    times = [shape_seconds(features(rows=8 * r), tile, H200) for r in (1, 2, 7, 16, 65, 128, 129, 500, 4096)]
    assert times == sorted(times)
