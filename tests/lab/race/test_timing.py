"""Input sets and the screening of configs."""

import time

import pytest
import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget, Failure, Measurement
from expertile.lab.race.contestants import Contestant
from expertile.lab.race.timing import pick_configs, time_contestants
from expertile.lab.race.workloads import ragged_m
from expertile.roofline import Work

CPU = torch.device("cpu")
HERE = Device.current("cpu")
WORKLOAD = ragged_m("w", "t", (64, 0, 64), 64, 64, "fp32")


def sleeper(name, seconds, seen=None):
    def bind(operands, policy):
        if seen is not None:
            seen.add(operands.a.data_ptr())
        return lambda: time.sleep(seconds)

    return Contestant(name, Work(1.0, 1.0), {"seconds": seconds}, bind)


def test_every_contestant_sees_the_same_sets_larger_than_the_cache():
    first, second = set(), set()
    outcomes = time_contestants(
        [sleeper("a", 0.0, first), sleeper("b", 0.0, second)], WORKLOAD, "eager", HERE, CPU, Budget(0.1), 0
    )
    assert all(isinstance(o, Measurement) for o in outcomes)
    assert first == second and 1 < len(first) <= 128
    assert len(first) == 128 or len(first) * WORKLOAD.memory_nbytes >= 3 * HERE.l2_bytes


def test_same_names_are_kept_apart_and_progress_uses_plain_ones():
    seen = []
    outcomes = time_contestants(
        [sleeper("a", 0.0), sleeper("a", 0.002)], WORKLOAD, "eager", HERE, CPU, Budget(0.1), 0,
        lambda i, medians: seen.append(set(medians)),
    )  # fmt: skip
    assert outcomes[0].time_s < 0.002 <= outcomes[1].time_s
    assert seen and seen[0] == {"a"}


def test_what_binding_raises_is_the_contestants_own_failure():
    def bind(operands, policy):
        raise torch.OutOfMemoryError("CUDA out of memory")

    greedy = Contestant("greedy", Work(1.0, 1.0), {}, bind)
    outcomes = time_contestants([greedy, sleeper("a", 0.0)], WORKLOAD, "eager", HERE, CPU, Budget(0.1), 0)
    assert isinstance(outcomes[0], Failure) and outcomes[0].kind == "memory"
    assert isinstance(outcomes[1], Measurement)


@pytest.mark.parametrize(
    ("seconds", "kept"), [((0.004, 0.008, 0.0), [0.004, 0.0]), ((0.0, 0.008, 0.004), [0.0]), ((0.001,), [0.001])]
)
def test_screening_keeps_the_default_and_a_faster_other(seconds, kept):
    group = [sleeper("a", s) for s in seconds]
    keep, tried = pick_configs([*group, sleeper("b", 0.0)], WORKLOAD, "eager", HERE, CPU, 0)
    assert [c.config["seconds"] for c in keep if c.name == "a"] == kept
    assert [c.name for c in keep][-1] == "b"
    assert list(tried.values()) == ([3] if len(kept) == 2 else [])


def test_all_ways_of_a_baseline_go_on():
    ways = [sleeper("copy", 0.004), sleeper("copy", 0.0)]
    assert pick_configs(ways, WORKLOAD, "eager", HERE, CPU, 0) == (ways, {})


def test_nobody_to_time():
    assert time_contestants([], WORKLOAD, "eager", HERE, CPU, Budget(), 0) == []
