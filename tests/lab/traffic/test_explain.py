"""Explained: bounds beside bytes, and which records count as the same call."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.lab.traffic import formulas
from expertile.lab.traffic.explain import explain_grouped, explain_subject
from expertile.lab.traffic.grouped import PADDED, grouped_ways
from expertile.lab.traffic.model import OURS, TORCH, UNFUSED
from tests.lab.records import timed
from tests.lab.traffic.test_formulas import H200

SOFTMAX = formulas()["softmax"].subject("fp32", {"rows": 8192, "cols": 8192})
SHAPE = {"rows": 8192, "cols": 8192}


def record(backend="expertile", time_s=2e-4, **changes):
    values = {"op": "softmax", "shape": SHAPE, "dtype": "fp32", "workload": "w"}
    return timed(time_s, backend=backend, **(values | changes))


def test_the_bound_is_the_useful_bytes_at_full_bandwidth():
    e = explain_subject(SOFTMAX, H200, [])
    assert e.bound.limiter == "memory" and e.bound.seconds == pytest.approx(2 * 8192 * 8192 * 4 / 4.8e12)
    ways = {w.name: w for w in e.ways}
    assert e.least_time_s(ways[OURS]) == pytest.approx(e.bound.seconds)
    assert e.times_ours(ways[UNFUSED]) == pytest.approx(4.0, rel=1e-3)
    assert e.least_time_s(ways[UNFUSED]) == pytest.approx(4 * e.bound.seconds, rel=1e-3)


def test_steps_are_bound_one_by_one():
    """A product that computes and a softmax that moves do not overlap when they are two kernels."""
    subject = formulas()["attention"].subject("bf16", {"head_dim": 256})
    e = explain_subject(subject, H200, [])
    (unfused,) = (w for w in e.ways if w.name == UNFUSED)
    assert e.least_time_s(unfused) > max(unfused.total.nbytes / 4.8e12, unfused.total.flops / H200.peak("bf16"))


def test_a_device_without_a_stated_bandwidth_bounds_nothing_by_memory():
    cpu = replace(Device.current("cpu"), peak_flops={})
    assert explain_subject(SOFTMAX, cpu, []).bound.seconds == 0.0


def test_achieved_is_the_same_call_on_the_same_gpu():
    others = [
        record(shape=SHAPE | {"cols": 4096}),
        record(dtype="bf16"),
        record(op="softmax_backward"),
        record(env=Env("NVIDIA H100 80GB HBM3")),
        record("copy"),
    ]
    assert explain_subject(SOFTMAX, H200, others).achieved == ()
    mine = [record("torch", 3e-4), record(), record(policy="eager", time_s=2.5e-4)]
    found = explain_subject(SOFTMAX, H200, [*others, *mine])
    assert [(a.backend, a.policy) for a in found.achieved] == [
        ("expertile", "graph"),
        ("expertile", "eager"),
        ("torch", "graph"),
    ]
    assert found.achieved[0].share(found.bound) == pytest.approx(found.bound.seconds / 2e-4)


def test_achieved_is_of_the_latest_run_alone():
    old = record(time_s=1.5e-4, run="old", date="2026-01-01")
    (found,) = explain_subject(SOFTMAX, H200, [old, record()]).achieved
    assert found.run == "r1"


def test_a_record_may_say_more_than_the_subject():
    subject = formulas()["layer_norm"].subject("fp32", SHAPE)
    more = record(op="layer_norm", shape=SHAPE | {"weight": True, "bias": True})
    assert explain_subject(subject, H200, [more]).achieved


def test_cache():
    assert not explain_subject(SOFTMAX, H200, []).fits_in_cache
    small = formulas()["softmax"].subject("fp32", {"rows": 64, "cols": 64})
    assert explain_subject(small, H200, []).fits_in_cache


def test_grouped_products():
    workload = ragged_m("w", "", (100, 0, 412), 256, 512, "bf16")
    ways = {w.name: w for w in grouped_ways(workload.problem("cuda"), workload.group_sizes)}
    a, b, out = 512 * 256 * 2, 2 * 256 * 512 * 2, 512 * 512 * 2  # the empty group's weights are not read
    for name in (UNFUSED, OURS):
        assert (ways[name].total.read, ways[name].total.written) == (a + b, out)
    assert ways[UNFUSED].total.launches == 2 and ways[TORCH].total.launches == 2 and ways[OURS].total.launches == 1
    padded = 3 * 412
    assert ways[PADDED].steps[1].flops == 2 * padded * 256 * 512
    # 1 + 4 tiles down, 2 across: rows are read once more, each group's weights once for every further tile.
    assert ways[OURS].total.again == (512 * 256 * (2 - 1) + (5 - 2) * 256 * 512) * 2


def test_grouped_products_are_explained_with_records():
    workload = ragged_m("w", "", (100, 0, 412), 256, 512, "bf16")
    problem = workload.problem("cuda")
    shape = workload.shape()
    held = timed(1e-3, shape=shape, backend="gluon_hopper")
    e = explain_grouped(problem, workload.group_sizes, H200, [held])
    assert e.achieved[0].backend == "gluon_hopper"
    assert e.work == problem.work(workload.group_sizes)


def test_other_layouts_are_refused():
    workload = wgrad("w", "", (64, 64), 128, 128, "bf16")
    with pytest.raises(ValueError, match="layout: expected ragged_m, got ragged_k"):
        grouped_ways(workload.problem("cuda"), workload.group_sizes)
    assert torch.bfloat16 is workload.torch_dtype
