"""Input sets and the screening of configs."""

import time
from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget, Failure, Measurement
from expertile.lab.operators.grouped_mm import grouped_mm
from expertile.lab.race.case import Candidate, Case, Site
from expertile.lab.race.operator import Verdict
from expertile.lab.race.timing import pick_configs, time_on_sets
from expertile.lab.race.workloads import ragged_m
from expertile.roofline import Work

CPU = torch.device("cpu")
WORKLOAD = ragged_m("w", "t", (64, 0, 64), 64, 64, "fp32")
CASE = Case(WORKLOAD, Site(Device.current("cpu"), CPU), grouped_mm(()))
SETS = CASE.input_sets(0)


def sleeper(name, seconds, seen=None):
    def bind(inputs, policy):
        if seen is not None:
            seen.add(inputs[0].data_ptr())
        return lambda: time.sleep(seconds)

    return Candidate(name, Work(1.0, 1.0), {"seconds": seconds}, bind)


def test_every_candidate_sees_the_same_sets_larger_than_the_cache():
    first, second = set(), set()
    timed = time_on_sets([sleeper("a", 0.0, first), sleeper("b", 0.0, second)], SETS, "eager", CPU, Budget(0.1))
    assert all(isinstance(c.outcome, Measurement) for c in timed)
    assert first == second and 1 < len(first) <= 128
    assert len(first) == 128 or len(first) * WORKLOAD.memory_nbytes >= 3 * CASE.site.device.l2_bytes


def test_same_names_are_kept_apart_and_progress_uses_plain_ones():
    seen = []
    timed = time_on_sets(
        [sleeper("a", 0.0), sleeper("a", 0.002)],
        SETS,
        "eager",
        CPU,
        Budget(0.1),
        lambda i, medians: seen.append(set(medians)),
    )
    assert timed[0].time_s < 0.002 <= timed[1].time_s
    assert seen and seen[0] == {"a"}


def test_what_binding_raises_is_the_candidates_own_failure():
    def bind(inputs, policy):
        raise torch.OutOfMemoryError("CUDA out of memory")

    greedy = Candidate("greedy", Work(1.0, 1.0), {}, bind)
    failed, timed = time_on_sets([greedy, sleeper("a", 0.0)], SETS, "eager", CPU, Budget(0.1))
    assert isinstance(failed.outcome, Failure) and failed.outcome.kind == "memory"
    assert isinstance(timed.outcome, Measurement)


@pytest.mark.parametrize(
    ("seconds", "kept"), [((0.004, 0.008, 0.0), [0.004, 0.0]), ((0.0, 0.008, 0.004), [0.0]), ((0.001,), [0.001])]
)
def test_screening_keeps_the_default_and_a_faster_other(seconds, kept):
    group = [sleeper("a", s) for s in seconds]
    keep = pick_configs([*group, sleeper("b", 0.0)], SETS, "eager", CPU)
    assert [c.config["seconds"] for c in keep if c.name == "a"] == kept
    assert [c.name for c in keep][-1] == "b"
    assert [c.tried for c in keep] == ([0, 3, 0] if len(kept) == 2 else [0, 0])


def test_screening_leaves_what_is_not_ready_its_record():
    wrong = replace(sleeper("a", 0.002), bind=None, verdict=Verdict(False, 1.0, 1.0, "off"))
    keep = pick_configs([sleeper("a", 0.004), wrong, sleeper("a", 0.0), sleeper("a", 0.008)], SETS, "eager", CPU)
    assert [(c.config["seconds"], c.status, c.tried) for c in keep] == [
        (0.004, "ok", 0),
        (0.002, "wrong", 0),
        (0.0, "ok", 3),
    ]


def test_all_ways_of_a_baseline_go_on():
    ways = [sleeper("copy", 0.004), sleeper("copy", 0.0)]
    assert pick_configs(ways, SETS, "eager", CPU) == ways


def test_what_is_not_ready_stays_as_it_is():
    wrong, captured = (
        replace(sleeper("a", 0.0), bind=None, verdict=Verdict(False, 1.0, 1.0, "off")),
        replace(sleeper("b", 0.0), policies=("graph",)),
    )
    assert time_on_sets([wrong, captured], SETS, "eager", CPU, Budget()) == [wrong, captured]
