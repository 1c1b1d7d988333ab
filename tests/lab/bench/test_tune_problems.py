"""The designed problems cover what they should, fit the device, and come again from the same seed."""

import itertools
import math

import pytest

from expertile.device import Device
from expertile.lab.bench.tune_problems import (
    DIMS,
    GROUPS,
    design,
    fits,
    grid,
    group_sizes,
    known,
    mixed,
    problems,
    seed_of,
)
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tuned import features_of

H200 = Device.by_name("h200")


@pytest.fixture(scope="module")
def designed():
    return list(itertools.islice(design(H200), 80))


def test_the_design_fills_the_space(designed):
    ragged = [w for w in designed if w.layout is Layout.RAGGED_M]
    rows = [math.log2(max(1, w.m)) for w in ragged]
    assert min(rows) < 3 and max(rows) > 15
    assert len({w.groups for w in designed}) > 8 and {w.groups for w in designed} <= set(GROUPS)
    assert {w.k for w in ragged} <= set(DIMS) and len({w.k for w in ragged}) > 10
    assert {w.dtype for w in designed} >= {"bf16", "fp16"}
    kinds = {(w.layout, w.b_layout) for w in designed}
    assert {(Layout.RAGGED_M, "nk"), (Layout.RAGGED_M, "kn"), (Layout.RAGGED_K, "kn"), (Layout.BATCHED, "nk")} <= kinds
    skews = {features_of(w.problem("cuda")).skew for w in designed}
    assert skews == {"even", "skewed", "one"}


def test_everything_fits_and_names_are_unique(designed):
    assert all(fits(w, H200) for w in designed)
    assert len({w.name for w in designed}) == len(designed)


def test_the_grid_has_neighbours_on_all_sides():
    found = list(grid(H200))
    assert len({w.name for w in found}) == len(found) > 400 and all(fits(w, H200) for w in found)
    kinds = {(w.layout, w.b_layout) for w in found}
    assert kinds == {(Layout.RAGGED_M, "nk"), (Layout.RAGGED_M, "kn"), (Layout.RAGGED_K, "kn")}
    rows = {sum(w.group_sizes) // w.groups for w in found if w.groups == 128}
    assert {16, 128, 1024} <= rows
    assert {features_of(w.problem("cuda")).skew for w in found} == {"even", "skewed"}
    assert [w.name for w in grid(H200)] == [w.name for w in found]


def test_seeds():
    def first(seed, **more):
        return list(itertools.islice(design(H200, seed, **more), 5))

    assert first(1) == first(1) != first(2)
    assert not {w.name for w in first(1)} & {w.name for w in first(2)}, "records of two seeds may share a file"
    assert {seed_of(w.routing) for w in itertools.islice(design(H200, 20011), 20) if w.routing != "equal"} == {20011}
    assert seed_of("equal") is None and seed_of("") is None
    assert any(w.groups not in GROUPS for w in itertools.islice(design(H200, 3, any_count=True), 20))


def test_every_eighth_is_unaligned_on_a_gpu():
    found = list(itertools.islice(mixed(H200, 3), 32))
    features = [features_of(w.problem("cuda")) for w in found]
    assert [any(f.aligned) for f in features] == [i % 8 != 7 for i in range(32)]
    assert all(f.k % 8 == 0 and f.n % 8 == 0 for f in features) and all(fits(w, H200) for w in found)
    assert len({w.name for w in found}) == 32
    cpu = Device.current("cpu")
    assert [w.name for w in itertools.islice(mixed(cpu), 9)] == [w.name for w in itertools.islice(design(cpu), 9)]


def test_known_shapes_come_first_and_in_turn():
    names = [w.preset for w in itertools.islice(problems(H200), 6)]
    assert names[1::2] == ["tune"] * 3 and "tune" not in names[::2]
    found = known(H200)
    distinct = {(w.layout, w.group_sizes, w.m, w.n, w.k, w.dtype) for w in found}
    assert len(distinct) == len(found)
    assert {w.preset for w in found} == {"anchors", "squares", "moe-ffn", "models", "moe", "moe-sonic"}
    assert {w.preset for w in known(Device.current("cpu"))} == {"cpu"}


def test_one_takes_most():
    sizes = group_sizes("one", 1000, 16, 5)
    assert sum(sizes) == 1000 and len(sizes) == 16 and max(sizes) == 900
    assert group_sizes("one", 10, 2, 5) == (5, 5)
