"""What stands between the products: each kernel is checked, rounding only where there are tiles, times in µs."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget
from expertile.lab.operators.moe_kernels import SHAPES, check, kernels, kernels_part, measure_kernels
from expertile.lab.race.case import Site

SITE = Site(replace(Device.current("cpu"), l2_bytes=1), torch.device("cpu"))  # one set of inputs
ALWAYS = {"perm", "route", "route+scores", "route_bwd", "torch topk", "torch argsort"}


def test_all_are_right_and_rounding_needs_tiles():
    small, large = (kernels(t, 8, 2, torch.device("cpu")) for t in (64, 600))
    assert small.keys() == ALWAYS and large.keys() == ALWAYS | {"round_nearest", "round_adaptive"}
    check(small)
    check(large)
    rounded = large["round_nearest"].call()
    assert not (rounded[rounded < 8].bincount() % 128).any()


@pytest.mark.parametrize("name", ["perm", "route", "route+scores", "route_bwd", "round_nearest", "torch topk"])
def test_a_wrong_kernel_is_named(name):
    made = kernels(600, 8, 2, torch.device("cpu"))
    right = made[name]

    def wrong(found):
        first, *others = right.seen(found)
        return (first + 1, *others)

    made[name] = replace(right, seen=wrong)
    with pytest.raises(RuntimeError, match=rf"^{name.replace('+', '.')}: output 0: "):
        check(made)


def test_a_part():
    part = measure_kernels(96, 8, 2, SITE, Budget(0.05, min_rounds=3, max_rounds=3))
    assert part.items() >= kernels_part(96, 8, 2).items() and part["us"].keys() == ALWAYS
    assert all(us > 0 for us in part["us"].values()) and part["reasons"] == {} and part["input_sets"] == 1


def test_the_page_s_shape_comes_first():
    assert SHAPES[0] == (32768, 128, 8) and len(set(SHAPES)) == len(SHAPES)
