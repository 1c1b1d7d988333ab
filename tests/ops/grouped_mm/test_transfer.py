"""Expected times follow how the candidates compared on the neighbours, and the bound of the problem."""

import math
from dataclasses import dataclass, replace

import pytest

from expertile.device import Device
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.transfer import Rival, bound_seconds, expected_seconds, expected_slowdowns
from expertile.ops.grouped_mm.tuned import Measured, Timed, features_of

H200 = Device.by_name("h200")


@dataclass(frozen=True)
class Config:
    block_m: int = 128
    block_n: int = 128
    group_m: int = 8


@dataclass(frozen=True)
class Tiled(Config):
    block_k: int = 64


@dataclass(frozen=True)
class Flagged(Config):
    flag: bool = False


def rival(name="ours", config_class=Config, **config):
    backend = Backend(name, "", lambda *a: a[1].a, configs=lambda p, d: (Config(),), peer=name == "peer")
    return Rival(backend, config_class(**config))


def features(rows=8192, groups=8, k=4096, n=4096):
    return features_of(ragged_m("x", "", (rows // groups,) * groups, k, n, "bf16").problem("cuda"))


def timed(seconds, name="ours", **config):
    return Timed(name, {"block_m": 128, "block_n": 128, "group_m": 8, **config}, seconds)


def measured(*times, of=None):
    return Measured(of or features(), "graph", times)


def slowdowns(rivals, near):
    return expected_slowdowns(rivals, features(), near, H200)


def test_a_measured_problem_gives_its_own_times():
    near = [(0.0, measured(timed(1e-3), timed(2e-3, block_m=64)))]
    assert expected_seconds([rival(), rival(block_m=64)], features(), near, H200) == pytest.approx([1e-3, 2e-3])


def test_the_nearer_counts_more():
    ours_first = measured(timed(1e-3), timed(2e-3, block_m=64))
    ours_last = measured(timed(1e-3, block_m=64), timed(2e-3))
    for near, first in (((0.5, 3.0), 0), ((3.0, 0.5), 1)):
        found = slowdowns([rival(), rival(block_m=64)], list(zip(near, (ours_first, ours_last), strict=True)))
        assert found[first] < found[1 - first] and 0 < found[first] < math.log(1.2)


def test_few_neighbours_say_nothing_of_a_backend():
    rivals = [rival("ours"), rival("peer")]
    both, ours = measured(timed(1e-3, "peer"), timed(2e-3)), measured(timed(1e-3))
    for near in ([(1.0, both), (1.0, ours)], [(0.1, both), (3.0, ours), (3.0, ours)]):
        known, peer = slowdowns(rivals, near)
        assert known - peer == pytest.approx(math.log(2.0)), "as where both ran"
    assert slowdowns(rivals, [(1.0, both), (1.0, ours), (1.0, ours)])[1] is None


def test_of_our_own_backends_fewer_will_do():
    """One of twenty at the same distance, unless its groups have more rows or it is of another GPU."""
    rivals = [rival("ours"), rival("new")]
    both, ours = (timed(5e-4, "new"), timed(1e-3)), measured(timed(1e-3))
    near = [(1.0, measured(*both)), *[(1.0, ours)] * 15]
    known, new = slowdowns(rivals, near)
    assert known - new == pytest.approx(math.log(2.0))
    assert slowdowns(rivals, [*near, *[(1.0, ours)] * 5])[1] is None
    more_rows = (1.0, measured(*both, of=features(rows=16384)))
    assert slowdowns(rivals, [more_rows, *near[1:]])[1] is None
    assert slowdowns(rivals, [(1.0, replace(near[0][1], gpu="another")), *near[1:]])[1] is None


def test_ranks_carry_over_whatever_the_times():
    """A neighbour that takes a hundred times as long says as much as any other at its distance."""
    long = measured(timed(1e-1), timed(1.2e-1, block_m=64))
    short = measured(timed(1e-3, block_m=64), timed(1.2e-3))
    both = [math.log(1.2) / 2] * 2
    assert slowdowns([rival(), rival(block_m=64)], [(1.0, long), (1.0, short)]) == pytest.approx(both)


def test_times_scale_with_the_work():
    near = [(1.0, measured(timed(1e-3)))]
    (seconds,) = expected_seconds([rival()], features(rows=16384), near, H200)
    assert seconds == pytest.approx(2e-3, rel=0.1)


def test_what_screening_took_off_was_slower_than_what_is_listed():
    near = [(0.0, measured(timed(1e-3), timed(2e-3, "theirs")))]
    rivals = [rival(), rival(block_m=64), rival("theirs", block_m=64), rival("unknown")]
    listed, missing, theirs, unknown = slowdowns(rivals, near)
    assert listed == 0 and missing > math.log(1.1)
    assert theirs > math.log(2.0), "slower than the best of its backend"
    assert unknown is None
    assert expected_seconds([rival()], features(), [], H200) == [None]


def test_a_neighbour_from_before_a_flag_says_nothing_of_it():
    old = measured(timed(1e-3), timed(1.3e-3, block_m=64))
    new = measured(timed(1e-3, block_m=64, flag=True), timed(1.2e-3, flag=False))
    on, off = rival(config_class=Flagged, block_m=64, flag=True), rival(config_class=Flagged)
    assert slowdowns([on, off], [(1.0, old)]) == [None, 0.0]
    with_it, without = slowdowns([on, off], [(1.0, old), (1.0, new)])
    assert without == pytest.approx(math.log(1.2) / 2) and without - with_it == pytest.approx(math.log(1.2))
    screened = measured(timed(1e-3, flag=False))
    assert slowdowns([on], [(1.0, screened)])[0] > 0, "it could have been listed"


def test_an_order_that_a_neighbour_does_not_know_counts_as_the_best_of_its_like():
    near = [(0.0, measured(timed(1e-3), timed(1.5e-3, group_m=16), timed(2e-3, block_m=64)))]
    rivals = [rival(group_m=4), rival(), rival(group_m=16), rival(block_m=64), rival(block_m=32)]
    new, best, other, slow, screened = slowdowns(rivals, near)
    assert best == 0 < new < 0.02, "what was timed itself settles a tie"
    assert other == pytest.approx(math.log(1.5)) and slow == pytest.approx(math.log(2.0))
    assert screened > 0, "no tile of that height is listed"


def test_raster_order_counts_only_where_configs_differ_by_it():
    near = [(0.0, measured(timed(1e-3), timed(1.5e-3, group_m=2)))]
    assert slowdowns([rival(group_m=4)], near) == [0.0], "derived from the problem: the tile decides"
    two = slowdowns([rival(group_m=8), rival(group_m=2)], near)
    assert two == pytest.approx([0.0, math.log(1.5)])


def test_a_slowdown_changes_with_the_waves_of_the_tile():
    """8 groups of 224 rows in tiles of 128x128 are one wave, of 288 rows two: tiles of 64 rows gain on them."""
    rivals = [rival(config_class=Tiled), rival(config_class=Tiled, block_m=64)]
    one, two = (features(8 * rows, n=1024) for rows in (224, 288))
    near = [(1.0, measured(timed(1e-3, block_k=64), timed(1.1e-3, block_m=64, block_k=64), of=one))]
    same = expected_slowdowns(rivals, one, near, H200)
    assert same == pytest.approx([0.0, math.log(1.1)])
    high, low = expected_slowdowns(rivals, two, near, H200)
    assert high - low > same[0] - same[1] + 0.05


def test_of_two_neighbours_that_one_counts_more_whose_tiles_compare_alike():
    """288 rows are two waves of 128x128, as 300 are, and 224 one: 64 rows high was faster there, and is here."""
    rivals = [rival(config_class=Tiled), rival(config_class=Tiled, block_m=64)]
    here, alike, other = (features(8 * rows, n=1024) for rows in (288, 300, 224))
    times = timed(1e-3, block_m=64, block_k=64), timed(1.1e-3, block_k=64)
    swapped = timed(1e-3, block_k=64), timed(1.1e-3, block_m=64, block_k=64)
    near = [(1.0, measured(*times, of=alike)), (1.0, measured(*swapped, of=other))]
    flipped = [(1.0, measured(*swapped, of=alike)), (1.0, measured(*times, of=other))]
    high, low = expected_slowdowns(rivals, here, near, H200)
    other_high, other_low = expected_slowdowns(rivals, here, flipped, H200)
    assert high - low > other_high - other_low + 0.05


def test_bound_grows_with_rows():
    of = [bound_seconds(features(rows=8 * r), H200) for r in (1, 2, 7, 16, 65, 128, 129, 500, 4096)]
    assert of == sorted(of)
    gradient = features_of(wgrad("x", "", (0, 0), 512, 768, "bf16").problem("cuda"))
    assert bound_seconds(gradient, H200) > 0
